"""Calls on GPU memory without the interpreter: ``call`` is compiled, ``table`` is what Python keeps for it, ``layout`` what both know."""
