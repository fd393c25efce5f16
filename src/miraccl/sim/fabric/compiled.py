"""Transfers on the compiled fabric: flat arrays, millions of events per second.

Gives the same result as ``interpreted.run``, event by event; links may fail, slow down and lose
packets, but have no jitter, duplication or corruption.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from miraccl.errors import InvalidUsage, SystemFailure
from miraccl.native import PREFIX, library
from miraccl.sim.fabric.events import SECOND
from miraccl.sim.fabric.hashing import DRAW_RANGE, mix
from miraccl.sim.fabric.kernels import fabric_layout as layout
from miraccl.sim.fabric.network import switch_salt
from miraccl.sim.fabric.senders import ONE
from miraccl.sim.fabric.transfers import Control, TransferRequest, TransferResult

Words = npt.NDArray[np.int64]

#: Packets in flight or queued for which memory is reserved: per transfer, and besides.
PACKETS_PER_TRANSFER, SPARE_PACKETS = 512, 1 << 16
#: Events beyond the horizon of the wheel: timers of transfers.
HEAP_SPARE = 1 << 16
_FAILURES = {1: "the event queue is full", 2: "all packets are in use"}


@cache
def _run_fabric() -> Callable[[int, int], int]:
    address = library("miraccl.sim.fabric.kernels.event_loop").address(PREFIX + "run_fabric")
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(address)


class _Memory:
    """State of one run: named arrays of records, and the world record that has their addresses."""

    def __init__(self) -> None:
        self.world = np.zeros(layout.WORLD_SIZE // 8, np.int64)
        self._kept: list[Words] = []

    def set(self, field: int, value: int) -> None:
        """Set a field of the world."""
        self.world[field // 8] = value

    def records(self, field: int, count: int, size: int = 8) -> Words:
        """Allocate ``count`` records of ``size`` bytes; store their address in ``field``."""
        made = np.zeros((max(count, 1), size // 8), np.int64)
        self._kept.append(made)
        self.set(field, made.ctypes.data)
        return made


def run(request: TransferRequest, until: int = 10 * SECOND) -> TransferResult:
    """Run transfers until all have ended or ``until`` ns have passed."""
    _check(request)
    memory = _Memory()
    _set_world(memory, request, until)
    ports = _set_ports(memory, request)
    _set_routes(memory, request)
    flows = _set_flows(memory, request)
    _set_packets(memory, request)
    _set_events(memory, request)
    failure = _run_fabric()(memory.world.ctypes.data, 0)
    if failure:
        raise SystemFailure(f"cannot go on with the simulation: {_FAILURES[failure]}")
    return _result(memory, request, ports, flows)


def _check(request: TransferRequest) -> None:
    for number, link in enumerate(request.topology.links):
        profile = link.profile
        if profile.jitter or profile.duplicate or profile.corrupt:
            raise InvalidUsage(
                f"cannot compile link {number} with jitter, duplication or corruption; "
                "use interpreted.run"
            )


def _set_world(memory: _Memory, request: TransferRequest, until: int) -> None:
    config = request.config
    for field, value in (
        (layout.UNTIL, until),
        (layout.UNFINISHED, len(request.transfers)),
        (layout.SEED, request.seed),
        (layout.NHOSTS, request.topology.hosts),
        (layout.PACKET_BYTES, config.packet),
        (layout.HEADER_BYTES, config.header),
        (layout.PAYLOAD_BYTES, config.payload),
        (layout.ENTROPIES, config.entropies),
        (layout.BALANCE, int(config.balance)),
        (layout.CONTROL, int(config.control)),
        (layout.TIMEOUT, config.timeout),
        (layout.WINDOW, config.window),
    ):
        memory.set(field, value)


def _set_ports(memory: _Memory, request: TransferRequest) -> Words:
    topology, config = request.topology, request.config
    used = {h for t in request.transfers for h in (t.source, t.target)}
    ports = memory.records(layout.PORTS, len(topology.links), layout.PORT_SIZE)
    hosts = memory.records(layout.HOSTS, topology.hosts, layout.HOST_SIZE)
    empty = [layout.HOST_READY_FIRST, layout.HOST_ACTIVE_FIRST, layout.HOST_RESEND_FIRST]
    for field in empty:
        hosts[:, field // 8 : field // 8 + 2] = -1
    seen: set[int] = set()
    for number, link in enumerate(topology.links):
        profile, port = link.profile, ports[number]
        first = link.source in used and link.source not in seen
        for field, value in (
            (layout.PORT_TARGET, link.target),
            (layout.PORT_RATE, profile.rate),
            (layout.PORT_LATENCY, profile.latency),
            (layout.PORT_QUEUE, profile.queue),
            (layout.PORT_MARK_ABOVE, profile.mark_above),
            (layout.PORT_TRIMMING, int(profile.trimming)),
            (layout.PORT_LOSS, int(profile.loss * DRAW_RANGE)),
            (layout.PORT_UP, 1),
            (layout.PORT_HOST, link.source if first else -1),
            (layout.PORT_CONTROL_FIRST, -1),
            (layout.PORT_CONTROL_LAST, -1),
            (layout.PORT_DATA_FIRST, -1),
            (layout.PORT_DATA_LAST, -1),
        ):
            port[field // 8] = value
        if first:
            seen.add(link.source)
            host = hosts[link.source]
            time = profile.transmission_time(config.packet)
            host[layout.HOST_PORT // 8] = number
            host[layout.HOST_PULL_INTERVAL // 8] = time * config.pull_percent // 100
    return ports


def _set_routes(memory: _Memory, request: TransferRequest) -> None:
    topology = request.topology
    routes = memory.records(layout.ROUTES, topology.switches * topology.hosts)
    groups: list[int] = []
    found: dict[tuple[int, ...], int] = {}
    flat = []
    for switch in topology.routes:
        for group in switch:
            if group not in found:
                found[group] = len(groups)
                groups += group
            flat.append(found[group] << 16 | len(group))
    if flat:
        routes[:, 0] = flat
    memory.records(layout.GROUPS, len(groups))[: len(groups), 0] = groups
    salts = [switch_salt(request.seed, i) for i in range(topology.switches)]
    memory.records(layout.SALTS, len(salts))[: len(salts), 0] = salts


def _set_flows(memory: _Memory, request: TransferRequest) -> Words:
    config = request.config
    flows = memory.records(layout.FLOWS, len(request.transfers), layout.FLOW_SIZE)
    counts = [-(-t.nbytes // config.payload) for t in request.transfers]
    states = np.zeros((max(1, sum(counts)), layout.STATE_SIZE // 8), np.int64)
    memory._kept.append(states)
    at = 0
    receiver_driven = config.control is Control.RECEIVER
    for number, (transfer, count) in enumerate(zip(request.transfers, counts, strict=True)):
        for field, value in (
            (layout.FLOW_SOURCE, transfer.source),
            (layout.FLOW_TARGET, transfer.target),
            (layout.FLOW_NBYTES, transfer.nbytes),
            (layout.FLOW_COUNT, count),
            (layout.FLOW_STATES, states.ctypes.data + at * layout.STATE_SIZE),
            (layout.FLOW_FINISHED, -1),
            (layout.FLOW_UNSOLICITED, config.window if receiver_driven else 0),
            (layout.FLOW_SEED, mix(request.seed) + number),
            (layout.FLOW_WINDOW, config.window * ONE),
            (layout.FLOW_ALPHA, ONE),
            (layout.FLOW_SLOW_START, 1),
            (layout.FLOW_MISSING, count),
        ):
            flows[number, field // 8] = value
        at += count
    return flows


def _set_packets(memory: _Memory, request: TransferRequest) -> None:
    count = len(request.transfers) * PACKETS_PER_TRANSFER + SPARE_PACKETS
    packets = memory.records(layout.PACKETS, count, layout.PACKET_SIZE)
    packets[:, layout.PACKET_NEXT // 8] = np.arange(1, count + 1)
    packets[-1, layout.PACKET_NEXT // 8] = -1
    capacity = count + len(request.topology.links) + request.topology.hosts
    capacity += 4 * len(request.transfers) + len(request.changes)
    nodes = memory.records(layout.NODES, capacity, layout.NODE_SIZE)
    nodes[:, layout.NODE_NEXT // 8] = np.arange(1, capacity + 1)
    nodes[-1, layout.NODE_NEXT // 8] = -1
    memory.records(layout.WHEEL, layout.SLOTS, layout.SLOT_SIZE)[:] = -1
    memory.records(layout.OCCUPIED, layout.SLOTS // layout.BITS)


def _set_events(memory: _Memory, request: TransferRequest) -> None:
    """Schedule changes of links and starts of transfers, sorted as a heap is."""
    changes = memory.records(layout.CHANGES, len(request.changes), layout.CHANGE_SIZE)
    events: list[tuple[int, int, int]] = []
    for number, change in enumerate(request.changes):
        if not 0 <= change.link < len(request.topology.links):
            raise InvalidUsage(
                f"cannot change link {change.link}: there are {len(request.topology.links)} links"
            )
        loss = None if change.loss is None else int(change.loss * DRAW_RANGE)
        for field, value in (
            (layout.CHANGE_LINK, change.link),
            (layout.CHANGE_UP, change.up),
            (layout.CHANGE_RATE, change.rate),
            (layout.CHANGE_LOSS, loss),
        ):
            changes[number, field // 8] = layout.KEEP if value is None else int(value)
        events.append((change.time, len(events) + 1, number * layout.TYPES + layout.CHANGE))
    for number, transfer in enumerate(request.transfers):
        events.append((transfer.start, len(events) + 1, number * layout.TYPES + layout.START))
    # All begin in the heap; those within the horizon enter the wheel with the first event.
    heap = memory.records(layout.HEAP, len(events) + HEAP_SPARE, layout.EVENT_SIZE)
    for number, event in enumerate(sorted(events)):
        heap[number] = event
    memory.set(layout.HEAP_CAPACITY, len(events) + HEAP_SPARE)
    memory.set(layout.ORDER, len(events))
    memory.set(layout.HEAP_SIZE, len(events))
    memory.set(layout.NOW, -1)


def _result(
    memory: _Memory, request: TransferRequest, ports: Words, flows: Words
) -> TransferResult:
    finished = flows[: len(request.transfers), layout.FLOW_FINISHED // 8]
    completion = tuple(
        int(end) - t.start if end >= 0 else -1
        for end, t in zip(finished, request.transfers, strict=True)
    )

    def total(records: Words, field: int) -> int:
        return int(records[:, field // 8].sum())

    return TransferResult(
        completion=completion,
        events=int(memory.world[layout.EXECUTED // 8]),
        sent=total(flows, layout.FLOW_SENT),
        resent=total(flows, layout.FLOW_RESENT),
        trimmed=total(ports, layout.PORT_TRIMMED),
        marked=total(ports, layout.PORT_MARKED),
        dropped=total(ports, layout.PORT_DROPPED),
        lost=total(ports, layout.PORT_LOST),
        last_loss=int(ports[:, layout.PORT_LAST_LOSS // 8].max()),
    )
