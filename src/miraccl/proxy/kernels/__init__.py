"""Kernel sources of the proxy. Only ``native.compiler`` imports the modules here that need Numba; ``layout`` is for all."""
