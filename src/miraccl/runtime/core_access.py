"""Documented access to the inside of a communicator, for ``runtime.multinode``, ``torch`` and
``tools.net``.

These packages need more than the public API: deadlines per operation, wait states for the deadlock
detector, the compiled engine's context, faults of GPU kernels. All of it passes through this file,
so a change of ``runtime.core`` affects them here alone. Outside ``runtime`` and ``api`` nothing
else uses private attributes of a communicator (tests/runtime/test_core_access.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from miraccl import params
from miraccl.diagnosis import blocked_ops
from miraccl.diagnosis.error_codec import departure_error
from miraccl.executor.cpu.kernels import layout

if TYPE_CHECKING:
    from miraccl.bootstrap.contract import Session
    from miraccl.diagnosis.waits import RankProgress, Wait
    from miraccl.errors import MiracclError
    from miraccl.runtime.core import CommunicatorCore
    from miraccl.runtime.wait_state import CoreWaitState
    from miraccl.transport.base import Endpoint
    from miraccl.transport.registry import TransportChoice
    from miraccl.types import Collective


class HasCore(Protocol):
    """Communicator (``api.communicator.Communicator``)."""

    @property
    def _core(self) -> CommunicatorCore: ...


class HasGpuSide(Protocol):
    """Communicator that may have a GPU side (``runtime.gpu``, ``runtime.multinode``)."""

    @property
    def _device(self) -> Any: ...


def core_access(comm: HasCore) -> CoreAccess:
    """Return the access to the core of ``comm``; equal for equal communicators."""
    return CoreAccess(comm._core)


@dataclass(frozen=True, slots=True)
class CoreAccess:
    """Access to one core: its ranks, checks, compiled context, progress and wait state."""

    core: CommunicatorCore

    # ---- ranks

    @property
    def rank(self) -> int:
        return self.core.rank

    @property
    def nranks(self) -> int:
        return self.core.nranks

    @property
    def session(self) -> Session:
        return self.core.session

    @property
    def hosts(self) -> Sequence[int]:
        """Host of each rank, as the transports see it; equal numbers share memory."""
        return self.core.fabric.hosts

    @property
    def on_one_host(self) -> bool:
        """True if all ranks share one host."""
        return len(set(self.hosts)) <= 1

    @property
    def endpoints(self) -> Mapping[int, Endpoint]:
        """Endpoint of each rank, between which further streams can be opened."""
        return self.core.fabric.endpoints

    @property
    def transports(self) -> Mapping[int, TransportChoice]:
        """Transport of each peer, with the reason."""
        return self.core.fabric.choices

    @property
    def required_algorithm(self) -> str:
        """Algorithm that the options require; empty leaves the choice to the planner."""
        return self.core.options.algo

    # ---- deadlines, checks and faults

    @property
    def timeout(self) -> float:
        """Deadline of operations on CPU memory, in seconds."""
        return self.core.fabric.timeout

    def set_timeout(self, seconds: float) -> None:
        """Set the deadline of later operations, at most ``params.FOREVER``."""
        seconds = min(seconds, params.FOREVER)
        self.core.fabric.timeout = seconds
        self.core.context.set(layout.CTX_TIMEOUT_NS, int(seconds * 1e9))

    @property
    def fault(self) -> MiracclError | None:
        """Fault of the communicator, if it has one."""
        return self.core.faults.fault

    def check(self, name: str) -> None:
        """Raise if the communicator is closed or has a fault; ``name``: the operation."""
        self.core.check(0, name)

    def check_result(self, code: int, name: str) -> None:
        """Raise the error of a code of the compiled engine; no error for ``layout.OK``."""
        self.core.check_result(code, name)

    def message_mismatch(
        self, peer: int, mine: tuple[int, int], theirs: tuple[int, int], text: str = ""
    ) -> MiracclError:
        """Return the error of a message of ``peer`` that is not the one to receive.

        ``mine``, ``theirs``: signature and elements. ``text`` replaces their comparison.
        """
        return self.core.faults.message_mismatch(peer, mine, theirs, text)

    def departure_of(self, peer: int) -> MiracclError | None:
        """Return the error of a wait for a rank that has left in an orderly way, None if it has
        not.
        """
        if not self.core.context.gone[peer]:
            return None
        reason = self.core.faults.left.get(peer, "finalized")
        return departure_error(self.global_ranks[peer], reason, rank=self.rank, op=None)

    def break_with(self, error: MiracclError) -> MiracclError:
        """Set ``error`` as the fault, notify the peers, and return the error to raise."""
        return self.core.faults.propagate(error)

    def wait_for_graph(self) -> tuple[str, ...]:
        """Return one line per rank with its operation and the location of its application."""
        faults = self.core.faults
        return faults.wait_for_graph(faults.query_statuses())

    @property
    def global_ranks(self) -> Sequence[int]:
        """Rank numbers in errors, by rank."""
        return self.core.faults.global_ranks

    def set_global_ranks(self, ranks: Sequence[int]) -> None:
        """Set the rank numbers in errors, for a part of a larger communicator."""
        self.core.faults.global_ranks = ranks

    # ---- the compiled engine

    @property
    def context_address(self) -> int:
        """Address of the engine's context, for compiled code."""
        return self.core.context.address

    @property
    def failed_peer(self) -> int:
        """Peer that the last error code of the engine is about."""
        return self.core.context.get(layout.CTX_ERR_PEER)

    def set_background(self, on: bool) -> None:
        """Declare that background threads enter the communicator (``on``) or that none does.

        While set, a thread blocked in the communicator does not hold up the application, so the
        deadlock detector does not treat its wait as the application's.
        """
        self.core.context.set(layout.CTX_BACKGROUND, int(on))

    # ---- progress and waits, for the deadlock detector

    @property
    def wait_state(self) -> CoreWaitState:
        """Wait-state provider that the deadlock detector reads."""
        return self.core.wait_state

    def detach_wait_state(self) -> None:
        """Remove the provider: threads inside are reported by another one."""
        blocked_ops.providers.remove(self.core.wait_state)

    def wait_inside(self) -> Wait | None:
        """Return the wait of the thread inside the engine, or None."""
        return self.core.wait_state.wait_inside()

    def progress(self) -> RankProgress:
        """Return the progress of this rank."""
        return self.core.wait_state.progress()

    def progress_page(self) -> dict[str, int]:
        """Return the engine's current operation, as the other ranks see it."""
        return self.core.fabric.board()

    def op_log(self) -> dict[int, tuple[int, int]]:
        """Return the last operations: {number, low bits: (signature, count)}."""
        return self.core.fabric.history(self.rank)


def check_gpu(comm: HasGpuSide, name: str) -> None:
    """Raise the fault that GPU kernels have reported so far, without waiting for them."""
    if comm._device is not None:
        comm._device.check(name)


def refresh_gpu_faults(comm: HasGpuSide) -> None:
    """Read faults left by finished kernels, so that the next ``check_gpu`` reports them."""
    side = comm._device
    if side is not None:
        getattr(side, "local", side).compare_ops()


def mark_collective(
    comm: HasGpuSide, collective: Collective, root: int, counts: Sequence[int], count: int
) -> None:
    """Mark the last ``count`` sends and receives of a group on GPU memory as one collective.

    For collectives of separate arrays, on one host (``runtime.gpu.grouped``).
    """
    comm._device.are_collective(collective, root, counts, count)
