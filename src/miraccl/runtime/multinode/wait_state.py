"""Wait state of a rank of a multi-node communicator, for the deadlock detector.

Every operation between nodes begins with a segment for the first staging thread, which answers in
order. A thread that waits for a rank in one operation has therefore not arrived at a later one,
whatever the application has called. Its wait is read from the words of the current operation;
nothing is recorded for this purpose.

With several ranks per node a rank waits in kernels, too. Others wait for its staging thread or for
its kernels, so these have stream names of their own. Normally only one of the two is blocked and
the other cannot advance either; if an operation uses both concurrently, each reports its own wait.
The detector thread probes the kernels, not the session's watcher, as a driver call may take long.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miraccl.diagnosis.detector import COUNTED_RANKS
from miraccl.diagnosis.mismatch import describe_message, describe_operation
from miraccl.diagnosis.stream_states import stream_states, wait_for_host
from miraccl.diagnosis.waits import (
    BlockedState,
    RankProgress,
    Wait,
    WaitForCredit,
    WaitForMessage,
    WaitForOperation,
    stream_name,
)
from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.nogil import offsets
from miraccl.executor.cpu.lower import describe_signature
from miraccl.runtime.core_access import CoreAccess, core_access
from miraccl.runtime.engine_errors import SEND_RECV
from miraccl.runtime.gpu.kernel_waits import FailFn, KernelWaits
from miraccl.runtime.gpu.wait_state import DeviceWaitState
from miraccl.runtime.multinode.direct import DirectOperation
from miraccl.runtime.multinode.messages import MessageOperation
from miraccl.runtime.multinode.streams import remaining_bytes
from miraccl.types import Collective

if TYPE_CHECKING:
    from miraccl.bootstrap.contract import Session
    from miraccl.runtime.gpu.probe import DeviceProbe
    from miraccl.runtime.multinode.node_layout import NodeLayout
    from miraccl.runtime.multinode.runtime import MultiNodeRuntime
    from miraccl.runtime.multinode.staging import StagedJob

#: suffixes of the stream names of the two halves of a rank
STAGING, KERNELS = " staging", " kernels"
#: collectives in which every rank needs data of every other one
_NEEDS_ALL = (Collective.ALL_REDUCE.name.lower(), Collective.BARRIER.name.lower())


def stream_name_of(runtime: MultiNodeRuntime) -> str:
    """Return the name of this rank's GPU work in the wait-for graph."""
    session = core_access(runtime.world).session
    return stream_name(session.tokens[session.rank], session.key, session.rank)


