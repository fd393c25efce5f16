"""Calls in threads in which the program has chosen another GPU than the communicator's.

The driver takes default streams, and what is made, for those of the current context.  So that is the communicator's inside a call, and the
program's again afterwards, as with NCCL.  In a thread without a context the communicator's stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class DeviceGuarded:
    """The methods of ``gpu``, in which its context is current."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._gpu, name)

        def call(*args: Any, **named: Any) -> Any:
            with self._gpu.gpu.device_guard():
                return method(*args, **named)

        return call


def guarded(gpu: Any) -> Any:
    """What takes the calls of this thread; one that is closed asks no driver any more, which a forked child has not."""
    return DeviceGuarded(gpu) if not gpu.closed and gpu.gpu.is_wrong_device() else gpu
