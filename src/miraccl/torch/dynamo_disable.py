"""Exclusion of this package from ``torch.compile``.

Dynamo would trace the frames that PyTorch's C++, or a graph break, calls here.  The function that
marks code objects lives below ``torch._dynamo``, whose import takes a second; on versions of
PyTorch without it the code is traced.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any


def disable_dynamo(*classes: type, functions: Iterable[Any] = ()) -> None:
    """Keep dynamo from tracing these functions and the methods of these classes, with their
    callees.
    """
    try:
        frames = importlib.import_module("torch._C._dynamo.eval_frame")
        alone = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        mark = frames.set_code_exec_strategy
    except (ImportError, AttributeError):
        return
    for value in (*functions, *(value for cls in classes for value in vars(cls).values())):
        if inspect.isfunction(value):
            mark(value.__code__, alone)
