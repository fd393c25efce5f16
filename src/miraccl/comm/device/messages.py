"""Sends, receives and the uneven collectives on GPU memory: what ``DeviceCommunicator`` does with the kernel ``p2p``.

Everything here but ``reduce_scatter_v`` only moves data: it becomes a list of messages, and one launch runs them all.  The first
operation on GPU memory sets the GPU side up and therefore takes all ranks; later ones take those that are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from miraccl.comm.arguments import counts_of, peer_rank
from miraccl.comm.device.hosts.transfers import DeviceTransfer
from miraccl.comm.device.memory import DeviceMemory, device_view, empty_like
from miraccl.errors import CollectiveMismatch, InvalidUsage, MiracclError
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.messages import MAX_BYTES, Message, describe
from miraccl.executor.cuda.source import Frame
from miraccl.topo.records import PathType
from miraccl.transport.cuda_p2p import SymmetricMemory
from miraccl.transport.cuda_pairs import DIRECT
from miraccl.types import Collective, DType, RedOp

if TYPE_CHECKING:
    from miraccl.executor.cuda.driver import Gpu
    from miraccl.executor.cuda.message_launch import MessageLaunches
    from miraccl.executor.cuda.plan import DevicePlan

SUM = RedOp.SUM
SINCE_ARCH = 90
SMALL_BYTES, SMALL_COUNT = 128 << 10, 32  # messages of a launch of at most 128 warps
_ITEMSIZES = tuple(dtype.itemsize for dtype in DType)  # by code: calls are counted in fractions of a microsecond


def frame_of(memory: SymmetricMemory) -> Frame:
    """How rows of messages are framed, the same on all ranks: lines where every path keeps 128 bytes together, which NVLink does.

    NCCL allows LL128 within a host up to NVB (src/graph/tuning.cc).  Where the topology is not known, Hopper and
    later are taken to have NVLink.
    """
    for (a, b), choice in memory.ways.items():
        path = memory.path(a, b)
        near = memory.facts[a].arch >= SINCE_ARCH if path is None else path <= PathType.NVB
        if choice.kind not in DIRECT or not near:
            return Frame.PAIR
    return Frame.LINE


def mismatch(host: Any, rank: int, name: str | None) -> MiracclError:
    """The error of ``layout.ERROR_SIZES``."""
    peer, sends = int(host[layout.HOST_PEER]), int(host[layout.HOST_WHAT]) == layout.WHAT_SEND
    words = [int(host[layout.HOST_SIZES + i]) for i in range(4)]
    mine, theirs = (_in_words(words[i] | words[i + 1] << 32) for i in (0, 2))
    verb, other = ("sends", "receives") if sends else ("receives", "sends")
    text = f"rank {rank} {verb} {mine} where rank {peer} {other} {theirs}"
    return CollectiveMismatch(text, rank=rank, peer=peer, op=name, hint="a send and its receive have the same count and dtype")


def _in_words(size: int) -> str:
    nbytes, code = size & ((1 << layout.TYPE_SHIFT) - 1), size >> layout.TYPE_SHIFT
    return describe(nbytes, code) if code in DType._value2member_map_ else f"{nbytes} bytes"


class MessageCalls:
    """The part of ``DeviceCommunicator`` that moves messages; it owns ``_messages``, everything else is the communicator's."""

    rank: int
    nranks: int
    gpu: Gpu
    last_plan: DevicePlan | None
    _messages: MessageLaunches

    if TYPE_CHECKING:

        def _enter(self, name: str, stream: Any, fills: bool = True) -> int: ...
        def _like(self, out: Any, source: DeviceMemory, count: int, where: str) -> DeviceMemory: ...
        def _share(self, source: DeviceMemory, where: str) -> int: ...
        def _root(self, root: Any, where: str) -> int: ...
        def _hold(self, views: Sequence[DeviceMemory], number: int) -> None: ...
        def _run(
            self, collective: Collective, source: DeviceMemory, target: DeviceMemory, count: int, op: Any, root: int, stream: Any
        ) -> None: ...

    # ---- point to point

    def send(self, x: Any, dst: int, *, stream: Any = None) -> None:
        """Send ``x`` to rank ``dst``. Matches one ``recv`` of the same count and dtype, in order."""
        self._go([self._message(x, dst, False, "x", "send", stream)], "send", stream)

    def recv(self, x: Any, src: int, *, stream: Any = None) -> Any:
        """Receive from rank ``src`` into ``x``."""
        self._go([self._message(x, src, True, "x", "recv", stream)], "recv", stream)
        return x

    def sendrecv(self, x: Any, dst: int, out: Any, src: int, *, stream: Any = None) -> Any:
        """Send ``x`` to ``dst`` and receive ``out`` from ``src`` at the same time."""
        pair = [self._message(x, dst, False, "x", "sendrecv", stream), self._message(out, src, True, "out", "sendrecv", stream)]
        self._go(pair, "sendrecv", stream)
        return out

    def transfer(self, x: Any, peer: Any, receives: bool, where: str, stream: Any = None) -> DeviceTransfer:
        """One argument of ``exchange``, checked."""
        memory, message = self._message(x, peer, receives, "out" if receives and where == "sendrecv" else "x", where, stream)
        return DeviceTransfer(receives=receives, peer=message.peer, memory=memory)

    def _message(self, x: Any, peer: Any, receives: bool, name: str, where: str, stream: Any) -> tuple[DeviceMemory, Message]:
        memory = device_view(x, name, where, stream, self.gpu)
        if receives and memory.read_only:
            raise InvalidUsage(f"{where}: arrays of type {type(x).__name__} cannot be written", rank=self.rank)
        return memory, _message(receives, peer_rank(peer, "src" if receives else "dst", self.nranks, where), memory)

    def _go(self, parts: list[tuple[DeviceMemory, Message]], name: str, stream: Any) -> None:
        """Enqueue one launch."""
        messages = [message for _, message in parts]
        number = self._enter(name, stream, sum([m.nbytes for m in messages]) > SMALL_BYTES or len(messages) > SMALL_COUNT)
        self._messages.run(messages, number)
        self.last_plan = self._messages.last_plan
        for memory, _ in parts:
            if memory.keep is not None:
                self._hold([memory], number)

    def exchange(self, transfers: Sequence[DeviceTransfer], *, stream: Any = None, name: str = "group") -> None:
        """Sends and receives that go on together; between two ranks they match in their order."""
        self._go([(t.memory, _message(t.receives, t.peer, t.memory)) for t in transfers], name, stream)

    def barrier(self, *, stream: Any = None) -> None:
        """What follows in the stream begins when every rank's stream has come here."""
        number = self._enter("barrier", stream, False)
        others = [r for r in range(self.nranks) if r != self.rank]
        self._messages.run([Message(receives, r, 0, 0, int(DType.UINT8)) for r in others for receives in (False, True)], number)

    # ---- even collectives with a root

    def gather(self, x: Any, root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        """All ranks' ``x``, one after another, on rank ``root``; the others get None."""
        source = device_view(x, "x", "gather", stream, self.gpu)
        return self._gather(x, source, [source.count] * self.nranks, root, out, "gather", stream)

    def scatter(self, x: Any = None, root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        """Rank r gets the r-th of nranks equal shares of the root's ``x``; the other ranks give ``out``."""
        if self.rank != self._root(root, "scatter"):
            target = self._given(out, "scatter", stream)
            return self._scatter(None, None, [target.count] * self.nranks, root, out, "scatter", stream)
        source = device_view(x, "x", "scatter", stream, self.gpu)
        return self._scatter(x, source, [self._share(source, "scatter")] * self.nranks, root, out, "scatter", stream)

    # ---- uneven collectives: counts in elements, one a rank

    def all_gather_v(self, x: Any, counts: Sequence[int], out: Any = None, *, stream: Any = None) -> Any:
        """As ``all_gather``; rank r contributes ``counts[r]`` elements."""
        name, sizes = "all_gather_v", counts_of(counts, "counts", self.nranks, "all_gather_v")
        source = self._sized(x, sizes[self.rank], f"counts[{self.rank}]", name, stream)
        out = empty_like(x, sum(sizes), name) if out is None else out
        target = self._like(out, source, sum(sizes), name)
        _no_overlap(target, source, sum(sizes[: self.rank]), name)
        sends = [source if source.count else None] * self.nranks
        self._move(sends, _cut(target, sizes), name, stream)
        return out

    def all_to_all_v(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int], out: Any = None, *, stream: Any = None) -> Any:
        """As ``all_to_all``; block j of ``x`` has ``send_counts[j]`` elements, block j of the result ``recv_counts[j]``."""
        name = "all_to_all_v"
        sends = counts_of(send_counts, "send_counts", self.nranks, name)
        receives = counts_of(recv_counts, "recv_counts", self.nranks, name)
        if sends[self.rank] != receives[self.rank]:
            mine = f"send_counts[{self.rank}] is {sends[self.rank]}, recv_counts[{self.rank}] is {receives[self.rank]}"
            raise InvalidUsage(f"{name}: a rank sends itself what it receives: {mine}", rank=self.rank)
        source = self._sized(x, sum(sends), "the sum of send_counts", name, stream)
        out = empty_like(x, sum(receives), name) if out is None else out
        target = self._like(out, source, sum(receives), name)
        _no_overlap(target, source, None, name)
        self._move(_cut(source, sends), _cut(target, receives), name, stream)
        return out

    def gather_v(self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        """As ``gather``; rank r contributes ``counts[r]`` elements."""
        sizes = counts_of(counts, "counts", self.nranks, "gather_v")
        source = self._sized(x, sizes[self.rank], f"counts[{self.rank}]", "gather_v", stream)
        return self._gather(x, source, sizes, root, out, "gather_v", stream)

    def scatter_v(self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        """As ``scatter``; rank r gets ``counts[r]`` elements."""
        sizes = counts_of(counts, "counts", self.nranks, "scatter_v")
        if self.rank != self._root(root, "scatter_v"):
            return self._scatter(None, None, sizes, root, out, "scatter_v", stream)
        source = self._sized(x, sum(sizes), "the sum of counts", "scatter_v", stream)
        return self._scatter(x, source, sizes, root, out, "scatter_v", stream)

    def reduce_scatter_v(self, x: Any, counts: Sequence[int], out: Any = None, op: Any = SUM, *, stream: Any = None) -> Any:
        """As ``reduce_scatter``; rank r gets ``counts[r]`` elements. Equal counts are one kernel, others a ``reduce`` per rank."""
        name, sizes = "reduce_scatter_v", counts_of(counts, "counts", self.nranks, "reduce_scatter_v")
        source = self._sized(x, sum(sizes), "the sum of counts", name, stream)
        out = empty_like(x, sizes[self.rank], name) if out is None else out
        target = self._like(out, source, sizes[self.rank], name)
        _no_overlap(source, target, sum(sizes[: self.rank]), name)
        if len(set(sizes)) == 1:
            self._run(Collective.REDUCE_SCATTER, source, target, sizes[0], op, 0, stream)
            return out
        for root, part in enumerate(_cut(source, sizes)):
            if part is not None:
                self._run(Collective.REDUCE, part, target if root == self.rank else part, part.count, op, root, stream)
        return out

    # ---- parts

    def _gather(self, x: Any, source: DeviceMemory, sizes: list[int], root: int, out: Any, name: str, stream: Any) -> Any:
        chief, total = self._root(root, name), sum(sizes)
        sends: list[DeviceMemory | None] = [None] * self.nranks
        receives: list[DeviceMemory | None] = [None] * self.nranks
        if source.count:
            sends[chief] = source
        if self.rank == chief:
            out = empty_like(x, total, name) if out is None else out
            target = self._like(out, source, total, name)
            _no_overlap(target, source, sum(sizes[:chief]), name)
            receives = _cut(target, sizes)
        self._move(sends, receives, name, stream)
        return out if self.rank == chief else None

    def _scatter(self, x: Any, source: DeviceMemory | None, sizes: list[int], root: int, out: Any, name: str, stream: Any) -> Any:
        chief, mine = self._root(root, name), sizes[self.rank]
        sends: list[DeviceMemory | None] = [None] * self.nranks
        receives: list[DeviceMemory | None] = [None] * self.nranks
        if source is not None:
            out = empty_like(x, mine, name) if out is None else out
            target = self._like(out, source, mine, name)
            _no_overlap(source, target, sum(sizes[:chief]), name)
            sends = _cut(source, sizes)
        else:
            target = self._given(out, name, stream)
            _expect(target, mine, "out", f"counts[{self.rank}]" if name == "scatter_v" else "its share", name)
        if mine:
            receives[chief] = target
        self._move(sends, receives, name, stream)
        return out

    def _given(self, out: Any, name: str, stream: Any) -> DeviceMemory:
        if out is None:
            raise InvalidUsage(f"{name}: a rank that is not the root gives out, the array for its share", rank=self.rank)
        return device_view(out, "out", name, stream, self.gpu)

    def _sized(self, x: Any, count: int, why: str, name: str, stream: Any) -> DeviceMemory:
        memory = device_view(x, "x", name, stream, self.gpu)
        _expect(memory, count, "x", why, name)
        return memory

    def _move(self, sends: list[DeviceMemory | None], receives: list[DeviceMemory | None], name: str, stream: Any) -> None:
        """``sends[r]`` to rank r and ``receives[r]`` from it, None for nothing; what stays in its place is not copied."""
        mine, here = sends[self.rank], receives[self.rank]
        if mine is not None and here is not None and mine.address == here.address:
            sends[self.rank] = receives[self.rank] = None
        for memory in receives:
            if memory is not None and memory.read_only:
                raise InvalidUsage(f"{name}: out is an array that cannot be written", rank=self.rank)
        parts = [(m, _message(False, r, m)) for r, m in enumerate(sends) if m is not None]
        parts += [(m, _message(True, r, m)) for r, m in enumerate(receives) if m is not None]
        self._go(parts, name, stream)


def _message(receives: bool, peer: int, memory: DeviceMemory) -> Message:
    address, count, dtype, _, _ = memory
    nbytes = count * _ITEMSIZES[dtype]
    if nbytes >= MAX_BYTES:
        raise InvalidUsage(f"a message has {nbytes} bytes; at most {MAX_BYTES - 1} are possible")
    return Message(receives, peer, address, nbytes, dtype._value_)


def _cut(memory: DeviceMemory, sizes: Sequence[int]) -> list[DeviceMemory | None]:
    """Consecutive parts; None for empty ones, which both sides leave out."""
    parts: list[DeviceMemory | None] = []
    first = 0
    for size in sizes:
        parts.append(memory.part(first, size) if size else None)
        first += size
    return parts


def _expect(memory: DeviceMemory, count: int, name: str, why: str, where: str) -> None:
    if memory.count != count:
        raise InvalidUsage(f"{where}: {name} has {memory.count} elements, but needs {count} ({why})")


def _no_overlap(whole: DeviceMemory, part: DeviceMemory, allowed: int | None, where: str) -> None:
    """``part`` may lie ``allowed`` elements into ``whole``, the in-place form; any other overlap is refused."""
    a, b = whole.address, part.address
    if not whole.nbytes or not part.nbytes or a >= b + part.nbytes or b >= a + whole.nbytes:
        return
    if allowed is None or b - a != allowed * whole.dtype.itemsize:
        raise InvalidUsage(f"{where}: input and output overlap, but not as this operation's in-place form does")