class MultiNodeWaitState(DeviceWaitState):
    """Wait-state provider of one rank; ``end(op, text)`` sets a deadlock as its fault."""

    def __init__(
        self,
        runtime: MultiNodeRuntime,
        layout: NodeLayout,
        kernels: tuple[DeviceProbe, Session] | None,
        end: FailFn,
        is_done: Callable[[], bool],
    ) -> None:
        """``kernels``: probe and session of this node's kernels, if there are several ranks on it.
        ``is_done()``: as for ``KernelWaitState``, of these kernels.
        """
        self._is_done = is_done
        self._runtime, self._layout, self._fail = runtime, layout, end
        self._world = core_access(runtime.world)
        self._cores = list(
            dict.fromkeys([self._world, *(core_access(cpu) for cpu in runtime.inter_node[:1])])
        )
        super().__init__(
            self._world.session,
            stream_name_of(runtime),
            needs_probe=kernels is not None,
        )
        self._kernels: KernelWaits | None = None
        if kernels is not None:
            probe, session = kernels
            self._kernels = KernelWaits(
                probe,
                session.key,
                session.rank,
                lambda rank: self._stream_name(layout.local_ranks[rank], KERNELS),
                end,
            )

    def _stream_name(self, rank: int, half: str) -> str:
        """Return the stream name of one half of a rank."""
        session = self._world.session
        return stream_name(session.tokens[rank], session.key + half, rank)

    @property
    def session(self) -> Session | None:
        return super().session if self._world.fault is None else None

    # ---- waits

    def _read_states(self, program: Wait | None) -> Mapping[str, BlockedState]:
        if program is not None and self._is_idle():
            nothing = [wait_for_host(program, self._world.session.tokens[self._world.rank])]
            return self._states(nothing, nothing, nothing)
        current, staging = self._staging_waits()
        kernels = self._kernels.waits() if self._kernels is not None else []
        both = [*staging, *kernels]
        if kernels and not staging and self._runtime.staging.waits_for_kernels():
            return self._states(both, kernels, kernels)
        if (
            current is not None
            and staging
            and not kernels
            and current[0].blocks_kernels(current[1])
        ):
            return self._states(both, staging, staging)
        return self._states(both, staging, kernels)

    def _states(
        self, both: list[Wait], staging: list[Wait], kernels: list[Wait]
    ) -> Mapping[str, BlockedState]:
        rank, progress = (
            self._world.rank,
            self._kernels.progress() if self._kernels is not None else {},
        )
        named = {
            self._stream_name(rank, STAGING): BlockedState(staging, self._progress()),
            self._stream_name(rank, KERNELS): BlockedState(kernels, progress),
        }
        return {self.name: BlockedState(both), **named}

    def _is_idle(self) -> bool:
        """Return True if nothing is enqueued and no graph can enqueue anything.

        With one rank per node all work passes the staging threads.
        """
        if not self._runtime.staging.idle:
            return False
        return self._layout.local_size == 1 or (self._kernels is not None and self._is_done())

    def _staging_waits(self) -> tuple[tuple[StagedJob, int] | None, list[Wait]]:
        """Return the current job and segment, and the waits of the staging thread in it."""
        current = self._runtime.staging.current_job()
        if current is None:
            return None, []
        operation = current[0].prepared(current[1])
        if isinstance(operation, MessageOperation):
            waits = self._message_waits(operation)
        else:
            waits = [
                wait
                for core in self._cores
                if (wait := self._collective_wait(core, operation)) is not None
            ]
        return current, waits if self._runtime.staging.current_job() == current else []

    def _collective_wait(self, core: CoreAccess, operation: Any) -> Wait | None:
        """Return the wait of the operation on a CPU communicator's progress page.

        It is ``operation``, or one that Python runs.
        """
        board = core.progress_page()
        if board["state"] != layout.STATE_WAITING:
            return None
        if board["p2p_sig"]:
            inside = core.wait_inside() if self._runtime.messages is None else None
            end = functools.partial(self._fail, describe_operation(board))
            awaited = (self._stream_name(board["peer"], STAGING),)
            return inside and dataclasses.replace(
                inside, awaited=awaited, fail=end, collective=SEND_RECV
            )
        ranks = {board["peer"]}
        if isinstance(operation, DirectOperation) and operation.core == core:
            ranks = {
                int(row[offsets.PEER // 8])
                for row in operation.rows
                if remaining_bytes(row, offsets.OUT) or remaining_bytes(row, offsets.IN)
            }
        if describe_signature(board["sig"])["collective"] in _NEEDS_ALL:
            ranks = set(range(core.nranks)) - {core.rank}
        if board != core.progress_page() or not ranks <= set(range(core.nranks)):
            return None
        found = self._wait_fields(
            [core.global_ranks[rank] for rank in sorted(ranks)],
            describe_operation(board),
            board["sig"],
        )
        return WaitForOperation(key=core.session.key, number=board["seq"], rank=core.rank, **found)

    def _message_waits(self, operation: MessageOperation) -> list[Wait]:
        """Return the waits of a round: per peer a missing message, else missing credit."""
        streams = operation.streams
        waits: list[Wait] = []
        before = streams.begun()
        for peer, direction, part in operation.active_messages():
            sent, taken = before[peer]
            sig, count = (
                int(part[offsets.SEGMENT_SIGNATURE // 8]),
                int(part[offsets.SEGMENT_COUNT // 8]),
            )
            found = self._wait_fields([peer], describe_message(sig, count), sig) | {
                "key": self._messages_key,
                "rank": self._world.rank,
            }
            waits.append(
                WaitForMessage(number=taken - 1, **found)
                if direction == offsets.IN
                else WaitForCredit(number=sent, **found)
            )
        return waits if streams.begun() == before else []

    def _wait_fields(self, ranks: Sequence[int], op: str, sig: int) -> dict[str, Any]:
        """Return the common fields of a wait for ``ranks`` of the whole communicator."""
        end, name = functools.partial(self._fail, op), describe_signature(sig)["collective"]
        return {
            "awaited": tuple(self._stream_name(rank, STAGING) for rank in ranks),
            "op": f"{op} on GPU memory",
            "fail": end,
            "collective": name,
        }

    # ---- progress

    @property
    def _messages_key(self) -> str:
        return f"{self._world.session.key} messages"

    def _progress(self) -> dict[str, RankProgress]:
        progress = {core.session.key: _progress_of(core) for core in self._cores}
        if self._runtime.messages is not None:
            current = self._runtime.staging.current_job()
            operation = current[0].prepared(current[1]) if current is not None else None
            # Read before the counts, which then include messages that begin in between.
            sends, receives = (
                operation.peers_to_begin() if isinstance(operation, MessageOperation) else ([], [])
            )
            sent, taken = [0] * self._world.nranks, [0] * self._world.nranks
            for peer, (gone, begun) in self._runtime.messages.begun().items():
                sent[peer], taken[peer] = gone, begun
            progress[self._messages_key] = RankProgress(
                sent=sent, received=taken, sends=sends, receives=receives
            )
        return progress


def _progress_of(core: CoreAccess) -> RankProgress:
    """Return a core's progress as this stream's; its background work is what this stream does."""
    op_log = {str(number): entry for number, entry in core.op_log().items()}
    return dataclasses.replace(core.progress(), background=False, op_log=op_log)


def monitor_node(
    runtime: MultiNodeRuntime,
    layout: NodeLayout,
    kernels: tuple[DeviceProbe, Session] | None,
    end: FailFn,
    is_done: Callable[[], bool],
) -> MultiNodeWaitState | None:
    """Include a rank's GPU work in the wait-for graph; arguments as for ``MultiNodeWaitState``.

    None with more than ``COUNTED_RANKS`` ranks, as for CPU communicators.
    """
    if layout.nranks > COUNTED_RANKS:
        return None
    state = MultiNodeWaitState(runtime, layout, kernels, end, is_done)
    stream_states.add(state)
    return state
