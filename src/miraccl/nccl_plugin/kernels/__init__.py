"""Kernel sources of the exported network plugin."""

SOURCES = ("miraccl.transport.fifo",)
