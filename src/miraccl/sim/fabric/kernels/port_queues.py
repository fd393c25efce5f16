"""Kernel source: output ports, as ``sim.fabric.ports.OutputPort``, and the packets in them."""

from __future__ import annotations

from miraccl.native.intrinsics import load, store
from miraccl.sim.fabric.hashing import draw
from miraccl.sim.fabric.kernels.event_queue import schedule
from miraccl.sim.fabric.kernels.fabric_layout import (
    ARRIVE,
    DATA,
    DRAWN,
    FAILED,
    FLOW_QUEUED,
    FLOW_READY_NEXT,
    FLOW_SHARING,
    FLOW_SIZE,
    FLOW_TARGET,
    FLOWS,
    FREE,
    HEADER_BYTES,
    HOST_READY_COUNT,
    HOST_READY_FIRST,
    HOST_READY_LAST,
    HOST_SIZE,
    HOSTS,
    NOW,
    PACKET_CONTROL,
    PACKET_ECHO,
    PACKET_ENTROPY,
    PACKET_FLOW,
    PACKET_KIND,
    PACKET_MARKED,
    PACKET_NEXT,
    PACKET_NODE,
    PACKET_PREVIOUS,
    PACKET_SEQUENCE,
    PACKET_SIZE,
    PACKET_SIZE_NOW,
    PACKET_TARGET,
    PACKET_TRIMMED,
    PACKET_WANTED,
    PACKETS,
    PORT_BUSY_UNTIL,
    PORT_CONTROL_BYTES,
    PORT_CONTROL_FIRST,
    PORT_CONTROL_LAST,
    PORT_DATA_BYTES,
    PORT_DATA_FIRST,
    PORT_DATA_LAST,
    PORT_DROPPED,
    PORT_HOST,
    PORT_LAST_LOSS,
    PORT_LATENCY,
    PORT_LOSS,
    PORT_LOST,
    PORT_MARK_ABOVE,
    PORT_MARKED,
    PORT_QUEUE,
    PORT_RATE,
    PORT_SIZE,
    PORT_TARGET,
    PORT_TRIMMED,
    PORT_TRIMMING,
    PORT_UP,
    PORT_WAKE_PENDING,
    PORTS,
    SECOND,
    SEED,
    WAKE,
)
from miraccl.sim.fabric.kernels.sender_steps import (
    bump,
    may_send,
    next_entropy,
    next_sequence,
    size_of,
    wanted,
)


def flow_at(world: int, number: int) -> int:
    return load(world + FLOWS) + number * FLOW_SIZE


def host_at(world: int, number: int) -> int:
    return load(world + HOSTS) + number * HOST_SIZE


def port_at(world: int, number: int) -> int:
    return load(world + PORTS) + number * PORT_SIZE


def packet_at(world: int, number: int) -> int:
    return load(world + PACKETS) + number * PACKET_SIZE


def next_random(world: int) -> int:
    return draw(load(world + SEED), bump(world + DRAWN, 1))


def new_packet(world: int, flow: int, target: int, entropy: int, size: int) -> int:
    """Take a packet from the free list; return its number."""
    number = load(world + FREE)
    packet = packet_at(world, number)
    after = load(packet + PACKET_NEXT)
    if after < 0:  # the last one stays, so that the list never ends
        store(world + FAILED, 2)
    else:
        store(world + FREE, after)
    store(packet + PACKET_FLOW, flow)
    store(packet + PACKET_TARGET, target)
    store(packet + PACKET_ENTROPY, entropy)
    store(packet + PACKET_SIZE_NOW, size)
    store(packet + PACKET_TRIMMED, 0)
    store(packet + PACKET_MARKED, 0)
    store(packet + PACKET_ECHO, 0)
    return number


def free_packet(world: int, number: int) -> int:
    store(packet_at(world, number) + PACKET_NEXT, load(world + FREE))
    store(world + FREE, number)
    return 0


# ---- queues: doubly linked lists of packet numbers, -1 ends them


