"""Waits of a rank, and the wake-ups of its peers.

A wait spins, then yields the processor, then sleeps on the rank's own doorbell (a futex in shared
memory): more ranks than cores still make progress, and a rank that waits long uses no processor.
Every wait has a deadline, ends on an abort, answers Ctrl-C, and compares its operation with the
progress page of the rank it waits for.

Where messages go over a network, a waiting rank advances the connections itself (``drive``). Before
it sleeps it hands them over to the proxy's thread; with a single core it sleeps in ``drive``, which
saves the switches to that thread.

Waking: after storing a flag, a rank reads the peer's ``CTRL_SLEEP`` word. "Store flag, load SLEEP"
against "store SLEEP, load flag" is Dekker's problem and needs a full fence on both sides. If there
is a core for every rank, the sleeper pays for both with the ``membarrier`` system call (a barrier
on every core that runs a registered process), so that a message costs no fence; if ranks share
cores, sleeping is common and the sender pays.
"""

from __future__ import annotations

from numba import types

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.progress_page import publish_wait
from miraccl.native.intrinsics import (
    FUTEX_WAIT,
    MEMBARRIER_GLOBAL_EXPEDITED,
    SYS_FUTEX,
    SYS_MEMBARRIER,
    PyErr_CheckSignals,
    PyErr_Fetch,
    PyEval_RestoreThread,
    PyEval_SaveThread,
    call4,
    clock_gettime,
    exchange,
    fence,
    inline,
    libc_write,
    load,
    load32,
    load_acquire,
    pause,
    sched_getaffinity,
    sched_getcpu,
    sched_setaffinity,
    sched_yield,
    store,
    store_release,
    syscall,
)
from miraccl.native.sleeper import ring_doorbell

SPIN_BETWEEN_YIELDS = 16
#: A yield that lasts this long has given the core to a thread that computes: a time slice of Linux
#: is 1.4 ms and more.
CORE_HELD_NS = 1_000_000
#: Number of waits that sleep at once after such a yield: the first, and the most, for the number
#: doubles with each of them and falls by 1 with each wait that yields. A sleep costs some 10 us
#: more than a yield (40 us where it hands network connections over), so 256 of them cost about as
#: much as a long yield does; a single one, as when other processes start, is not worth that.
FIRST_SKIPPED_YIELDS, MOST_SKIPPED_YIELDS = 8, 256
FIRST_SLEEP_NS = 1_000_000
#: Longest sleep in ``drive``: an abort does not end it.
DRIVE_SLEEP_NS = 10_000_000
# An operation on more bytes releases the GIL from its start.
RELEASE_GIL_BYTES = 1 << 18


@inline
def now_ns(ctx: int) -> int:
    """Return CLOCK_MONOTONIC, or a virtual rank's time, in nanoseconds."""
    if load(ctx + layout.CTX_TIME) != 0:
        return load(load(ctx + layout.CTX_TIME))
    spec = load(ctx + layout.CTX_SCRATCH) + layout.SCRATCH_NOW
    clock_gettime(1, spec)
    return load(spec) * 1000000000 + load(spec + 8)


