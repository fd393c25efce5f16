"""Time for the control plane to report why a connection ended, before the loss itself is raised."""

from __future__ import annotations

from collections.abc import Callable

from miraccl import clock
from miraccl.bootstrap.contract import Session
from miraccl.deadline import Deadline
from miraccl.wire.proxy_records import Loss, LossKind

#: Time for the control plane to report a death that a system call has shown.
DEATH_NOTICE_S = 1.0
#: Time in which the control plane may report why a connection ended.
NOTICE_FIRST_S = 0.5
#: Time for a delayed watcher thread to process the notices received so far.
CATCH_UP_S = 5.0


def await_notice(check: Callable[[], None]) -> None:
    """Call ``check``, which raises once the cause is known, until ``DEATH_NOTICE_S`` has passed."""
    deadline = Deadline.after(DEATH_NOTICE_S)
    while deadline.left:
        check()
        clock.sleep(0.01)


def run_after_notice(session: Session, loss: Loss, action: Callable[[], None]) -> None:
    """Run ``action`` for a lost connection, after the control plane had time to report the cause.

    A peer that died, or raised an error before, is a better explanation than its lost connection.
    """

    def look() -> None:
        session.drain(CATCH_UP_S)
        action()

    timer = clock.timer(
        NOTICE_FIRST_S if loss.kind in (LossKind.RESET, LossKind.ABORTED) else 0.0, look
    )
    timer.daemon, timer.name = True, "miraccl connection lost"
    try:
        timer.start()
    except RuntimeError:  # cannot start a thread: report the cause known so far
        action()
