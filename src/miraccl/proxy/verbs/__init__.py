"""Engines of the verbs transports: threads that post and poll, and recover queue pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from miraccl import params
from miraccl.transport.base import Transport, TransportContext
from miraccl.transport.verbs import VerbsTransport

if TYPE_CHECKING:
    from miraccl.topo.hca import Hca, Port


def open_reliable(
    context: TransportContext, ports: Sequence[tuple[Hca, Port]], *, in_place_only: bool = False
) -> VerbsTransport:
    """Open reliable queue pairs on ``ports``; ``in_place_only`` as ``VerbsOptions`` has it."""
    from miraccl.native.verbs_abi import load_library
    from miraccl.proxy.verbs.engine import VerbsEngine
    from miraccl.transport.verbs_ports import options_from_environment

    library = load_library()
    return VerbsTransport(
        context,
        library=library,
        ports=ports,
        engine=lambda: VerbsEngine(
            rank=context.endpoint.rank,
            library=library,
            wake=context.wake,
            on_lost=context.on_lost,
            control=context.control,
        ),
        options=replace(options_from_environment(), in_place_only=in_place_only),
    )


def open_transport(context: TransportContext) -> Transport:
    """Open verbs for ``context``; see ``transport.registry.TransportSpec``."""
    from miraccl.native.verbs_abi import load_library
    from miraccl.proxy.verbs.packet_engine import VerbsDatagramEngine
    from miraccl.transport.datagram import options_from_environment as datagram_options
    from miraccl.transport.verbs_datagram import VerbsDatagramTransport, kind_of
    from miraccl.transport.verbs_ports import options_from_environment, usable_ports

    kind = kind_of(params.IB_QP_TYPE.read())
    if kind is None:
        return open_reliable(context, usable_ports())
    library = load_library()
    engine: dict[str, Any] = {
        "rank": context.endpoint.rank,
        "library": library,
        "wake": context.wake,
        "on_lost": context.on_lost,
        "control": context.control,
    }
    return VerbsDatagramTransport(
        context,
        library=library,
        ports=usable_ports(),
        options=options_from_environment(),
        engine=lambda: VerbsDatagramEngine(**engine),
        kind=kind,
        datagram=datagram_options(),
    )
