"""Point-to-point and uneven operations on GPU memory, run by the kernel ``p2p``.

All of them except ``reduce_scatter_v`` only move data: an operation becomes a list of messages that
run in one launch. The first operation on GPU memory creates the GPU side and involves all ranks;
later ones involve the ranks named.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from miraccl.errors import CollectiveMismatch, InvalidUsage, MiracclError
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.message_collectives import op_signature
from miraccl.executor.cuda.message_lowering import MAX_BYTES, P2pMessage, describe_message
from miraccl.executor.cuda.source import Framing
from miraccl.executor.cuda.warp_queues import saturates_gpu
from miraccl.ops.device_arrays import DeviceMemory
from miraccl.runtime.gpu.operations import (
    CheckedDeviceCall,
    DeviceOperations,
    DeviceTransfer,
    sends_and_receives,
    split_by_rank,
)
from miraccl.topo.records import PathType
from miraccl.transport.cuda_p2p import SymmetricMemory
from miraccl.transport.cuda_pairs import DIRECT
from miraccl.types import Collective, DType, Operator

if TYPE_CHECKING:
    from miraccl.executor.cuda.gpu import Gpu
    from miraccl.executor.cuda.lower import CommArgs
    from miraccl.executor.cuda.message_launch import MessageLaunches
    from miraccl.executor.cuda.plan import DevicePlan

NVLINK_SINCE_ARCH = 90
_WORD, _REFUSED = struct.Struct("<Q"), 1 << 63
_ITEMSIZES = tuple(
    dtype.itemsize for dtype in DType
)  # by code; a property would cost a measurable part of a call


def message_frame(memory: SymmetricMemory) -> Framing:
    """Return the packet frame of messages, the same on all ranks.

    128-byte lines are used if every path delivers them whole, which NVLink does. NCCL allows LL128
    within a host up to NVB (src/graph/tuning.cc). Without a topology, Hopper and later are assumed
    to have NVLink.
    """
    for (a, b), choice in memory.choices.items():
        path = memory.path(a, b)
        near = memory.facts[a].arch >= NVLINK_SINCE_ARCH if path is None else path <= PathType.NVB
        if choice.kind not in DIRECT or not near:
            return Framing.PAIR
    return Framing.LINE


def read_rejected_size(gpu: Gpu, args: CommArgs, peer: int) -> int | None:
    """Return the size of this rank's message that ``peer`` rejected, as in ``layout.MESSAGE``."""
    (word,) = _WORD.unpack(
        gpu.read(
            args.inboxes[peer] + layout.REJECTED_OFFSET + peer * layout.WORD_STRIDE, _WORD.size
        )
    )
    return int(word) - _REFUSED if word >= _REFUSED else None


def size_mismatch(
    host: Any, rank: int, peer: int, rejected: int | None, op: str | None
) -> MiracclError:
    """Return the error of ``layout.ERROR_SIZES``.

    ``rejected``: see ``read_rejected_size``; a sending kernel knows only its current message.
    """
    sends = int(host[layout.HOST_AWAITED]) == layout.AWAIT_SEND
    words = [int(host[layout.HOST_SIZES + i]) for i in range(4)]
    sizes = [words[i] | words[i + 1] << 32 for i in (0, 2)]
    mine, theirs = (
        _format_size(rejected if sends and rejected is not None else sizes[0]),
        _format_size(sizes[1]),
    )
    verb, other = ("sends", "receives") if sends else ("receives", "sends")
    text = f"rank {rank} {verb} {mine} where rank {peer} {other} {theirs}"
    hint = (
        "counts, dtype and root must be the same on all ranks"
        if op
        else "a send and its receive have the same count and dtype"
    )
    return CollectiveMismatch(text, rank=rank, peer=peer, op=op, hint=hint)


def _format_size(size: int) -> str:
    nbytes, code = size & ((1 << layout.TYPE_SHIFT) - 1), size >> layout.TYPE_SHIFT
    return describe_message(nbytes, code) if code in DType._value2member_map_ else f"{nbytes} bytes"


