"""Kernel source: one path of a flow (``wire.datagram.path``), decision by decision."""

from __future__ import annotations

from miraccl.native.intrinsics import call6, inline, load, store
from miraccl.proxy.kernels import flow_layout as layout
from miraccl.proxy.kernels import ranges
from miraccl.wire.datagram import path as spec
from miraccl.wire.datagram.control.base import RATE, SECOND, WINDOW
from miraccl.wire.datagram.packets import MIN_MTU
from miraccl.wire.datagram.rtt import MAX_NS, SETTLED

MIN_LOSS_DELAY_NS = spec.MIN_LOSS_DELAY_NS
MIN_PROBE_TIMEOUT_NS, MAX_PROBE_TIMEOUT_NS = spec.MIN_PROBE_TIMEOUT_NS, spec.MAX_PROBE_TIMEOUT_NS
PROBE_FIRST_NS, PROBE_LAST_NS = spec.PROBE_FIRST_NS, spec.PROBE_LAST_NS
DEAD_AFTER, BURST_NS, ACK_EVERY = spec.DEAD_AFTER, spec.BURST_NS, spec.ACK_EVERY
ACK_DELAY_NS, MAX_THRESHOLD = spec.ACK_DELAY_NS, spec.MAX_PACKET_THRESHOLD
BLACK_HOLE_AFTER = spec.BLACK_HOLE_AFTER
MTU_PROBE_FIRST_NS, MTU_PROBE_LAST_NS = spec.MTU_PROBE_FIRST_NS, spec.MTU_PROBE_LAST_NS
REMEMBERED, IN_FLIGHT_LIMIT = spec.REMEMBERED, spec.REMEMBERED - spec.PROBE_ROOM


@inline
def path_of(flow: int, index: int) -> int:
    """Address of a path."""
    return load(flow + layout.FLOW_PATHS) + index * layout.PATH_BYTES


@inline
def sent_at(path: int, position: int) -> int:
    """Address of the record of a packet that must be acknowledged."""
    return path + layout.PATH_SENT + (position & (REMEMBERED - 1)) * layout.SENT_BYTES


@inline
def usable(path: int) -> bool:
    """Return True if the path may carry new data."""
    return load(path + layout.PATH_STATE) == layout.OPEN


@inline
def window_of(path: int) -> int:
    """Congestion window in bytes."""
    return load(path + layout.PATH_CONTROL + 8 * WINDOW)


