"""Connections to ranks on other hosts: the TCP transport and its proxy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miraccl.proxy.engine import ProgressEngine
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.transport.base import Endpoint, OnLost
from miraccl.transport.socket import SocketTransport


def open_network(
    setup: SetupPhases,
    me: Endpoint,
    slot_bytes: int,
    wake: Callable[[int], None],
    on_lost: OnLost,
    check: Callable[[], None],
    control: int,
) -> tuple[SocketTransport, Any]:
    """Open the TCP transport and its proxy; the caller closes them in this order.

    Args:
        slot_bytes: Bytes of a FIFO slot.
        wake: Called with a rank when data for it has arrived.
        check: Raises if a rank dies while the ranks connect.
        control: Address of the executor's control page.
    """
    proxy = ProgressEngine(rank=me.rank, wake=wake, on_lost=on_lost, control=control)
    transport = SocketTransport(
        me,
        proxy=proxy,
        secret=setup.session.data_key,
        job=setup.session.name.encode(),
        slot_bytes=slot_bytes,
        timeout=setup.deadline,
        check=check,
    )
    return transport, proxy
