"""Errors as torch.distributed's users expect them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch.distributed as dist

from miraccl.errors import MiracclError


class BackendError(dist.DistBackendError):
    """What went wrong in miraccl, in its words; ``error`` is the original, with ``fault``, ``rank``, ``peer``, ``op`` and ``hint``."""

    def __init__(self, error: MiracclError) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        """Also out of another process, as pools and Ray bring them."""
        return type(self), (self.error,)


class _AsBackendErrors:
    """Stands around the arguments of every call, so it is no generator, which takes a microsecond."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, MiracclError):
            raise BackendError(error) from error


_AS_BACKEND_ERRORS = _AsBackendErrors()


def as_backend_errors() -> AbstractContextManager[None]:
    """Inside the block, errors of miraccl leave as ``BackendError``."""
    return _AS_BACKEND_ERRORS
