"""Calls on GPU memory without the interpreter: ``call`` is compiled, with ``rows``, ``groups`` and ``tensors``; ``table`` is what Python
keeps for it, ``layout`` what both know."""

#: modules outside this package whose functions end up in compiled code
SOURCES = ("miraccl.executor.cuda.lanes",)
