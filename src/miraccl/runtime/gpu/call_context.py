"""Context of a call on GPU memory: its stream, its group, in the background or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from miraccl.runtime.gpu.work import BackgroundStream
    from miraccl.runtime.group import Group

StreamGetter = Callable[[], Any]
"""Returns the current stream of an array library as an object."""


class CallContext(NamedTuple):
    """Circumstances of a call, passed to ``DeviceOperations.run``.

    Attributes:
        stream: Stream that the caller passed; None for the current one.
        current_stream: Current stream of the arrays' library, if it is not the one that
            ``ops.streams`` finds (CuPy arrays in a program with PyTorch).
        group: Open group, which records the call.
        background: Stream of the communicator, in which an ``async_op`` call runs.
    """

    stream: Any = None
    current_stream: StreamGetter | None = None
    group: Group | None = None
    background: BackgroundStream | None = None

    @property
    def own_stream(self) -> Any:
        """Stream in which the call is to run; None for the current one."""
        if self.stream is None and self.current_stream is not None:
            return self.current_stream()
        return self.stream