@inline
def futex_wait(ctx: int, address: int, value: int, nanoseconds: int) -> None:
    """Sleep while the futex word has ``value``, for at most ``nanoseconds``."""
    if load(ctx + layout.CTX_SLEEPER) != 0:
        call4(load(ctx + layout.CTX_SLEEPER), address, value, nanoseconds, 0)
        return
    spec = load(ctx + layout.CTX_SCRATCH) + layout.SCRATCH_SLEEP
    store(spec, nanoseconds // 1000000000)
    store(spec + 8, nanoseconds % 1000000000)
    syscall(SYS_FUTEX, address, FUTEX_WAIT, value, spec, 0, 0)


@inline
def signal_eventfd(ctx: int, descriptor: int) -> None:
    """Add 1 to an eventfd."""
    word = load(ctx + layout.CTX_SCRATCH) + layout.SCRATCH_EVENTFD
    store(word, 1)
    libc_write(types.int32(descriptor), word, 8)


#: Modes of ``drive`` (``proxy.kernels.progress_engine``).
DRIVE_POSTED, DRIVE_POLL, DRIVE_HAND_OVER, DRIVE_SLEEP = 0, 1, 2, 3


@inline
def drives(ctx: int) -> bool:
    """Return True if this rank can advance its network connections."""
    return load(ctx + layout.CTX_DRIVE) != 0


@inline
def drive(ctx: int, mode: int) -> int:
    """Advance the network connections; return 0 if the proxy's thread is doing that."""
    return call4(load(ctx + layout.CTX_DRIVE), load(ctx + layout.CTX_DRIVEN), mode, 0, 0)


@inline
def sleeps_driving(ctx: int, peer: int) -> bool:
    """Return True if a wait for a peer sleeps in ``drive``."""
    if load(ctx + layout.CTX_DRIVE_SLEEPS) == 0:
        return False
    conn = load(ctx + layout.CTX_RECV) + peer * layout.CONN_SIZE
    return load(conn + layout.CONN_CAPS) & layout.CAP_NEEDS_PROGRESS != 0


@inline
def pause_or_drive(ctx: int) -> None:
    """Spend a moment of a wait."""
    if drives(ctx):
        drive(ctx, DRIVE_POLL)
    else:
        pause()


@inline
def wake_peer(ctx: int, conn: int) -> None:
    """Wake the other end of a connection if it sleeps, after a flag was stored."""
    if load(conn + layout.CONN_CAPS) & layout.CAP_NEEDS_PROGRESS == 0:
        if load(ctx + layout.CTX_MEMBARRIER) == 0:
            fence()
        ctrl = load(conn + layout.CONN_CTRL)
        if load(ctrl + layout.CTRL_SLEEP) != 0:
            ring_doorbell(ctrl)
    elif not drives(ctx) or drive(ctx, DRIVE_POSTED) == 0:
        fence()
        if load_acquire(load(conn + layout.CONN_ASLEEP)) != 0:
            signal_eventfd(ctx, load(conn + layout.CONN_DOORBELL))


@inline
def fail(ctx: int, code: int, peer: int, expected: int, actual: int) -> int:
    """Record an error in the context and return its code."""
    store(ctx + layout.CTX_ERR, code)
    store(ctx + layout.CTX_ERR_PEER, peer)
    store(ctx + layout.CTX_ERR_STEP, load(ctx + layout.CTX_STEP))
    store(ctx + layout.CTX_ERR_EXPECTED, expected)
    store(ctx + layout.CTX_ERR_ACTUAL, actual)
    return code


@inline
def release_gil(ctx: int) -> None:
    """Release the GIL; idempotent."""
    if load(ctx + layout.CTX_TSTATE) == 0:
        store(ctx + layout.CTX_TSTATE, PyEval_SaveThread())


@inline
def restore_gil(ctx: int) -> None:
    """Acquire the GIL again if it was released."""
    state = load(ctx + layout.CTX_TSTATE)
    if state != 0 and state != -1:
        store(ctx + layout.CTX_TSTATE, 0)
        PyEval_RestoreThread(state)


@inline
def interrupted(ctx: int) -> bool:
    """Run Python's signal handlers (Ctrl-C); return True if one raised."""
    state = load(ctx + layout.CTX_TSTATE)
    if state == -1:  # not started by Python
        return False
    PyEval_RestoreThread(state)
    raised = PyErr_CheckSignals() != 0
    if raised:  # deferred: Python ends the communicator before it raises it
        kept = ctx + layout.CTX_EXCEPTION
        PyErr_Fetch(kept, kept + 8, kept + 16)
    store(ctx + layout.CTX_TSTATE, PyEval_SaveThread())
    return raised


@inline
def diverged_signature(ctx: int, peer: int) -> int:
    """Return the signature of the operation that the peer runs under this one's number, 0 if it is
    equal.

    The peer may be further on: its history has the last ``HISTORY`` operations. 0 if it does not
    know.
    """
    table = load(ctx + layout.CTX_CTRLS)
    theirs = load(table + 8 * peer)
    if theirs == 0:
        return 0
    mine = load(ctx + layout.CTX_CTRL)
    seq = load(mine + layout.PROGRESS_SEQ)
    if load_acquire(theirs + layout.PROGRESS_SEQ) < seq:
        return 0
    sig = load_acquire(theirs + layout.CTRL_HISTORY + (seq & (layout.HISTORY - 1)) * 16)
    # An entry with another number has been overwritten by a later operation.
    if sig & layout.SEQ_MASK != seq & layout.SEQ_MASK or sig == load(mine + layout.PROGRESS_SIG):
        return 0
    return sig


@inline
def peer_diverged(ctx: int, peer: int, sending: bool) -> bool:
    """Return True if a wait for ``peer`` can never end: it waits for this rank on the control
    plane.

    The awaited word must be read once more afterwards: it may have been stored before. Messages
    from other hosts may arrive later than the notice on the control plane; for such a peer this
    requires that it has not begun this operation, or that all of its messages have arrived.
    """
    row = load(ctx + layout.CTX_CONTROL_WAITS) + peer * layout.CONTROL_WAIT_SIZE
    if (
        load_acquire(row + layout.CONTROL_WAIT_SET) == 0
        or load(ctx + layout.CTX_BACKGROUND) != 0
        or load(ctx + layout.CTX_BUSY) & layout.BUSY_PENDING != 0
    ):
        return False
    near = load(load(ctx + layout.CTX_CTRLS) + 8 * peer) != 0
    if sending and not near:
        return False
    ctrl = load(ctx + layout.CTX_CTRL)
    if load(ctrl + layout.PROGRESS_P2P_SIG) == 0:
        return load(row + layout.CONTROL_WAIT_SEQ) < load(ctrl + layout.PROGRESS_SEQ)
    return near or load(row + layout.CONTROL_WAIT_SENT) == load(
        load(ctx + layout.CTX_RECV) + peer * layout.CONN_SIZE + layout.CONN_COUNT
    )


@inline
def peer_completed(ctx: int, peer: int) -> bool:
    """Return True if the peer has completed the collective this rank is in: ranks disagree on
    messages.

    The awaited word must be read once more afterwards.
    """
    ctrl, theirs = load(ctx + layout.CTX_CTRL), load(load(ctx + layout.CTX_CTRLS) + 8 * peer)
    if theirs == 0 or load(ctrl + layout.PROGRESS_P2P_SIG) != 0:
        return False
    seq, other = load(ctrl + layout.PROGRESS_SEQ), load_acquire(theirs + layout.PROGRESS_SEQ)
    ended = other > seq
    if other == seq:
        ended = (
            load_acquire(theirs + layout.PROGRESS_STATE) == layout.STATE_IDLE
            or load_acquire(theirs + layout.PROGRESS_P2P_SIG) != 0
        )
    # After an abort a rank numbers operations that it does not run.
    return ended and load_acquire(theirs + layout.CTRL_ABORT) == 0


@inline
def deadline_expired(ctx: int, now: int) -> bool:
    """Return True if the operation's deadline has passed; the first call sets it."""
    deadline = load(ctx + layout.CTX_DEADLINE)
    if deadline == 0:
        store(ctx + layout.CTX_DEADLINE, now + load(ctx + layout.CTX_TIMEOUT_NS))
        return False
    return now > deadline


@inline
def ranks_on_core(ctx: int, cpu: int, above: int) -> int:
    """Count the other ranks of this host numbered above ``above`` that last waited on ``cpu``."""
    mine, count = load(ctx + layout.CTX_RANK), 0
    for rank in range(above + 1, load(ctx + layout.CTX_NRANKS)):
        ctrl = load(load(ctx + layout.CTX_CTRLS) + 8 * rank)
        if rank != mine and ctrl != 0 and load(ctrl + layout.PROGRESS_CPU) == cpu + 1:
            count += 1
    return count


@inline
def find_freer_core(ctx: int, cpu: int, here: int, allowed: int) -> int:
    """Return the core of ``allowed`` with the fewest ranks, -1 unless it has at least two fewer
    than
    here.

    ``here``: number of other ranks on the current core.
    """
    best, fewest = -1, here
    for other in range(8 * layout.CPU_SET_BYTES):
        if (load(allowed + (other >> 6) * 8) >> (other & 63)) & 1 != 0 and other != cpu:
            count = ranks_on_core(ctx, other, -1)
            if count < fewest:
                best, fewest = other, count
            if fewest == 0:
                break
    return best


@inline
def migrate_to_freer_core(ctx: int) -> None:
    """Move this thread to a freer core if the current one has two ranks more.

    The thread's affinity is narrowed for the move and restored at once: it is a hint to the
    scheduler, not a binding.
    """
    # The kernel wakes a sleeper where its waker runs, so ranks that wait for each other gather on
    # one core while another is idle, and stay there because none runs long enough to be moved. The
    # highest rank of the core moves.
    cpu = types.int64(sched_getcpu())
    store(load(ctx + layout.CTX_CTRL) + layout.PROGRESS_CPU, cpu + 1)
    waits = load(ctx + layout.CTX_WAIT_COUNT) + 1
    store(ctx + layout.CTX_WAIT_COUNT, waits)
    if waits & 15 != 0:  # every 16th wait is enough
        return
    here = ranks_on_core(ctx, cpu, -1)
    if here == 0 or ranks_on_core(ctx, cpu, load(ctx + layout.CTX_RANK)) != 0:
        return
    allowed, chosen = (
        load(ctx + layout.CTX_CPU_MASKS),
        load(ctx + layout.CTX_CPU_MASKS) + layout.CPU_SET_BYTES,
    )
    for word in range(layout.CPU_SET_BYTES // 8):
        store(allowed + 8 * word, 0)
        store(chosen + 8 * word, 0)
    if sched_getaffinity(types.int32(0), layout.CPU_SET_BYTES, allowed) < 0:
        return
    core = find_freer_core(ctx, cpu, here, allowed)
    if core < 0:
        return
    store(chosen + (core >> 6) * 8, 1 << (core & 63))
    if sched_setaffinity(types.int32(0), layout.CPU_SET_BYTES, chosen) == 0:
        sched_setaffinity(types.int32(0), layout.CPU_SET_BYTES, allowed)
        store(load(ctx + layout.CTX_CTRL) + layout.PROGRESS_CPU, core + 1)


@inline
def should_yield(ctx: int) -> bool:
    """Return True if this wait yields before it sleeps; called once per wait."""
    naps = load(ctx + layout.CTX_SKIP_YIELDS)
    if naps > 0:
        store(ctx + layout.CTX_SKIP_YIELDS, naps - 1)
    else:
        penalty = load(ctx + layout.CTX_NEXT_SKIP)
        store(ctx + layout.CTX_NEXT_SKIP, max(FIRST_SKIPPED_YIELDS, penalty - 1))
    return naps == 0


@inline
def yield_core(ctx: int, since: int) -> int:
    """Yield the core, which this rank has had since ``since``; return the time afterwards.

    Ranks that share cores hand them over by yielding. A process that computes keeps the core for a
    whole time slice, whereas a sleeping rank returns as soon as it is woken; so after a yield that
    lasted ``CORE_HELD_NS`` the next waits sleep at once (``should_yield``).
    """
    sched_yield()
    now = now_ns(ctx)
    if now - since >= CORE_HELD_NS:
        penalty = load(ctx + layout.CTX_NEXT_SKIP)
        store(ctx + layout.CTX_SKIP_YIELDS, penalty)
        store(ctx + layout.CTX_NEXT_SKIP, min(2 * penalty, MOST_SKIPPED_YIELDS))
    return now


@inline
def next_sleep_ns(ctx: int, sleep_ns: int) -> int:
    """Return the duration of the sleep after one of ``sleep_ns``.

    When it stops growing, some 60 ms into the wait, the deadlock detector is notified.
    """
    longest = load(ctx + layout.CTX_MAX_SLEEP_NS)
    if sleep_ns < longest <= 2 * sleep_ns and load(ctx + layout.CTX_DETECTOR) >= 0:
        signal_eventfd(ctx, load(ctx + layout.CTX_DETECTOR))
    return min(2 * sleep_ns, longest)


@inline
def arm_doorbell(ctx: int) -> int:
    """Announce that this rank is about to sleep; return the doorbell's value for ``futex_sleep``.

    The awaited word must be read after this.
    """
    if drives(ctx):
        drive(ctx, DRIVE_HAND_OVER)
    ctrl = load(ctx + layout.CTX_CTRL)
    doorbell = load32(ctrl + layout.CTRL_DOORBELL)
    exchange(ctrl + layout.CTRL_SLEEP, 1)
    if load(ctx + layout.CTX_MEMBARRIER) != 0:
        syscall(SYS_MEMBARRIER, MEMBARRIER_GLOBAL_EXPEDITED, 0, 0, 0, 0, 0)
    return doorbell


@inline
def wait_error(ctx: int, peer: int, now: int) -> int:
    """Return OK, or the ERR_* of an abort or an expired deadline."""
    ctrl = load(ctx + layout.CTX_CTRL)
    if load_acquire(ctrl + layout.CTRL_ABORT) != 0:
        return fail(ctx, layout.ERR_ABORTED, peer, 0, load(ctrl + layout.CTRL_ABORT))
    if deadline_expired(ctx, now):
        return fail(ctx, layout.ERR_TIMEOUT, peer, 0, 0)
    return layout.OK


@inline
def futex_sleep(ctx: int, peer: int, doorbell: int, sleep_ns: int, now: int) -> int:
    """Sleep for ``sleep_ns`` from ``now`` on or until the doorbell rings.

    Returns OK, or the ERR_* of an abort or an expired deadline.
    """
    result = wait_error(ctx, peer, now)
    if result == layout.OK:
        ctrl = load(ctx + layout.CTX_CTRL)
        left = load(ctx + layout.CTX_DEADLINE) - now
        futex_wait(ctx, ctrl + layout.CTRL_DOORBELL, doorbell, max(1, min(sleep_ns, left)))
        store(ctrl + layout.CTRL_SLEEP, 0)
    return result


@inline
def drive_sleep(ctx: int, peer: int, sleep_ns: int, now: int) -> tuple[int, bool]:
    """Advance the network connections and, if nothing moves, sleep there for ``sleep_ns`` from
    ``now`` on.

    Returns (OK or the ERR_* of ``wait_error``, False if the proxy's thread has the connections).
    """
    result = wait_error(ctx, peer, now)
    if result != layout.OK:
        return result, True
    left = min(DRIVE_SLEEP_NS, load(ctx + layout.CTX_DEADLINE) - now)
    function, argument = load(ctx + layout.CTX_DRIVE), load(ctx + layout.CTX_DRIVEN)
    moved = call4(function, argument, DRIVE_SLEEP, max(1, min(sleep_ns, left)), 0)
    return layout.OK, moved != 0


def _sleep_until(ctx: int, address: int, target: int, peer: int) -> int:
    """Sleep until the word at ``address`` has reached ``target``; see ``wait``."""
    ctrl = load(ctx + layout.CTX_CTRL)
    sending = address == load(
        load(ctx + layout.CTX_SEND) + peer * layout.CONN_SIZE + layout.CONN_TAIL_ADDR
    )
    store(ctx + layout.CTX_AWAITED_TAIL, target if sending else 0)
    publish_wait(ctx, peer)
    sleep_ns = FIRST_SLEEP_NS
    result, driving = layout.OK, sleeps_driving(ctx, peer)
    while True:
        doorbell = 0 if driving else arm_doorbell(ctx)
        if load_acquire(address) >= target:
            break
        now = now_ns(ctx)
        if driving:
            result, driving = drive_sleep(ctx, peer, sleep_ns, now)
        else:
            result = futex_sleep(ctx, peer, doorbell, sleep_ns, now)
            driving = sleeps_driving(ctx, peer)
        if result != layout.OK or load_acquire(address) >= target:
            break
        # The whole sleep passed: check for other ends of the wait.
        if sleep_ns > FIRST_SLEEP_NS or now_ns(ctx) - now > FIRST_SLEEP_NS * 9 // 10:
            other = diverged_signature(ctx, peer)
            if other != 0:
                result = fail(
                    ctx, layout.ERR_MISMATCH, peer, load(ctrl + layout.PROGRESS_SIG), other
                )
                break
            if peer_completed(ctx, peer) and load_acquire(address) < target:
                result = fail(ctx, layout.ERR_ENDED, peer, 0, 0)
                break
            if (
                load_acquire(load(ctx + layout.CTX_GONE) + 8 * peer) != 0
                and load_acquire(address) < target
            ):
                result = fail(ctx, layout.ERR_LEFT, peer, 0, 0)
                break
            if peer_diverged(ctx, peer, sending) and load_acquire(address) < target:
                result = fail(ctx, layout.ERR_DIVERGED, peer, 0, 0)
                break
            if interrupted(ctx):
                result = fail(ctx, layout.ERR_INTERRUPTED, peer, 0, 0)
                break
            sleep_ns = next_sleep_ns(ctx, sleep_ns)
    store(ctrl + layout.CTRL_SLEEP, 0)
    if result == layout.OK:  # else the progress page keeps the place of the error
        store_release(ctrl + layout.PROGRESS_STATE, layout.STATE_RUNNING)
    return result


sleep_until = inline(_sleep_until)


@inline
def wait(ctx: int, address: int, target: int, peer: int) -> int:
    """Wait until the word at ``address`` has reached ``target``; return OK or an ERR_*."""
    for _ in range(load(ctx + layout.CTX_SPIN)):
        if load_acquire(address) >= target:
            return layout.OK
        pause_or_drive(ctx)
    release_gil(ctx)
    if load(ctx + layout.CTX_MIGRATE) != 0:
        migrate_to_freer_core(ctx)
    yields = load(ctx + layout.CTX_YIELDS) if should_yield(ctx) else 0
    now = now_ns(ctx) if yields > 0 else 0
    while yields > 0 and load(ctx + layout.CTX_SKIP_YIELDS) == 0:
        yields -= 1
        now = yield_core(ctx, now)
        if drives(ctx):
            drive(ctx, DRIVE_POLL)
        for _ in range(SPIN_BETWEEN_YIELDS):
            if load_acquire(address) >= target:
                return layout.OK
            pause()
    return sleep_until(ctx, address, target, peer)
