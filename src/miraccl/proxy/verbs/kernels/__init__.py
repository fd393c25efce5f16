"""Kernel sources of the verbs engine; only ``native.compiler`` imports those that need Numba."""

#: Packages and modules outside this one that the compiled code depends on.
SOURCES = (
    "miraccl.proxy.kernels",
    "miraccl.wire.verbs.rows",
    "miraccl.wire.stream",
    "miraccl.transport.fifo",
    "miraccl.native.verbs_abi",
)
