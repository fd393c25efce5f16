"""Sources of the compiled inner search, recompiled when one of them changes (``native.library``)."""