@inline
def rate_of(path: int) -> int:
    """Pacing rate in bytes per second."""
    own = load(path + layout.PATH_CONTROL + 8 * RATE)
    if own != 0:
        return own
    smoothed = max(1, load(path + layout.PATH_SMOOTHED))
    return max(1, window_of(path) * SECOND * 5 // (4 * smoothed))


@inline
def has_room(path: int, size: int) -> bool:
    """Return True if the window admits a packet of ``size`` bytes; always one at a time."""
    if load(path + layout.PATH_NSENT) == 0:
        return True
    if load(path + layout.PATH_ORDER) - load(path + layout.PATH_OLDEST) >= IN_FLIGHT_LIMIT:
        return False
    limit = min(window_of(path), load(path + layout.PATH_MAX_IN_FLIGHT))
    return load(path + layout.PATH_IN_FLIGHT) + size <= limit


@inline
def release_time(path: int, now: int) -> int:
    """Earliest time at which pacing admits a packet."""
    return max(now, load(path + layout.PATH_RELEASE) - BURST_NS)


@inline
def expected_finish(path: int, size: int) -> int:
    """Expected time until ``size`` more bytes arrive, in ns."""
    rtt = load(path + layout.PATH_SMOOTHED)
    queued = load(path + layout.PATH_IN_FLIGHT) + size
    return queued * rtt // max(1, window_of(path)) + rtt // 2


@inline
def on_sent(path: int, now: int, size: int, flags: int) -> int:
    """Record a packet that must be acknowledged; return its record, without spans yet."""
    order = load(path + layout.PATH_ORDER)
    if load(path + layout.PATH_NSENT) == 0:
        store(path + layout.PATH_DELIVERED_AT, now)
        store(path + layout.PATH_OLDEST, order)
    record = sent_at(path, order)
    if load(record + layout.SENT_STATE) == layout.LOST:  # forgotten now
        count_lost(path, order, -1)
    store(record + layout.SENT_STATE, layout.IN_FLIGHT)
    store(record + layout.SENT_NUMBER, load(path + layout.PATH_NEXT_NUMBER))
    store(record + layout.SENT_TIME, now)
    store(record + layout.SENT_SIZE, size)
    store(record + layout.SENT_DELIVERED, load(path + layout.PATH_DELIVERED))
    store(record + layout.SENT_DELIVERED_AT, load(path + layout.PATH_DELIVERED_AT))
    store(record + layout.SENT_FLAGS, flags)
    store(record + layout.SENT_NSPANS, 0)
    store(path + layout.PATH_ORDER, order + 1)
    store(path + layout.PATH_NSENT, load(path + layout.PATH_NSENT) + 1)
    store(path + layout.PATH_IN_FLIGHT, load(path + layout.PATH_IN_FLIGHT) + size)
    store(path + layout.PATH_LAST_ELICITING, now)
    release = max(now, load(path + layout.PATH_RELEASE)) + size * SECOND // rate_of(path)
    store(path + layout.PATH_RELEASE, release)
    return record


@inline
def take_number(path: int) -> int:
    """Return the next packet number."""
    number = load(path + layout.PATH_NEXT_NUMBER)
    store(path + layout.PATH_NEXT_NUMBER, number + 1)
    store(path + layout.PATH_SENT_PACKETS, load(path + layout.PATH_SENT_PACKETS) + 1)
    return number


@inline
def lost_group(path: int, position: int) -> int:
    """Address of the number of lost packets near a position."""
    group = (position & (REMEMBERED - 1)) // layout.LOST_GROUP
    return path + layout.PATH_LOST_GROUPS + 8 * group


@inline
def count_lost(path: int, position: int, change: int) -> None:
    """Count a remembered packet that was declared lost, or is no longer."""
    group = lost_group(path, position)
    store(group, load(group) + change)
    store(path + layout.PATH_NLOST, load(path + layout.PATH_NLOST) + change)


@inline
def leave_flight(path: int, record: int, state: int) -> None:
    """Count a packet as acknowledged or lost."""
    store(record + layout.SENT_STATE, state)
    left = load(path + layout.PATH_IN_FLIGHT) - load(record + layout.SENT_SIZE)
    store(path + layout.PATH_IN_FLIGHT, left)
    store(path + layout.PATH_NSENT, load(path + layout.PATH_NSENT) - 1)
    oldest, order = load(path + layout.PATH_OLDEST), load(path + layout.PATH_ORDER)
    while oldest < order and load(sent_at(path, oldest) + layout.SENT_STATE) != layout.IN_FLIGHT:
        oldest += 1
    store(path + layout.PATH_OLDEST, oldest)


@inline
def first_position(path: int, number: int, oldest: int) -> int:
    """Position of the first packet from ``oldest`` on with ``number`` or a later one."""
    low, high = oldest, load(path + layout.PATH_ORDER)
    while low < high:
        middle = (low + high) // 2
        if load(sent_at(path, middle) + layout.SENT_NUMBER) < number:
            low = middle + 1
        else:
            high = middle
    return low


@inline
def on_spurious(path: int) -> None:
    """Undo a reduction: a packet declared lost was only late."""
    store(path + layout.PATH_SPURIOUS, load(path + layout.PATH_SPURIOUS) + 1)
    store(path + layout.PATH_LOST_PACKETS, load(path + layout.PATH_LOST_PACKETS) - 1)
    threshold = min(2 * load(path + layout.PATH_THRESHOLD), MAX_THRESHOLD)
    store(path + layout.PATH_THRESHOLD, threshold)
    call6(load(path + layout.PATH_UNDO_FN), path + layout.PATH_CONTROL, 0, 0, 0, 0, 0)


@inline
def add_rtt(path: int, sample: int, ack_delay: int) -> None:
    """Add a round-trip time (``wire.datagram.rtt``)."""
    sample = min(max(1, sample), MAX_NS)
    samples, smoothed = load(path + layout.PATH_SAMPLES), load(path + layout.PATH_SMOOTHED)
    store(path + layout.PATH_LATEST, sample)
    minimum = sample if samples == 0 else min(load(path + layout.PATH_MINIMUM), sample)
    store(path + layout.PATH_MINIMUM, minimum)
    adjusted = max(minimum, sample - ack_delay)
    store(path + layout.PATH_ADJUSTED, adjusted)
    if samples == 0 or (samples < SETTLED and 4 * adjusted < smoothed):
        store(path + layout.PATH_SMOOTHED, adjusted)
        store(path + layout.PATH_VARIATION, adjusted // 2)
    else:
        variation = load(path + layout.PATH_VARIATION)
        distance = max(smoothed - adjusted, adjusted - smoothed)
        store(path + layout.PATH_VARIATION, variation + (distance - variation) // 4)
        store(path + layout.PATH_SMOOTHED, smoothed + (adjusted - smoothed) // 8)
    store(path + layout.PATH_SAMPLES, samples + 1)


@inline
def count_marks(path: int, ce: int) -> int:
    """Return the newly reported ECN marks."""
    before = load(path + layout.PATH_PEER_MARKED)
    marked = (ce - before) & 0xFFFFFFFF
    if marked >= 1 << 31:
        marked = 0
    store(path + layout.PATH_PEER_MARKED, (before + marked) & 0xFFFFFFFF)
    return marked


@inline
def after_acknowledgement(
    path: int, now: int, delay: int, marked: int, nbytes: int, newest: int
) -> None:
    """Update RTT and controller after packets were acknowledged, ``newest`` the last of them."""
    store(path + layout.PATH_STATE, layout.OPEN)
    store(path + layout.PATH_TIMEOUTS, 0)
    store(path + layout.PATH_PROBES, 0)
    store(path + layout.PATH_PROBE_INTERVAL, PROBE_FIRST_NS)
    store(path + layout.PATH_DELIVERED, load(path + layout.PATH_DELIVERED) + nbytes)
    store(path + layout.PATH_ACKED_BYTES, load(path + layout.PATH_ACKED_BYTES) + nbytes)
    mtu = max(load(path + layout.PATH_MTU), load(newest + layout.SENT_SIZE))
    store(path + layout.PATH_MTU, mtu)
    number, time = load(newest + layout.SENT_NUMBER), load(newest + layout.SENT_TIME)
    if number > load(path + layout.PATH_LARGEST_ACKED):
        store(path + layout.PATH_LARGEST_ACKED, number)
        add_rtt(path, now - time, delay)
    interval = now - load(newest + layout.SENT_DELIVERED_AT)
    delivered = load(path + layout.PATH_DELIVERED) - load(newest + layout.SENT_DELIVERED)
    store(path + layout.PATH_DELIVERED_AT, now)
    rate = 0
    if interval > 0:
        rate = delivered * SECOND // interval
    sample = path + layout.PATH_SAMPLE  # struct AckSample
    store(sample, now)
    store(sample + 8, load(path + layout.PATH_ADJUSTED))
    store(sample + 16, load(path + layout.PATH_SMOOTHED))
    store(sample + 24, load(path + layout.PATH_MINIMUM))
    store(sample + 32, nbytes)
    store(sample + 40, marked)
    store(sample + 48, load(path + layout.PATH_IN_FLIGHT))
    store(sample + 56, time)
    store(sample + 64, rate)
    store(sample + 72, load(newest + layout.SENT_FLAGS) & layout.FLAG_LIMITED)
    call6(
        load(path + layout.PATH_ACKED_FN),
        path + layout.PATH_CONTROL,
        sample,
        load(path + layout.PATH_MTU),
        0,
        0,
        0,
    )


@inline
def report_lost(path: int, now: int, count: int, nbytes: int, newest_time: int) -> None:
    """Count lost packets; a path that carries probes only says nothing about congestion."""
    store(path + layout.PATH_LOST_PACKETS, load(path + layout.PATH_LOST_PACKETS) + count)
    store(path + layout.PATH_LOST_BYTES, load(path + layout.PATH_LOST_BYTES) + nbytes)
    tried = count == 1 and nbytes > load(path + layout.PATH_MTU)
    if load(path + layout.PATH_STATE) <= layout.SUSPECT and not tried:
        call6(
            load(path + layout.PATH_LOST_FN),
            path + layout.PATH_CONTROL,
            now,
            nbytes,
            newest_time,
            load(path + layout.PATH_MTU),
            0,
        )


@inline
def timeout_at(path: int) -> int:
    """Time of the probe timeout, 0 for none."""
    if load(path + layout.PATH_NSENT) == 0 or load(path + layout.PATH_PROBES) != 0:
        return 0
    smoothed, variation = load(path + layout.PATH_SMOOTHED), load(path + layout.PATH_VARIATION)
    base = max(MIN_PROBE_TIMEOUT_NS, smoothed + 4 * variation + ACK_DELAY_NS)
    backoff = base << min(load(path + layout.PATH_TIMEOUTS), 16)
    return load(path + layout.PATH_LAST_ELICITING) + min(backoff, MAX_PROBE_TIMEOUT_NS)


@inline
def path_timer(path: int) -> int:
    """Time at which the path has something to do, 0 for none."""
    if load(path + layout.PATH_STATE) >= layout.DEAD:
        return load(path + layout.PATH_PROBE_AT)
    loss, timeout = load(path + layout.PATH_LOSS_TIME), timeout_at(path)
    if loss == 0:
        return timeout
    return loss if timeout == 0 else min(loss, timeout)


@inline
def shrink(path: int, now: int) -> None:
    """Send packets that every path carries from now on, and probe for the full size later."""
    if load(path + layout.PATH_MTU) > MIN_MTU:
        store(path + layout.PATH_MTU, MIN_MTU)
        store(path + layout.PATH_MTU_PROBE_INTERVAL, MTU_PROBE_FIRST_NS)
        store(path + layout.PATH_MTU_PROBE_AT, now + MTU_PROBE_FIRST_NS)


@inline
def is_shrunk(path: int) -> bool:
    """Return True if the path is open and its packets have shrunk."""
    return usable(path) and load(path + layout.PATH_MTU) < load(path + layout.PATH_FULL_MTU)


# ---- packets received


@inline
def is_new(path: int, number: int) -> bool:
    """Return True unless the number was received or lies below the remembered window."""
    if number < load(path + layout.PATH_FLOOR):
        return False
    return not ranges.contains(path + layout.PATH_NUMBERS, number)


@inline
def add_number(path: int, now: int, number: int, eliciting: bool, marked: int, urgent: int) -> None:
    """Record a packet and decide when it is acknowledged."""
    largest = load(path + layout.PATH_LARGEST)
    numbers = path + layout.PATH_NUMBERS
    in_order = number == largest + 1
    ranges.add(numbers, number, number + 1, layout.MAX_ACK_RANGES + 1)
    while load(numbers) > layout.MAX_ACK_RANGES:
        store(path + layout.PATH_FLOOR, ranges.stop_of(numbers, 0))
        ranges.splice(numbers, 0, 1, 0)
    if number > largest:
        store(path + layout.PATH_LARGEST, number)
        store(path + layout.PATH_LARGEST_AT, now)
    store(path + layout.PATH_MARKED, load(path + layout.PATH_MARKED) + marked)
    if not eliciting:
        return
    pending = load(path + layout.PATH_PENDING) + 1
    store(path + layout.PATH_PENDING, pending)
    store(path + layout.PATH_REPEATS, 2)
    if urgent != 0 or marked != 0 or not in_order or pending >= ACK_EVERY:
        store(path + layout.PATH_DUE, now)
    elif pending == 1:
        store(path + layout.PATH_DUE, now + ACK_DELAY_NS)


@inline
def on_duplicate(path: int, now: int) -> None:
    """Acknowledge a packet again."""
    store(path + layout.PATH_DUPLICATES, load(path + layout.PATH_DUPLICATES) + 1)
    store(path + layout.PATH_DUE, now)
    store(path + layout.PATH_REPEATS, 2)
    store(path + layout.PATH_PENDING, max(1, load(path + layout.PATH_PENDING)))
