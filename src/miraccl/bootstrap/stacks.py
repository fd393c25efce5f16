"""Stack samples of the threads of this process: the line of the application that called us."""

from __future__ import annotations

import gc
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable
from types import FrameType

from miraccl import clock

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FOLDERS = [
    sysconfig.get_paths().get(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")
]
#: A virtual environment may see those of the system and of the user as well.
_FOLDERS += [*site.getsitepackages(), site.getusersitepackages()]
_LIBRARIES = sorted({os.path.abspath(path) + os.sep for path in _FOLDERS if path})


def add_library(folder: str) -> None:
    """Count a package as a library, not as application code, wherever it is installed."""
    path = os.path.abspath(folder) + os.sep
    if path not in _LIBRARIES:
        _LIBRARIES.append(path)


#: Standard library code that runs callbacks whenever messages, connections or results arrive.
_EVENT_LOOPS = tuple(
    os.path.join(folder, path)
    for folder in filter(None, _FOLDERS[:2])
    for path in (
        "asyncio" + os.sep,
        "socketserver.py",
        "concurrent/futures/process.py",
        "multiprocessing/pool.py",
    )
)
#: Packages of this library that call application code only from signal handlers.
_ENTRY_POINTS = tuple(
    _PACKAGE + folder + os.sep for folder in ("api", "runtime", "diagnosis", "fastpath", "torch")
)

_lock = threading.RLock()
_paused = False  # True while the holder of the lock has disabled the garbage collector


class SampledFrames:
    """Context manager that gives the innermost frame of every thread, by ident.

    Callers of the frames must be walked inside the block. Do not keep references to frames of this
    thread beyond it: they keep all locals alive until the next run of the garbage collector.
    """

    # The garbage collector is disabled inside the block. Before CPython 3.12 it runs wherever
    # something is allocated, and finalizers let other threads run. If that happens while the
    # interpreter makes an object for a frame of another thread, which then ends, the object points
    # to freed memory. If it happens while the interpreter collects the frames, and another thread
    # comes here or starts a thread, the process deadlocks (python/cpython#106883).

    def __enter__(self) -> dict[int, FrameType]:
        global _paused
        _lock.acquire()
        self._collects = gc.isenabled()
        _paused |= self._collects
        gc.disable()
        self._innermost = sys._current_frames()
        return self._innermost

    def __exit__(self, *exc: object) -> None:
        global _paused
        self._innermost.clear()
        if self._collects:
            gc.enable()
            _paused = False
        _lock.release()


def _after_fork() -> None:
    global _lock, _paused
    _lock = threading.RLock()
    if _paused:  # by a thread of the parent
        gc.enable()
        _paused = False


os.register_at_fork(after_in_child=_after_fork)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen "))


def _describe(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"


def locate(idents: Iterable[int], depth: int = 8) -> list[dict[str, object]]:
    """Return the locations of threads; those that have ended are left out.

    ``where``: innermost line of the application; ``call``: our function that it is blocked in, if
    any; ``stack``: that line and its callers. A wait ends in the standard library (``threading``,
    ``selectors``) and a call of ours may come from a library (DDP), so library frames are skipped,
    unless there are no others.
    """
    with SampledFrames() as innermost:
        return [_describe_thread(innermost[ident], depth) for ident in idents if ident in innermost]


def _describe_thread(innermost: FrameType, depth: int) -> dict[str, object]:
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
    """Return the first caller of ``frame`` outside libraries, ``frame`` itself if there is none."""
    caller: FrameType | None = frame
    while caller is not None and _is_library(caller) and not _is_ours(caller):
        caller = caller.f_back
    return caller or frame


def _is_users(file: str) -> bool:
    return not file.startswith((_PACKAGE, *_LIBRARIES, "<frozen "))


def may_call_user_code(frame: FrameType, thread: clock.Thread | None) -> bool:
    """Return True if a library's thread may call application code by itself.

    Such a thread serves events, or is about to start with that code.
    """
    at: FrameType | None = frame
    while at is not None:
        if at.f_code.co_filename.startswith(_EVENT_LOOPS):
            return True
        at = at.f_back
    begins = (getattr(thread, "_target", None), getattr(type(thread), "run", None))
    return any(
        _is_users(code.co_filename)
        for code in (getattr(function, "__code__", None) for function in begins)
        if code is not None
    )


def is_called_back(frame: FrameType) -> bool:
    """Return True if a thread runs application code inside a call of ours: a signal handler."""
    at: FrameType | None = frame
    users = False
    while at is not None:
        if users and at.f_code.co_filename.startswith(_ENTRY_POINTS):
            return True
        users |= _is_users(at.f_code.co_filename)
        at = at.f_back
    return False


def runs_user_code(frame: FrameType, *, also_here: bool) -> bool:
    """Return True if application code is on the stack of a thread.

    ``also_here``: code of this library counts as well.
    """
    at: FrameType | None = frame
    while at is not None:
        if _is_ours(at):
            if also_here:
                return True
        elif not _is_library(at):
            return True
        at = at.f_back
    return False
