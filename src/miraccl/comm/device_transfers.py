"""Sends and receives of GPU memory between hosts, cut into rounds.

All transfers between this rank and a peer in one direction are a lane: their pieces follow one another in the order of the calls, however
they were grouped, so that both ends see the same sequence.  Round k runs the k-th piece of every lane together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miraccl.comm.device_memory import DeviceMemory
from miraccl.comm.device_staging import ALIGN, TRANSFERS_PER_SLOT, Copy, CpuCommunicator, Piece, RunPiece, Slots
from miraccl.types import DType


@dataclass(frozen=True, kw_only=True)
class DeviceTransfer:
    """One send or receive of GPU memory."""

    receives: bool
    peer: int
    memory: DeviceMemory


@dataclass(frozen=True, slots=True)
class Message:
    """What a round sends to or receives from a peer: ``count`` elements at byte ``host`` of the slot."""

    receives: bool
    peer: int
    host: int
    count: int
    dtype: DType


@dataclass(frozen=True, kw_only=True)
class Round:
    piece: Piece
    messages: tuple[Message, ...]


def message_bytes(slot_bytes: int) -> int:
    """Bytes of a message at most; the same at both ends, whatever else they have in their groups."""
    return slot_bytes // TRANSFERS_PER_SLOT // ALIGN * ALIGN


def cut_transfers(transfers: Sequence[DeviceTransfer], slot_bytes: int) -> tuple[list[Round], int]:
    """The rounds, and the bytes that a slot needs. Buffers of copies are the transfers by number."""
    most = message_bytes(slot_bytes)
    lanes: dict[tuple[bool, int], list[tuple[Copy, Message]]] = {}
    for number, transfer in enumerate(transfers):
        lane = lanes.setdefault((transfer.receives, transfer.peer), [])
        host = most * list(lanes).index((transfer.receives, transfer.peer))
        size = transfer.memory.dtype.itemsize
        for begin in range(0, transfer.memory.nbytes, most):
            nbytes = min(most, transfer.memory.nbytes - begin)
            message = Message(transfer.receives, transfer.peer, host, nbytes // size, transfer.memory.dtype)
            lane.append((Copy(number, begin, host, nbytes), message))
    rounds = []
    for number in range(max(map(len, lanes.values()), default=0)):
        both = [lane[number] for lane in lanes.values() if number < len(lane)]
        down = tuple(copy for copy, message in both if not message.receives)
        up = tuple(copy for copy, message in both if message.receives)
        rounds.append(Round(piece=Piece(down=down, up=up), messages=tuple(message for _, message in both)))
    return rounds, most * max(1, len(lanes))


def transfers_on(cpu: CpuCommunicator, rounds: Sequence[Round], slots: Slots) -> RunPiece:
    """Run rounds on a CPU communicator: receives are posted first, then everything is waited for."""

    def run(piece: Piece, number: int, slot: int) -> None:
        works = []
        for message in sorted(rounds[number].messages, key=lambda m: not m.receives):
            memory = slots.view(slot, message.host, message.count, message.dtype)
            call = cpu.recv if message.receives else cpu.send
            works.append(call(memory, message.peer, async_op=True))
        for work in works:
            work.wait()

    return run
