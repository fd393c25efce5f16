"""Compiled entry points of a communicator's operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from miraccl.executor.cuda.fast_call_layout import NOT_HANDLED

FastCall = Callable[..., int]
"""Runs a call and returns 0, or returns a code and has done nothing.

The arguments are those of ``OpSpec.fast_arguments``.
"""


def not_handled(*args: object) -> int:
    """Entry of an operation without a fast path."""
    return NOT_HANDLED


@dataclass(slots=True, kw_only=True)
class FastCalls:
    """Entry point of each operation, by name; without compiled code it handles no call.

    A communicator replaces its ``FastCalls`` as a whole when its GPU side is created.
    """

    all_reduce: FastCall = not_handled
    reduce: FastCall = not_handled
    broadcast: FastCall = not_handled
    all_gather: FastCall = not_handled
    reduce_scatter: FastCall = not_handled
    all_to_all: FastCall = not_handled
    gather: FastCall = not_handled
    scatter: FastCall = not_handled
    all_gather_v: FastCall = not_handled
    reduce_scatter_v: FastCall = not_handled
    all_to_all_v: FastCall = not_handled
    gather_v: FastCall = not_handled
    scatter_v: FastCall = not_handled
    barrier: FastCall = not_handled
    send: FastCall = not_handled
    recv: FastCall = not_handled
    sendrecv: FastCall = not_handled

    def entry(self, name: str) -> FastCall:
        """Return the entry point of the operation ``name``."""
        call: FastCall = getattr(self, name)
        return call
