"""Checked send or receive of GPU memory."""

from __future__ import annotations

from dataclasses import dataclass

from miraccl.runtime.gpu.memory import DeviceMemory


@dataclass(frozen=True, kw_only=True)
class DeviceTransfer:
    """One send or receive of GPU memory."""

    receives: bool
    peer: int
    memory: DeviceMemory
