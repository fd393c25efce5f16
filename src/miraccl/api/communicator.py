"""The communicator: creation, memory, plans and further communicators.

Its operations are in ``api.operations``, its end is in ``api.lifecycle``. This module knows neither
transports nor algorithms.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Unpack, overload

from miraccl.api.aggregators import Aggregators
from miraccl.api.lifecycle import Lifecycle
from miraccl.api.messages import Messages, PersistentOperations
from miraccl.api.operations import SUM, Collectives
from miraccl.api.sparse_operations import SparseCollectives
from miraccl.api.uneven import UnevenCollectives
from miraccl.deadline import Deadline
from miraccl.runtime.core import CommunicatorCore
from miraccl.runtime.gpu.launch_order import LaunchOrders, thread_launch_orders
from miraccl.runtime.options import CommunicatorOptions, Options, shows_options
from miraccl.runtime.rendezvous import join_by_id, start_deadline
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.runtime.shrink import shrink
from miraccl.types import Collective, DType, Operator

if TYPE_CHECKING:
    from miraccl.bootstrap.contract import Session
    from miraccl.bootstrap.unique_id import UniqueId
    from miraccl.executor.cuda.plan import DevicePlan
    from miraccl.planning.cost_model import CpuConstants
    from miraccl.planning.device_candidates import DeviceCandidate
    from miraccl.planning.planner import Candidate
    from miraccl.runtime.fabric_contract import FabricFactory
    from miraccl.runtime.multinode.runtime import MultiNodePlan


class Communicator(
    Collectives,
    UnevenCollectives,
    SparseCollectives,
    Messages,
    PersistentOperations,
    Aggregators,
    Lifecycle,
):
    """A group of ranks that communicate; this process (or thread) is one of them.

    ``Communicator(nranks, unique_id, rank)`` is collective: every rank passes the id that
    ``get_unique_id()`` returned on one of them. ``miraccl.init()`` creates a communicator of the
    ranks that a launcher started.

    Arrays are NumPy arrays, or objects with ``__array_interface__``, the buffer protocol or DLPack
    in CPU memory; contiguous, of a dtype in ``miraccl.DType``. GPU memory (PyTorch, CuPy,
    ``__cuda_array_interface__``, DLPack) is passed to the same operations: they enqueue kernels in
    ``stream``, by default the current stream, and return. With ``async_op=True`` an operation
    returns a ``Work``; on GPU memory it runs in a stream of the communicator, and ``Work.wait``
    makes the current stream wait.

    One thread at a time may be inside a communicator. ``abort`` may be called from any thread.

    Args:
        nranks: Number of ranks, 1 or more.
        unique_id: The ``UniqueId`` of the job, its bytes or its text.
        rank: This rank, from 0 to nranks - 1.
        timeout: Deadline of every operation, in seconds. Default: MIRACCL_TIMEOUT, 300.
        algo: Algorithm for every collective that has it, such as ``"ring"``. Default: MIRACCL_ALGO,
            chosen by the cost model.
        proto: Protocol: ``"simple"``, ``"ll"`` or, on GPU memory, ``"ll128"``. Default:
            MIRACCL_PROTO, chosen by the cost model.
        deterministic: Results depend on neither size, algorithm nor layout. Default:
            MIRACCL_DETERMINISTIC, False.
        buffsize: Bytes of all FIFOs of a CPU rank; 0 chooses. Default: MIRACCL_BUFFSIZE, 0.
        cta_policy: GPU resources of kernels: ``"default"``, ``"efficiency"`` or ``"zero"``.
            MIRACCL_CTA_POLICY takes precedence.

    Attributes:
        rank: This rank.
        nranks: Number of ranks.

    Raises:
        InvalidUsage: An argument or option is not allowed.
        PlanMismatch: Ranks passed different options.
        BootstrapError, PeerDied, CollectiveTimeout: The ranks could not connect in time
            (MIRACCL_BOOTSTRAP_TIMEOUT, 60 s).
    """

    @shows_options
    def __init__(
        self,
        nranks: int,
        unique_id: UniqueId | bytes | str,
        rank: int,
        **options: Unpack[CommunicatorOptions],
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
        open_fabric: FabricFactory | None = None,
        constants: CpuConstants | None = None,
    ) -> Communicator:
        """Create a communicator over an established session.

        Args:
            session: Control plane of the ranks.
            options: Options of the communicator.
            parent: Communicator whose cost model and launch order the new one shares.
            setup: Phases of that session, if they share a deadline with more than this creation.
            launch_orders: Returns the order of kernel launches that this communicator and its
                children
                join, called on first GPU use.
            open_fabric: Makes the connections between the ranks; default: the parent's, or those
                of processes.
            constants: Cost model; default: the parent's, or that measured on this machine.

        Raises:
            BootstrapError, PlanMismatch, PeerDied, SystemFailure: The ranks could not connect.
        """
        self = cls.__new__(cls)
        self._start(session, options, setup, parent, launch_orders, open_fabric, constants)
        return self

    def _start(
        self,
        session: Session,
        options: Options,
        setup: SetupPhases | None,
        parent: Communicator | None = None,
        launch_orders: Callable[[], LaunchOrders] = thread_launch_orders,
        open_fabric: FabricFactory | None = None,
        constants: CpuConstants | None = None,
    ) -> None:
        self.rank, self.nranks = session.rank, session.nranks
        if parent is not None:
            open_fabric = open_fabric or parent._core.open_fabric
            constants = constants or parent._core.constants
        core = self._core = CommunicatorCore(
            session, options, constants=constants, setup=setup, open_fabric=open_fabric
        )
        self._device = self._background = None
        self._gpu_lock = threading.RLock()
        self._launch_orders = parent._launch_orders if parent else launch_orders
        #: Plan of the last operation on CPU memory; 0 if the last operation was on GPU memory.
        self._cpu_plan, self._cpu_plan_address = core.context.last_run_word()
        self._fast = core.fast_calls()
        self._splits = 0
        self._gpu_waits = 0  # waits of the application for the GPU so far

    def _create_over(self, session: Session, setup: SetupPhases) -> Communicator:
        return Communicator.from_session(session, Options.create(), setup=setup)

    def _create_child(self, session: Session, setup: SetupPhases) -> Communicator:
        return Communicator.from_session(session, self._core.options, parent=self, setup=setup)

    # ---- memory and plans

    def empty(self, shape: Any, dtype: Any = "float32", device: str = "cpu") -> Any:
        """Return an uninitialised array in window memory, which all ranks of the host can address.

        Large operations on window memory save copies.

        Args:
            shape: Number of elements, or a tuple of lengths.
            dtype: A ``DType``, its label, a NumPy type or, on a GPU, a PyTorch dtype.
            device: ``"cpu"``, ``"cuda"`` or ``"cuda:<number>"``. GPU memory is zeroed and lives as
                long as the communicator; that call is collective.

        Returns:
            A NumPy array; on a GPU a PyTorch tensor for a PyTorch dtype, else a ``DeviceArray``.

        Raises:
            InvalidUsage: ``shape``, ``dtype`` or ``device`` is not allowed.
            SystemFailure: Out of window memory.
        """
        if str(device) == "cpu":
            return self._core.empty(shape, dtype)
        gpu = self._gpu_by_name(device, "empty")
        with gpu.device_guard():
            return gpu.empty(shape, dtype)

    def memory(self) -> dict[str, int]:
        """Return the bytes this rank holds for the communicator, by purpose.

        Keys starting with ``gpu_`` (GPU memory and pinned host memory) exist once a GPU is used.

        Raises:
            CommunicatorClosed: The communicator was finalized.
        """
        gpu = self._device.memory() if self._device is not None else {}
        return self._core.memory() | {f"gpu_{name}": nbytes for name, nbytes in gpu.items()}

    @overload
    def explain(
        self,
        collective: str | Collective,
        nbytes: int,
        dtype: Any = ...,
        op: Operator = ...,
        *,
        device: Literal["cpu"] = ...,
        density: float = ...,
        block: int = ...,
    ) -> list[Candidate]: ...

    @overload
    def explain(
        self,
        collective: str | Collective,
        nbytes: int,
        dtype: Any = ...,
        op: Operator = ...,
        *,
        device: Any,
        density: float = ...,
        block: int = ...,
    ) -> list[Candidate] | list[DeviceCandidate]: ...

    def explain(
        self,
        collective: str | Collective,
        nbytes: int,
        dtype: Any = DType.FLOAT32,
        op: Operator = SUM,
        *,
        device: Any = "cpu",
        density: float = 0.01,
        block: int = 256,
    ) -> list[Candidate] | list[DeviceCandidate]:
        """Return all algorithms for ``collective`` on a buffer of ``nbytes``, the chosen one first.

        Args:
            collective: A ``Collective`` or its name, such as ``"all_reduce"``, or
                ``"all_reduce_sparse"``.
            nbytes: Bytes of the larger of the whole input and output.
            dtype: Element type.
            op: Reduction operator.
            device: ``"cpu"``, ``"cuda"`` or ``"cuda:<number>"``. The first call that names a GPU is
                collective.
            density, block: Of ``all_reduce_sparse``, as for ``explain_sparse``.

        Returns:
            ``Candidate`` records with predicted times; ``DeviceCandidate`` records for a GPU;
            ``SparseCandidate`` records, with the break-even density, for ``all_reduce_sparse``.

        Raises:
            InvalidUsage: An argument is not allowed.
        """
        if rows := self._explain_if_sparse(collective, nbytes, dtype, density, block, device):
            found: list[Candidate] = [*rows]
            return found
        kind, block_bytes, element = self._core.parse_explain_request(collective, nbytes, dtype)
        if str(device) == "cpu":
            transports = self._core.describe_transports()
            return [
                replace(candidate, transports=transports)
                for candidate in self._core.planner.candidates(kind, block_bytes, element)
            ]
        gpu = self._gpu_by_name(device, "explain")
        with gpu.device_guard():
            return gpu.explain(kind, block_bytes, element, op)

    def summary(self) -> str:
        """Describe the connections of this rank: the transport of each peer and the reason.

        Raises:
            CommunicatorClosed: The communicator was finalized.
        """
        return self._core.connection_summary()

    @property
    def last_plan(self) -> Candidate | DevicePlan | MultiNodePlan | None:
        """Plan of the last collective on CPU memory, or of a later operation on GPU memory."""
        on_cpu = self._cpu_plan[0]
        return (
            self._core.planner.choice_of(on_cpu)
            if on_cpu or self._device is None
            else self._device.last_plan
        )

    # ---- other communicators

    @property
    def local_rank(self) -> int:
        """Number of this rank among the ranks of its host, from 0."""
        return self._core.fabric.local.index(self.rank)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Create one communicator per ``color``, with ranks ordered by (key, rank). Collective.

        Args:
            color: Whole number; None to take no part.
            key: Whole number that orders the ranks of a color.

        Returns:
            The communicator of this rank's color; None if ``color`` is None.

        Raises:
            InvalidUsage: ``color`` or ``key`` is not a whole number.
            CollectiveTimeout, PeerDied, BootstrapError: The ranks did not all call it in time.
        """
        return self.split_within(Deadline.after(self._core.session.timeout), color, key)

    def split_within(
        self, deadline: Deadline, color: int | None, key: int = 0
    ) -> Communicator | None:
        """Run ``split`` under the given deadline.

        Args:
            deadline: End of the setup of the new communicator.
            color: Ranks with the same color form a communicator; None takes part in none.
            key: Order of the ranks in the new communicator.

        Raises:
            MiracclError: As ``split``.
        """
        session = self._core.split(color, key, self._splits + 1, deadline)
        self._splits += 1  # after the checks: a rejected call is unknown to the other ranks
        if session is None:
            return None
        return self._create_child(session, SetupPhases(session, deadline))

    def shrink(self) -> Communicator:
        """Create a communicator of the surviving ranks after this one broke. Collective over these.

        A rank that dies during the call is left out as well.

        Raises:
            CollectiveTimeout: A surviving rank did not call it within ``timeout``.
            CommunicatorClosed: This communicator was finalized.
        """
        self._core.check_open("shrink")
        self._splits += 1
        return shrink(self._core, self._splits, self._create_child)

    def __reduce__(self) -> NoReturn:
        """Reject pickling and copying: a copy would have its own GPU side and count of splits."""
        advice = "other processes get their own rank by miraccl.init() or a unique id"
        raise TypeError(
            "cannot pickle or copy a Communicator: it belongs to the process that created it "
            f"({advice})"
        )

    def __repr__(self) -> str:
        state = " closed" if self._core.closed else ""
        return f"<Communicator rank {self.rank} of {self.nranks}{state}>"
