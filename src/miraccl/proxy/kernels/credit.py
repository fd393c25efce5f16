"""Kernel source: grants of this rank to all of its peers (``wire.datagram.credit``).

Wanted are the bytes of frames whose header has arrived: headers need no grant.
"""

from __future__ import annotations

from miraccl.native.intrinsics import inline, load, store
from miraccl.proxy.kernels import flow_layout as layout
from miraccl.proxy.kernels import link_layout
from miraccl.proxy.kernels.link_send import alive
from miraccl.proxy.kernels.progress_engine import link_at
from miraccl.wire.datagram.control.base import SECOND
from miraccl.wire.datagram.credit import QUANTUM_BYTES, SHORT_BYTES, UNSOLICITED_BYTES


@inline
def sender_at(engine: int, i: int) -> int:
    """Flow of a peer that needs grants, 0 if there is none at ``i``."""
    link = link_at(engine, i)
    if link == 0 or not alive(link):
        return 0
    flow = load(link + link_layout.LINK_FLOW)
    return flow if load(flow + layout.FLOW_ADMITS) != 0 else 0


@inline
def backlog_of(flow: int) -> int:
    """Bytes that a sender wants to send and was not granted."""
    return max(0, load(flow + layout.FLOW_WANTED) - load(flow + layout.FLOW_ADMITTED))


@inline
def outstanding_of(flow: int) -> int:
    """Bytes granted and not yet received, as far as the sender can use the grant."""
    usable = max(load(flow + layout.FLOW_WANTED), UNSOLICITED_BYTES)
    usable = min(load(flow + layout.FLOW_ADMITTED), usable)
    return max(0, usable - load(flow + layout.FLOW_RECEIVED))


@inline
def admit(flow: int, total: int) -> None:
    """Grant a sender ``total`` bytes since the start."""
    store(flow + layout.FLOW_ADMITTED, total)
    if total > load(flow + layout.FLOW_GRANT_TOTAL):
        store(flow + layout.FLOW_GRANT_TOTAL, total)
        store(flow + layout.FLOW_GRANT_DUE, 1)


@inline
def refill(port: int, now: int) -> None:
    """Allow more bytes, at the rate of grants."""
    budget, rate = load(port + layout.PORT_BUDGET), load(port + layout.PORT_CREDIT_RATE)
    refilled = load(port + layout.PORT_REFILLED)
    if rate == 0:
        store(port + layout.PORT_ALLOWANCE, budget)
    elif now > refilled:
        # the time in which the allowance fills up: a longer one would overflow
        elapsed = min(now - refilled, budget * SECOND // rate + 1)
        more = elapsed * rate // SECOND
        allowance = min(budget, load(port + layout.PORT_ALLOWANCE) + more)
        store(port + layout.PORT_ALLOWANCE, allowance)
        store(port + layout.PORT_REFILLED, now)


@inline
def renew_idle(engine: int) -> int:
    """Give idle senders their unsolicited start back; return the bytes outstanding of all."""
    outstanding = 0
    for i in range(load(engine + link_layout.ENGINE_NLINKS)):
        flow = sender_at(engine, i)
        if flow != 0:
            received = load(flow + layout.FLOW_RECEIVED)
            unused = load(flow + layout.FLOW_ADMITTED) - received
            idle = load(flow + layout.FLOW_WANTED) == received
            if idle and unused < UNSOLICITED_BYTES // 2:
                admit(flow, received + UNSOLICITED_BYTES)
            outstanding += outstanding_of(flow)
    return outstanding


@inline
def next_sender(engine: int) -> int:
    """Return the flow to grant next: the least backlog among short ones, else in turn; or 0."""
    best, least, turn, is_short = 0, 0, 0, False
    for i in range(load(engine + link_layout.ENGINE_NLINKS)):
        flow = sender_at(engine, i)
        backlog = 0
        if flow != 0:
            backlog = backlog_of(flow)
        if backlog != 0:
            short, own = backlog <= SHORT_BYTES, load(flow + layout.FLOW_CREDIT_TURN)
            first = best == 0 or (short and not is_short)
            if not first and short == is_short:
                if short and backlog != least:
                    first = backlog < least
                else:
                    first = own < turn
            if first:
                best, least, turn, is_short = flow, backlog, own, short
    return best


@inline
def issue_grants(engine: int, port: int, now: int) -> None:
    """Grant what budget and rate admit."""
    refill(port, now)
    free = load(port + layout.PORT_BUDGET) - renew_idle(engine)
    going = True
    while going and free >= QUANTUM_BYTES:
        flow = 0
        if load(port + layout.PORT_ALLOWANCE) >= QUANTUM_BYTES:
            flow = next_sender(engine)
        going = flow != 0
        if going:
            turn, step = load(port + layout.PORT_TURN) + 1, min(QUANTUM_BYTES, backlog_of(flow))
            store(port + layout.PORT_TURN, turn)
            store(flow + layout.FLOW_CREDIT_TURN, turn)
            admit(flow, load(flow + layout.FLOW_ADMITTED) + step)
            free -= step
            store(port + layout.PORT_ALLOWANCE, load(port + layout.PORT_ALLOWANCE) - step)


@inline
def credit_timer(engine: int, port: int, now: int) -> int:
    """Time at which ``issue_grants`` may have more to give without a packet; 0 for none."""
    rate = load(port + layout.PORT_CREDIT_RATE)
    if load(port + layout.PORT_BUDGET) == 0 or rate == 0:
        return 0
    outstanding, waits = 0, False
    for i in range(load(engine + link_layout.ENGINE_NLINKS)):
        flow = sender_at(engine, i)
        if flow != 0:
            outstanding += outstanding_of(flow)
            if backlog_of(flow) != 0:
                waits = True
    if not waits or load(port + layout.PORT_BUDGET) - outstanding < QUANTUM_BYTES:
        return 0
    return now + max(0, QUANTUM_BYTES - load(port + layout.PORT_ALLOWANCE)) * SECOND // rate + 1
