"""Processes that tools start: how they end with their parent, and what their end is called."""

from __future__ import annotations

import ctypes
import os
import signal

MAX_WAIT_SECONDS = 3600.0  # seconds a selector waits at most; epoll counts milliseconds in 32 bits
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def restore_sigchld() -> None:
    """Have the kernel keep the statuses of children that end; where it was told to forget them (``trap '' CHLD``), so were we."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ``parent`` ends, and end now if that has happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def signal_name(number: int) -> str:
    """Also of those that have none, such as most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
