"""Kernel source: system calls on sockets, for both sides of a stream."""

from __future__ import annotations

import platform

from miraccl.native.intrinsics import (
    FUTEX_WAIT,
    SYS_FUTEX,
    clock_gettime,
    errno_location,
    inline,
    load,
    load32,
    pause,
    sched_yield,
    store,
    syscall,
)

SYS_SENDMSG, SYS_RECVMSG, SYS_PPOLL, SYS_SENDTO, SYS_RECVFROM = (
    (211, 212, 73, 206, 207) if platform.machine() == "aarch64" else (46, 47, 271, 44, 45)
)
MSG_DONTWAIT, MSG_NOSIGNAL = 0x40, 0x4000
POLLIN, POLLOUT = 1, 4
EINTR, EAGAIN = 4, 11
#: Time after which a polling thread yields its core. Longer is worse where both sides share a core:
#: with 15 us a round trip on a busy machine took 50 us, all of the polling time, instead of 20.
PAUSE_NS = 2_000
#: Offsets in a scratch area: struct msghdr, struct pollfd, struct timespec twice, and the time
#: since which a call would have blocked (0: the last one moved bytes).
MESSAGE, POLLFD, TIMEOUT, CLOCK, SINCE = 0, 64, 80, 96, 112
#: Results of ``settle`` and ``move`` beside bytes and minus errno: the time is over, the other side
#: has closed the stream.
LATE, CLOSED = -(1 << 20), -(1 << 21)
#: ``until`` of a wait without a limit.
FOREVER = 1 << 62


@inline
def now_ns(scratch: int) -> int:
    clock_gettime(1, scratch + CLOCK)
    return load(scratch + CLOCK) * 1000000000 + load(scratch + CLOCK + 8)


@inline
def add_vector(vectors: int, count: int, address: int, nbytes: int) -> int:
    """Append an iovec; return how many there are."""
    store(vectors + 16 * count, address)
    store(vectors + 16 * count + 8, nbytes)
    return count + 1


@inline
def transmit(call: int, fd: int, vectors: int, count: int, scratch: int) -> int:
    """Send or receive without blocking; return bytes, or minus errno."""
    message = scratch + MESSAGE
    store(message, 0)
    store(message + 8, 0)
    store(message + 16, vectors)
    store(message + 24, count)
    store(message + 32, 0)
    store(message + 40, 0)
    store(message + 48, 0)
    done = syscall(call, fd, message, MSG_DONTWAIT | MSG_NOSIGNAL, 0, 0, 0)
    return done if done >= 0 else -load32(errno_location())


@inline
def transmit_one(call: int, fd: int, address: int, nbytes: int) -> int:
    """Send (SENDTO) or receive (RECVFROM) one range without blocking; return as ``transmit``.

    The kernel copies no ``msghdr`` and no vectors, which is some 0.3 us of a notification.
    """
    done = syscall(call, fd, address, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL, 0, 0)
    return done if done >= 0 else -load32(errno_location())


@inline
def wait_socket(fd: int, events: int, wait_ns: int, scratch: int) -> int:
    """Sleep until a socket is ready or ``wait_ns`` have passed (negative: no limit); return the
    number of ready sockets, or minus errno.
    """
    store(scratch + POLLFD, fd | events << 32)
    store(scratch + TIMEOUT, wait_ns // 1000000000)
    store(scratch + TIMEOUT + 8, wait_ns % 1000000000)
    timeout = scratch + TIMEOUT if wait_ns >= 0 else 0
    ready = syscall(SYS_PPOLL, scratch + POLLFD, 1, timeout, 0, 8, 0)
    return ready if ready >= 0 else -load32(errno_location())


@inline
def nap(word: int, value: int, wait_ns: int, scratch: int) -> None:
    """Sleep for ``wait_ns``, below a second, unless a word is not ``value``, or until a wake-up."""
    store(scratch + TIMEOUT, 0)
    store(scratch + TIMEOUT + 8, wait_ns)
    syscall(SYS_FUTEX, word, FUTEX_WAIT, value & 0xFFFFFFFF, scratch + TIMEOUT, 0, 0)


@inline
def relax(elapsed: int) -> None:
    """Wait a moment between two polls: first on the core, later giving it to others."""
    if elapsed < PAUSE_NS:
        pause()
    else:
        sched_yield()


@inline
def settle(call: int, got: int, fd: int, spin_ns: int, until: int, scratch: int) -> int:
    """Process the result of ``transmit``: return the bytes; 0 to try again, after a wait if it
    would have blocked; ``LATE``, ``CLOSED`` or minus errno.

    The wait polls for ``spin_ns`` after the first call that would have blocked, then sleeps.
    """
    if got > 0:
        store(scratch + SINCE, 0)
        return got
    if got == 0:
        return CLOSED if call == SYS_RECVMSG else 0
    if got == -EINTR:
        return 0
    if got != -EAGAIN:
        return got
    now = now_ns(scratch)
    if now >= until:
        return LATE
    if load(scratch + SINCE) == 0:
        store(scratch + SINCE, now)
    elapsed = now - load(scratch + SINCE)
    if elapsed < spin_ns:
        relax(elapsed)
        return 0
    events = POLLIN if call == SYS_RECVMSG else POLLOUT
    ready = wait_socket(fd, events, until - now if until < FOREVER else -1, scratch)
    return 0 if ready >= 0 or ready == -EINTR else ready


@inline
def move(
    call: int, fd: int, vectors: int, count: int, spin_ns: int, until: int, scratch: int
) -> int:
    """Send or receive once, or wait; return as ``settle``."""
    return settle(call, transmit(call, fd, vectors, count, scratch), fd, spin_ns, until, scratch)
