"""Sources of the compiled inner search; a change recompiles it (``native.library``)."""
