"""Prepared operations: arguments checked, plan made and addresses bound once; a call is one builtin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miraccl.executor.cpu.context import unlocked_kernel
from miraccl.executor.cpu.kernels import layout as at
from miraccl.fastpath.disabled import no_door
from miraccl.ops.arguments import refuse_stream

if TYPE_CHECKING:
    from miraccl.ops.calls import Call
    from miraccl.runtime.core import Member


class Persistent:
    """``op()`` runs the operation on the buffers it was made with and returns the result's array. It counts as one operation of the
    communicator, in the order of the calls; ``miraccl.group`` does not collect it."""

    def __init__(self, member: Member, call: Call, name: str) -> None:
        self._member, self._call, self.name = member, call, name
        self.result = call.result
        self._run = member.planner.make_run(call.request)
        self._run.words[at.RUN_IN // 8] = call.source
        self._run.words[at.RUN_OUT // 8] = call.target
        self._plain = call.before is None
        self._door = (
            member.context.door("prepared", call.request.collective, run=self._run)
            if self._plain
            else no_door
        )

    def unlocked(self) -> tuple[int, int, int] | None:
        """(function, context, run) for compiled code without the interpreter's lock, which calls ``function(context, run, 0, 0)``
        (``executor.cpu.kernels.unlocked``) as long as this object lives; None where Python has a part in the operation."""
        return (
            (unlocked_kernel("run_unlocked"), self._member.context.address, self._run.address)
            if self._plain
            else None
        )

    def conclude(self, code: int) -> None:
        """Raise what a code of that function means."""
        self._member._conclude(code, self.name)

    def __call__(self, stream: Any = None) -> Any:
        """A ``stream`` is for GPU memory alone (``DevicePersistent``). It is no keyword-only argument here, which would take 10 ns."""
        code = self._door() if stream is None else at.NEED_PLAN
        if not code:
            return self.result
        refuse_stream(stream, self._member.rank, self.name)
        return self._member.run_prepared(self._run, self._call, self.name, code)

    def __repr__(self) -> str:
        return f"<Persistent {self.name}>"
