"""Calls on GPU memory without the interpreter: ``call`` is compiled, with ``rows``, ``groups`` and ``tensors``; ``table`` is what Python
keeps for it, ``layout`` what both know."""
