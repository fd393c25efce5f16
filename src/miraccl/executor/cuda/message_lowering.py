"""Lowering of sends and receives to the arguments of the kernel ``p2p`` (source/p2p.cuh).

Messages between two ranks in one direction are a peer queue, served by warp queues of one warp
each. The number of warp queues of a message follows from its bytes and from ``WarpQueueRules``,
which is the same on all ranks. Small launches fit into the arguments; larger ones use a table that
the kernel reads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.lower import CommArgs, pack_args
from miraccl.executor.cuda.source import Framing, KernelSpec
from miraccl.executor.cuda.warp_queues import WARPS, copy_warp_queues_for, warp_queues_for
from miraccl.types import DType

MAX_BYTES = 1 << 48  # of a message, exclusive

_MESSAGE, _QUEUE, _HEAD = (
    struct.Struct(code) for code in (layout.MESSAGE, layout.QUEUE, layout.P2P_HEAD)
)


class P2pMessage(NamedTuple):
    """Send to ``peer`` or receive from it.

    ``code`` is the dtype, compared with the peer's; the data are moved as bytes.
    """

    receives: bool
    peer: int
    address: int
    nbytes: int
    code: int


@dataclass(frozen=True, kw_only=True)
class WarpQueueRules:
    """Rules shared by all ranks that map messages to warps.

    ``multiprocessors``: number that kernels may use; ``frame``: framing of rows.
    """

    nranks: int
    multiprocessors: int
    frame: Framing = Framing.LINE

    @property
    def max_copy_warp_queues(self) -> int:
        """Maximum warps for messages of a rank to itself."""
        return max(1, min(64, self.multiprocessors * WARPS // 8))

    @property
    def max_warp_queues(self) -> int:
        """Maximum warp queues of a message.

        With all peers in both directions at once, all warp queues are on the GPU together.
        """
        warps = self.multiprocessors * WARPS - self.max_copy_warp_queues
        return max(
            1, min(layout.message_warp_queues(self.nranks), warps // (2 * max(1, self.nranks - 1)))
        )

    def warp_queues_for(self, nbytes: int) -> int:
        """Return the warp queues of a message (``partition`` of source/p2p.cuh)."""
        return (
            1
            if nbytes >= self.bulk_min_bytes
            else warp_queues_for(
                nbytes, *layout.GROUP_SIZES[self.frame.value], self.max_warp_queues
            )
        )

    @property
    def bulk_min_bytes(self) -> int:
        """Bytes from which a message is large.

        Only if two blocks per multiprocessor leave one for every large queue beside the warp
        queues.
        """
        return layout.BULK_MIN_BYTES if self.multiprocessors >= 2 * (self.nranks - 1) else MAX_BYTES

    def kernel_spec(self, bulk: bool, capacity: int) -> KernelSpec:
        """Return the kernel to compile; ``bulk``: with large messages; ``capacity`` as in
        ``LoweredMessages``.
        """
        return KernelSpec(
            family="bulk" if bulk else "p2p",
            nranks=self.nranks,
            dtype=DType.UINT8,
            reduces=False,
            frame=self.frame,
            threads=32 * WARPS,
            min_blocks=2 if bulk else 1,
            capacity=capacity,
        )


@dataclass(frozen=True, kw_only=True)
class LoweredMessages:
    """Lowered launch of messages.

    ``positions[i]`` is the offset of message i's address, in ``table`` if there is one, else in
    ``args``. ``queues`` lists the message indices of each peer queue.
    """

    args: bytearray
    table: bytearray | None
    positions: tuple[int, ...]
    queues: tuple[tuple[int, ...], ...]
    blocks: int
    threads: int
    bulk_blocks: int  # blocks for large messages
    capacity: int  # bytes at the end of ``args`` for queues and messages

    def set_table(self, address: int) -> None:
        """Set the address at which the kernel reads the table."""
        struct.pack_into("<Q", self.args, len(self.args) - self.capacity - _HEAD.size, address)

    def queue_offset(self, queue: int) -> int:
        """Return the offset of a queue's record in ``args``."""
        return len(self.args) - self.capacity + queue * _QUEUE.size


