"""The communicator: every public operation, each a few lines.

An operation takes one of two ways.  The door (``executor.cpu.kernels.engine``) reads the arrays' headers and runs the plan in compiled
code; that is every call whose like has been seen.  The long way checks the arguments, makes the plan, and handles groups,
background work and everything else that is not an everyday call.  Once there is a GPU side, its doors (``executor.cuda.doors``) stand
before those of the CPU.  This file knows neither transports nor algorithms.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from miraccl.bootstrap import Session, UniqueId
from miraccl.comm import calls
from miraccl.comm import group as groups
from miraccl.comm.arguments import peer_rank, view
from miraccl.comm.calls import Call, Place
from miraccl.comm.device.memory import current_ordinal, lies_on_gpu, ordinal_of
from miraccl.comm.exchange import Transfer
from miraccl.comm.meeting import meet_by_id
from miraccl.comm.member import Member, Options
from miraccl.comm.persistent import Persistent
from miraccl.comm.planner import Candidate
from miraccl.errors import InvalidUsage, MiracclError
from miraccl.executor.cpu.kernels import layout as at
from miraccl.executor.cuda.doors.layout import NOTED
from miraccl.types import Collective, DType, RedOp

if TYPE_CHECKING:
    from miraccl.comm.device.communicator import DeviceCommunicator
    from miraccl.comm.device.explain import DeviceCandidate
    from miraccl.comm.device.hosts.communicator import HostsCommunicator
    from miraccl.comm.device.hosts.jobs import HostsPlan
    from miraccl.comm.device.work import Background, DevicePersistent
    from miraccl.executor.cuda.plan import DevicePlan

SUM = RedOp.SUM


def _no_door(*args: Any) -> int:
    return at.NEED_PLAN


class Communicator:
    """A group of ranks that communicate; this process (or thread) is one of them.

    ``Communicator(nranks, unique_id, rank)`` is collective: every rank calls it with the id that ``get_unique_id()`` gave to one of them.
    ``miraccl.init()`` does that for ranks that a launcher started.  Keyword options: ``timeout`` in seconds of every operation
    (MIRACCL_TIMEOUT), ``algo`` and ``proto`` as MIRACCL_ALGO and MIRACCL_PROTO, ``deterministic`` (MIRACCL_DETERMINISTIC) for results
    that depend on neither size, algorithm nor layout.

    Arrays are NumPy arrays, or anything with ``__array_interface__``, the buffer protocol or DLPack in CPU memory; contiguous, of a
    dtype in ``miraccl.DType``.  Every operation takes GPU memory, too (PyTorch, CuPy, ``__cuda_array_interface__``, DLPack): it enqueues
    kernels in ``stream`` or else the current stream and returns (``comm.device``).  Operations return the array with the result.  With
    ``async_op=True`` they return a ``Work``; on GPU memory they run on a stream of the communicator's, and its ``wait`` makes the current
    stream wait.
    One thread at a time may be inside a communicator; ``abort`` may be called from any.
    """

    rank: int
    nranks: int
    _member: Member
    _reduce: Callable[..., int] = staticmethod(_no_door)  # on CPU memory it has no door
    _begin_notes: Callable[[Any], bool]  # what a door of the GPU asks for that notes a call as the first one of a group

    def __init__(self, nranks: int, unique_id: UniqueId | bytes | str, rank: int, **options: Any) -> None:
        opts = Options.create(**options)
        self._start(meet_by_id(nranks, unique_id, rank, opts), opts)

    @classmethod
    def from_session(cls, session: Session, options: Options, *, parent: Communicator | None = None) -> Communicator:
        """A communicator over a session that has met already."""
        self = cls.__new__(cls)
        self._start(session, options, parent)
        return self

    def _start(self, session: Session, options: Options, parent: Communicator | None = None) -> None:
        self.rank, self.nranks = session.rank, session.nranks
        member = self._member = Member(session, options, constants=parent._member.constants if parent else None)
        self._lock = threading.RLock()
        self._device: DeviceCommunicator | HostsCommunicator | None = None
        self._background: Background | None = None
        context = member.context
        word = at.CTX_LAST_PLAN // 8
        self._cpu_plan: Any = context.words.data[word : word + 1]  # 0: the last operation was on GPU memory
        self._cpu_plan_address = context.address + at.CTX_LAST_PLAN
        self._all_reduce = context.door("collective", Collective.ALL_REDUCE)
        self._all_gather = context.door("collective", Collective.ALL_GATHER)
        self._reduce_scatter = context.door("collective", Collective.REDUCE_SCATTER)
        self._broadcast = context.door("collective", Collective.BROADCAST)
        self._all_to_all = context.door("collective", Collective.ALL_TO_ALL)
        self._send = context.door("send_recv", Collective.SEND_RECV, arg=0)
        self._recv = context.door("send_recv", Collective.SEND_RECV, arg=1)
        self._sendrecv = context.door("sendrecv", Collective.SEND_RECV)
        self._barrier: Callable[[], int] = member.barrier_door()
        self._splits = 0

    # ---- collectives

    def all_reduce(self, x: Any, out: Any = None, op: Any = SUM, *, async_op: bool = False, stream: Any = None) -> Any:
        """Reduce ``x`` over all ranks; every rank gets the result, in ``x`` itself or in ``out`` (same count and dtype)."""
        if not (code := self._all_reduce(x, out, op, async_op, stream)):
            return x if out is None else out
        if (gpu := self._gpu(async_op, stream, x, out)) is not None:
            return gpu.all_reduce(x, out, op, stream=stream)
        return self._long_way(calls.all_reduce, (x, out, op), "all_reduce", async_op, code)

    def all_gather(self, x: Any, out: Any = None, *, async_op: bool = False, stream: Any = None) -> Any:
        """All ranks' ``x`` (equal counts), one after another along the first axis, on every rank."""
        code = 0
        target = out if out is not None or async_op else calls.new_stacked(x, self.nranks)
        if target is not None and not (code := self._all_gather(x, target, 0, async_op, stream)):
            return target
        if (gpu := self._gpu(async_op, stream, x, out)) is not None:
            return gpu.all_gather(x, out, stream=stream)
        return self._long_way(calls.all_gather, (x, out), "all_gather", async_op, code)

    def reduce_scatter(self, x: Any, out: Any = None, op: Any = SUM, *, async_op: bool = False, stream: Any = None) -> Any:
        """Reduce ``x`` over all ranks; rank r gets the r-th of nranks equal shares (cut along the first axis)."""
        code = 0
        target = out if out is not None or async_op else calls.new_share(x, self.nranks)
        if target is not None and not (code := self._reduce_scatter(x, target, op, async_op, stream)):
            return target
        if (gpu := self._gpu(async_op, stream, x, out)) is not None:
            return gpu.reduce_scatter(x, out, op, stream=stream)
        return self._long_way(calls.reduce_scatter, (x, out, op), "reduce_scatter", async_op, code)

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False, stream: Any = None) -> Any:
        """``x`` of rank ``root`` into ``x`` of every rank."""
        if not (code := self._broadcast(x, None, root, async_op, stream)):
            return x
        if (gpu := self._gpu(async_op, stream, x)) is not None:
            return gpu.broadcast(x, root, stream=stream)
        return self._long_way(calls.broadcast, (x, root), "broadcast", async_op, code)

    def reduce(self, x: Any, root: int = 0, out: Any = None, op: Any = SUM, *, async_op: bool = False, stream: Any = None) -> Any:
        """Reduce ``x`` over all ranks into ``x`` (or ``out``) of rank ``root``; the others' ``x`` stays as it is."""
        if not self._reduce(x, out, op, async_op, stream, root):
            return x if out is None or root != self.rank else out
        if (gpu := self._gpu(async_op, stream, x, out)) is not None:
            return gpu.reduce(x, root, out, op, stream=stream)
        return self._long_way(calls.reduce, (x, root, out, op), "reduce", async_op)

    def all_to_all(self, x: Any, out: Any = None, *, async_op: bool = False, stream: Any = None) -> Any:
        """Block j of rank i's ``x`` becomes block i of rank j's result; ``x`` has nranks equal blocks."""
        code = 0
        target = out if out is not None or async_op else calls.new_like(x)
        if target is not None and not (code := self._all_to_all(x, target, 0, async_op, stream)):
            return target
        if (gpu := self._gpu(async_op, stream, x, out)) is not None:
            return gpu.all_to_all(x, out, stream=stream)
        return self._long_way(calls.all_to_all, (x, out), "all_to_all", async_op, code)

    def gather(self, x: Any, root: int = 0, out: Any = None, *, async_op: bool = False, stream: Any = None) -> Any:
        """All ranks' ``x`` on rank ``root``, as ``all_gather`` puts them; the others get None."""
        if (gpu := self._gpu(async_op, stream, x, out)) is not None:
            return gpu.gather(x, root, out, stream=stream)
        return self._long_way(calls.gather, (x, root, out), "gather", async_op)

    def scatter(self, x: Any = None, root: int = 0, out: Any = None, *, async_op: bool = False, stream: Any = None) -> Any:
        """Rank r gets the r-th of nranks equal shares of the root's ``x``; the other ranks give ``out`` (``x`` is not looked at)."""
        if (gpu := self._gpu(async_op, stream, x, out)) is not None:
            return gpu.scatter(x, root, out, stream=stream)
        return self._long_way(calls.scatter, (x, root, out), "scatter", async_op)

    def barrier(self, *, async_op: bool = False, stream: Any = None) -> Any:
        """Return once every rank has come. With ``stream``, what follows there on the GPU begins once every rank's stream has come."""
        if stream is not None:
            return self._gpu_calls(async_op, current_ordinal()).barrier(stream=stream)
        if not async_op and not (code := self._barrier()):
            return None
        return self._long_way(calls.barrier, (), "barrier", async_op, 0 if async_op else code)

    # ---- uneven collectives: counts in elements, one a rank, the same list on every rank unless said

    def all_gather_v(self, x: Any, counts: Sequence[int], out: Any = None, *, async_op: bool = False, stream: Any = None) -> Any:
        """As ``all_gather``; rank r contributes ``counts[r]`` elements. The result is flat."""
        if (gpu := self._gpu(async_op, stream, x, out)) is not None:
            return gpu.all_gather_v(x, counts, out, stream=stream)
        return self._long_way(calls.all_gather_v, (x, counts, out), "all_gather_v", async_op)

    def reduce_scatter_v(
        self, x: Any, counts: Sequence[int], out: Any = None, op: Any = SUM, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """As ``reduce_scatter``; rank r gets ``counts[r]`` elements."""
        if (gpu := self._gpu(async_op, stream, x, out)) is not None:
            return gpu.reduce_scatter_v(x, counts, out, op, stream=stream)
        return self._long_way(calls.reduce_scatter_v, (x, counts, out, op), "reduce_scatter_v", async_op)

    def all_to_all_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Any = None,
        *,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """As ``all_to_all``; block j of ``x`` has ``send_counts[j]`` elements, block j of the result ``recv_counts[j]`` (own counts)."""
        if (gpu := self._gpu(async_op, stream, x, out)) is not None:
            return gpu.all_to_all_v(x, send_counts, recv_counts, out, stream=stream)
        return self._long_way(calls.all_to_all_v, (x, send_counts, recv_counts, out), "all_to_all_v", async_op)

    def gather_v(self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None, *, async_op: bool = False, stream: Any = None) -> Any:
        """As ``gather``; rank r contributes ``counts[r]`` elements."""
        if (gpu := self._gpu(async_op, stream, x, out)) is not None:
            return gpu.gather_v(x, counts, root, out, stream=stream)
        return self._long_way(calls.gather, (x, root, out, counts), "gather_v", async_op)

    def scatter_v(
        self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """As ``scatter``; rank r gets ``counts[r]`` elements."""
        if (gpu := self._gpu(async_op, stream, x, out)) is not None:
            return gpu.scatter_v(x, counts, root, out, stream=stream)
        return self._long_way(calls.scatter, (x, root, out, counts), "scatter_v", async_op)

    # ---- point to point

    def send(self, x: Any, dst: int, *, async_op: bool = False, stream: Any = None) -> Any:
        """Send ``x`` to rank ``dst``; returns when ``x`` may be changed. Matches one ``recv`` of the same count and dtype, in order."""
        code = self._send(x, dst, async_op, stream)
        if not code or (code == NOTED and self._begin_notes(groups.current())):
            return None
        if (gpu := self._gpu(async_op, stream, x)) is not None:
            return gpu.send(x, dst, stream=stream)
        return self._transfer(x, dst, False, "send", async_op, code)

    def recv(self, x: Any, src: int, *, async_op: bool = False, stream: Any = None) -> Any:
        """Receive from rank ``src`` into ``x``."""
        code = self._recv(x, src, async_op, stream)
        if not code or (code == NOTED and self._begin_notes(groups.current())):
            return x
        if (gpu := self._gpu(async_op, stream, x)) is not None:
            return gpu.recv(x, src, stream=stream)
        return self._transfer(x, src, True, "recv", async_op, code)

    def sendrecv(self, x: Any, dst: int, out: Any, src: int, *, async_op: bool = False, stream: Any = None) -> Any:
        """Send ``x`` to ``dst`` and receive ``out`` from ``src`` at the same time."""
        code = self._sendrecv(x, dst, out, src, async_op, stream)
        if not code or (code == NOTED and self._begin_notes(groups.current())):
            return out
        if (gpu := self._gpu(async_op, stream, x, out)) is not None:
            return gpu.sendrecv(x, dst, out, src, stream=stream)
        self._member.check(code, "sendrecv")
        pair = [self._checked(x, dst, False, "sendrecv"), self._checked(out, src, True, "sendrecv", "out")]
        calls.refuse_overlap(pair[0].memory, pair[1].memory, None, self._place("sendrecv"))
        group = self._open_group("sendrecv", async_op)
        if group is not None:
            for transfer in pair:
                group.add(self, transfer)
            return out
        return self._member.exchange(pair, out, "sendrecv", async_op)

    # ---- persistent operations: everything is checked and planned once

    def all_reduce_init(self, x: Any, out: Any = None, op: Any = SUM) -> Persistent | DevicePersistent:
        """A prepared ``all_reduce``: ``op = comm.all_reduce_init(x); op()``. Buffers are bound; call it on all ranks alike."""
        return self._prepare(calls.all_reduce, "all_reduce", x, out, op)

    def all_gather_init(self, x: Any, out: Any = None) -> Persistent | DevicePersistent:
        """A prepared ``all_gather``."""
        return self._prepare(calls.all_gather, "all_gather", x, out)

    def reduce_scatter_init(self, x: Any, out: Any = None, op: Any = SUM) -> Persistent | DevicePersistent:
        """A prepared ``reduce_scatter``."""
        return self._prepare(calls.reduce_scatter, "reduce_scatter", x, out, op)

    def broadcast_init(self, x: Any, root: int = 0) -> Persistent | DevicePersistent:
        """A prepared ``broadcast``."""
        return self._prepare(calls.broadcast, "broadcast", x, root)

    def reduce_init(self, x: Any, root: int = 0, out: Any = None, op: Any = SUM) -> Persistent | DevicePersistent:
        """A prepared ``reduce``."""
        return self._prepare(calls.reduce, "reduce", x, root, out, op)

    def all_to_all_init(self, x: Any, out: Any = None) -> Persistent | DevicePersistent:
        """A prepared ``all_to_all``."""
        return self._prepare(calls.all_to_all, "all_to_all", x, out)

    def gather_init(self, x: Any, root: int = 0, out: Any = None) -> Persistent | DevicePersistent:
        """A prepared ``gather``."""
        return self._prepare(calls.gather, "gather", x, root, out)

    def scatter_init(self, x: Any = None, root: int = 0, out: Any = None) -> Persistent | DevicePersistent:
        """A prepared ``scatter``."""
        return self._prepare(calls.scatter, "scatter", x, root, out)

    # ---- memory, plans, life

    def empty(self, shape: Any, dtype: Any = "float32", device: str = "cpu") -> Any:
        """An array in window memory, which all ranks of the host address directly: large operations on it copy nothing in between.

        ``device`` "cuda" or "cuda:1" gives GPU memory, zeroed; that call is collective, and the memory lives as long as the communicator.
        A dtype of PyTorch's gives a tensor, another one a ``comm.device.windows.DeviceArray``.
        """
        if str(device) == "cpu":
            return self._member.empty(shape, dtype)
        return self._on_device(device, "empty").empty(shape, dtype)

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds for the communicator, by purpose; those on a GPU and pinned for it apart, once it is used."""
        gpu = self._device.memory() if self._device is not None else {}
        return self._member.memory() | {f"gpu_{name}": nbytes for name, nbytes in gpu.items()}

    @overload
    def explain(
        self, collective: str | Collective, nbytes: int, dtype: Any = ..., op: Any = ..., *, device: Literal["cpu"] = ...
    ) -> list[Candidate]: ...

    @overload
    def explain(
        self, collective: str | Collective, nbytes: int, dtype: Any = ..., op: Any = ..., *, device: Any
    ) -> list[Candidate] | list[DeviceCandidate]: ...

    def explain(
        self, collective: str | Collective, nbytes: int, dtype: Any = DType.FLOAT32, op: Any = SUM, *, device: Any = "cpu"
    ) -> list[Candidate] | list[DeviceCandidate]:
        """All ways to run ``collective`` on a buffer of ``nbytes`` (the larger of the whole input and output), the chosen one first.

        ``device`` "cuda" or "cuda:1" asks about GPU memory (``comm.device.explain.DeviceCandidate``); as the first call that names a GPU
        it is collective.
        """
        kind, block_bytes, element = self._member.question(collective, nbytes, dtype)
        if str(device) == "cpu":
            return self._member.planner.candidates(kind, block_bytes, element, op)
        return self._on_device(device, "explain").explain(kind, block_bytes, element, op)

    @property
    def last_plan(self) -> Candidate | DevicePlan | HostsPlan | None:
        """The plan of the last operation: of the last collective on CPU memory, or of what was started on GPU memory after it."""
        on_cpu = self._cpu_plan[0]
        return self._member.planner.choice_of(on_cpu) if on_cpu or self._device is None else self._device.last_plan

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its host."""
        return self._member.fabric.local.index(self.rank)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """One communicator per ``color``, ranks ordered by (key, rank). Collective; a rank with color None gets None."""
        session, options = self._member.split(color, key, self._splits + 1)
        self._splits += 1  # a refused call does not count: the others know nothing of it
        return None if session is None else Communicator.from_session(session, options, parent=self)

    def shrink(self) -> Communicator:
        """A communicator of the ranks that live, after this one broke. Collective over the living."""
        self._splits += 1
        return Communicator.from_session(self._member.living(self._splits), self._member.options, parent=self)

    def abort(self, reason: str = "abort() was called") -> None:
        """End the communicator now, on all ranks: whoever waits raises ``CommunicatorAborted``. Any thread may call it."""
        if self._device is not None and not self._member.foreign:
            self._device.abort(reason)
        self._member.abort(reason)

    def finalize(self) -> None:
        """Leave in an orderly way, after what is pending; may be called twice. Not collective.

        Raises what a kernel on the GPU found after the last call that could tell it (``CollectiveTimeout``, ``CollectiveMismatch``).
        """
        if self._member.foreign:
            return
        if self._background is not None:
            self._background.close()
        untold = self._device.close() if self._device is not None else None
        self._member.finalize()
        if untold is not None:
            raise untold

    def synchronize(self) -> None:
        """Wait for this rank's GPU, and raise what its kernels found."""
        if self._device is not None:
            self._device.synchronize()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: Any, value: BaseException | None, trace: Any) -> None:
        if value is not None and not self._member.closed:
            self.abort(f"{kind.__name__} left the communicator's with block: {value}")
        try:
            self.finalize()
        except MiracclError:
            if value is None:
                raise

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.nranks}{' closed' if self._member.closed else ''}>"

    # ---- GPU memory

    def _gpu(self, async_op: bool, stream: Any, *arrays: Any) -> Any:
        """What the call goes to if one of ``arrays`` lies on a GPU, else None."""
        for x in arrays:
            if lies_on_gpu(x):
                if self._device is not None and not async_op:
                    self._cpu_plan[0] = 0
                    group = groups.current()
                    return self._device if group is None else self._device.grouped(group)
                return self._gpu_calls(async_op, ordinal_of(x))
        if stream is not None:
            raise InvalidUsage("a stream is for operations on GPU memory; these arrays lie in CPU memory", rank=self.rank)
        return None

    def _on_device(self, device: Any, name: str) -> DeviceCommunicator | HostsCommunicator:
        """The GPU side, for a device in words (torch.device is written alike)."""
        kind, _, number = str(device).partition(":")
        if kind != "cuda" or (number and not number.isdecimal()):
            raise InvalidUsage(f"{name}: device is {device!r}; allowed are cpu, cuda and cuda:<number>", rank=self.rank)
        side = self._device_side(int(number) if number else current_ordinal())
        if number and int(number) != side.gpu.ordinal:
            text = f"{name}: device is {device!r}, but this communicator works on GPU {side.gpu.ordinal}"
            raise InvalidUsage(text, rank=self.rank, hint="a rank works on one GPU: that of the first array it passed")
        return side

    def _gpu_calls(self, async_op: bool, ordinal: int) -> Any:
        """The GPU side, or what has its methods: to note calls for the end of a group, or to start them in the background."""
        device = self._device_side(ordinal)
        self._cpu_plan[0] = 0
        group = groups.current()
        if group is not None:
            if async_op:
                raise InvalidUsage("async_op has no meaning inside a group; the group is one operation", rank=self.rank)
            return device.grouped(group)
        if not async_op:
            return device
        if self._background is None:
            from miraccl.comm.device.work import Background

            self._background = Background(device)
        return self._background

    def _device_side(self, ordinal: int) -> DeviceCommunicator | HostsCommunicator:
        """The GPU side; made with the first call, by all ranks together."""
        if self._device is None:
            from miraccl.comm.device.hosts.communicator import make_device_communicator  # most programs have no GPU and need none of it

            self._member.check(0, "the first operation on GPU memory")
            options = self._member.options
            self._device = make_device_communicator(
                self._member.session,
                ordinal,
                options,
                open_cpu=lambda session: Communicator.from_session(session, options, parent=self),
            )
            doors = self._device.stand_before(lambda name: vars(self).get(f"_{name}"), self._cpu_plan_address)
            vars(self).update({f"_{name}": door for name, door in doors.items()})
        return self._device

    # ---- the long way

    def _place(self, name: str) -> Place:
        return Place(self.rank, self.nranks, name)

    @staticmethod
    def _open_group(name: str, async_op: bool) -> Any:
        """The group that this call goes into, if one is open."""
        group = groups.current()
        if group is not None and async_op:
            raise InvalidUsage(f"{name}: async_op has no meaning inside a group; the group is one operation")
        return group

    def _long_way(self, make: Callable[..., Call], args: tuple[Any, ...], name: str, async_op: bool, code: int = 0) -> Any:
        """``make(place, *args)`` is the call; ``code`` is what the door said, 0 if it was not asked.

        What calls this has no lambda over its arguments: these would be cells, made anew with every call that a door runs.
        """
        self._member.check(code, name)
        call = make(self._place(name), *args)
        group = self._open_group(name, async_op)
        if group is not None:
            group.add(self, (name, call))
            return call.result
        return self._member.submit(call, name) if async_op else self._member.run(call, name)

    def _prepare(self, make: Callable[..., Call], name: str, *args: Any) -> Persistent | DevicePersistent:
        self._member.check(0, name)
        on_gpu = next((x for x in args if lies_on_gpu(x)), None)
        if on_gpu is not None:
            from miraccl.comm.device.work import DevicePersistent

            return DevicePersistent(self._device_side(ordinal_of(on_gpu)), name, args, self._cpu_plan)
        return Persistent(self._member, make(self._place(name), *args), name)

    def _checked(self, x: Any, peer: Any, receives: bool, name: str, argument: str = "x") -> Transfer:
        self._member.check(0, name)
        other = peer_rank(peer, "src" if receives else "dst", self.nranks, name)
        return Transfer(receives=receives, peer=other, memory=view(x, argument, writes=receives, where=name))

    def _transfer(self, x: Any, peer: Any, receives: bool, name: str, async_op: bool, code: int) -> Any:
        self._member.check(code, name)
        transfer = self._checked(x, peer, receives, name)
        result = x if receives else None
        group = self._open_group(name, async_op)
        if group is not None:
            group.add(self, transfer)
            return result
        return self._member.exchange([transfer], result, name, async_op)

    def run_group(self, items: list[Any]) -> None:
        """From ``group``: all sends and receives together, then the collectives in their order."""
        transfers = [item for item in items if isinstance(item, Transfer)]
        if transfers:
            self._member.exchange(transfers, None, "group", False)
        for item in items:
            if not isinstance(item, Transfer):
                name, call = item
                self._member.run(call, name)
