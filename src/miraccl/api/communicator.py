"""The communicator: how it begins and ends, its memory and its plans.

Its operations are those of ``comm.operations``.  This file knows neither transports nor algorithms.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from miraccl.api.operations import SUM, Operations
from miraccl.bootstrap import Session, UniqueId
from miraccl.deadline import Deadline
from miraccl.diagnosis import blocked_ops
from miraccl.errors import MiracclError
from miraccl.executor.cpu.kernels import layout
from miraccl.planning.planner import Candidate
from miraccl.runtime.control import FINALIZE
from miraccl.runtime.core import CommunicatorCore
from miraccl.runtime.gpu.device_guard import guarded
from miraccl.runtime.gpu.launch_order import LaunchOrders, thread_launch_orders
from miraccl.runtime.options import Options
from miraccl.runtime.rendezvous import join_by_id, start_deadline
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.runtime.shrink import shrink
from miraccl.types import Collective, DType

if TYPE_CHECKING:
    from miraccl.executor.cuda.plan import DevicePlan
    from miraccl.runtime.gpu.communicator import DeviceCommunicator
    from miraccl.runtime.gpu.explain import DeviceCandidate
    from miraccl.runtime.multinode.communicator import MultiNodeCommunicator
    from miraccl.runtime.multinode.runtime import MultiNodePlan


class Communicator(Operations):
    """A group of ranks that communicate; this process (or thread) is one of them.

    ``Communicator(nranks, unique_id, rank)`` is collective: every rank calls it with the id that ``get_unique_id()`` gave to one of them.
    ``miraccl.init()`` does that for ranks that a launcher started.  Keyword options: ``timeout`` in seconds of every operation
    (MIRACCL_TIMEOUT), ``algo`` and ``proto`` as MIRACCL_ALGO and MIRACCL_PROTO, ``deterministic`` (MIRACCL_DETERMINISTIC) for results
    that depend on neither size, algorithm nor layout, ``cta_policy`` ("default", "efficiency", "zero") for what kernels take of a GPU
    where MIRACCL_CTA_POLICY does not say.

    Arrays are NumPy arrays, or anything with ``__array_interface__``, the buffer protocol or DLPack in CPU memory; contiguous, of a
    dtype in ``miraccl.DType``.  Every operation takes GPU memory, too (PyTorch, CuPy, ``__cuda_array_interface__``, DLPack): it enqueues
    kernels in ``stream`` or else the current stream and returns (``comm.device``).  Operations return the array with the result.  With
    ``async_op=True`` they return a ``Work``; on GPU memory they run on a stream of the communicator's, and its ``wait`` makes the current
    stream wait.
    One thread at a time may be inside a communicator; ``abort`` may be called from any.
    """

    def __init__(
        self, nranks: int, unique_id: UniqueId | bytes | str, rank: int, **options: Any
    ) -> None:
        opts = Options.create(**options)
        deadline = start_deadline()
        session = join_by_id(nranks, unique_id, rank, opts, deadline)
        self._start(session, opts, SetupPhases(session, deadline))

    @classmethod
    def from_session(
        cls,
        session: Session,
        options: Options,
        *,
        parent: Communicator | None = None,
        setup: SetupPhases | None = None,
        launch_orders: Callable[[], LaunchOrders] = thread_launch_orders,
    ) -> Communicator:
        """A communicator over a session that has met already; ``stages`` of that session, where there is a deadline for more than these;
        ``orders`` gives what its kernels and its parts' are ordered in, when they begin (``comm.device.order``)."""
        self = cls.__new__(cls)
        self._start(session, options, setup, parent, launch_orders)
        return self

    def _start(
        self,
        session: Session,
        options: Options,
        setup: SetupPhases | None,
        parent: Communicator | None = None,
        launch_orders: Callable[[], LaunchOrders] = thread_launch_orders,
    ) -> None:
        self.rank, self.nranks = session.rank, session.nranks
        constants = parent._core.constants if parent else None
        core = self._core = CommunicatorCore(session, options, constants=constants, setup=setup)
        self._device = self._background = None
        self._gpu_lock = threading.RLock()
        self._launch_orders = parent._launch_orders if parent else launch_orders
        context = core.context
        word = layout.CTX_LAST_RUN // 8
        self._cpu_plan = context.words.data[
            word : word + 1
        ]  # 0: the last operation was on GPU memory
        self._cpu_plan_address = context.address + layout.CTX_LAST_RUN
        self._all_reduce = context.fast_call("collective", Collective.ALL_REDUCE)
        self._all_gather = context.fast_call("collective", Collective.ALL_GATHER)
        self._reduce_scatter = context.fast_call("collective", Collective.REDUCE_SCATTER)
        self._broadcast = context.fast_call("collective", Collective.BROADCAST)
        self._all_to_all = context.fast_call("collective", Collective.ALL_TO_ALL)
        self._reduce = context.fast_call("reduce", Collective.REDUCE)
        self._gather = context.fast_call("rooted", Collective.GATHER)
        self._scatter = context.fast_call("rooted", Collective.SCATTER)
        self._all_gather_v = context.fast_call("uneven", Collective.ALL_GATHER)
        self._reduce_scatter_v = context.fast_call("uneven_reduce", Collective.REDUCE_SCATTER)
        self._all_to_all_v = context.fast_call("uneven", Collective.ALL_TO_ALL)
        self._gather_v = context.fast_call("uneven", Collective.GATHER)
        self._scatter_v = context.fast_call("uneven", Collective.SCATTER)
        self._send = context.fast_call("send_recv", Collective.SEND_RECV, arg=0)
        self._recv = context.fast_call("send_recv", Collective.SEND_RECV, arg=1)
        self._sendrecv = context.fast_call("sendrecv", Collective.SEND_RECV)
        self._barrier = core.barrier_fast_entry()
        self._splits = 0
        self._gpu_waits = 0  # how often the program has waited for the GPU

    def _create_child(self, session: Session, setup: SetupPhases) -> Communicator:
        return self._make_part(session, setup)

    # ---- memory and plans

    def empty(self, shape: Any, dtype: Any = "float32", device: str = "cpu") -> Any:
        """An array in window memory, which all ranks of the host address directly: large operations on it copy nothing in between.

        ``device`` "cuda" or "cuda:1" gives GPU memory, zeroed; that call is collective, and the memory lives as long as the communicator.
        A dtype of PyTorch's gives a tensor, another one a ``comm.device.windows.DeviceArray``.
        """
        if str(device) == "cpu":
            return self._core.empty(shape, dtype)
        return self._gpu_by_name(device, "empty").empty(shape, dtype)

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds for the communicator, by purpose; those on a GPU and pinned for it apart, once it is used."""
        gpu = self._device.memory() if self._device is not None else {}
        return self._core.memory() | {f"gpu_{name}": nbytes for name, nbytes in gpu.items()}

    @overload
    def explain(
        self,
        collective: str | Collective,
        nbytes: int,
        dtype: Any = ...,
        op: Any = ...,
        *,
        device: Literal["cpu"] = ...,
    ) -> list[Candidate]: ...

    @overload
    def explain(
        self,
        collective: str | Collective,
        nbytes: int,
        dtype: Any = ...,
        op: Any = ...,
        *,
        device: Any,
    ) -> list[Candidate] | list[DeviceCandidate]: ...

    def explain(
        self,
        collective: str | Collective,
        nbytes: int,
        dtype: Any = DType.FLOAT32,
        op: Any = SUM,
        *,
        device: Any = "cpu",
    ) -> list[Candidate] | list[DeviceCandidate]:
        """All ways to run ``collective`` on a buffer of ``nbytes`` (the larger of the whole input and output), the chosen one first.

        ``device`` "cuda" or "cuda:1" asks about GPU memory (``comm.device.explain.DeviceCandidate``); as the first call that names a GPU
        it is collective.
        """
        kind, block_bytes, element = self._core.parse_explain_request(collective, nbytes, dtype)
        if str(device) == "cpu":
            return self._core.planner.candidates(kind, block_bytes, element)
        found: list[DeviceCandidate] = self._gpu_by_name(device, "explain").explain(
            kind, block_bytes, element, op
        )
        return found

    @property
    def last_plan(self) -> Candidate | DevicePlan | MultiNodePlan | None:
        """The plan of the last operation: of the last collective on CPU memory, or of what was started on GPU memory after it."""
        on_cpu = self._cpu_plan[0]
        return (
            self._core.planner.choice_of(on_cpu)
            if on_cpu or self._device is None
            else self._device.last_plan
        )

    # ---- life

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks of its host."""
        return self._core.fabric.local.index(self.rank)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """One communicator per ``color``, ranks ordered by (key, rank). Collective; a rank with color None gets None."""
        return self.split_within(Deadline.after(self._core.session.timeout), color, key)

    def split_within(
        self, deadline: Deadline, color: int | None, key: int = 0
    ) -> Communicator | None:
        """``split`` as a part of something that has a deadline."""
        session = self._core.split(color, key, self._splits + 1, deadline)
        self._splits += 1  # a refused call does not count: the others know nothing of it
        return None if session is None else self._make_part(session, SetupPhases(session, deadline))

    def shrink(self) -> Communicator:
        """A communicator of the ranks that live, after this one broke. Collective over the living; who dies meanwhile is left out, too."""
        self._core.check_open("shrink")
        self._splits += 1
        return shrink(self._core, self._splits, self._make_part)

    def _make_part(self, session: Session, stages: SetupPhases) -> Communicator:
        return Communicator.from_session(session, self._core.options, parent=self, setup=stages)

    def abort(self, reason: str = "abort() was called") -> None:
        """End the communicator now, on all ranks: whoever waits raises ``CommunicatorAborted``. Any thread may call it."""
        if self._device is not None and not self._core.in_forked_child:
            self._device.abort(reason)
        self._core.abort(reason)

    def finalize(self) -> None:
        """Leave in an orderly way, after what is pending; may be called twice. Not collective.

        Raises what a kernel on the GPU, or a lane between hosts, found after the last call that could tell it (``CollectiveTimeout``,
        ``CollectiveMismatch``), and that a message of a collective on GPU memory was taken by nobody.
        """
        if self._core.in_forked_child:
            return
        self._core.cancel_pending_setup()
        if self._background is not None:
            self._background.close()
        untold = None
        if self._device is not None:
            with (
                self._register_gpu_wait(self._device),
                self._core.faults.control.enter(FINALIZE),
            ):  # it waits for the other ranks
                untold = guarded(self._device).close(self._core.faults.raised)
        self._core.finalize()
        if untold is not None:
            raise untold

    def synchronize(self) -> None:
        """Wait for this rank's GPU, and raise what its kernels found."""
        if self._device is not None:
            with self._register_gpu_wait(self._device):
                guarded(self._device).synchronize()

    def _register_gpu_wait(
        self, device: DeviceCommunicator | MultiNodeCommunicator
    ) -> blocked_ops.BlockedScope:
        """The program's wait for all that it has called on GPU memory."""
        self._gpu_waits += 1
        return blocked_ops.BlockedScope(
            functools.partial(
                self._core.wait_state.wait_for_stream, device.wait_state.name, self._gpu_waits
            )
        )

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: Any, value: BaseException | None, trace: Any) -> None:
        if value is not None and not self._core.closed:
            self.abort(f"{kind.__name__} left the communicator's with block: {value}")
        try:
            self.finalize()
        except MiracclError:
            if value is None:
                raise

    def __reduce__(self) -> NoReturn:
        """A shallow copy would count parts by itself, and have a GPU side of its own."""
        advice = "other processes get a rank of their own, by miraccl.init() or a unique id"
        raise TypeError(
            f"a Communicator belongs to the process that made it and can be neither pickled nor copied ({advice})"
        )

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.nranks}{' closed' if self._core.closed else ''}>"
