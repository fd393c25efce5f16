"""Kernel source: the sender of a transfer, as ``sim.fabric.senders.Sender``."""

from __future__ import annotations

from miraccl.native.intrinsics import load, store
from miraccl.sim.fabric.hashing import draw
from miraccl.sim.fabric.kernels.fabric_layout import (
    ACKNOWLEDGED,
    BALANCE,
    CONTROL,
    ENTROPIES,
    FLOW_ACKNOWLEDGED,
    FLOW_ALPHA,
    FLOW_COUNT,
    FLOW_CREDIT,
    FLOW_DRAWS,
    FLOW_FINISHED,
    FLOW_FROZEN_UNTIL,
    FLOW_IDLE,
    FLOW_IN_FLIGHT,
    FLOW_LAST_SENT,
    FLOW_NACKS,
    FLOW_NBYTES,
    FLOW_NEXT,
    FLOW_OFFSET,
    FLOW_OLDEST,
    FLOW_PULLS,
    FLOW_RECYCLED,
    FLOW_RECYCLED_FROM,
    FLOW_RECYCLED_TO,
    FLOW_RESEND_COUNT,
    FLOW_RESEND_HEAD,
    FLOW_RESEND_TAIL,
    FLOW_RESENT,
    FLOW_ROUND_ACKS,
    FLOW_ROUND_MARKS,
    FLOW_ROUND_START,
    FLOW_SEED,
    FLOW_SENT,
    FLOW_SHARING,
    FLOW_SLOW_START,
    FLOW_STATES,
    FLOW_TURN,
    FLOW_UNSOLICITED,
    FLOW_WINDOW,
    HEADER_BYTES,
    IN_FLIGHT,
    NOW,
    PACKET_BYTES,
    PAYLOAD_BYTES,
    RECYCLE,
    RECYCLED,
    RESEND,
    SENDER_CONTROL,
    STATE_RESEND,
    STATE_SENT_AT,
    STATE_SIZE,
    STATE_STATUS,
    TIMEOUT,
    UNFINISHED,
    WINDOW,
)

MIN_WINDOW, FREEZE_TIMEOUTS, REORDER_DIVISOR, LOSS_SCAN = 2, 8, 8, 64
SPRAY_REORDER_DIVISOR = 4
ALPHA_SHIFT, ONE, MAX_WINDOW = 4, 1 << 16, 1 << 12


def bump(address: int, by: int) -> int:
    """Add to a word; return its new value."""
    value = load(address) + by
    store(address, value)
    return value


def state_of(flow: int, sequence: int) -> int:
    return load(flow + FLOW_STATES) + sequence * STATE_SIZE


def may_send(world: int, flow: int) -> int:
    """Return 1 if there is a packet to send and it is admitted."""
    if load(flow + FLOW_NEXT) == load(flow + FLOW_COUNT) and load(flow + FLOW_RESEND_COUNT) == 0:
        return 0
    if load(world + CONTROL) == SENDER_CONTROL:
        return 1 if load(flow + FLOW_IN_FLIGHT) < max(1, load(flow + FLOW_WINDOW) >> 16) else 0
    return 1 if load(flow + FLOW_CREDIT) > 0 or load(flow + FLOW_UNSOLICITED) > 0 else 0


