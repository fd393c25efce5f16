"""Kernel sources of the proxy; only ``native.compiler`` imports those that need Numba."""
