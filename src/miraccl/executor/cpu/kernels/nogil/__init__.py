"""Kernel sources of operations that compiled code starts itself (``operations``), over TCP streams (``streams``); ``layout`` is for all.

A package of its own: what changes here does not make the engine and the folds be compiled anew.
"""

#: packages whose numbers and functions end up in this one's compiled code
SOURCES = ("miraccl.executor.cpu.kernels",)
