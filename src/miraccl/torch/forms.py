"""Short call forms of c10d groups, such as ``group.allreduce(x, op=..., timeout=...)``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def short_form(
    options: type, *names: str, lead: int, tensor_at: int | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method that takes ``lead`` arguments and ``options`` so that it accepts the short
    form.

    Args:
        options: The options class of c10d.
        names: Option fields that may be passed instead of an options object, in positional order.
        lead: Number of arguments before the options.
        tensor_at: Position of an argument that may be one tensor instead of a list; the other
            leading
            arguments are then wrapped in lists as well.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            # the form that torch.distributed itself uses
            if len(args) > lead and isinstance(args[lead], options):
                return method(self, *args)
            given, rest = args[:lead], args[lead:]
            alone = tensor_at is not None and isinstance(given[tensor_at], torch.Tensor)
            if not alone and not kwargs and not rest:
                return method(self, *given)
            if "opts" in kwargs:
                return method(self, *given, kwargs["opts"])
            opts, values = options(), dict(zip(names, rest)) | kwargs
            if len(rest) > len(names) or set(values) - set(names):
                raise TypeError(
                    f"{method.__name__} takes {', '.join(names)} or opts; "
                    f"got {rest} and {sorted(kwargs)}"
                )
            for name, value in values.items():
                if value is not None:
                    setattr(opts, _FIELDS[name], value)
            return method(self, *([x] if alone else x for x in given), opts)

        return call

    return decorate
