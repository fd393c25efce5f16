"""Errors as torch.distributed's users expect them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from miraccl.errors import MiracclError


class BackendError(dist.DistBackendError):
    """What went wrong in miraccl, in its words; ``error`` is the original, with ``fault``, ``rank``, ``peer``, ``op`` and ``hint``."""

    def __init__(self, error: MiracclError) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


@contextmanager
def as_backend_errors() -> Iterator[None]:
    """Inside the block, errors of miraccl leave as ``BackendError``."""
    try:
        yield
    except MiracclError as error:
        raise BackendError(error) from error
