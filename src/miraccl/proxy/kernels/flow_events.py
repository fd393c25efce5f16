"""Kernel source: single calls of a flow, for the comparison with ``wire.datagram.flow``."""

from __future__ import annotations

from typing import Any

from miraccl.native.intrinsics import load, store
from miraccl.proxy.kernels import flow_layout as layout
from miraccl.proxy.kernels import link_layout
from miraccl.proxy.kernels.credit import credit_timer, issue_grants
from miraccl.proxy.kernels.flow_receive import flow_on_timer, receive, well_formed
from miraccl.proxy.kernels.flow_send import flow_timer, next_packet
from miraccl.proxy.kernels.link_send import enqueue
from miraccl.wire.datagram.control import CONTROLLERS


def submit(flow: int, stream: int, length: int) -> int:
    """Queue a frame of ``length`` bytes."""
    link = load(flow + layout.FLOW_LINK)
    enqueue(link, stream, 1, 0, 0, length, 0, length, 0, 0, link_layout.CONTROL_ENTRY)
    return 0


def packet_in(flow: int, now: int, packet: int, length_and_mark: int) -> int:
    """Process a packet; the second argument is its bytes * 2 + 1 if it was marked."""
    receive(flow, now, packet, length_and_mark >> 1, length_and_mark & 1)
    return 0


def packet_out(flow: int, now: int, out: int) -> int:
    """Build the next packet; 0 if there is none."""
    return next_packet(flow, now, out)


def on_timer(flow: int, now: int) -> int:
    """Handle expired timers."""
    flow_on_timer(flow, now)
    return 0


def timer(flow: int, now: int) -> int:
    """Time of the next timer."""
    return flow_timer(flow, now)


def grant(flow: int, total: int) -> int:
    """Admit bytes of the peer."""
    if total > load(flow + layout.FLOW_GRANT_TOTAL):
        store(flow + layout.FLOW_GRANT_TOTAL, total)
        store(flow + layout.FLOW_GRANT_DUE, 1)
    return 0


def well_formed_packet(flow: int, packet: int, length: int) -> int:
    """Return 1 for a packet that ``encode`` could have produced."""
    return length >= 16 and well_formed(packet, length)


def issue(engine: int, port: int, now: int) -> int:
    """Issue the grants that are due."""
    issue_grants(engine, port, now)
    return 0


def grant_timer(engine: int, port: int, now: int) -> int:
    """Time of the next grants that pacing holds back."""
    return credit_timer(engine, port, now)


EXPORTS: dict[str, Any] = {
    "issue": issue,
    "grant_timer": grant_timer,
    "submit": submit,
    "packet_in": packet_in,
    "packet_out": packet_out,
    "on_timer": on_timer,
    "timer": timer,
    "grant": grant,
    "well_formed_packet": well_formed_packet,
}
for _name, _controller in CONTROLLERS.items():
    EXPORTS[f"{_name}_acked"] = _controller.acked
    EXPORTS[f"{_name}_lost"] = _controller.lost
    EXPORTS[f"{_name}_timeout"] = _controller.timeout
    EXPORTS[f"{_name}_undo"] = _controller.undo
