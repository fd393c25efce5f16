"""Kernel sources of the compiled fabric; only ``native.compiler`` imports those that need Numba."""

#: Sources outside of this package that the compiled code contains.
SOURCES = ("miraccl.sim.fabric.hashing",)
