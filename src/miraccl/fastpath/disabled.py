"""What operations have instead of a door: their calls go the long way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miraccl.fastpath.cuda.layout import NOT_TAKEN


def not_handled(*args: Any) -> int:
    return NOT_TAKEN


class FastPathDisabled:
    """An operation whose door is not set has none. A call asks first: 0 is that it is done."""

    _all_reduce: Callable[..., int] = staticmethod(not_handled)
    _all_gather: Callable[..., int] = staticmethod(not_handled)
    _reduce_scatter: Callable[..., int] = staticmethod(not_handled)
    _all_to_all: Callable[..., int] = staticmethod(not_handled)
    _broadcast: Callable[..., int] = staticmethod(not_handled)
    _reduce: Callable[..., int] = staticmethod(not_handled)
    _gather: Callable[..., int] = staticmethod(not_handled)
    _scatter: Callable[..., int] = staticmethod(not_handled)
    _all_gather_v: Callable[..., int] = staticmethod(not_handled)
    _reduce_scatter_v: Callable[..., int] = staticmethod(not_handled)
    _all_to_all_v: Callable[..., int] = staticmethod(not_handled)
    _gather_v: Callable[..., int] = staticmethod(not_handled)
    _scatter_v: Callable[..., int] = staticmethod(not_handled)
    _send: Callable[..., int] = staticmethod(not_handled)
    _recv: Callable[..., int] = staticmethod(not_handled)
    _sendrecv: Callable[..., int] = staticmethod(not_handled)
