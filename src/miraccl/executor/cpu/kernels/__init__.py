"""Kernel sources of the CPU executor. Only ``native.compiler`` imports the modules here that need Numba; ``layout`` is for all."""

#: modules outside this package whose numbers end up in compiled code
SOURCES = ("miraccl.types", "miraccl.schedule.ir", "miraccl.executor.cpu.sizes")
