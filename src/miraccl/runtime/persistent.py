"""Prepared operations: arguments checked, plan made and addresses bound once; a call is one builtin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miraccl.executor.cpu.context import nogil_kernel
from miraccl.executor.cpu.kernels import layout
from miraccl.fastpath.disabled import not_handled
from miraccl.ops.arguments import reject_stream

if TYPE_CHECKING:
    from miraccl.ops.calls import PreparedOp
    from miraccl.runtime.core import CommunicatorCore


class Persistent:
    """``op()`` runs the operation on the buffers it was made with and returns the result's array. It counts as one operation of the
    communicator, in the order of the calls; ``miraccl.group`` does not collect it."""

    def __init__(self, core: CommunicatorCore, call: PreparedOp, name: str) -> None:
        self._core, self._call, self.name = core, call, name
        self.result = call.result
        self._run = core.planner.make_run(call.request)
        self._run.words[layout.RUN_IN // 8] = call.source
        self._run.words[layout.RUN_OUT // 8] = call.target
        self._runs_without_python = call.prologue is None
        self._fast_entry = (
            core.context.fast_call("prepared", call.request.collective, run=self._run)
            if self._runs_without_python
            else not_handled
        )

    def unlocked(self) -> tuple[int, int, int] | None:
        """(function, context, run) for compiled code without the interpreter's lock, which calls ``function(context, run, 0, 0)``
        (``executor.cpu.kernels.nogil``) as long as this object lives; None where Python has a part in the operation."""
        return (
            (nogil_kernel("run_nogil"), self._core.context.address, self._run.address)
            if self._runs_without_python
            else None
        )

    def check_result(self, code: int) -> None:
        """Raise what a code of that function means."""
        self._core.check_result(code, self.name)

    def __call__(self, stream: Any = None) -> Any:
        """A ``stream`` is for GPU memory alone (``DevicePersistent``). It is no keyword-only argument here, which would take 10 ns."""
        code = self._fast_entry() if stream is None else layout.NOT_HANDLED
        if not code:
            return self.result
        reject_stream(stream, self._core.rank, self.name)
        return self._core.run_persistent(self._run, self._call, self.name, code)

    def __repr__(self) -> str:
        return f"<Persistent {self.name}>"
