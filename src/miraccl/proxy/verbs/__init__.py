"""Engine of the verbs transport: a thread that posts and polls, and recovers queue pairs."""

from __future__ import annotations

from miraccl.transport.base import TransportContext
from miraccl.transport.verbs import VerbsTransport


def open_transport(context: TransportContext) -> VerbsTransport:
    """Open verbs for ``context``; see ``transport.registry.TransportSpec``."""
    from miraccl.native.verbs_abi import load_library
    from miraccl.proxy.verbs.engine import VerbsEngine
    from miraccl.transport.verbs_ports import options_from_environment, usable_ports

    library = load_library()
    return VerbsTransport(
        context,
        library=library,
        ports=usable_ports(),
        engine=lambda: VerbsEngine(
            rank=context.endpoint.rank,
            library=library,
            wake=context.wake,
            on_lost=context.on_lost,
            control=context.control,
        ),
        options=options_from_environment(),
    )
