"""What the host reads from the memory of a host's GPUs once waits have failed or work has ended, and what operations are called there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from miraccl.errors import MiracclError
from miraccl.executor.cuda import moves
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.plan import DevicePlan
from miraccl.executor.cuda.source import Frame
from miraccl.ops.arguments import operator
from miraccl.runtime.gpu.flight_recorder import (
    Boards,
    Come,
    Held,
    Regions,
    UnderWay,
    read_boards,
    read_come,
    read_head,
    read_under_way,
    read_waits,
)
from miraccl.runtime.gpu.messages import read_rejected_size
from miraccl.runtime.gpu.unmatched import find_untaken

if TYPE_CHECKING:
    from miraccl.runtime.gpu.faults import DeviceFaults

Seen = TypeVar("Seen")


class Known(Protocol):
    """A launch that was made."""

    @property
    def signatures(self) -> tuple[int, ...]: ...
    @property
    def plan(self) -> DevicePlan: ...


class Looks:
    """Looks at the regions ``where`` of a communicator; ``launches()`` are those that it has made, by (collective, dtype, count, operator,
    root)."""

    def __init__(
        self,
        gpu: Gpu,
        where: Regions,
        launches: Callable[[], Iterable[tuple[tuple[Any, ...], Known]]],
    ) -> None:
        self._gpu, self._where, self._launches = gpu, where, launches
        self._judged = 0, 0  # how far operations were compared with those of others

    def _look(self, read: Callable[..., Seen], *what: Any) -> Seen | None:
        with (
            contextlib.suppress(MiracclError),
            self._gpu.device_guard(),
        ):  # the GPU may be what is broken
            return read(self._gpu, self._where, *what)
        return None

    def boards(self) -> Boards | None:
        """What all ranks run."""
        return self._look(read_boards)

    def refused(self, peer: int) -> int | None:
        """The size of this rank's message that ``peer`` has refused."""
        return self._look(read_rejected_size, peer)

    def stopped(self) -> bool:
        """Whether a wait on this rank's GPU has ended without what it waited for, where that can be read."""
        head = self._look(read_head)
        return head is not None and head.stopped

    def under_way(self) -> UnderWay | None:
        """The launch that this rank is in now."""
        return self._look(read_under_way)

    def waits(self) -> list[Held]:
        """What this rank waits for in messages now."""
        return self._look(read_waits) or []

    def come(self) -> Come | None:
        """How far the kernels of this rank have come, where that can be read."""
        return self._look(read_come)

    def copies(self) -> tuple[int, int] | None:
        """Number and signature of the operation whose copies wait for peers now."""
        head = self._look(read_head)
        return head.copies if head is not None else None

    def name(self, number: int, signature: int) -> str:
        """As of CPU operations, with the number of the launch: ``all_reduce #17 (1024 x float32, sum; ring, simple)``; ``number`` 0: a
        collective that is messages."""
        if not number:
            return moves.describe(signature)
        for (collective, dtype, count, op, root), launch in self._launches():
            if signature in launch.signatures:
                what = [f"{count} x {dtype.label}"]
                what += (
                    [operator(op, dtype, collective.label)[0].name.lower()]
                    if collective.reduces
                    else []
                )
                what += [f"root {root}"] if collective.rooted else []
                return f"{collective.label} #{number} ({', '.join(what)}; {launch.plan.algo}, {launch.plan.proto})"
        return f"launch #{number}"

    def judge(self, faults: DeviceFaults) -> None:
        """Find a mismatch in the last operations that left nobody waiting: the next ones would tell of it. The GPU has ended its work."""
        head = self._look(read_head)
        boards = (
            self._look(read_boards, head)
            if head is not None and head.place != self._judged
            else None
        )
        if boards is not None and head is not None:
            found = boards.unlike()
            if found is not None:
                faults.found_mismatch(*found)
            elif boards.all_have_come:
                self._judged = head.place

    def judge_end(self, faults: DeviceFaults, frame: Frame) -> None:
        """The same once all ranks have come to the end and their GPUs have ended their work: equally many operations, and no messages of
        collectives that nobody has taken."""
        boards = self._look(read_boards)
        if boards is None:
            return
        boards = dataclasses.replace(
            boards, stopped=lambda _: False
        )  # or not all had come; their memory may be going already
        if (unlike := boards.unlike()) is not None:
            faults.found_mismatch(*unlike)
        elif (ahead := boards.ahead()) is not None:
            faults.found_ahead(ahead)
        elif (untaken := self._look(find_untaken, frame, boards)) is not None:
            faults.found_untaken(*untaken)
