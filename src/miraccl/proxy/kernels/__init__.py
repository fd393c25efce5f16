"""Kernel sources of the proxy; only ``native.compiler`` imports those that need Numba."""

#: Modules outside this package that the compiled code depends on.
SOURCES = (
    "miraccl.transport.fifo",
    "miraccl.wire.proxy_sender",
    "miraccl.wire.datagram",
    "miraccl.wire.datagram.control",
    "miraccl.wire.stream",
    "miraccl.wire.verbs.policy",
    "miraccl.executor.cpu.kernels.layout",
)