class MessageOperations(DeviceOperations):
    """Operations of ``DeviceCommunicator`` that run as messages.

    The mixin owns ``_messages``; everything else belongs to the communicator.
    """

    last_plan: DevicePlan | None
    _messages: MessageLaunches

    if TYPE_CHECKING:

        def enter_operation(self, name: str, stream: Any, fills: bool = True) -> int: ...
        def retain(self, views: Sequence[DeviceMemory], number: int) -> None: ...
        def _run(
            self,
            collective: Collective,
            source: DeviceMemory,
            target: DeviceMemory,
            count: int,
            op: Operator,
            root: int,
            stream: Any,
        ) -> None: ...

    # ---- point to point

    def _launch_messages(
        self,
        parts: list[tuple[DeviceMemory, P2pMessage]],
        name: str,
        stream: Any,
        signature: int = 0,
    ) -> None:
        """Enqueue one launch; ``signature``: that of the collective they form, if any."""
        messages = [message for _, message in parts]
        fills = saturates_gpu(sum([m.nbytes for m in messages]), len(messages))
        number = self.enter_operation(name, stream, fills)
        self._messages.run(messages, number, fills, signature)
        self.last_plan = self._messages.last_plan
        for memory, _ in parts:
            if memory.keep is not None:
                self.retain([memory], number)

    def exchange(
        self,
        transfers: Sequence[DeviceTransfer],
        *,
        stream: Any = None,
        name: str = "group",
        signature: int = 0,
    ) -> None:
        """Run sends and receives concurrently; between two ranks they match in order.

        ``signature``: that of the collective which they form, if any. All ranks then call this,
        also those without messages.
        """
        self._launch_messages(
            [(t.memory, _message(t.receives, t.peer, t.memory)) for t in transfers],
            name,
            stream,
            signature,
        )

    def barrier(self, *, stream: Any = None) -> None:
        """Delay later work in the stream until every rank's stream has arrived here."""
        number = self.enter_operation("barrier", stream, False)
        others = [r for r in range(self.nranks) if r != self.rank]
        words = [
            P2pMessage(receives, r, 0, 0, int(DType.UINT8))
            for r in others
            for receives in (False, True)
        ]
        self._messages.run(words, number, False, op_signature(Collective.BARRIER))

    # ---- collectives as messages

    def _run_blocks(self, call: CheckedDeviceCall, stream: Any) -> None:
        """Run a rooted or uneven collective."""
        if call.spec.op_at:
            self._reduce_blocks(call.source, call.target, call.sends, call.operator, stream)
            return
        sent, received = sends_and_receives(call, self.rank, self.nranks)
        parts = [(m, _message(False, r, m)) for r, m in sent]
        parts += [(m, _message(True, r, m)) for r, m in received]
        counts = call.common_counts(self.nranks)
        signature = op_signature(call.spec.collective, call.root, counts)
        self._launch_messages(parts, call.spec.name, stream, signature)

    def _reduce_blocks(
        self,
        source: DeviceMemory,
        target: DeviceMemory,
        sizes: Sequence[int],
        op: Operator,
        stream: Any,
    ) -> None:
        """Run one kernel for equal counts, a ``reduce`` per rank otherwise."""
        if len(set(sizes)) == 1:
            self._run(Collective.REDUCE_SCATTER, source, target, sizes[0], op, 0, stream)
            return
        for root, part in split_by_rank(source, sizes):
            self._run(
                Collective.REDUCE,
                part,
                target if root == self.rank else part,
                part.count,
                op,
                root,
                stream,
            )


def _message(receives: bool, peer: int, memory: DeviceMemory) -> P2pMessage:
    address, count, dtype, _, _ = memory
    nbytes = count * _ITEMSIZES[dtype]
    if nbytes >= MAX_BYTES:
        raise InvalidUsage(
            f"cannot send a message of {nbytes} bytes: the maximum is {MAX_BYTES - 1}"
        )
    return P2pMessage(receives, peer, address, nbytes, dtype._value_)
