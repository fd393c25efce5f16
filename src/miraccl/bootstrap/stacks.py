"""Where a thread is: the line of the user's program that called us, not the line of ours that waits."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType

import miraccl

_PACKAGE = os.path.dirname(os.path.abspath(miraccl.__file__)) + os.sep
_LIBRARIES = tuple(
    os.path.abspath(path) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_paths().get(key))
)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen "))


def _describe(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"


def locate(ident: int, depth: int = 8) -> dict[str, object] | None:
    """``where``: innermost line that is not ours; ``call``: our function it called, if any; ``stack``: that line and its callers.

    A wait of ours usually ends in the standard library (``threading``, ``selectors``), so library frames below ours are skipped
    too.  ``None`` when the thread does not exist (any more).
    """
    frame: FrameType | None = sys._current_frames().get(ident)
    if frame is None:
        return None
    inner: FrameType | None = frame
    while inner is not None and not _is_ours(inner) and _is_library(inner):
        inner = inner.f_back
    call = ""
    if inner is not None and _is_ours(inner):
        while inner is not None and _is_ours(inner):
            call = inner.f_code.co_name
            inner = inner.f_back
        frame = inner
    stack: list[str] = []
    while frame is not None and len(stack) < depth:
        stack.append(_describe(frame))
        frame = frame.f_back
    return {"where": stack[0] if stack else "", "call": call, "stack": stack}
