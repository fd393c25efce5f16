"""Which backend of a group takes a call: the tensors' device says it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from miraccl.torch.work import Work


def first_tensor(arguments: Any) -> Any:
    """The first tensor among arguments and lists (of lists) of them; None if there is none."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, list | tuple) and (found := first_tensor(argument)) is not None:
            return found
    return None


def by_device(*names: str) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Decorates a call of a group: with tensors of another backend's device it is that backend's, under whichever of ``names`` this version
    of PyTorch has."""

    def decorate(method: Callable[..., Work]) -> Callable[..., Work]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Work:
            other = self.elsewhere_for(args)
            if other is None:
                return method(self, *args, **kwargs)
            theirs: Work = getattr(other, next(name for name in names if hasattr(other, name)))(
                *args, **kwargs
            )
            return theirs

        return call

    return decorate
