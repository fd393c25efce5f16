"""Schedules on CPU ranks: compiled loops over flat arrays."""

#: packages whose numbers and functions end up in this one's compiled code (``unlocked``)
SOURCES = ("miraccl.executor.cpu.kernels",)
