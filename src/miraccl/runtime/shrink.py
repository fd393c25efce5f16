"""Creation of a communicator of the surviving ranks from one that broke.

Ranks may know of different deaths. Each attempt includes the ranks that the caller believes alive;
it ends when one of these is known to be gone, and the next attempt excludes it. All attempts share
one deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from miraccl import clock
from miraccl.deadline import Deadline
from miraccl.diagnosis.detector import PendingCreation
from miraccl.errors import BootstrapError, CollectiveMismatch, CommunicatorAborted, PeerDied
from miraccl.runtime.loss_notice import NOTICE_FIRST_S
from miraccl.runtime.setup_phases import SetupPhases

if TYPE_CHECKING:
    from miraccl.bootstrap.contract import Session
    from miraccl.runtime.core import CommunicatorCore

POLL_S = 0.005
T = TypeVar("T")


def shrink(core: CommunicatorCore, number: int, make: Callable[[Session, SetupPhases], T]) -> T:
    """Return ``make(session, setup)`` for the surviving ranks.

    Args:
        core: The communicator that broke.
        number: Count of splits and shrinks of it; the same on all ranks.
        make: Creates the new communicator; collective over the surviving ranks.
    """
    deadline = Deadline.after(core.session.timeout)
    # The name leaves out the ranks: attempts with different sets of ranks belong together.
    name = f"shrink {number} of {core.session.key}"
    while True:
        ranks = _live_ranks(core)
        session = core.session.subgroup(
            ranks, f"{core.session.name}/shrink{number}:{','.join(map(str, ranks))}"
        )
        stages = SetupPhases(session, deadline)

        def end(text: str, stages: SetupPhases = stages) -> None:
            stages.cancel(CollectiveMismatch(text, rank=core.rank, op="shrink"))

        with (
            PendingCreation(name, session.tokens, "shrink", core.rank, end),
            core.pending_setup.track(stages, ranks),
        ):
            try:
                # Otherwise a rank left before the setup was tracked.
                if _live_ranks(core) == ranks:
                    return make(session, stages)
            except (CommunicatorAborted, PeerDied, BootstrapError):
                if not _ranks_have_left(core, ranks):
                    stages.check()  # another rank may know the cause already, and have left
                    raise


def _live_ranks(core: CommunicatorCore) -> list[int]:
    """Return the ranks that have neither died nor left."""
    gone = {*core.faults.lost, *core.faults.left, *core.session.gone()}
    return [r for r in range(core.nranks) if r not in gone]


def _ranks_have_left(core: CommunicatorCore, ranks: list[int]) -> bool:
    """Return True if one of ``ranks`` is gone, or becomes known to be within ``NOTICE_FIRST_S``."""
    deadline = clock.monotonic() + NOTICE_FIRST_S
    while _live_ranks(core) == ranks and clock.monotonic() < deadline:
        clock.sleep(POLL_S)
    return _live_ranks(core) != ranks