def _append(world: int, first: int, last: int, number: int) -> int:
    """Append to the queue whose ends are stored at ``first`` and ``last``."""
    packet, before = packet_at(world, number), load(last)
    store(packet + PACKET_NEXT, -1)
    store(packet + PACKET_PREVIOUS, before)
    if before < 0:
        store(first, number)
    else:
        store(packet_at(world, before) + PACKET_NEXT, number)
    store(last, number)
    return 0


def _pop_first(world: int, first: int, last: int) -> int:
    number = load(first)
    after = load(packet_at(world, number) + PACKET_NEXT)
    store(first, after)
    if after < 0:
        store(last, -1)
    else:
        store(packet_at(world, after) + PACKET_PREVIOUS, -1)
    return number


def _pop_last(world: int, first: int, last: int) -> int:
    number = load(last)
    before = load(packet_at(world, number) + PACKET_PREVIOUS)
    store(last, before)
    if before < 0:
        store(first, -1)
    else:
        store(packet_at(world, before) + PACKET_NEXT, -1)
    return number


# ---- ports


def enqueue(world: int, port_number: int, number: int) -> int:
    """Queue, mark, trim or drop a packet; send it if the link is free."""
    port = port_at(world, port_number)
    packet = packet_at(world, number)
    if load(packet + PACKET_CONTROL) == 0 and load(packet + PACKET_TRIMMED) == 0:
        number = _enqueue_data(world, port, number)
        if number < 0:
            return 0
        packet = packet_at(world, number)
    if load(packet + PACKET_CONTROL) != 0 or load(packet + PACKET_TRIMMED) != 0:
        size = load(packet + PACKET_SIZE_NOW)
        if load(port + PORT_CONTROL_BYTES) + size > 2 * load(port + PORT_QUEUE):
            bump(port + PORT_DROPPED, 1)
            free_packet(world, number)
            return 0
        _append(world, port + PORT_CONTROL_FIRST, port + PORT_CONTROL_LAST, number)
        bump(port + PORT_CONTROL_BYTES, size)
    kick(world, port_number)
    return 0


def _enqueue_data(world: int, port: int, number: int) -> int:
    """Queue data; return the packet or the one trimmed for it, -1 if it was dropped."""
    packet = packet_at(world, number)
    size = load(packet + PACKET_SIZE_NOW)
    if load(port + PORT_DATA_BYTES) + size > load(port + PORT_QUEUE):
        if load(port + PORT_TRIMMING) == 0:
            bump(port + PORT_DROPPED, 1)
            free_packet(world, number)
            return -1
        if load(port + PORT_DATA_LAST) >= 0 and (next_random(world) & 1) != 0:
            victim = _pop_last(world, port + PORT_DATA_FIRST, port + PORT_DATA_LAST)
            bump(port + PORT_DATA_BYTES, size - load(packet_at(world, victim) + PACKET_SIZE_NOW))
            _append(world, port + PORT_DATA_FIRST, port + PORT_DATA_LAST, number)
            number = victim
            packet = packet_at(world, number)
        store(packet + PACKET_TRIMMED, 1)
        store(packet + PACKET_SIZE_NOW, load(world + HEADER_BYTES))
        bump(port + PORT_TRIMMED, 1)
        return number
    _append(world, port + PORT_DATA_FIRST, port + PORT_DATA_LAST, number)
    queued = bump(port + PORT_DATA_BYTES, size)
    above = load(port + PORT_MARK_ABOVE)
    if above > 0 and queued > above:
        store(packet + PACKET_MARKED, 1)
        bump(port + PORT_MARKED, 1)
    return number


def kick(world: int, port_number: int) -> int:
    """Send if there is something to send and the link is free; else wake when it is."""
    port = port_at(world, port_number)
    if load(port + PORT_WAKE_PENDING) != 0:
        return 0
    if load(world + NOW) >= load(port + PORT_BUSY_UNTIL):
        transmit(world, port_number)
    else:
        store(port + PORT_WAKE_PENDING, 1)
        schedule(world, load(port + PORT_BUSY_UNTIL), WAKE, port_number)
    return 0


