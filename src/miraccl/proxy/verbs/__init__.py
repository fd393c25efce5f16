"""Engines of the verbs transports: threads that post and poll, and recover queue pairs."""

from __future__ import annotations

from typing import Any

from miraccl import params
from miraccl.transport.base import Transport, TransportContext
from miraccl.transport.verbs import VerbsTransport


def open_transport(context: TransportContext) -> Transport:
    """Open verbs for ``context``; see ``transport.registry.TransportSpec``."""
    from miraccl.native.verbs_abi import load_library
    from miraccl.proxy.verbs.engine import VerbsEngine
    from miraccl.proxy.verbs.packet_engine import VerbsDatagramEngine
    from miraccl.transport.datagram import options_from_environment as datagram_options
    from miraccl.transport.verbs_datagram import VerbsDatagramTransport, kind_of
    from miraccl.transport.verbs_ports import options_from_environment, usable_ports

    kind = kind_of(params.IB_QP_TYPE.read())
    library = load_library()
    shared: dict[str, Any] = {
        "library": library,
        "ports": usable_ports(),
        "options": options_from_environment(),
    }
    engine: dict[str, Any] = {
        "rank": context.endpoint.rank,
        "library": library,
        "wake": context.wake,
        "on_lost": context.on_lost,
        "control": context.control,
    }
    if kind is None:
        return VerbsTransport(context, engine=lambda: VerbsEngine(**engine), **shared)
    return VerbsDatagramTransport(
        context,
        engine=lambda: VerbsDatagramEngine(**engine),
        kind=kind,
        datagram=datagram_options(),
        **shared,
    )
