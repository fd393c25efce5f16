"""Split of sends and receives between nodes into messages and rounds.

The transfers with one peer in one direction form a queue: their messages follow in call
order. Message sizes do not depend on the grouping of calls, so both ends see the same sequence.
Messages that fit into ``ROUND_SLOTS`` slots form one round: all are posted at once and end in any
order. Larger groups take several rounds in which all queues advance by the same number of messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miraccl.runtime.gpu.operations import DeviceTransfer
from miraccl.runtime.multinode.network import CpuCommunicator, PythonStaging
from miraccl.runtime.multinode.segments import ALIGN, SegmentCopy, StagedSegment
from miraccl.runtime.multinode.staging import PinnedSlots
from miraccl.types import DType

MIN_MESSAGES_PER_SLOT, MAX_MESSAGES_PER_SLOT = 2, 16
ROUND_SLOTS = 2


@dataclass(frozen=True, slots=True)
class StagedMessage:
    """Message of a round: ``count`` elements at byte ``host`` of the slot.

    ``transfer_count``: elements of the whole transfer.
    """

    receives: bool
    peer: int
    host: int
    count: int
    dtype: DType
    transfer_count: int


@dataclass(frozen=True, kw_only=True)
class MessageRound:
    """Messages of one round, with their segment."""

    segment: StagedSegment
    messages: tuple[StagedMessage, ...]


EMPTY_ROUND = MessageRound(segment=StagedSegment(), messages=())


def message_bytes(slot_bytes: int, max_remote_ranks: int) -> int:
    """Return the largest message in bytes, the same at both ends whatever their groups contain.

    A round has one message to and one from each of at most ``max_remote_ranks`` ranks.
    """
    return (
        slot_bytes
        // min(max(MIN_MESSAGES_PER_SLOT, max_remote_ranks), MAX_MESSAGES_PER_SLOT)
        // ALIGN
        * ALIGN
    )


MessageQueue = list[tuple[int, int, int]]  # (transfer, first byte, bytes) per message


def split_transfers(
    transfers: Sequence[DeviceTransfer], slot_bytes: int, max_remote_ranks: int
) -> tuple[list[MessageRound], int]:
    """Return the rounds, and the bytes that a slot needs.

    Copies refer to the transfers by index. ``max_remote_ranks``: as for ``message_bytes``.
    """
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
    """Return a round of these messages, and its bytes."""
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
    """Return the network that runs rounds on a CPU communicator, posting receives first."""

    def run(piece: StagedSegment, number: int, slot: int) -> None:
        works = []
        for message in sorted(rounds[number].messages, key=lambda m: not m.receives):
            memory = slots.view(slot, message.host, message.count, message.dtype)
            call = communicator.recv if message.receives else communicator.send
            works.append(call(memory, message.peer, async_op=True))
        for work in works:
            work.wait()

    return PythonStaging(run)
