"""Sources of the compiled inner search; a change here, and only here, has it compiled anew (see ``native.library``)."""