def _next(world: int, port: int) -> int:
    """Return the next packet of a port, -1 for none."""
    if load(port + PORT_CONTROL_FIRST) >= 0:
        number = _pop_first(world, port + PORT_CONTROL_FIRST, port + PORT_CONTROL_LAST)
        bump(port + PORT_CONTROL_BYTES, -load(packet_at(world, number) + PACKET_SIZE_NOW))
        return number
    if load(port + PORT_DATA_FIRST) >= 0:
        number = _pop_first(world, port + PORT_DATA_FIRST, port + PORT_DATA_LAST)
        bump(port + PORT_DATA_BYTES, -load(packet_at(world, number) + PACKET_SIZE_NOW))
        return number
    if load(port + PORT_HOST) >= 0:
        return next_data(world, host_at(world, load(port + PORT_HOST)))
    return -1


def transmit(world: int, port_number: int) -> int:
    port = port_at(world, port_number)
    number = _next(world, port)
    if number < 0:
        return 0
    packet = packet_at(world, number)
    rate = load(port + PORT_RATE)
    bits = load(packet + PACKET_SIZE_NOW) * 8 * SECOND
    free_at = load(world + NOW) + (bits + rate - 1) // rate
    store(port + PORT_BUSY_UNTIL, free_at)
    lost = 0
    if load(port + PORT_UP) == 0 or (
        load(port + PORT_LOSS) > 0 and next_random(world) < load(port + PORT_LOSS)
    ):
        lost = 1
    if lost != 0:
        bump(port + PORT_LOST, 1)
        store(port + PORT_LAST_LOSS, load(world + NOW))
        free_packet(world, number)
    else:
        store(packet + PACKET_NODE, load(port + PORT_TARGET))
        schedule(world, free_at + load(port + PORT_LATENCY), ARRIVE, number)
    queued = load(port + PORT_CONTROL_FIRST) >= 0 or load(port + PORT_DATA_FIRST) >= 0
    if not queued and load(port + PORT_HOST) >= 0:
        queued = load(host_at(world, load(port + PORT_HOST)) + HOST_READY_FIRST) >= 0
    if queued:
        store(port + PORT_WAKE_PENDING, 1)
        schedule(world, free_at, WAKE, port_number)
    return 0


# ---- data of hosts


def offer(world: int, number: int, host: int) -> int:
    """Queue a sender for its host's link if it may send; return 1 if it was queued."""
    flow = flow_at(world, number)
    if load(flow + FLOW_QUEUED) != 0 or may_send(world, flow) == 0:
        return 0
    store(flow + FLOW_QUEUED, 1)
    bump(host + HOST_READY_COUNT, 1)
    store(flow + FLOW_READY_NEXT, -1)
    last = load(host + HOST_READY_LAST)
    if last < 0:
        store(host + HOST_READY_FIRST, number)
    else:
        store(flow_at(world, last) + FLOW_READY_NEXT, number)
    store(host + HOST_READY_LAST, number)
    return 1


def next_data(world: int, host: int) -> int:
    """Return the next data packet of a host, -1 for none; senders take turns."""
    while load(host + HOST_READY_FIRST) >= 0:
        number = load(host + HOST_READY_FIRST)
        flow = flow_at(world, number)
        after = load(flow + FLOW_READY_NEXT)
        store(host + HOST_READY_FIRST, after)
        if after < 0:
            store(host + HOST_READY_LAST, -1)
        store(flow + FLOW_QUEUED, 0)
        others = bump(host + HOST_READY_COUNT, -1)
        if may_send(world, flow) != 0:
            store(flow + FLOW_SHARING, others + 1)
            sequence = next_sequence(world, flow)
            entropy = next_entropy(world, flow)
            size = size_of(world, flow, sequence)
            packet_number = new_packet(world, number, load(flow + FLOW_TARGET), entropy, size)
            packet = packet_at(world, packet_number)
            store(packet + PACKET_CONTROL, 0)
            store(packet + PACKET_KIND, DATA)
            store(packet + PACKET_SEQUENCE, sequence)
            store(packet + PACKET_WANTED, wanted(world, flow))
            offer(world, number, host)
            return packet_number
    return -1
