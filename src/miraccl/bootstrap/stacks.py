"""Where threads are: the line of the user's program that called us, not the line of ours that waits."""

from __future__ import annotations

import gc
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable
from types import FrameType

import miraccl

_PACKAGE = os.path.dirname(os.path.abspath(miraccl.__file__)) + os.sep
_FOLDERS = [sysconfig.get_paths().get(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
#: A virtual environment may see those of the system and of the user as well.
_FOLDERS += [*site.getsitepackages(), site.getusersitepackages()]
_LIBRARIES = sorted({os.path.abspath(path) + os.sep for path in _FOLDERS if path})


def add_library(folder: str) -> None:
    """A package that is no part of the user's program, wherever it lies: in a source tree, or a container's own place."""
    path = os.path.abspath(folder) + os.sep
    if path not in _LIBRARIES:
        _LIBRARIES.append(path)


_lock = threading.RLock()


def frames() -> dict[int, FrameType]:
    """The innermost frame of every thread.

    Without the garbage collector meanwhile: before CPython 3.11.9 finalizers would run while a lock of the interpreter is held, and if one
    of them lets another thread run that comes here or begins a thread, the process stands still for ever (python/cpython#106883).
    """
    with _lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen "))


def _describe(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"


def locate(idents: Iterable[int], depth: int = 8) -> list[dict[str, object]]:
    """Where the threads are, those that do not exist (any more) left out.

    ``where``: innermost line of the user's program; ``call``: our function it waits in, if any; ``stack``: that line and its callers.
    A wait ends in the standard library (``threading``, ``selectors``) and a call of ours may come from a library (DDP), so library
    frames are skipped, unless there are no others.
    """
    innermost = frames()
    return [_place(innermost[ident], depth) for ident in idents if ident in innermost]


def _place(innermost: FrameType, depth: int) -> dict[str, object]:
    frame, call = _below_libraries(innermost), ""
    if _is_ours(frame):
        outer: FrameType | None = frame
        while outer is not None and _is_ours(outer):
            call = outer.f_code.co_name
            outer = outer.f_back
        frame = _below_libraries(outer) if outer is not None else frame
    stack: list[str] = []
    caller: FrameType | None = frame
    while caller is not None and len(stack) < depth:
        stack.append(_describe(caller))
        caller = caller.f_back
    return {"where": stack[0], "call": call, "stack": stack}


def _below_libraries(frame: FrameType) -> FrameType:
    """The first caller of ``frame`` that is no library's, or ``frame`` itself where there is none."""
    caller: FrameType | None = frame
    while caller is not None and _is_library(caller) and not _is_ours(caller):
        caller = caller.f_back
    return caller or frame


def runs_user_code(frame: FrameType, *, also_here: bool) -> bool:
    """Whether a thread at ``frame`` runs a line that is neither of a library nor ours (``also_here``: or ours)."""
    at: FrameType | None = frame
    while at is not None:
        if _is_ours(at):
            if also_here:
                return True
        elif not _is_library(at):
            return True
        at = at.f_back
    return False
