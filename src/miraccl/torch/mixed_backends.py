"""Backends of other libraries beside miraccl in one group, as in ``cpu:miraccl,cuda:nccl``.

PyTorch lets Python subclass ``ProcessGroup`` but not ``Backend``, and a plugin's group replaces the
whole group: PyTorch stops at the first such backend and drops those made before.  The miraccl group
therefore creates the other backends in an inner PyTorch group and forwards calls with tensors on
their devices.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from miraccl.errors import InvalidUsage


def devices_of_call(default: dict[str, str]) -> dict[str, str]:
    """Return the backend name per device type from PyTorch's calling frame.

    PyTorch does not pass the device map to a plugin, so it is read from the caller's locals; if it
    is not found there, return ``default``.
    """
    frame = sys._getframe(2)
    config = frame.f_locals.get("backend_config")
    if not isinstance(config, distributed_c10d.BackendConfig):
        return default
    return {str(device): str(name) for device, name in config.get_device_backend_map().items()}


class OtherBackends:
    """Backends of other libraries by device type; ``group`` is the PyTorch group they are in."""

    def __init__(
        self,
        devices: dict[str, str],
        store: Any,
        rank: int,
        size: int,
        *,
        timeout: datetime.timedelta,
        options: Any = None,
        global_ranks: Sequence[int] = (),
        name: str = "",
    ) -> None:
        self.devices = devices
        self.group = dist.ProcessGroup(store, rank, size)
        self._arguments = (rank, size, timeout, options, list(global_ranks), name)
        made: dict[str, tuple[Any, Any]] = {}
        for device, backend in devices.items():
            if backend not in made:
                made[backend] = self._create(backend, dist.PrefixStore(f"{device}/", store))
            kind, instance = made[backend]
            self.group._set_default_backend(kind)
            self.group._register_backend(torch.device(device), kind, instance)

    def _create(self, backend: str, store: Any) -> tuple[Any, Any]:
        rank, size, timeout, options, global_ranks, name = self._arguments
        kind = dist.ProcessGroup.BackendType
        if backend == "gloo" and dist.is_gloo_available():
            return kind.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        if backend == "nccl" and dist.is_nccl_available():
            options = options or dist.ProcessGroupNCCL.Options()
            options._timeout, options.global_ranks_in_group, options.group_name = (
                timeout,
                global_ranks,
                name,
            )
            return kind.NCCL, dist.ProcessGroupNCCL(store, rank, size, options)
        if backend in ("gloo", "nccl"):
            raise InvalidUsage(
                f"this build of PyTorch has no {backend.upper()}", hint="builds for CUDA have NCCL"
            )
        plugin = dist.Backend._plugins.get(backend.upper())
        if plugin is None or plugin.extended_api:
            raise InvalidUsage(
                f"cannot combine miraccl with backend {backend!r} in one group",
                hint="gloo and nccl can be combined with it",
            )
        instance = plugin.creator_fn(store, rank, size, timeout)
        if isinstance(instance, dist.ProcessGroup):
            raise InvalidUsage(
                f"cannot combine miraccl with backend {backend!r}: it replaces the whole group"
            )
        return kind.CUSTOM, instance

    def split(
        self,
        store: Any,
        ranks: Sequence[int],
        rank: int,
        *,
        timeout: datetime.timedelta,
        options: Any,
        name: str,
        devices: Any = None,
    ) -> OtherBackends | None:
        """Create the same backends for a subset of the ranks; collective over that subset.

        Args:
            ranks: Ranks of this group that form the new one, in order; contains ``rank``.
            devices: Restrict the new group to these devices.

        Returns:
            The new backends, or None if ``devices`` leaves none.
        """
        kept = (
            self.devices if devices is None else {torch.device(device).type for device in devices}
        )
        chosen = {device: backend for device, backend in self.devices.items() if device in kept}
        if not chosen:
            return None
        _, _, _, own, global_ranks, _ = self._arguments
        return OtherBackends(
            chosen,
            store,
            ranks.index(rank),
            len(ranks),
            timeout=timeout,
            options=own if options is None else options,
            global_ranks=[global_ranks[r] for r in ranks] if global_ranks else ranks,
            name=name,
        )

    def close(self) -> None:
        self.group.shutdown()

    def abort(self) -> None:
        self.group.abort()
