"""Tests of the datagram machines, in virtual time."""

#: Modules outside this package that ``history_kernel`` depends on (``native.sources_of``).
SOURCES = ("miraccl.proxy.kernels",)
