"""Wait state of one communicator on this rank, for deadlock detection."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from miraccl.bootstrap.contract import Session
from miraccl.diagnosis import blocked_ops
from miraccl.diagnosis.detector import COUNTED_RANKS, deadlock_detector
from miraccl.diagnosis.mismatch import describe_operation
from miraccl.diagnosis.waits import (
    RankProgress,
    Wait,
    WaitForControlOp,
    WaitForCredit,
    WaitForMessage,
    WaitForOperation,
    WaitForStream,
)
from miraccl.errors import CollectiveMismatch
from miraccl.executor.cpu.kernels import layout
from miraccl.runtime.control import FINALIZE
from miraccl.runtime.engine_errors import HINT

if TYPE_CHECKING:
    from miraccl.runtime.core import CommunicatorCore


class CoreWaitState:
    """Wait state of a ``CommunicatorCore`` (``diagnosis.blocked_ops``).

    Attributes:
        key: Identifies the communicator on all of its ranks.
        default_timeout_s: Deadline of operations without one of their own, in seconds.
        open_transfers: Returns the transfers that advance in the background, as (peer, receives);
            peer -1 means any. Replaced by code that runs its own message engine.
        runs_in_background: Returns True if submitted operations may not have started. Replaced as
            above.
    """

    def __init__(self, core: CommunicatorCore) -> None:
        self._core = core
        self.key = core.session.key
        self.default_timeout_s = core.options.timeout
        self.open_transfers: Callable[[], list[tuple[int, bool]]] = self._open_transfers
        self.runs_in_background: Callable[[], bool] = self._has_background_work

    def register(self) -> None:
        """Report this rank's waits to the deadlock detector, from now until ``remove``."""
        if 1 < self._core.nranks <= COUNTED_RANKS:  # beyond that, status queries take too long
            self._core.context.set(layout.CTX_DETECTOR, deadlock_detector.start())
            blocked_ops.providers.add(self)

    def remove(self) -> None:
        blocked_ops.providers.remove(self)

    def blocked_in_control_op(self) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread waits for a control operation."""
        return blocked_ops.BlockedScope(self.wait_for_control_op)

    @property
    def session(self) -> Session | None:
        faults = self._core.faults
        return (
            None
            if self._core.closed or faults.closing or faults.fault is not None
            else self._core.session
        )

    @property
    def has_shorter_deadline(self) -> bool:
        """True if operations have a shorter deadline than default: the application may go on after
        it.
        """
        return self._core.fabric.timeout < self.default_timeout_s

    def _has_background_work(self) -> bool:
        return bool(self._core.pending or self._core.context.get(layout.CTX_BACKGROUND))

    def _open_transfers(self) -> list[tuple[int, bool]]:
        return [(transfer.peer, transfer.receives) for transfer in self._core.transfers]

    def current_wait(self) -> Wait | None:
        return None if self._has_background_work() else self.wait_inside()

    def wait_inside(self) -> Wait | None:
        """Return the wait of the thread that is inside the engine, or None."""
        core, context = self._core, self._core.context
        if core.closed or core.faults.fault is not None or self.has_shorter_deadline:
            return None
        # Read first: the counts only grow, so a wait computed from old counts is never too late.
        received = [context.messages_received(rank) for rank in range(core.nranks)]
        board = core.fabric.board()
        taken = context.get(layout.CTX_AWAITED_TAIL)
        if (
            board["state"] != layout.STATE_WAITING
            or taken < 0
            or board != core.fabric.board()
            or board["peer"] == layout.ANY_PEER
        ):
            return None
        peer, op = board["peer"], f"{describe_operation(board)} of {core.session.name}"
        if board["p2p_sig"]:
            return self.wait_for_message(peer, received[peer], taken, op)
        return WaitForOperation(
            number=board["seq"], must_receive=taken, **self._common_fields([peer], op)
        )

    def wait_for_message(self, peer: int, received: int, taken: int, op: str) -> Wait:
        """Return the wait for a message, or for buffer space, of ``peer``.

        Args:
            received: Messages of ``peer`` that have arrived so far.
            taken: Messages that ``peer`` must consume for this rank to go on; 0 if it waits for
                data.
        """
        found = self._common_fields([peer], op)
        return (
            WaitForCredit(number=taken, **found)
            if taken
            else WaitForMessage(number=received, **found)
        )

    def wait_for_stream(self, stream: str, number: int, op: str = "synchronize") -> Wait | None:
        """Return the ``number``-th wait of the host in ``op`` for a GPU stream of this process."""
        if self._core.faults.fault is not None:
            return None
        end, key = functools.partial(self._fail, op), f"{self.key} {op}"
        return WaitForStream(
            key=key, awaited=(stream,), op=op, fail=end, number=number, rank=self._core.rank
        )

    def wait_for_control_op(self) -> Wait | None:
        """Return the wait in the control operation that this rank is in, or None."""
        core, now = self._core, self._core.faults.control.current
        if not now or now["op"] == FINALIZE or core.faults.fault is not None:
            return None
        others = [rank for rank in range(core.nranks) if rank != core.rank]
        return WaitForControlOp(
            number=now["number"],
            **self._common_fields(others, f"{now['op']} of {core.session.name}"),
        )

    def _common_fields(self, ranks: Sequence[int], op: str) -> dict[str, Any]:
        """Return the fields that all waits of this communicator share."""
        awaited = tuple(self._core.session.tokens[rank] for rank in ranks)
        return {
            "key": self.key,
            "awaited": awaited,
            "op": op,
            "fail": functools.partial(self._fail, op),
            "rank": self._core.rank,
        }

    def progress(self) -> RankProgress:
        core = self._core
        # Read first: an operation that ends afterwards is included in the counts below.
        background = self.runs_in_background()
        transfers = [*self.open_transfers(), *core.context.pending_sendrecv()]
        return RankProgress(
            operations=core.context.get(layout.CTX_SEQ),
            control_ops=core.faults.control.last_started,
            sent=core.context.messages_sent(),
            received=[core.context.messages_received(rank) for rank in range(core.nranks)],
            background=background,
            sends=[peer for peer, receives in transfers if not receives],
            receives=[peer for peer, receives in transfers if receives],
        )

    def _fail(self, op: str, text: str) -> None:
        self._core.faults.propagate(
            CollectiveMismatch(text, rank=self._core.rank, op=op, hint=HINT)
        )
