"""Profiler events, such as ``miraccl:all_reduce``, from the call to the end of the operation.

The event of an asynchronous operation ends with its future; on a GPU it covers the launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function

from miraccl.torch.routing import first_tensor
from miraccl.torch.work import Work


def profiling() -> bool:
    """Return True while ``torch.profiler`` records."""
    return bool(torch.autograd._profiler_enabled())


def profiled(title: str, start: Callable[[], Work], on_gpu: bool) -> Work:
    """Run ``start`` inside a profiler event and return its work."""
    event = record_function(title)
    with event:
        work = start()
        if not on_gpu and not work.is_completed():
            event._call_end_callbacks_on_future(work.get_future())
    return work


def shown_as(title: str) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Decorate a method of a group as one profiler event."""

    def decorate(method: Callable[..., Work]) -> Callable[..., Work]:
        @functools.wraps(method)
        def call(self: Any, *args: Any) -> Work:
            if not profiling():
                return method(self, *args)
            tensor = first_tensor(args)
            return profiled(
                title, lambda: method(self, *args), tensor is not None and tensor.is_cuda
            )

        return call

    return decorate
