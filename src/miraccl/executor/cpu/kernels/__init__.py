"""Kernel sources of the CPU executor.

Only ``native.compiler`` imports the modules here that need Numba; ``layout`` is for every module.
"""

#: modules outside this package whose constants are part of the compiled code
SOURCES = ("miraccl.types", "miraccl.schedule.ir", "miraccl.executor.cpu.sizes")
