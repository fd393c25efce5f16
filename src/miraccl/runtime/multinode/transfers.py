"""Sends and receives of GPU memory between hosts, cut into messages and rounds.

All transfers between this rank and a peer in one direction are a queue: their messages follow one another in the order of the calls.  The
size of messages does not depend on how calls are grouped, so both ends see the same sequence.  What fits into ``ROUND_SLOTS`` slots is one
round: everything is posted fits and may end in any order.  Larger groups take several rounds, in which all queues go on at one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miraccl.runtime.gpu.transfer import DeviceTransfer
from miraccl.runtime.multinode.network import CpuCommunicator, PythonStaging
from miraccl.runtime.multinode.segments import ALIGN, SegmentCopy, StagedSegment
from miraccl.runtime.multinode.staging import PinnedSlots
from miraccl.types import DType

MIN_MESSAGES_PER_SLOT, MAX_MESSAGES_PER_SLOT = 2, 16
ROUND_SLOTS = 2


@dataclass(frozen=True, slots=True)
class StagedMessage:
    """What a round sends to or receives from a peer: ``count`` elements at byte ``host`` of the slot, of a transfer of ``whole``."""

    receives: bool
    peer: int
    host: int
    count: int
    dtype: DType
    transfer_count: int


@dataclass(frozen=True, kw_only=True)
class MessageRound:
    segment: StagedSegment
    messages: tuple[StagedMessage, ...]


EMPTY_ROUND = MessageRound(segment=StagedSegment(), messages=())


def message_bytes(slot_bytes: int, max_remote_ranks: int) -> int:
    """Bytes of a message at capacity, where no rank has more than ``max_remote_ranks`` on other hosts: a round has one to and one from each of them. The
    same at both ends, whatever else they have in their groups."""
    return (
        slot_bytes
        // min(max(MIN_MESSAGES_PER_SLOT, max_remote_ranks), MAX_MESSAGES_PER_SLOT)
        // ALIGN
        * ALIGN
    )


MessageQueue = list[tuple[int, int, int]]  # (transfer, first byte, bytes) of each message


def split_transfers(
    transfers: Sequence[DeviceTransfer], slot_bytes: int, max_remote_ranks: int
) -> tuple[list[MessageRound], int]:
    """The rounds, and the bytes that a slot needs. Buffers of copies are the transfers by number; ``max_remote_ranks`` as for ``message_bytes``."""
    capacity = message_bytes(slot_bytes, max_remote_ranks)
    queues: dict[tuple[bool, int], MessageQueue] = {}
    for number, transfer in enumerate(transfers):
        nbytes = transfer.memory.nbytes
        messages = [
            (number, begin, min(capacity, nbytes - begin)) for begin in range(0, nbytes, capacity)
        ]
        queues.setdefault((transfer.receives, transfer.peer), []).extend(messages)
    longest = max(map(len, queues.values()), default=0)
    fits = (
        sum(-(-nbytes // ALIGN) * ALIGN for queue in queues.values() for _, _, nbytes in queue)
        <= ROUND_SLOTS * slot_bytes
    )
    step = longest if fits else max(1, ROUND_SLOTS * slot_bytes // (capacity * len(queues)))
    rounds, need = [], 0
    for first in range(0, longest, step):
        parts = [message for queue in queues.values() for message in queue[first : first + step]]
        found, nbytes = _round(transfers, parts)
        rounds.append(found)
        need = max(need, nbytes)
    return rounds, need


def _round(transfers: Sequence[DeviceTransfer], parts: MessageQueue) -> tuple[MessageRound, int]:
    """A round of these messages, and its bytes."""
    host = 0
    down: list[SegmentCopy] = []
    up: list[SegmentCopy] = []
    messages = []
    for number, begin, nbytes in parts:
        transfer = transfers[number]
        (up if transfer.receives else down).append(SegmentCopy(number, begin, host, nbytes))
        memory = transfer.memory
        messages.append(
            StagedMessage(
                transfer.receives,
                transfer.peer,
                host,
                nbytes // memory.dtype.itemsize,
                memory.dtype,
                memory.count,
            )
        )
        host += -(-nbytes // ALIGN) * ALIGN
    return MessageRound(
        segment=StagedSegment(down=tuple(down), up=tuple(up)), messages=tuple(messages)
    ), host


def run_on_communicator(
    communicator: CpuCommunicator, rounds: Sequence[MessageRound], slots: PinnedSlots
) -> PythonStaging:
    """Run rounds on a CPU communicator: receives are posted first, then everything is waited for."""

    def run(piece: StagedSegment, number: int, slot: int) -> None:
        works = []
        for message in sorted(rounds[number].messages, key=lambda m: not m.receives):
            memory = slots.view(slot, message.host, message.count, message.dtype)
            call = communicator.recv if message.receives else communicator.send
            works.append(call(memory, message.peer, async_op=True))
        for work in works:
            work.wait()

    return PythonStaging(run)
