"""A communicator of the ranks that live, made of one that broke.

Ranks may know of different deaths. They try with those that each takes for living; a try ends when one of these is known to be gone, and
the next one is without it.  All tries have one deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from miraccl.bootstrap import Session
from miraccl.deadline import Deadline
from miraccl.diagnosis.detector import Creation
from miraccl.errors import BootstrapError, CollectiveMismatch, CommunicatorAborted, PeerDied
from miraccl.runtime.core import Member
from miraccl.runtime.fabric import NOTICE_FIRST_S
from miraccl.runtime.setup_phases import Stages

LOOK_S = 0.005
T = TypeVar("T")


def shrink(member: Member, number: int, make: Callable[[Session, Stages], T]) -> T:
    """``make`` of the session of the ranks that live, and of its stages; ``number`` is the same on all of them."""
    deadline = Deadline.after(member.session.timeout)
    name = f"shrink {number} of {member.session.key}"  # whoever they take for living: those who know less will learn it
    while True:
        ranks = _living(member)
        session = member.session.sub(
            ranks, f"{member.session.name}/shrink{number}:{','.join(map(str, ranks))}"
        )
        stages = Stages(session, deadline)

        def end(text: str, stages: Stages = stages) -> None:
            stages.end(CollectiveMismatch(text, rank=member.rank, op="shrink"))

        with (
            Creation(name, session.tokens, "shrink", member.rank, end),
            member.underway.attend(stages, ranks),
        ):
            try:
                if (
                    _living(member) == ranks
                ):  # else somebody has left before the stages could be told
                    return make(session, stages)
            except (CommunicatorAborted, PeerDied, BootstrapError):
                if not _fewer_live(member, ranks):
                    stages.look()  # another rank may have been told first why, and left
                    raise


def _living(member: Member) -> list[int]:
    """The ranks that have neither died nor left."""
    gone = {*member.faults.lost, *member.faults.left, *member.session.gone()}
    return [r for r in range(member.nranks) if r not in gone]


def _fewer_live(member: Member, ranks: list[int]) -> bool:
    """Whether one of ``ranks``, of which this is one, is gone; a connection may break before the control plane tells that."""
    deadline = time.monotonic() + NOTICE_FIRST_S
    while _living(member) == ranks and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return _living(member) != ranks
