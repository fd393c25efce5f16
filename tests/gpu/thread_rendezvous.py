"""Ranks that are threads of one process, where they make something together."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from miraccl.deadline import Deadline

TIMEOUT_S = 30.0


class ThreadRendezvous:
    """Where they meet."""

    def __init__(self, nranks: int) -> None:
        self.barrier, self.blobs = threading.Barrier(nranks), [b""] * nranks

    def stages(self, rank: int) -> ThreadSetupPhases:
        return ThreadSetupPhases(self, rank, Deadline.after(TIMEOUT_S))

    def abort(self) -> None:
        """A rank does not come any more."""
        self.barrier.abort()


@dataclass(frozen=True)
class ThreadSetupPhases:
    """``transport.cuda_p2p.Stages`` of one rank."""

    rendezvous: ThreadRendezvous
    rank: int
    deadline: Deadline

    def gather(self, name: str, data: bytes = b"") -> list[bytes]:
        self.rendezvous.barrier.wait(self.deadline.left)
        self.rendezvous.blobs[self.rank] = data
        self.rendezvous.barrier.wait(self.deadline.left)
        return list(self.rendezvous.blobs)

    def check(self) -> None:
        """Nothing ends them."""
