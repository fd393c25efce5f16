"""Errors in the classes that users of ``torch.distributed`` expect."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch.distributed as dist

from miraccl.errors import MiracclError


class BackendError(dist.DistBackendError):
    """``DistBackendError`` with the text of a miraccl error.

    ``error`` is the original, with ``fault``, ``rank``, ``peer``, ``op`` and ``hint``.
    """

    def __init__(self, error: MiracclError) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, as process pools and Ray need it."""
        return type(self), (self.error,)


class _AsBackendErrors:
    """Context manager that translates errors; a class because a generator costs a microsecond."""

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
    """Translate miraccl errors raised inside the block to ``BackendError``."""
    return _AS_BACKEND_ERRORS
