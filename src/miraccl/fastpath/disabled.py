"""What operations have instead of a door: their calls go the long way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miraccl.fastpath.cuda.layout import NOT_TAKEN


def no_door(*args: Any) -> int:
    return NOT_TAKEN


class NoDoors:
    """An operation whose door is not set has none. A call asks first: 0 is that it is done."""

    _all_reduce: Callable[..., int] = staticmethod(no_door)
    _all_gather: Callable[..., int] = staticmethod(no_door)
    _reduce_scatter: Callable[..., int] = staticmethod(no_door)
    _all_to_all: Callable[..., int] = staticmethod(no_door)
    _broadcast: Callable[..., int] = staticmethod(no_door)
    _reduce: Callable[..., int] = staticmethod(no_door)
    _gather: Callable[..., int] = staticmethod(no_door)
    _scatter: Callable[..., int] = staticmethod(no_door)
    _all_gather_v: Callable[..., int] = staticmethod(no_door)
    _reduce_scatter_v: Callable[..., int] = staticmethod(no_door)
    _all_to_all_v: Callable[..., int] = staticmethod(no_door)
    _gather_v: Callable[..., int] = staticmethod(no_door)
    _scatter_v: Callable[..., int] = staticmethod(no_door)
    _send: Callable[..., int] = staticmethod(no_door)
    _recv: Callable[..., int] = staticmethod(no_door)
    _sendrecv: Callable[..., int] = staticmethod(no_door)
