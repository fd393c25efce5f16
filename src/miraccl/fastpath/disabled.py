"""Stand-ins for the compiled fast path: every call goes to the slow path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miraccl.executor.cuda.fast_call_layout import NOT_HANDLED


def not_handled(*args: Any) -> int:
    return NOT_HANDLED


class FastPathDisabled:
    """Fast-path entry of each operation, until a compiled one is installed on the instance.

    An entry returns 0 if it has run the operation, else a code of ``executor.cpu`` or ``fastpath``.
    """

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
