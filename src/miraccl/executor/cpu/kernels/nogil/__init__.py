"""Kernel sources of operations that compiled code starts itself, on threads without the GIL.

``operations`` has the entry points, ``streams`` the TCP streams, ``offsets`` is for every module.
The package is separate so that a change here does not recompile the engine and the folds.
"""

#: packages whose constants and functions are part of the compiled code
SOURCES = ("miraccl.executor.cpu.kernels",)
