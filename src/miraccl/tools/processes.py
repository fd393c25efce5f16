"""Process helpers of the tools: parent death, child status, signal names."""

from __future__ import annotations

import ctypes
import os
import signal

MAX_WAIT_SECONDS = 3600.0  # of a selector; epoll counts milliseconds in 32 bits
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def restore_sigchld() -> None:
    """Reset SIGCHLD to its default if it is ignored, so that exit statuses of children are
    available.
    """
    # ``trap '' CHLD`` in a shell is inherited: the kernel then discards exit statuses.
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent exits; exit now if that has happened
    already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def signal_name(number: int) -> str:
    """Return the name of a signal, ``signal N`` for those without one, such as most real-time
    signals.
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
