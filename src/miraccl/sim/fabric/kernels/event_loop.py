"""Kernel source: hosts and the event loop, as ``sim.fabric.interpreted``."""

from __future__ import annotations

from typing import Any

from miraccl.native.intrinsics import load, store
from miraccl.sim.fabric.hashing import choose
from miraccl.sim.fabric.kernels.event_queue import next_time, pop, schedule
from miraccl.sim.fabric.kernels.fabric_layout import (
    ACK,
    ARRIVE,
    BALANCE,
    CHANGE,
    CHANGE_LINK,
    CHANGE_LOSS,
    CHANGE_RATE,
    CHANGE_SIZE,
    CHANGE_UP,
    CHANGES,
    COMPLETE,
    CONTROL,
    DATA,
    ENTROPIES,
    EXECUTED,
    FAILED,
    FLOW_ACTIVE_NEXT,
    FLOW_COUNT,
    FLOW_CREDIT,
    FLOW_ENTROPY,
    FLOW_FINISHED,
    FLOW_IDLE,
    FLOW_ISSUED,
    FLOW_LISTED,
    FLOW_MISSING,
    FLOW_NACKS,
    FLOW_NEXT,
    FLOW_PULLS,
    FLOW_RESEND_BACKLOG,
    FLOW_RESEND_COUNT,
    FLOW_RESEND_LISTED,
    FLOW_RESENDING_NEXT,
    FLOW_SOURCE,
    FLOW_TARGET,
    FLOW_TRIMMED,
    FLOW_UNSOLICITED,
    FLOW_WANTED,
    GROUPS,
    HEADER_BYTES,
    HOST_ACTIVE_FIRST,
    HOST_NEXT_PULL,
    HOST_PACING,
    HOST_PORT,
    HOST_PULL_INTERVAL,
    HOST_PULLS,
    HOST_RESEND_FIRST,
    IN_FLIGHT,
    KEEP,
    NACK,
    NHOSTS,
    NOW,
    PACKET_CONTROL,
    PACKET_ECHO,
    PACKET_ENTROPY,
    PACKET_FLOW,
    PACKET_KIND,
    PACKET_MARKED,
    PACKET_NODE,
    PACKET_SEQUENCE,
    PACKET_TARGET,
    PACKET_TRIMMED,
    PACKET_WANTED,
    PORT_LOSS,
    PORT_RATE,
    PORT_UP,
    PORT_WAKE_PENDING,
    PULL,
    PULL_DUE,
    RECYCLE,
    REQUEST,
    ROUTES,
    SALTS,
    SENDER_CONTROL,
    START,
    STATE_RECEIVED,
    STATE_STATUS,
    TIMEOUT,
    TIMER,
    TYPES,
    UNFINISHED,
    UNTIL,
    WAKE,
)
from miraccl.sim.fabric.kernels.port_queues import (
    enqueue,
    flow_at,
    free_packet,
    host_at,
    kick,
    new_packet,
    offer,
    packet_at,
    port_at,
    transmit,
)
from miraccl.sim.fabric.kernels.sender_steps import (
    bump,
    may_send,
    next_draw,
    on_ack,
    on_complete,
    on_timer,
    queue_again,
    state_of,
    wanted,
)


def reply(world: int, flow: int, kind: int, sequence: int, entropy: int) -> int:
    """Return a control packet to the flow's other end, not yet queued."""
    record = flow_at(world, flow)
    target = load(record + FLOW_TARGET) if kind == REQUEST else load(record + FLOW_SOURCE)
    number = new_packet(world, flow, target, entropy, load(world + HEADER_BYTES))
    packet = packet_at(world, number)
    store(packet + PACKET_CONTROL, 1)
    store(packet + PACKET_KIND, kind)
    store(packet + PACKET_SEQUENCE, sequence)
    return number


def request(world: int, number: int, host: int, stalled: int) -> int:
    """Ask for credits if a sender cannot go on without."""
    flow = flow_at(world, number)
    if load(world + CONTROL) == SENDER_CONTROL or may_send(world, flow) != 0:
        return 0
    if load(flow + FLOW_NEXT) == load(flow + FLOW_COUNT) and load(flow + FLOW_RESEND_COUNT) == 0:
        return 0
    received = load(flow + FLOW_PULLS) if stalled != 0 else -1
    entropy = next_draw(flow) % load(world + ENTROPIES)
    packet = reply(world, number, REQUEST, received, entropy)
    store(packet_at(world, packet) + PACKET_WANTED, wanted(world, flow))
    enqueue(world, load(host + HOST_PORT), packet)
    return 0


def offer_and_kick(world: int, number: int, host: int) -> int:
    if offer(world, number, host) != 0:
        kick(world, load(host + HOST_PORT))
    return 0


