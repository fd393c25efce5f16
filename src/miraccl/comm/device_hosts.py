"""Collectives on GPU memory over several hosts: kernels inside a host, pinned memory and the CPU communicator between hosts.

``make_device_communicator`` gives the communicator of one host (``comm.device``) or ``HostsCommunicator``, with the same methods.  All
is enqueued in the caller's stream and may be captured in CUDA graphs; a proxy thread does the network's part (``comm.device_staging``).

Two algorithms.  ``hierarchical`` sums and spreads inside each host on its GPUs and sends every element once per host: it needs hosts of
equal numbers of ranks.  ``staged`` hands everything to the CPU communicator of all ranks, which has every collective, operator and type.
16-bit floats are rounded once inside a host and once between hosts; averages of integers are staged, for they are truncated once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from miraccl import errors, params
from miraccl.bootstrap import Event, Notice, PeerLost, Session
from miraccl.comm.arguments import counts_of, operator, peer_rank
from miraccl.comm.device import DeviceCommunicator
from miraccl.comm.device_arguments import DeviceArguments
from miraccl.comm.device_memory import DeviceMemory, device_view, empty_like
from miraccl.comm.device_network import CpuCommunicator, InPython, StagedCollective, agreeing
from miraccl.comm.device_pieces import Piece, Shape, cut, elements_per_piece
from miraccl.comm.device_staging import LANES, Network, StagedJob, Staging
from miraccl.comm.device_transfers import DeviceTransfer, cut_transfers, transfers_on
from miraccl.comm.nccl_wishes import Wishes
from miraccl.errors import CommunicatorAborted, CommunicatorClosed, InvalidUsage, MiracclError, PeerDied, SystemFailure
from miraccl.transport.cuda_p2p import Explanation
from miraccl.types import Collective, DType, RedOp

SUM = RedOp.SUM
LEAST_SLOT = 64 << 10
CLOSE_WAIT_S = 10.0
NOTICE = "gpu_fault"
OpenCpu = Callable[[Session], CpuCommunicator]
_ON_GPU = tuple(dtype for dtype in DType if dtype not in (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2))


def host_name(session: Session) -> str:
    """Which host this rank counts itself to. Ranks that may share neither device nor host memory are hosts of their own."""
    name = params.HOSTID.read() or session.hosts[session.rank]
    apart = params.P2P_DISABLE.read() == 1 and params.SHM_DISABLE.read()
    return f"{name}/rank{session.rank}" if apart else name


def make_device_communicator(
    session: Session,
    ordinal: int,
    *,
    open_cpu: OpenCpu,
    timeout: float | None = None,
    algo: str | None = None,
    proto: str | None = None,
    deterministic: bool = False,
    wishes: Wishes | None = None,
) -> DeviceCommunicator | HostsCommunicator:
    """The GPU side of a communicator, made collectively by all ranks of ``session``, each with the ``ordinal`` of its GPU.

    ``open_cpu`` makes a CPU communicator of a session; only several hosts need it.
    """
    names = [blob.decode() for blob in session.all_gather(host_name(session).encode(), "gpu hosts")]
    if len(set(names)) == 1:
        return DeviceCommunicator(session, ordinal, timeout=timeout, algo=algo, proto=proto, deterministic=deterministic, wishes=wishes)
    return HostsCommunicator(
        session, ordinal, names, open_cpu=open_cpu, timeout=timeout, algo=algo, proto=proto, deterministic=deterministic, wishes=wishes
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostsPlan:
    """How an operation runs; ``pieces`` of at most ``piece_bytes`` go over the network one after another."""

    algo: str
    reason: str
    pieces: int
    piece_bytes: int
    proto: str = "staging"


class HostsCommunicator(DeviceArguments):
    """Ranks of several hosts, each with a GPU. ``hosts[r]`` is the name of rank r's host."""

    def __init__(
        self,
        session: Session,
        ordinal: int,
        hosts: Sequence[str],
        *,
        open_cpu: OpenCpu,
        timeout: float | None = None,
        algo: str | None = None,
        proto: str | None = None,
        deterministic: bool = False,
        wishes: Wishes | None = None,
    ) -> None:
        self.session, self.rank, self.nranks = session, session.rank, session.nranks
        self.groups = group_by_host(hosts)
        self.host = next(h for h, ranks in enumerate(self.groups) if self.rank in ranks)
        mine = self.groups[self.host]
        self.width, self.index = len(mine), mine.index(self.rank)
        self.even = len({len(ranks) for ranks in self.groups}) == 1
        self.host_major = [r for ranks in self.groups for r in ranks] == list(range(self.nranks))
        self.fault: MiracclError | None = None
        self.closed = False
        self.last_plan: HostsPlan | None = None
        self._lock = threading.Lock()
        self._side: int | None = None
        self._jobs: dict[tuple[Any, ...], StagedJob] = {}
        self._cpus: list[CpuCommunicator] = []
        sizes = session.all_gather(str(params.GPU_STAGING.read()).encode(), "gpu staging")
        self.slot_bytes = max(LEAST_SLOT, min(int(size) for size in sizes))
        self._local_session = session.sub(mine, f"{session.name}/gpu host {self.host}")
        self.local = DeviceCommunicator(
            self._local_session, ordinal, timeout=timeout, algo=algo, proto=proto, deterministic=deterministic, wishes=wishes
        )
        self.gpu = self.local.gpu
        self.world = self._open(open_cpu, range(self.nranks), "gpu world")
        #: between hosts of equal numbers of ranks, those of one index: a communicator per lane
        self.crosses: tuple[CpuCommunicator, ...] = ()
        if self.even:
            ranks = [ranks[self.index] for ranks in self.groups]
            lanes = [self._open(open_cpu, ranks, f"gpu cross {self.index}.{lane}") for lane in range(self.width == 1, LANES)]
            self.crosses = (self.world, *lanes) if self.width == 1 else tuple(lanes)
        self.staging = Staging(self.gpu, self.slot_bytes, on_fault=self._fail, name=f"miraccl-staging-{self.rank}")
        session.barrier("gpu staging ready")
        session.on_event(self._event)

    def _open(self, open_cpu: OpenCpu, ranks: Sequence[int], name: str) -> CpuCommunicator:
        cpu = open_cpu(self.session.sub(ranks, f"{self.session.name}/{name}"))
        self._cpus.append(cpu)
        return cpu

    # ---- collectives

    def all_reduce(self, x: Any, out: Any = None, op: Any = SUM, *, stream: Any = None) -> Any:
        """Reduce ``x`` over all ranks into ``out``, or into ``x`` itself."""
        source = device_view(x, "x", "all_reduce", stream, self.gpu)
        target = source if out is None else self._like(out, source, source.count, "all_reduce")
        operator(op, source.dtype, "all_reduce")
        if source.count:
            with self._operation("all_reduce", stream, [source, target], target) as (number, captured):
                if self._sums_on_gpu(source.dtype, op):
                    self._all_reduce(source, target, op, number, captured)
                else:
                    self._staged(Collective.ALL_REDUCE, source, target, source.count, op, 0, number, captured)
        return x if out is None else out

    def reduce_scatter(self, x: Any, out: Any = None, op: Any = SUM, *, stream: Any = None) -> Any:
        """Reduce ``x`` over all ranks; rank r gets the r-th of nranks equal shares in ``out``."""
        source = device_view(x, "x", "reduce_scatter", stream, self.gpu)
        count = self._share(source, "reduce_scatter")
        out = empty_like(x, count, "reduce_scatter") if out is None else out
        target = self._like(out, source, count, "reduce_scatter")
        operator(op, source.dtype, "reduce_scatter")
        if count:
            with self._operation("reduce_scatter", stream, [source, target], target) as (number, captured):
                if self._sums_on_gpu(source.dtype, op):
                    self._reduce_scatter(source, target, op, number, captured)
                else:
                    self._staged(Collective.REDUCE_SCATTER, source, target, count, op, 0, number, captured)
        return out

    def all_gather(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        """All ranks' ``x``, one after another, on every rank."""
        source = device_view(x, "x", "all_gather", stream, self.gpu)
        out = empty_like(x, source.count * self.nranks, "all_gather") if out is None else out
        target = self._like(out, source, source.count * self.nranks, "all_gather")
        if source.count:
            with self._operation("all_gather", stream, [source, target], target) as (number, captured):
                if self._hierarchical():
                    self._all_gather(source, target, number, captured)
                else:
                    self._staged(Collective.ALL_GATHER, source, target, source.count, SUM, 0, number, captured)
        return out

    def all_to_all(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Block j of rank i's ``x`` becomes block i of rank j's ``out``."""
        source = device_view(x, "x", "all_to_all", stream, self.gpu)
        count = self._share(source, "all_to_all")
        out = empty_like(x, source.count, "all_to_all") if out is None else out
        target = self._like(out, source, source.count, "all_to_all")
        self._apart(source, target, "all_to_all")
        if count:
            with self._operation("all_to_all", stream, [source, target], target) as (number, captured):
                if self._hierarchical() and self.host_major:
                    self._all_to_all(source, target, count, number, captured)
                else:
                    self._staged(Collective.ALL_TO_ALL, source, target, count, SUM, 0, number, captured)
        return out

    def broadcast(self, x: Any, root: int = 0, *, stream: Any = None) -> Any:
        """``x`` of rank ``root`` into ``x`` of every rank."""
        chief, source = self._root(root, "broadcast"), device_view(x, "x", "broadcast", stream, self.gpu)
        if source.count:
            with self._operation("broadcast", stream, [source], source if self.rank != chief else None) as (number, captured):
                if self._hierarchical():
                    self._broadcast(source, chief, number, captured)
                else:
                    self._staged(Collective.BROADCAST, source, source, source.count, SUM, chief, number, captured)
        return x

    def reduce(self, x: Any, root: int = 0, out: Any = None, op: Any = SUM, *, stream: Any = None) -> Any:
        """Reduce ``x`` over all ranks into ``x`` or ``out`` of rank ``root``; the others' stays as it is."""
        chief, source = self._root(root, "reduce"), device_view(x, "x", "reduce", stream, self.gpu)
        target = source if out is None or self.rank != chief else self._like(out, source, source.count, "reduce")
        operator(op, source.dtype, "reduce")
        if source.count:
            with self._operation("reduce", stream, [source, target], target if self.rank == chief else None) as (number, captured):
                if self._sums_on_gpu(source.dtype, op):
                    self._reduce(source, target, op, chief, number, captured)
                else:
                    self._staged(Collective.REDUCE, source, target, source.count, op, chief, number, captured)
        return x if target is source else out

    def gather(self, x: Any, root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        """All ranks' ``x``, one after another, on rank ``root``; the others get None."""
        chief, source = self._root(root, "gather"), device_view(x, "x", "gather", stream, self.gpu)
        if self.rank != chief:
            out = None
        elif out is None:
            out = empty_like(x, source.count * self.nranks, "gather")
        target = source if out is None else self._like(out, source, source.count * self.nranks, "gather")
        if source.count:
            with self._operation("gather", stream, [source, target], target if self.rank == chief else None) as (number, captured):
                self._staged(Collective.GATHER, source, target, source.count, SUM, chief, number, captured)
        return out

    def scatter(self, x: Any = None, root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        """Rank r gets the r-th of nranks equal shares of the root's ``x``; the other ranks give ``out``."""
        chief = self._root(root, "scatter")
        if self.rank == chief:
            source = device_view(x, "x", "scatter", stream, self.gpu)
            count = self._share(source, "scatter")
            out = empty_like(x, count, "scatter") if out is None else out
            target = self._like(out, source, count, "scatter")
        else:
            source = target = device_view(out, "out", "scatter", stream, self.gpu)
        if target.count:
            with self._operation("scatter", stream, [source, target], target) as (number, captured):
                self._staged(Collective.SCATTER, source, target, target.count, SUM, chief, number, captured)
        return out

    # ---- uneven collectives: counts in elements, one a rank

    def all_gather_v(self, x: Any, counts: Sequence[int], out: Any = None, *, stream: Any = None) -> Any:
        """As ``all_gather``; rank r contributes ``counts[r]`` elements."""
        sizes, source = self._counts(counts, "all_gather_v"), self._sized(x, "x", counts, "all_gather_v", stream)
        out = empty_like(x, sum(sizes), "all_gather_v") if out is None else out
        target = self._like(out, source, sum(sizes), "all_gather_v")
        self._uneven(Collective.ALL_GATHER, source, target, (source.count,), sizes, sizes, stream)
        return out

    def reduce_scatter_v(self, x: Any, counts: Sequence[int], out: Any = None, op: Any = SUM, *, stream: Any = None) -> Any:
        """As ``reduce_scatter``; rank r gets ``counts[r]`` elements."""
        sizes, source = self._counts(counts, "reduce_scatter_v"), device_view(x, "x", "reduce_scatter_v", stream, self.gpu)
        self._expect(source, sum(sizes), "x", "reduce_scatter_v")
        operator(op, source.dtype, "reduce_scatter_v")
        out = empty_like(x, sizes[self.rank], "reduce_scatter_v") if out is None else out
        target = self._like(out, source, sizes[self.rank], "reduce_scatter_v")
        self._uneven(Collective.REDUCE_SCATTER, source, target, sizes, (target.count,), sizes, stream, op=op)
        return out

    def all_to_all_v(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int], out: Any = None, *, stream: Any = None) -> Any:
        """As ``all_to_all``; block j of ``x`` has ``send_counts[j]`` elements, block j of the result ``recv_counts[j]``."""
        sends, receives = self._counts(send_counts, "all_to_all_v"), self._counts(recv_counts, "all_to_all_v")
        source = device_view(x, "x", "all_to_all_v", stream, self.gpu)
        self._expect(source, sum(sends), "x", "all_to_all_v")
        if sends[self.rank] != receives[self.rank]:
            text = f"all_to_all_v: a rank sends itself what it receives, not {sends[self.rank]} and {receives[self.rank]} elements"
            raise InvalidUsage(text, rank=self.rank)
        out = empty_like(x, sum(receives), "all_to_all_v") if out is None else out
        target = self._like(out, source, sum(receives), "all_to_all_v")
        self._apart(source, target, "all_to_all_v")
        self._uneven(Collective.ALL_TO_ALL, source, target, sends, receives, (), stream)
        return out

    def gather_v(self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        """As ``gather``; rank r contributes ``counts[r]`` elements."""
        chief, sizes = self._root(root, "gather_v"), self._counts(counts, "gather_v")
        source = self._sized(x, "x", counts, "gather_v", stream)
        if self.rank != chief:
            out = None
        elif out is None:
            out = empty_like(x, sum(sizes), "gather_v")
        target = source if out is None else self._like(out, source, sum(sizes), "gather_v")
        receives = sizes if self.rank == chief else ()
        self._uneven(Collective.GATHER, source, target, (source.count,), receives, sizes, stream, root=chief)
        return out

    def scatter_v(self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        """As ``scatter``; rank r gets ``counts[r]`` elements."""
        chief, sizes = self._root(root, "scatter_v"), self._counts(counts, "scatter_v")
        if self.rank == chief:
            source = device_view(x, "x", "scatter_v", stream, self.gpu)
            self._expect(source, sum(sizes), "x", "scatter_v")
            out = empty_like(x, sizes[chief], "scatter_v") if out is None else out
            target = self._like(out, source, sizes[chief], "scatter_v")
        else:
            source = target = self._sized(out, "out", counts, "scatter_v", stream)
        sends = sizes if self.rank == chief else ()
        self._uneven(Collective.SCATTER, source, target, sends, (target.count,), sizes, stream, root=chief)
        return out

    def empty(self, shape: Any, dtype: Any = "float32") -> Any:
        """Window memory of this host's ranks: any GPU memory for operations over hosts, addressed by peers in the part inside the host."""
        return self.local.empty(shape, dtype)

    def barrier(self, *, stream: Any = None) -> None:
        """What follows in the stream begins when every rank's stream has come here."""
        with self._operation("barrier", stream, [], None) as (number, captured):
            job = self._job(("barrier",), captured, lambda: ((Piece(),), InPython(lambda *_: self.world.barrier())))
            self.staging.enqueue(job, (), number)

    # ---- point to point

    def send(self, x: Any, dst: int, *, stream: Any = None) -> None:
        """Send ``x`` to rank ``dst``. Matches one ``recv`` of the same count and dtype, in order."""
        self.exchange([self.transfer(x, dst, False, "send", stream)], stream=stream, name="send")

    def recv(self, x: Any, src: int, *, stream: Any = None) -> Any:
        """Receive from rank ``src`` into ``x``."""
        self.exchange([self.transfer(x, src, True, "recv", stream)], stream=stream, name="recv")
        return x

    def sendrecv(self, x: Any, dst: int, out: Any, src: int, *, stream: Any = None) -> Any:
        """Send ``x`` to ``dst`` and receive ``out`` from ``src`` at the same time."""
        pair = [self.transfer(x, dst, False, "sendrecv", stream), self.transfer(out, src, True, "sendrecv", stream)]
        self.exchange(pair, stream=stream, name="sendrecv")
        return out

    def transfer(self, x: Any, peer: Any, receives: bool, where: str, stream: Any = None) -> DeviceTransfer:
        """One argument of ``exchange``, checked."""
        memory = device_view(x, "x", where, stream, self.gpu)
        if receives and memory.read_only:
            raise InvalidUsage(f"{where}: arrays of type {type(x).__name__} cannot be written", rank=self.rank)
        return DeviceTransfer(receives=receives, peer=peer_rank(peer, "src" if receives else "dst", self.nranks, where), memory=memory)

    def exchange(self, transfers: Sequence[DeviceTransfer], *, stream: Any = None, name: str = "group") -> None:
        """Sends and receives that go on together; between two ranks they match in their order.

        Those within the host are one kernel, in a stream beside the caller's where there are others: neither kind waits for the other.
        """
        mine = self.groups[self.host]
        near = [dataclasses.replace(t, peer=mine.index(t.peer)) for t in transfers if t.peer in mine]
        far = [t for t in transfers if t.peer not in mine and t.memory.count]
        with self._operation(name, stream, [t.memory for t in transfers], None) as (number, captured):
            if near and far:
                self.gpu.order_streams(number, self._beside())
                self.local.exchange(near, stream=self._beside(), name=name)
                self._exchange(far, number, captured)
                self.gpu.order_streams(self._beside(), number)
                self.local._stream = number
            elif near:
                self.local.exchange(near, stream=number, name=name)
            elif far:
                self._exchange(far, number, captured)

    def _beside(self) -> int:
        """A stream of our own."""
        if self._side is None:
            with self.gpu.outside_of_capture():
                self._side = self.gpu.make_stream()
        return self._side

    def _exchange(self, transfers: Sequence[DeviceTransfer], number: int, captured: bool) -> None:
        """With ranks of other hosts."""
        rounds, need = cut_transfers(transfers, self.slot_bytes)
        key = ("exchange", tuple((t.receives, t.peer, t.memory.count, t.memory.dtype) for t in transfers))
        slots = self.staging.slots_for(need)
        job = self._job(key, captured, lambda: (tuple(r.piece for r in rounds), transfers_on(self.world, rounds, slots)), need=need)
        self._note("staged", "sends and receives", len(rounds), need)
        self.staging.enqueue(job, [t.memory.address for t in transfers], number)

    # ---- hierarchical: this host's GPUs, and the ranks of equal index on the other hosts

    def _hierarchical(self) -> bool:
        return self.even and self.width > 1

    def _sums_on_gpu(self, dtype: DType, op: Any) -> bool:
        """Whether sums may be made in two steps, on GPUs first."""
        averages_integers = op is RedOp.AVG and not dtype.is_float
        return self._hierarchical() and isinstance(op, RedOp) and dtype in _ON_GPU and not averages_integers

    def _all_reduce(self, source: DeviceMemory, target: DeviceMemory, op: RedOp, number: int, captured: bool) -> None:
        """reduce_scatter in the host, all_reduce of this rank's shard between hosts, all_gather in the host.

        What cannot be shared out evenly belongs to the last rank of a host, next to its share.
        """
        width, last = self.width, self.width - 1
        share, rest = divmod(source.count, width)
        even, shard = share * width, target.part(self.index * share, share)
        if share:
            self.local.reduce_scatter(source.part(0, even), shard, op, stream=number)
        if rest:
            self.local.reduce(source.part(even, rest), last, target.part(even, rest), op, stream=number)
        mine = target.part(self.index * share, share + (rest if self.index == last else 0))
        if mine.count:
            shape = self._cross_shape(Collective.ALL_REDUCE, mine, mine.count)
            self._enqueue(self.crosses, shape, mine.dtype, op, (mine.address, mine.address), number, captured)
        if share:
            self.local.all_gather(shard, target.part(0, even), stream=number)
        if rest:
            self.local.broadcast(target.part(even, rest), last, stream=number)

    def _all_gather(self, source: DeviceMemory, target: DeviceMemory, number: int, captured: bool) -> None:
        """all_gather between hosts among ranks of equal index, then inside each host."""
        count = source.count
        places = tuple(ranks[self.index] * count for ranks in self.groups)
        shape = dataclasses.replace(self._cross_shape(Collective.ALL_GATHER, source, count), places=places)
        self._enqueue(self.crosses, shape, source.dtype, SUM, (source.address, target.address), number, captured)
        if self.host_major:
            for host in range(len(self.groups)):
                part = target.part(host * self.width * count, self.width * count)
                self.local.all_gather(part.part(self.index * count, count), part, stream=number)
            return
        for ranks in self.groups:
            for index, rank in enumerate(ranks):
                self.local.broadcast(target.part(rank * count, count), index, stream=number)

    def _reduce_scatter(self, source: DeviceMemory, target: DeviceMemory, op: RedOp, number: int, captured: bool) -> None:
        """Each block is reduced inside the host to the rank of its owner's index, into its slot; then reduce_scatter between hosts."""
        count, dtype = target.count, source.dtype
        shape = self._cross_shape(Collective.REDUCE_SCATTER, source, count)
        most = elements_per_piece(shape, self.slot_bytes)

        def before(piece: int, slot: int) -> None:
            size = min(most, count - piece * most)
            for host, ranks in enumerate(self.groups):
                for index, rank in enumerate(ranks):
                    out = self._in_slot(slot, host * size, size, dtype) if index == self.index else None
                    self.local.reduce(source.part(rank * count + piece * most, size), index, out, op, stream=number)

        self._enqueue(self.crosses, shape, dtype, op, (0, target.address), number, captured, before=before)

    def _broadcast(self, memory: DeviceMemory, root: int, number: int, captured: bool) -> None:
        """Between hosts among the ranks with the root's index, then inside each host, piece by piece."""
        host, index = self._place(root)
        shape = self._cross_shape(Collective.BROADCAST, memory, memory.count, host)
        most = elements_per_piece(shape, self.slot_bytes)

        def after(piece: int, slot: int) -> None:
            size = min(most, memory.count - piece * most)
            self.local.broadcast(memory.part(piece * most, size), index, stream=number)

        both = (memory.address, memory.address)
        self._enqueue(self.crosses, shape, memory.dtype, SUM, both, number, captured, takes_part=index == self.index, after=after)

    def _reduce(self, source: DeviceMemory, target: DeviceMemory, op: RedOp, root: int, number: int, captured: bool) -> None:
        """Inside each host to the rank with the root's index, into its slot, then between hosts, piece by piece."""
        host, index = self._place(root)
        shape = self._cross_shape(Collective.REDUCE, source, source.count, host)
        most = elements_per_piece(shape, self.slot_bytes)

        def before(piece: int, slot: int) -> None:
            size = min(most, source.count - piece * most)
            out = self._in_slot(slot, 0, size, source.dtype) if index == self.index else None
            self.local.reduce(source.part(piece * most, size), index, out, op, stream=number)

        to = (0, target.address)
        self._enqueue(self.crosses, shape, source.dtype, op, to, number, captured, takes_part=index == self.index, before=before)

    def _all_to_all(self, source: DeviceMemory, target: DeviceMemory, count: int, number: int, captured: bool) -> None:
        """Blocks inside the host on GPUs, those for other hosts through the CPU communicator of all ranks."""
        begin, near = self.host * self.width, self.width
        self.local.all_to_all(source.part(begin * count, near * count), target.part(begin * count, near * count), stream=number)
        counts = tuple(0 if begin <= rank < begin + near else count for rank in range(self.nranks))
        even = Shape.even(Collective.ALL_TO_ALL, source.dtype.itemsize, self.rank, self.nranks, 0, count)
        places = tuple(rank * count for rank in range(self.nranks))
        shape = dataclasses.replace(even, sends=counts, receives=counts, uneven=True, source_places=places, places=places)
        self._enqueue((self.world,), shape, source.dtype, SUM, (source.address, target.address), number, captured)

    def _place(self, rank: int) -> tuple[int, int]:
        """Host and index in the host of a rank."""
        return next((host, ranks.index(rank)) for host, ranks in enumerate(self.groups) if rank in ranks)

    def _cross_shape(self, collective: Collective, memory: DeviceMemory, count: int, root: int = 0) -> Shape:
        return Shape.even(collective, memory.dtype.itemsize, self.host, len(self.groups), root, count)

    def _in_slot(self, slot: int, first: int, count: int, dtype: DType) -> DeviceMemory:
        """Elements of a slot, as kernels see them."""
        slots = self.staging.slots
        return DeviceMemory(slots.on_gpu + slot * slots.nbytes, first + count, dtype).part(first, count)

    # ---- staging

    def _staged(
        self,
        collective: Collective,
        source: DeviceMemory,
        target: DeviceMemory,
        count: int,
        op: Any,
        root: int,
        number: int,
        captured: bool,
    ) -> None:
        """The whole operation through CPU communicators of all ranks."""
        shape = Shape.even(collective, source.dtype.itemsize, self.rank, self.nranks, root, count)
        cpus = self.crosses if self.even and self.width == 1 else (self.world,)
        self._enqueue(cpus, shape, source.dtype, op, (source.address, target.address), number, captured)

    def _uneven(
        self,
        collective: Collective,
        source: DeviceMemory,
        target: DeviceMemory,
        sends: Sequence[int],
        receives: Sequence[int],
        counts: Sequence[int],
        stream: Any,
        *,
        op: Any = SUM,
        root: int = 0,
    ) -> None:
        if counts and not any(counts):
            return
        shape = Shape(
            collective=collective,
            itemsize=source.dtype.itemsize,
            rank=self.rank,
            nranks=self.nranks,
            root=root,
            sends=tuple(sends),
            receives=tuple(receives),
            counts=tuple(counts),
            uneven=True,
        )
        writes = target if target is not source else None
        with self._operation(f"{collective.label}_v", stream, [source, target], writes) as (number, captured):
            self._enqueue((self.world,), shape, source.dtype, op, (source.address, target.address), number, captured)

    def _enqueue(
        self,
        cpus: tuple[CpuCommunicator, ...],
        shape: Shape,
        dtype: DType,
        op: Any,
        buffers: tuple[int, int],
        number: int,
        captured: bool,
        *,
        takes_part: bool = True,
        before: Callable[[int, int], None] | None = None,
        after: Callable[[int, int], None] | None = None,
    ) -> None:
        """Enqueue a collective of ``cpus``, one a lane; with ``before`` a kernel writes the slots, and nothing is copied down."""
        unknown = shape.uneven and shape.collective is Collective.ALL_TO_ALL and not shape.places

        def make() -> tuple[tuple[Piece, ...], Network]:
            pieces = cut(shape, self.slot_bytes)
            network = StagedCollective(cpus, shape, dtype, op, self.staging.slots)
            if before is not None:
                pieces = tuple(dataclasses.replace(piece, down=()) for piece in pieces)
            return agreeing(self.world, pieces, network) if unknown else (pieces, network)

        operation = op if isinstance(op, RedOp) else (type(op).__name__, op.scalar)
        job = self._job((shape, dtype, operation, cpus == self.crosses), captured, make, stride=len(cpus))
        if cpus == self.crosses and self.width > 1:
            self._note("hierarchical", f"{len(self.groups)} hosts of {self.width} ranks", job.npieces, self.slot_bytes)
        else:
            self._note("staged", self._why_staged(shape, dtype, op), job.npieces, self.slot_bytes)
        self.staging.enqueue(job, buffers, number, takes_part=takes_part, before=before, after=after)

    def _job(
        self,
        key: tuple[Any, ...],
        captured: bool,
        make: Callable[[], tuple[tuple[Piece, ...], Network]],
        *,
        need: int = 0,
        stride: int = 1,
    ) -> StagedJob:
        """The job of a kind of operation; captured ones apart, because a graph may bring them at any time."""
        job = self._jobs.get((key, captured))
        if job is None:
            pieces, network = make()
            job = self._jobs[key, captured] = self.staging.job(pieces, self.staging.slots_for(need), network, captured, stride)
        return job

    def _why_staged(self, shape: Shape, dtype: DType, op: Any) -> str:
        if self.width == 1 and self.even:
            return "one rank per host"
        if not self.even:
            return "hosts have different numbers of ranks"
        if shape.collective.reduces and dtype not in _ON_GPU:
            return f"{dtype.label} is not added up on GPUs"
        if shape.collective.reduces and not isinstance(op, RedOp):
            return f"{type(op).__name__} is for the CPU"
        return "blocks for other hosts" if shape.places else "no algorithm of two steps"

    def _note(self, algo: str, reason: str, pieces: int, piece_bytes: int) -> None:
        self.last_plan = HostsPlan(algo=algo, reason=reason, pieces=pieces, piece_bytes=piece_bytes)

    @contextlib.contextmanager
    def _operation(self, name: str, stream: Any, views: Sequence[DeviceMemory], writes: DeviceMemory | None) -> Iterator[tuple[int, bool]]:
        """Every call is inside: what it may raise, the stream's number and whether it is captured; keeps what views keep."""
        if writes is not None and writes.read_only:
            hint = "give out, an array that can; arrays of JAX never change"
            raise InvalidUsage(f"{name}: the result's array cannot be written", rank=self.rank, hint=hint)
        self.check(name)
        self.gpu.make_current()
        number = self.local._enter(name, stream)
        try:
            yield number, self.gpu.capture_id(number) != 0
        except SystemFailure as error:  # half of it may be enqueued: no rank can count on what comes next
            self._fail(error)
            raise
        self.local._hold(views, number)

    # ---- arguments

    def _counts(self, counts: Any, where: str) -> tuple[int, ...]:
        return tuple(counts_of(counts, "counts", self.nranks, where))

    def _sized(self, x: Any, name: str, counts: Sequence[int], where: str, stream: Any) -> DeviceMemory:
        memory = device_view(x, name, where, stream, self.gpu)
        self._expect(memory, counts[self.rank], name, where)
        return memory

    def _expect(self, memory: DeviceMemory, count: int, name: str, where: str) -> None:
        if memory.count != count:
            raise InvalidUsage(f"{where}: {name} has {memory.count} elements, but needs {count}", rank=self.rank)

    def _apart(self, source: DeviceMemory, target: DeviceMemory, where: str) -> None:
        if source.nbytes and source.address < target.address + target.nbytes and target.address < source.address + source.nbytes:
            raise InvalidUsage(f"{where} has no in-place form: x and out must not overlap", rank=self.rank)

    # ---- explanation

    def explain(self) -> Explanation:
        """(pair, way, why) of the pairs of ranks that this rank knows of: those of its host, and its own with other hosts."""
        mine = self.groups[self.host]
        near = [((mine[a], mine[b]), kind, why) for (a, b), kind, why in self.local.symmetric.explain()]
        others = [rank for rank in range(self.nranks) if rank not in mine]
        far = [((min(self.rank, p), max(self.rank, p)), "staging", "another host: pinned memory and sockets") for p in others]
        return sorted([*near, *far])

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds: on its GPU, and pinned on the host."""
        local = self.local.memory()
        return local | {"pinned": local["pinned"] + self.staging.bytes_pinned()}

    # ---- failure and end

    def check(self, name: str = "") -> None:
        """Raise if the communicator is closed or broken. Does not wait."""
        if self.closed:
            raise CommunicatorClosed("the communicator has been finalized", rank=self.rank, op=name or None)
        if self.fault is not None:
            raise self.fault
        self.local.check(name)

    def _fail(self, error: Exception, told: bool = False) -> None:
        """The first fault stays, and the other ranks are told unless they told us. Streams are let go: the proxy answers without running
        anything, kernels of the host end."""
        with self._lock:
            if self.fault is not None:
                return
            self.fault = error if isinstance(error, MiracclError) else SystemFailure(f"staging failed: {error!r}", rank=self.rank)
        self.staging.drain()
        self.local.abort(tell=False)
        if not told:
            words = {"kind": type(self.fault).__name__, "message": self.fault.message, "peer": self.fault.peer, "op": self.fault.op}
            with contextlib.suppress(MiracclError):  # the control plane may be gone as well
                self.session.notify({NOTICE: words})

    def _event(self, event: Event) -> None:
        if self.closed:
            return
        if isinstance(event, PeerLost):
            self._fail(PeerDied(f"rank {event.rank} died: {event.reason}", rank=self.rank, peer=event.rank), told=True)
        elif isinstance(event, Notice) and isinstance(words := event.payload.get(NOTICE), dict):
            kind = getattr(errors, str(words.get("kind")), None)
            if isinstance(kind, type) and issubclass(kind, MiracclError):
                peer = words.get("peer")
                about = peer if isinstance(peer, int) else event.from_rank
                error = kind(str(words.get("message", "")), rank=self.rank, peer=about, op=words.get("op"))
                self._fail(error, told=True)
                self._abort_cpus(error.message)

    def _abort_cpus(self, reason: str) -> None:
        for cpu in self._cpus:
            cpu.abort(reason)

    def abort(self, reason: str = "abort() was called") -> None:
        """End what waits, on all ranks; later calls raise. Any thread may call it."""
        if not self.closed:
            self._fail(CommunicatorAborted(f"rank {self.rank} aborted the communicator: {reason}", rank=self.rank, peer=self.rank))
            self._abort_cpus(reason)

    def synchronize(self) -> None:
        """Wait for this rank's GPU, then ``check``."""
        self.gpu.make_current()
        self.gpu.synchronize()
        self.check()

    def close(self) -> MiracclError | None:
        """Free everything, after this rank's GPU has ended its work; may be called twice. Gives what was found and no call has told."""
        if self.closed:
            return None
        with contextlib.suppress(MiracclError):
            self.gpu.make_current()
            self.gpu.synchronize()
        if self.fault is None:
            with contextlib.suppress(MiracclError):  # no CPU communicator ends while another rank's stream needs it
                self.session.barrier("gpu hosts close", timeout=CLOSE_WAIT_S)
        self.closed = True
        with contextlib.suppress(MiracclError):
            self.staging.close()
            if self._side is not None:
                self.gpu.destroy_stream(self._side)
        untold = self.local.close()
        for cpu in self._cpus:
            cpu.finalize()
        self._local_session.close()
        return untold


def group_by_host(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks of each host, hosts in the order of their first ranks."""
    return [tuple(rank for rank, name in enumerate(hosts) if name == host) for host in dict.fromkeys(hosts)]
