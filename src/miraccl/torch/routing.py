"""Routing of a call to a backend by the device of its tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from miraccl.torch.work import Work


def first_tensor(arguments: Any) -> Any:
    """Return the first tensor in nested lists of arguments, or None."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, list | tuple) and (found := first_tensor(argument)) is not None:
            return found
    return None


def by_device(*names: str) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Decorate a method so that tensors of another backend's device go to that backend.

    ``names`` are the names of the method in different versions of PyTorch.
    """

    def decorate(method: Callable[..., Work]) -> Callable[..., Work]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Work:
            other = self.other_group_for(args)
            if other is None:
                return method(self, *args, **kwargs)
            theirs: Work = getattr(other, next(name for name in names if hasattr(other, name)))(
                *args, **kwargs
            )
            return theirs

        return call

    return decorate