def wanted(world: int, flow: int) -> int:
    """Total number of credits that this sender can use, less those for trimmed packets."""
    left = load(flow + FLOW_COUNT) - load(flow + FLOW_NEXT) + load(flow + FLOW_RESEND_COUNT)
    window = max(MIN_WINDOW, load(world + WINDOW) // max(1, load(flow + FLOW_SHARING)))
    missing = min(window, left) - load(flow + FLOW_CREDIT) - load(flow + FLOW_UNSOLICITED)
    return load(flow + FLOW_PULLS) + max(0, missing) - load(flow + FLOW_NACKS)


def size_of(world: int, flow: int, sequence: int) -> int:
    if sequence < load(flow + FLOW_COUNT) - 1:
        return load(world + PACKET_BYTES)
    before = sequence * load(world + PAYLOAD_BYTES)
    return load(flow + FLOW_NBYTES) - before + load(world + HEADER_BYTES)


def next_sequence(world: int, flow: int) -> int:
    """Choose the next packet to send and account for it."""
    sequence = 0
    if load(flow + FLOW_RESEND_COUNT) > 0:
        while True:
            head = load(flow + FLOW_RESEND_HEAD)
            store(flow + FLOW_RESEND_HEAD, head + 1)
            entry = state_of(flow, head % load(flow + FLOW_COUNT))
            sequence = load(entry + STATE_RESEND)
            if load(state_of(flow, sequence) + STATE_STATUS) == RESEND:
                break
        bump(flow + FLOW_RESEND_COUNT, -1)
        bump(flow + FLOW_RESENT, 1)
    else:
        sequence = load(flow + FLOW_NEXT)
        store(flow + FLOW_NEXT, sequence + 1)
    if load(flow + FLOW_CREDIT) > 0:
        bump(flow + FLOW_CREDIT, -1)
    elif load(flow + FLOW_UNSOLICITED) > 0:
        bump(flow + FLOW_UNSOLICITED, -1)
    state = state_of(flow, sequence)
    store(state + STATE_STATUS, IN_FLIGHT)
    store(state + STATE_SENT_AT, load(world + NOW))
    store(flow + FLOW_LAST_SENT, load(world + NOW))
    bump(flow + FLOW_IN_FLIGHT, 1)
    bump(flow + FLOW_SENT, 1)
    return sequence


def next_draw(flow: int) -> int:
    return draw(load(flow + FLOW_SEED), bump(flow + FLOW_DRAWS, 1))


def next_entropy(world: int, flow: int) -> int:
    entropies = load(world + ENTROPIES)
    if load(world + BALANCE) == RECYCLE:
        return _recycled_entropy(world, flow, entropies)
    entropy = (load(flow + FLOW_TURN) + load(flow + FLOW_OFFSET)) % entropies
    if bump(flow + FLOW_TURN, 1) == entropies:
        store(flow + FLOW_TURN, 0)
        store(flow + FLOW_OFFSET, next_draw(flow))
    return entropy


def _recycled_entropy(world: int, flow: int, entropies: int) -> int:
    first, last = load(flow + FLOW_RECYCLED_FROM), load(flow + FLOW_RECYCLED_TO)
    if first < last:
        store(flow + FLOW_RECYCLED_FROM, first + 1)
        return load(flow + FLOW_RECYCLED + 8 * (first % RECYCLED))
    if load(world + NOW) < load(flow + FLOW_FROZEN_UNTIL) and last >= RECYCLED:
        turn = bump(flow + FLOW_TURN, 1)
        return load(flow + FLOW_RECYCLED + 8 * (turn % RECYCLED))
    return next_draw(flow) % entropies


def queue_again(flow: int, sequence: int) -> int:
    store(state_of(flow, sequence) + STATE_STATUS, RESEND)
    bump(flow + FLOW_IN_FLIGHT, -1)
    tail = load(flow + FLOW_RESEND_TAIL)
    store(state_of(flow, tail % load(flow + FLOW_COUNT)) + STATE_RESEND, sequence)
    store(flow + FLOW_RESEND_TAIL, tail + 1)
    bump(flow + FLOW_RESEND_COUNT, 1)
    return 0


def on_ack(world: int, flow: int, sequence: int, entropy: int, marked: int) -> int:
    """Process the acknowledgement of one packet."""
    store(flow + FLOW_IDLE, 0)
    if load(flow + FLOW_FINISHED) >= 0:
        return 0
    state = state_of(flow, sequence)
    status = load(state + STATE_STATUS)
    if status == ACKNOWLEDGED:
        return 0
    if status == IN_FLIGHT:
        bump(flow + FLOW_IN_FLIGHT, -1)
    else:
        bump(flow + FLOW_RESEND_COUNT, -1)
    store(state + STATE_STATUS, ACKNOWLEDGED)
    count = load(flow + FLOW_COUNT)
    if bump(flow + FLOW_ACKNOWLEDGED, 1) == count:
        store(flow + FLOW_FINISHED, load(world + NOW))
        bump(world + UNFINISHED, -1)
    oldest = load(flow + FLOW_OLDEST)
    while oldest < count and load(state_of(flow, oldest) + STATE_STATUS) == ACKNOWLEDGED:
        oldest += 1
    store(flow + FLOW_OLDEST, oldest)
    if load(world + BALANCE) == RECYCLE and marked == 0:
        _recycle(flow, entropy)
    if load(world + CONTROL) == SENDER_CONTROL:
        sent_at = load(state + STATE_SENT_AT)
        _adjust_window(world, flow, sent_at, marked)
        _detect_losses(world, flow, sent_at)
    elif load(world + BALANCE) == RECYCLE:
        _leave_dead_paths(world, flow, load(state + STATE_SENT_AT))
    return 0


def on_complete(world: int, flow: int) -> int:
    """End the transfer: the receiver has everything, but acknowledgements were lost."""
    if load(flow + FLOW_FINISHED) < 0:
        store(flow + FLOW_FINISHED, load(world + NOW))
        bump(world + UNFINISHED, -1)
    count = load(flow + FLOW_COUNT)
    store(flow + FLOW_NEXT, count)
    store(flow + FLOW_OLDEST, count)
    store(flow + FLOW_ACKNOWLEDGED, count)
    store(flow + FLOW_RESEND_COUNT, 0)
    store(flow + FLOW_IN_FLIGHT, 0)
    return 0


def _recycle(flow: int, entropy: int) -> int:
    first, last = load(flow + FLOW_RECYCLED_FROM), load(flow + FLOW_RECYCLED_TO)
    if last - first == RECYCLED:
        store(flow + FLOW_RECYCLED_FROM, first + 1)
    store(flow + FLOW_RECYCLED + 8 * (last % RECYCLED), entropy)
    store(flow + FLOW_RECYCLED_TO, last + 1)
    return 0


def _adjust_window(world: int, flow: int, sent_at: int, marked: int) -> int:
    acks = bump(flow + FLOW_ROUND_ACKS, 1)
    marks = bump(flow + FLOW_ROUND_MARKS, marked)
    window = load(flow + FLOW_WINDOW)
    if load(flow + FLOW_SLOW_START) != 0 and marked == 0:
        window += ONE
    else:
        store(flow + FLOW_SLOW_START, 0)
        window += ONE * ONE // window
    if sent_at >= load(flow + FLOW_ROUND_START):
        alpha = load(flow + FLOW_ALPHA)
        alpha += (marks * ONE // acks - alpha) >> ALPHA_SHIFT
        store(flow + FLOW_ALPHA, alpha)
        if marks > 0:
            window -= window * alpha // (2 * ONE)
        store(flow + FLOW_ROUND_START, load(world + NOW))
        store(flow + FLOW_ROUND_ACKS, 0)
        store(flow + FLOW_ROUND_MARKS, 0)
    store(flow + FLOW_WINDOW, max(ONE, min(window, MAX_WINDOW * ONE)))
    return 0


def _detect_losses(world: int, flow: int, sent_at: int) -> int:
    limit = sent_at - load(world + TIMEOUT) // REORDER_DIVISOR
    oldest, lost = load(flow + FLOW_OLDEST), 0
    for sequence in range(oldest, min(load(flow + FLOW_NEXT), oldest + LOSS_SCAN)):
        state = state_of(flow, sequence)
        if load(state + STATE_STATUS) == IN_FLIGHT and load(state + STATE_SENT_AT) < limit:
            queue_again(flow, sequence)
            lost = 1
    if lost != 0 and sent_at >= load(flow + FLOW_FROZEN_UNTIL):
        store(flow + FLOW_FROZEN_UNTIL, load(flow + FLOW_LAST_SENT))
        store(flow + FLOW_WINDOW, max(ONE, load(flow + FLOW_WINDOW) // 2))
        store(flow + FLOW_SLOW_START, 0)
    return 0


def _leave_dead_paths(world: int, flow: int, sent_at: int) -> int:
    now, timeout = load(world + NOW), load(world + TIMEOUT)
    limit, oldest = sent_at - timeout // SPRAY_REORDER_DIVISOR, load(flow + FLOW_OLDEST)
    for sequence in range(oldest, min(load(flow + FLOW_NEXT), oldest + LOSS_SCAN)):
        state = state_of(flow, sequence)
        if load(state + STATE_STATUS) == IN_FLIGHT and load(state + STATE_SENT_AT) < limit:
            queue_again(flow, sequence)
            store(flow + FLOW_FROZEN_UNTIL, now + FREEZE_TIMEOUTS * timeout)
    return 0


def on_timer(world: int, flow: int) -> tuple[int, int]:
    """Queue packets without an answer again; return the next check and whether it is stalled."""
    now, timeout = load(world + NOW), load(world + TIMEOUT)
    oldest, stalled = now, load(flow + FLOW_IDLE)
    store(flow + FLOW_IDLE, 1)
    expired = 0
    for sequence in range(load(flow + FLOW_OLDEST), load(flow + FLOW_NEXT)):
        state = state_of(flow, sequence)
        if load(state + STATE_STATUS) == IN_FLIGHT:
            sent_at = load(state + STATE_SENT_AT)
            if sent_at + timeout <= now:
                queue_again(flow, sequence)
                expired = 1
            else:
                oldest = min(oldest, sent_at)
    if expired != 0:
        store(flow + FLOW_WINDOW, ONE)
        store(flow + FLOW_SLOW_START, 0)
        store(flow + FLOW_FROZEN_UNTIL, now + FREEZE_TIMEOUTS * timeout)
        stalled = 1
    return oldest + timeout, stalled
