"""Profiler events, such as ``miraccl:all_reduce``, from the call to the end of the operation.

Events carry the shapes of the inputs and count as asynchronous, as those of c10d's Gloo backend do.
On a GPU an event covers the launch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function

from miraccl import clock
from miraccl.torch.routing import first_tensor
from miraccl.torch.work import Work

#: Event with inputs (PyTorch 2.1 and later); older versions record no shapes.
_record: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)


def profiling() -> bool:
    """Return True while ``torch.profiler`` records."""
    return bool(torch.autograd._profiler_enabled())


def profiled(title: str, start: Callable[[], Work], on_gpu: bool, inputs: Sequence[Any]) -> Work:
    """Run ``start`` inside a profiler event with these inputs and return its work."""
    events = [record_function(title) if _record is None else _record(title, list(inputs))]
    caller = threading.get_ident()
    events[0].__enter__()
    try:
        work = start()
    except BaseException:
        events[0].__exit__(None, None, None)
        raise
    if on_gpu or work.is_completed():
        _end(events, caller)
    else:
        work.get_future().add_done_callback(lambda _: _end(events, caller))
    return work


def _end(events: list[Any], caller: int) -> None:
    """End an event on another thread than its caller's: the profiler then calls it asynchronous.

    ``__exit__`` does nothing on threads that are not profiled themselves; dropping the last
    reference ends the event on any thread.
    """
    if _record is None:
        events[0].__exit__(None, None, None)
    elif threading.get_ident() != caller:
        events.clear()
    else:
        thread = clock.thread(events.clear, name="miraccl-profiler")
        thread.start()
        thread.join()


def shown_as(title: str) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Decorate a method of a group as one profiler event."""

    def decorate(method: Callable[..., Work]) -> Callable[..., Work]:
        @functools.wraps(method)
        def call(self: Any, *args: Any) -> Work:
            if not profiling():
                return method(self, *args)
            tensor = first_tensor(args)
            return profiled(
                title,
                lambda: method(self, *args),
                tensor is not None and tensor.is_cuda,
                [] if tensor is None else [tensor],
            )

        return call

    return decorate
