"""Groups of sends and receives of one communicator: the table that ``kernels.p2p.exchange`` walks over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from miraccl.comm.arguments import Memory
from miraccl.errors import InvalidUsage
from miraccl.executor.cpu.context import Wires
from miraccl.executor.cpu.kernels import layout as at
from miraccl.executor.cpu.lower import Words, signature
from miraccl.types import Collective, RedOp


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One send or receive."""

    receives: bool
    peer: int
    memory: Memory


def build_table(transfers: Sequence[Transfer], wires: dict[int, Wires]) -> Words:
    """The words of a group; transfers between the same two ranks follow one another in their order."""
    table = np.zeros((max(1, len(transfers)), at.OP_SIZE // 8), np.int64)
    next_round: dict[tuple[int, bool], int] = {}
    for row, transfer in zip(table, transfers, strict=False):
        wire = wires[transfer.peer]
        piece = wire.slot_bytes if wire.kind == at.KIND_SHM else at.NET_PIECE
        rounds = max(1, -(-transfer.memory.nbytes // piece))
        first = next_round.get((transfer.peer, transfer.receives), 0)
        next_round[transfer.peer, transfer.receives] = first + rounds
        for place, value in (
            (at.OP_KIND, int(transfer.receives)),
            (at.OP_PEER, transfer.peer),
            (at.OP_ADDR, transfer.memory.address),
            (at.OP_BYTES, transfer.memory.nbytes),
            (at.OP_SIG, signature(Collective.SEND_RECV, transfer.memory.dtype, RedOp.SUM, 0, transfer.memory.count)),
            (at.OP_FIRST_ROUND, first),
            (at.OP_ROUNDS, rounds),
            (at.OP_COUNT, transfer.memory.count),
        ):
            row[place // 8] = value
    return table


def copy_to_self(transfers: Sequence[Transfer], rank: int) -> list[Callable[[], None]]:
    """What a rank sends to itself: copies, the n-th send to the n-th receive."""
    sends = [t for t in transfers if t.peer == rank and not t.receives]
    receives = [t for t in transfers if t.peer == rank and t.receives]
    if len(sends) != len(receives):
        text = f"rank {rank} sends itself {len(sends)} messages and receives {len(receives)} of them in one group"
        raise InvalidUsage(text, hint="a rank that sends to itself needs the receive in the same group")
    for a, b in zip(sends, receives, strict=True):
        if a.memory.dtype is not b.memory.dtype or a.memory.count != b.memory.count:
            raise InvalidUsage(
                f"rank {rank} sends itself {a.memory.count} x {a.memory.dtype.label}"
                f" and receives {b.memory.count} x {b.memory.dtype.label}"
            )
    return [_copier(a.memory, b.memory) for a, b in zip(sends, receives, strict=True)]


def _copier(source: Memory, target: Memory) -> Callable[[], None]:
    return lambda: np.copyto(target.array.reshape(-1), source.array.reshape(-1))