def lower_messages(
    messages: Sequence[P2pMessage], comm_args: CommArgs, rules: WarpQueueRules, signature: int = 0
) -> LoweredMessages:
    """Lower all messages to one launch; messages of a queue keep their order.

    ``signature``: the message collective (``message_collectives``), or 0; a rank without messages
    takes part in it as well.

    Raises:
        InvalidUsage: Messages of this rank to itself do not pair up, or a message is too large.
    """
    queues: dict[tuple[int, int], list[int]] = {}
    for number, message in enumerate(messages):
        if message.nbytes >= MAX_BYTES:
            raise InvalidUsage(
                f"cannot send a message of {message.nbytes} bytes: "
                f"at most {MAX_BYTES - 1} are allowed"
            )
        if message.peer != comm_args.rank:
            queues.setdefault(
                (layout.FROM_PEER if message.receives else layout.TO_PEER, message.peer), []
            ).append(number)
    to_self = _pair_self_messages(
        [(n, m) for n, m in enumerate(messages) if m.peer == comm_args.rank], comm_args.rank
    )
    if to_self or (signature and not queues):
        queues[layout.TO_SELF, comm_args.rank] = to_self
    heads, large, warp, first = [], [], 0, 0
    for (kind, peer), numbers in queues.items():
        sizes = [messages[n].nbytes for n in numbers]
        if kind == layout.TO_SELF:
            nqueues = copy_warp_queues_for(max(sizes, default=0), rules.max_copy_warp_queues)
        else:
            nqueues = max(map(rules.warp_queues_for, sizes))
            if max(sizes) >= rules.bulk_min_bytes:
                large.append(
                    (
                        layout.TO_BULK if kind == layout.TO_PEER else layout.FROM_BULK,
                        peer,
                        first,
                        len(numbers),
                    )
                )
        heads.append(_QUEUE.pack(kind, peer, nqueues, warp, first, len(numbers), 0, 0))
        warp, first = warp + nqueues, first + len(numbers)
    blocks = _bulk_queues(large, 2 * rules.multiprocessors - -(-warp // WARPS))
    draws = len(heads) if signature else 0
    return _pack(
        messages,
        list(queues.values()),
        heads + blocks,
        warp,
        pack_args(comm_args, count=0, signature=signature),
        draws,
        rules,
    )


def _bulk_queues(large: Sequence[tuple[int, int, int, int]], blocks: int) -> list[bytes]:
    """Return records of the large messages' queues, which share blocks and slots equally.

    Sender and receiver may have different numbers of blocks.
    """
    receives = sum(kind == layout.FROM_BULK for kind, *_ in large)
    each, slots = (
        blocks // max(1, len(large)),
        layout.BULK_BYTES // layout.CHUNK_BYTES // max(1, receives),
    )
    heads, slot = [], 0
    for number, (kind, peer, first, count) in enumerate(large):
        own = (slot, slots) if kind == layout.FROM_BULK else (0, 0)
        heads.append(_QUEUE.pack(kind, peer, each, number * each, first, count, *own))
        slot += own[1]
    return heads


def _pack(
    messages: Sequence[P2pMessage],
    queues: list[list[int]],
    heads: list[bytes],
    warps: int,
    args: bytearray,
    draws: int,
    rules: WarpQueueRules,
) -> LoweredMessages:
    order = [number for numbers in queues for number in numbers]
    bulk = sum(
        _QUEUE.unpack(head)[2] for head in heads if head[0] in (layout.TO_BULK, layout.FROM_BULK)
    )
    ordered = [messages[number] for number in order]
    records = bytearray().join(
        _MESSAGE.pack(m.address, m.nbytes | m.code << layout.TYPE_SHIFT) for m in ordered
    )
    args += _HEAD.pack(0, len(heads), rules.max_warp_queues, bulk, draws)
    inline, head = len(messages) <= layout.MAX_MESSAGES, b"".join(heads)
    start = len(args) + len(head) if inline else 0
    body, small = head + records if inline else head, layout.small_capacity(rules.nranks)
    capacity = small if len(body) <= small and not bulk else layout.LARGE_CAPACITY
    args += body.ljust(capacity, b"\0")
    positions = {number: start + i * _MESSAGE.size for i, number in enumerate(order)}
    blocks = -(-warps // WARPS) if bulk else max(1, min(warps, rules.multiprocessors))
    return LoweredMessages(
        args=args,
        table=None if inline else records,
        positions=tuple(positions[number] for number in range(len(order))),
        queues=tuple(map(tuple, queues)),
        blocks=bulk + blocks,
        threads=32 * (WARPS if bulk else max(1, -(-warps // blocks))),
        bulk_blocks=bulk,
        capacity=capacity,
    )


def _pair_self_messages(messages: list[tuple[int, P2pMessage]], rank: int) -> list[int]:
    """Return send and receive indices alternately: the n-th send of this rank to itself and its
    n-th
    receive.
    """
    sends = [item for item in messages if not item[1].receives]
    receives = [item for item in messages if item[1].receives]
    if len(sends) != len(receives):
        text = (
            f"cannot match the messages of rank {rank} to itself: "
            f"{len(sends)} sends and {len(receives)} receives"
        )
        raise InvalidUsage(
            text, rank=rank, hint="put a send to the own rank and its receive in the same group"
        )
    found = []
    for (i, send), (j, receive) in zip(sends, receives, strict=True):
        if (send.nbytes, send.code) != (receive.nbytes, receive.code):
            sent, received = (
                describe_message(send.nbytes, send.code),
                describe_message(receive.nbytes, receive.code),
            )
            raise InvalidUsage(
                f"cannot match a message of rank {rank} to itself: "
                f"sent {sent}, received {received}",
                rank=rank,
            )
        found += [i, j]
    return found


def describe_message(nbytes: int, code: int) -> str:
    """Return a message's size as text."""
    dtype = DType(code)
    return f"{nbytes // dtype.itemsize} x {dtype.label} ({nbytes} bytes)"
