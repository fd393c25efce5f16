"""Ranks that are threads of one process, where they make something together."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from miraccl.deadline import Deadline

PATIENCE_S = 30.0


class Room:
    """Where they meet."""

    def __init__(self, nranks: int) -> None:
        self.barrier, self.blobs = threading.Barrier(nranks), [b""] * nranks

    def stages(self, rank: int) -> RoomStages:
        return RoomStages(self, rank, Deadline.after(PATIENCE_S))

    def abort(self) -> None:
        """A rank does not come any more."""
        self.barrier.abort()


@dataclass(frozen=True)
class RoomStages:
    """``transport.cuda_p2p.Stages`` of one rank."""

    room: Room
    rank: int
    deadline: Deadline

    def gather(self, name: str, data: bytes = b"") -> list[bytes]:
        self.room.barrier.wait(self.deadline.left)
        self.room.blobs[self.rank] = data
        self.room.barrier.wait(self.deadline.left)
        return list(self.room.blobs)

    def check(self) -> None:
        """Nothing ends them."""
