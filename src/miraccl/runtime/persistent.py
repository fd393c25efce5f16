"""Persistent operations: arguments checked, plan made and addresses bound once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miraccl.executor.cpu.context import nogil_kernel
from miraccl.executor.cpu.kernels import layout
from miraccl.fastpath.fast_calls import not_handled
from miraccl.ops.arguments import reject_stream

if TYPE_CHECKING:
    from miraccl.ops.prepare import PreparedOp
    from miraccl.runtime.core import CommunicatorCore


class Persistent:
    """A prepared operation on CPU memory; ``op()`` runs it on its buffers and returns the result
    array.

    Each call counts as one operation of the communicator, in call order. ``miraccl.group`` does not
    collect it.
    """

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
        """Return (function, context, run) for compiled code that runs the operation without the
        GIL.

        Such code calls ``function(context, run, 0, 0)`` (``kernels.nogil``) while this object is
        alive. None if the operation needs Python.
        """
        return (
            (nogil_kernel("run_nogil"), self._core.context.address, self._run.address)
            if self._runs_without_python
            else None
        )

    def check_result(self, code: int) -> None:
        """Raise the error of a result code of that function."""
        self._core.check_result(code, self.name)

    def __call__(self, stream: Any = None) -> Any:
        """Run the operation and return the result array.

        Args:
            stream: Must be None: only ``DevicePersistent`` takes a stream.

        Raises:
            InvalidUsage: ``stream`` is given, or another thread is inside the communicator.
            CollectiveTimeout, PeerDied, CollectiveMismatch, CommunicatorAborted: The operation
                failed.
        """
        code = self._fast_entry() if stream is None else layout.NOT_HANDLED
        if not code:
            return self.result
        reject_stream(stream, self._core.rank, self.name)
        return self._core.run_persistent(self._run, self._call, self.name, code)

    def __repr__(self) -> str:
        return f"<Persistent {self.name}>"
