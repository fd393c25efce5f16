"""Rendezvous of ranks that are threads of one process."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from miraccl.deadline import Deadline

TIMEOUT_S = 30.0


class ThreadRendezvous:
    """Barrier and exchange of the ranks."""

    def __init__(self, nranks: int) -> None:
        self.barrier, self.blobs = threading.Barrier(nranks), [b""] * nranks

    def stages(self, rank: int) -> ThreadSetupPhases:
        return ThreadSetupPhases(self, rank, Deadline.after(TIMEOUT_S))

    def abort(self) -> None:
        """Break the barrier: a rank will not arrive."""
        self.barrier.abort()


@dataclass(frozen=True)
class ThreadSetupPhases:
    """Setup phases (``transport.cuda_p2p``) of one rank."""

    rendezvous: ThreadRendezvous
    rank: int
    deadline: Deadline

    def gather(self, name: str, data: bytes = b"") -> list[bytes]:
        self.rendezvous.barrier.wait(self.deadline.left)
        self.rendezvous.blobs[self.rank] = data
        self.rendezvous.barrier.wait(self.deadline.left)
        return list(self.rendezvous.blobs)

    def check(self) -> None:
        """Do nothing: these phases are never ended."""