def start(world: int, number: int) -> int:
    schedule(world, load(world + NOW) + load(world + TIMEOUT), TIMER, number)
    host = host_at(world, load(flow_at(world, number) + FLOW_SOURCE))
    offer_and_kick(world, number, host)
    return 0


def timer(world: int, number: int) -> int:
    flow = flow_at(world, number)
    if load(flow + FLOW_FINISHED) >= 0:
        return 0
    again, stalled = on_timer(world, flow)
    host = host_at(world, load(flow + FLOW_SOURCE))
    if stalled != 0:
        request(world, number, host, 1)
    offer_and_kick(world, number, host)
    schedule(world, again, TIMER, number)
    return 0


# ---- receiving


def deliver(world: int, number: int) -> int:
    """Forward a packet at a switch, or process it at a host."""
    packet = packet_at(world, number)
    node, nhosts = load(packet + PACKET_NODE), load(world + NHOSTS)
    if node < nhosts:
        receive(world, host_at(world, node), packet)
        free_packet(world, number)
        return 0
    switch = node - nhosts
    route = load(load(world + ROUTES) + 8 * (switch * nhosts + load(packet + PACKET_TARGET)))
    first, count = route >> 16, route & 0xFFFF
    salt = load(load(world + SALTS) + 8 * switch)
    at = choose(salt, load(packet + PACKET_FLOW), load(packet + PACKET_ENTROPY), count)
    enqueue(world, load(load(world + GROUPS) + 8 * (first + at)), number)
    return 0


def receive(world: int, host: int, packet: int) -> int:
    kind, number = load(packet + PACKET_KIND), load(packet + PACKET_FLOW)
    flow = flow_at(world, number)
    sequence, entropy = load(packet + PACKET_SEQUENCE), load(packet + PACKET_ENTROPY)
    if kind == DATA:
        answer = on_data(
            flow, sequence, load(packet + PACKET_WANTED), load(packet + PACKET_TRIMMED)
        )
        back = reply(world, number, answer, sequence, entropy)
        store(packet_at(world, back) + PACKET_ECHO, load(packet + PACKET_MARKED))
        enqueue(world, load(host + HOST_PORT), back)
        want(world, number, host)
    elif kind == REQUEST:
        store(flow + FLOW_ENTROPY, entropy)
        if sequence >= 0:
            store(flow + FLOW_ISSUED, min(load(flow + FLOW_ISSUED), sequence))
        total = max(load(flow + FLOW_WANTED), load(packet + PACKET_WANTED))
        store(flow + FLOW_WANTED, total)
        if load(flow + FLOW_MISSING) == 0:
            enqueue(world, load(host + HOST_PORT), reply(world, number, COMPLETE, 0, entropy))
        want(world, number, host)
    else:
        if kind == ACK:
            on_ack(world, flow, sequence, entropy, load(packet + PACKET_ECHO))
        elif kind == NACK:
            on_nack(world, number, host, sequence)
        elif kind == PULL:
            on_pull(flow, sequence)
        else:
            on_complete(world, flow)
        offer_and_kick(world, number, host)
    return 0


def on_data(flow: int, sequence: int, total: int, trimmed: int) -> int:
    """Process a data packet; return the type of the answer."""
    store(flow + FLOW_WANTED, max(load(flow + FLOW_WANTED), total))
    state = state_of(flow, sequence)
    if trimmed != 0:
        if load(state + STATE_RECEIVED) != 0:
            return ACK
        bump(flow + FLOW_TRIMMED, 1)
        bump(flow + FLOW_RESEND_BACKLOG, 1)
        return NACK
    if load(state + STATE_RECEIVED) == 0:
        store(state + STATE_RECEIVED, 1)
        bump(flow + FLOW_MISSING, -1)
    return ACK


def on_nack(world: int, number: int, host: int, sequence: int) -> int:
    flow = flow_at(world, number)
    unsolicited = load(flow + FLOW_UNSOLICITED)
    store(flow + FLOW_IDLE, 0)
    status = load(state_of(flow, sequence) + STATE_STATUS)
    if load(flow + FLOW_FINISHED) < 0 and status == IN_FLIGHT:
        queue_again(flow, sequence)
    bump(flow + FLOW_NACKS, 1)
    store(flow + FLOW_UNSOLICITED, 0)
    if unsolicited != 0:
        request(world, number, host, 0)
    return 0


def on_pull(flow: int, total: int) -> int:
    store(flow + FLOW_IDLE, 0)
    pulls = load(flow + FLOW_PULLS)
    if total > pulls:
        bump(flow + FLOW_CREDIT, total - pulls)
        store(flow + FLOW_PULLS, total)
    return 0


# ---- credits


def backlog(flow: int) -> int:
    """Credits wanted and not issued."""
    if load(flow + FLOW_MISSING) == 0:
        return 0
    return load(flow + FLOW_WANTED) + load(flow + FLOW_TRIMMED) - load(flow + FLOW_ISSUED)


