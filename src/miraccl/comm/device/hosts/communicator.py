"""Collectives on GPU memory over several hosts: kernels inside a host, pinned memory and the CPU communicator between hosts.

``make_device_communicator`` gives the communicator of one host (``comm.device``) or ``HostsCommunicator``, with the same methods.  All
is enqueued in the caller's stream and may be captured in CUDA graphs; lanes of a proxy do the network's part (``staging``).

Two algorithms.  ``hierarchical`` sums and spreads inside each host on its GPUs and sends every element once per host: it needs hosts of
equal numbers of ranks.  ``staged`` hands everything to the CPU communicator of all ranks, which has every collective, operator and type.
16-bit floats are rounded once inside a host and once between hosts; averages of integers are staged, for they are truncated once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from miraccl.bootstrap import Session
from miraccl.comm.arguments import operator, peer_rank
from miraccl.comm.device.communicator import DeviceCommunicator
from miraccl.comm.device.explain import DeviceCandidate
from miraccl.comm.device.hosts.faults import HostsFaults
from miraccl.comm.device.hosts.jobs import HostsJobs, HostsPlan, OpenCpu
from miraccl.comm.device.hosts.layout import HostsLayout, host_name
from miraccl.comm.device.hosts.pieces import Shape
from miraccl.comm.device.hosts.steps import TwoSteps
from miraccl.comm.device.hosts.transfers import DeviceTransfer
from miraccl.comm.device.hosts.uneven import UnevenCollectives
from miraccl.comm.device.memory import DeviceMemory, device_view, empty_like
from miraccl.comm.nccl_wishes import Wishes
from miraccl.errors import InvalidUsage, MiracclError, SystemFailure
from miraccl.transport.cuda_p2p import Explanation
from miraccl.types import Collective, DType, RedOp

SUM = RedOp.SUM
CLOSE_WAIT_S = 10.0
#: what has an algorithm of two steps, inside the hosts and between them (``steps``)
IN_TWO_STEPS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.BROADCAST, Collective.REDUCE)


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


class HostsCommunicator(UnevenCollectives):
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
        self.layout = HostsLayout.of(session.rank, hosts)
        self.faults = HostsFaults(session, let_go=self._let_go, abort_network=lambda reason: self.jobs.abort(reason))
        self._side: int | None = None
        self._local_session = session.sub(self.layout.mine, f"{session.name}/gpu host {self.layout.host}")
        self.local = DeviceCommunicator(
            self._local_session, ordinal, timeout=timeout, algo=algo, proto=proto, deterministic=deterministic, wishes=wishes
        )
        self.gpu = self.local.gpu
        self.jobs = HostsJobs(session, self.layout, self.gpu, open_cpu, self.faults.fail)
        self.steps = TwoSteps(self.local, self.jobs)
        session.barrier("gpu staging ready")
        session.on_event(self.faults.heard)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        return self.layout.groups

    @property
    def last_plan(self) -> HostsPlan | None:
        """How the last operation between hosts ran."""
        return self.jobs.last_plan

    @property
    def closed(self) -> bool:
        return self.faults.closed

    # ---- collectives

    def all_reduce(self, x: Any, out: Any = None, op: Any = SUM, *, stream: Any = None) -> Any:
        """Reduce ``x`` over all ranks into ``out``, or into ``x`` itself."""
        source = device_view(x, "x", "all_reduce", stream, self.gpu)
        target = source if out is None else self._like(out, source, source.count, "all_reduce")
        operator(op, source.dtype, "all_reduce")
        if source.count:
            with self._operation("all_reduce", stream, [source, target], target) as (number, captured):
                if self.steps.sums(source.dtype, op):
                    self.steps.all_reduce(source, target, op, number, captured)
                else:
                    self.jobs.staged(Collective.ALL_REDUCE, source, target, source.count, op, 0, number, captured)
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
                if self.steps.sums(source.dtype, op):
                    self.steps.reduce_scatter(source, target, op, number, captured)
                else:
                    self.jobs.staged(Collective.REDUCE_SCATTER, source, target, count, op, 0, number, captured)
        return out

    def all_gather(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        """All ranks' ``x``, one after another, on every rank."""
        source = device_view(x, "x", "all_gather", stream, self.gpu)
        out = empty_like(x, source.count * self.nranks, "all_gather") if out is None else out
        target = self._like(out, source, source.count * self.nranks, "all_gather")
        if source.count:
            with self._operation("all_gather", stream, [source, target], target) as (number, captured):
                if self.layout.hierarchical:
                    self.steps.all_gather(source, target, number, captured)
                else:
                    self.jobs.staged(Collective.ALL_GATHER, source, target, source.count, SUM, 0, number, captured)
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
                if self.layout.hierarchical and self.layout.host_major:
                    self.steps.all_to_all(source, target, count, number, captured)
                else:
                    self.jobs.staged(Collective.ALL_TO_ALL, source, target, count, SUM, 0, number, captured)
        return out

    def broadcast(self, x: Any, root: int = 0, *, stream: Any = None) -> Any:
        """``x`` of rank ``root`` into ``x`` of every rank."""
        chief, source = self._root(root, "broadcast"), device_view(x, "x", "broadcast", stream, self.gpu)
        if source.count:
            with self._operation("broadcast", stream, [source], source if self.rank != chief else None) as (number, captured):
                if self.layout.hierarchical:
                    self.steps.broadcast(source, chief, number, captured)
                else:
                    self.jobs.staged(Collective.BROADCAST, source, source, source.count, SUM, chief, number, captured)
        return x

    def reduce(self, x: Any, root: int = 0, out: Any = None, op: Any = SUM, *, stream: Any = None) -> Any:
        """Reduce ``x`` over all ranks into ``x`` or ``out`` of rank ``root``; the others' stays as it is."""
        chief, source = self._root(root, "reduce"), device_view(x, "x", "reduce", stream, self.gpu)
        target = source if out is None or self.rank != chief else self._like(out, source, source.count, "reduce")
        operator(op, source.dtype, "reduce")
        if source.count:
            with self._operation("reduce", stream, [source, target], target if self.rank == chief else None) as (number, captured):
                if self.steps.sums(source.dtype, op):
                    self.steps.reduce(source, target, op, chief, number, captured)
                else:
                    self.jobs.staged(Collective.REDUCE, source, target, source.count, op, chief, number, captured)
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
                self.jobs.staged(Collective.GATHER, source, target, source.count, SUM, chief, number, captured)
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
                self.jobs.staged(Collective.SCATTER, source, target, target.count, SUM, chief, number, captured)
        return out

    def empty(self, shape: Any, dtype: Any = "float32") -> Any:
        """Window memory of this host's ranks: any GPU memory for operations over hosts, addressed by peers in the part inside the host."""
        return self.local.empty(shape, dtype)

    def barrier(self, *, stream: Any = None) -> None:
        """What follows in the stream begins when every rank's stream has come here."""
        with self._operation("barrier", stream, [], None) as (number, captured):
            self.jobs.barrier(number, captured)

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
        mine = self.layout.mine
        near = [dataclasses.replace(t, peer=mine.index(t.peer)) for t in transfers if t.peer in mine]
        far = [t for t in transfers if t.peer not in mine and t.memory.count]
        with self._operation(name, stream, [t.memory for t in transfers], None) as (number, captured):
            if near and far:
                self.gpu.order_streams(number, self._beside())
                self.local.exchange(near, stream=self._beside(), name=name)
                self.jobs.exchange(far, number, captured)
                self.gpu.order_streams(self._beside(), number)
                self.local._stream = number
            elif near:
                self.local.exchange(near, stream=number, name=name)
            elif far:
                self.jobs.exchange(far, number, captured)

    def _beside(self) -> int:
        """A stream of our own."""
        if self._side is None:
            with self.gpu.outside_of_capture():
                self._side = self.gpu.make_stream()
        return self._side

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
            self.faults.fail(error)
            raise
        self.local._hold(views, number)

    # ---- explanation

    def explain(self, collective: Collective, block_bytes: int, dtype: DType, op: Any = SUM) -> list[DeviceCandidate]:
        """How ``collective`` runs on blocks of so many bytes, and why. Nothing is communicated."""
        operator(op, dtype, collective.label)
        if collective.reduces:
            two_steps = collective in IN_TWO_STEPS and self.steps.sums(dtype, op)
        else:
            two_steps = collective in IN_TWO_STEPS and self.layout.hierarchical
        count = block_bytes // dtype.itemsize
        shape = Shape.even(collective, dtype.itemsize, self.rank, self.nranks, 0, count)
        if collective is Collective.ALL_TO_ALL and self.layout.hierarchical and self.layout.host_major:
            shape = dataclasses.replace(shape, places=tuple(range(self.nranks)))  # those inside the host are not staged
        reason = self.jobs.why(two_steps, shape, dtype, op)
        algo = "hierarchical" if two_steps else "staged"
        return [DeviceCandidate(algo=algo, proto="staging", chosen=True, reason=reason, ways=tuple(self.ways()))]

    def ways(self) -> Explanation:
        """(pair, way, why) of the pairs of ranks that this rank knows of: those of its host, and its own with other hosts."""
        mine = self.layout.mine
        near = [((mine[a], mine[b]), kind, why) for (a, b), kind, why in self.local.ways()]
        others = [rank for rank in range(self.nranks) if rank not in mine]
        far = [((min(self.rank, p), max(self.rank, p)), "staging", "another host: pinned memory and sockets") for p in others]
        return sorted([*near, *far])

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds: on its GPU, and pinned on the host."""
        local = self.local.memory()
        return local | {"pinned": local["pinned"] + self.jobs.bytes_pinned()}

    # ---- failure and end

    def check(self, name: str = "") -> None:
        """Raise if the communicator is closed or broken. Does not wait."""
        self.faults.check(name)
        self.local.check(name)

    def _let_go(self) -> None:
        """End what streams wait for."""
        self.jobs.staging.drain()
        self.local.abort(tell=False)

    def abort(self, reason: str = "abort() was called") -> None:
        """End what waits, on all ranks; later calls raise. Any thread may call it."""
        self.faults.abort(reason)

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
        if self.faults.fault is None:
            with contextlib.suppress(MiracclError):  # no CPU communicator ends while another rank's stream needs it
                self.session.barrier("gpu hosts close", timeout=CLOSE_WAIT_S)
        self.faults.closed = True
        with contextlib.suppress(MiracclError):
            self.jobs.staging.close()
            if self._side is not None:
                self.gpu.destroy_stream(self._side)
        untold = self.local.close()
        self.jobs.finalize()
        self._local_session.close()
        return untold
