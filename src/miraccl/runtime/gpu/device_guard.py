"""Device guard for calls from threads whose current CUDA device is another one.

The driver resolves default streams and allocates for the current context. Inside a call the
communicator's context is current; afterwards the application's is restored, as NCCL does. A
thread without a context keeps the communicator's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class DeviceGuarded:
    """Methods of ``gpu``, each called with the communicator's context current."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._gpu, name)

        def call(*args: Any, **named: Any) -> Any:
            with self._gpu.gpu.device_guard():
                return method(*args, **named)

        return call


def guarded(gpu: Any) -> Any:
    """Return ``gpu``, wrapped in a device guard if another device is current.

    A closed communicator is returned as it is: a forked child has no CUDA driver to query.
    """
    return DeviceGuarded(gpu) if not gpu.closed and gpu.gpu.is_wrong_device() else gpu