def list_flow(world: int, number: int, first: int, link: int) -> int:
    """Append a flow to the list whose ends are at ``first``, linked at offset ``link``."""
    store(flow_at(world, number) + link, -1)
    last = load(first + 8)
    if last < 0:
        store(first, number)
    else:
        store(flow_at(world, last) + link, number)
    store(first + 8, number)
    return 0


def want(world: int, number: int, host: int) -> int:
    """List a receiver that wants credits, and start the pacer."""
    flow = flow_at(world, number)
    if load(world + CONTROL) == SENDER_CONTROL or backlog(flow) <= 0:
        return 0
    if load(flow + FLOW_RESEND_BACKLOG) > 0 and load(flow + FLOW_RESEND_LISTED) == 0:
        store(flow + FLOW_RESEND_LISTED, 1)
        list_flow(world, number, host + HOST_RESEND_FIRST, FLOW_RESENDING_NEXT)
    if load(flow + FLOW_LISTED) == 0:
        store(flow + FLOW_LISTED, 1)
        list_flow(world, number, host + HOST_ACTIVE_FIRST, FLOW_ACTIVE_NEXT)
    if load(host + HOST_PACING) == 0:
        store(host + HOST_PACING, 1)
        schedule(world, load(host + HOST_NEXT_PULL), PULL_DUE, load(flow + FLOW_TARGET))
    return 0


def pull(world: int, host_number: int) -> int:
    """Issue one credit, to a transfer that resends if there is one."""
    host = host_at(world, host_number)
    if pull_from(world, host, 1) == 0 and pull_from(world, host, 0) == 0:
        store(host + HOST_PACING, 0)
        return 0
    due = load(world + NOW) + load(host + HOST_PULL_INTERVAL)
    store(host + HOST_NEXT_PULL, due)
    schedule(world, due, PULL_DUE, host_number)
    return 0


def pull_from(world: int, host: int, resend: int) -> int:
    first = host + (HOST_RESEND_FIRST if resend != 0 else HOST_ACTIVE_FIRST)
    link = FLOW_RESENDING_NEXT if resend != 0 else FLOW_ACTIVE_NEXT
    listed = FLOW_RESEND_LISTED if resend != 0 else FLOW_LISTED
    while load(first) >= 0:
        number = load(first)
        flow = flow_at(world, number)
        after = load(flow + link)
        store(first, after)
        if after < 0:
            store(first + 8, -1)
        if backlog(flow) <= 0 or (resend != 0 and load(flow + FLOW_RESEND_BACKLOG) <= 0):
            store(flow + listed, 0)
        else:
            issued = bump(flow + FLOW_ISSUED, 1)
            left = max(0, load(flow + FLOW_RESEND_BACKLOG) - 1)
            store(flow + FLOW_RESEND_BACKLOG, left)
            if backlog(flow) > 0 and (resend == 0 or left > 0):
                list_flow(world, number, first, link)
            else:
                store(flow + listed, 0)
            entropy = bump(host + HOST_PULLS, 1) % load(world + ENTROPIES)
            if load(world + BALANCE) == RECYCLE:
                entropy = load(flow + FLOW_ENTROPY)
            packet = reply(world, number, PULL, issued, entropy)
            enqueue(world, load(host + HOST_PORT), packet)
            return 1
    return 0


# ---- loop


def change(world: int, number: int) -> int:
    """Apply a change of a link."""
    record = load(world + CHANGES) + number * CHANGE_SIZE
    port = port_at(world, load(record + CHANGE_LINK))
    if load(record + CHANGE_UP) != KEEP:
        store(port + PORT_UP, load(record + CHANGE_UP))
    if load(record + CHANGE_RATE) != KEEP:
        store(port + PORT_RATE, load(record + CHANGE_RATE))
    if load(record + CHANGE_LOSS) != KEEP:
        store(port + PORT_LOSS, load(record + CHANGE_LOSS))
    return 0


def run(world: int, unused: int) -> int:
    """Execute events until all transfers have ended, none is left, or time is up."""
    while load(world + UNFINISHED) > 0 and load(world + FAILED) == 0:
        time = next_time(world)
        if time < 0 or time > load(world + UNTIL):
            break
        what = pop(world, time)
        kind, argument = what % TYPES, what // TYPES
        bump(world + EXECUTED, 1)
        if kind == ARRIVE:
            deliver(world, argument)
        elif kind == WAKE:
            store(port_at(world, argument) + PORT_WAKE_PENDING, 0)
            transmit(world, argument)
        elif kind == PULL_DUE:
            pull(world, argument)
        elif kind == TIMER:
            timer(world, argument)
        elif kind == START:
            start(world, argument)
        elif kind == CHANGE:
            change(world, argument)
    return load(world + FAILED)


EXPORTS: dict[str, Any] = {"run_fabric": run}
