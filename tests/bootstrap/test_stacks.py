"""Locations of threads in terms of the application."""

from __future__ import annotations

import gc
import os
import site
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from miraccl.bootstrap import stacks as stacks_module
from miraccl.bootstrap.stacks import add_library, locate
from miraccl.diagnosis import blocked_ops
from tests.bootstrap.kit import PATIENCE, until


def _place_of(call: Callable[[Any], None]) -> dict[str, object]:
    """Return the location of a thread while ``call(event)`` waits for the event."""
    started, go = threading.Event(), threading.Event()

    class Signal(threading.Event):
        def wait(self, timeout=None):
            started.set()
            return go.wait(timeout)

    thread = threading.Thread(target=call, args=(Signal(),), daemon=True)
    thread.start()
    assert started.wait(PATIENCE)
    assert thread.ident is not None
    (place,) = locate([thread.ident])
    go.set()
    thread.join(PATIENCE)
    return place


def test_location_of_an_application_thread():
    def user_function(event):
        event.wait(PATIENCE)

    place = _place_of(user_function)
    assert place["call"] == ""
    assert any("user_function" in line and "test_stacks.py" in line for line in place["stack"])  # type: ignore[attr-defined]


def _settled(thread: threading.Thread, function: str) -> dict[str, object]:
    """Return the location of a thread that waits in ``function``."""

    def has_come() -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        return frame is not None and frame.f_code.co_name == function

    until(has_come)
    return locate([thread.ident or 0])[0]


STAND_STILL = """
import ctypes, gc, threading, weakref
from miraccl.bootstrap.stacks import locate

usleep = ctypes.CDLL(None).usleep  # lets other threads run

class Cycle:
    def __init__(self):
        self.me = self
        weakref.finalize(self, usleep, 1)

def look(main):
    for _ in range(200):
        gc.set_threshold(1 << 30)
        for _ in range(3): Cycle()
        gc.set_threshold(1)  # now whoever needs memory next collects them
        assert locate([main])

threads = [threading.Thread(target=look, args=(threading.main_thread().ident,)) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert gc.isenabled()
"""


def test_no_finalizer_runs_while_sampling():
    """A finalizer that ran while one thread looked let another one look: the interpreter stood
    still.
    """
    subprocess.run([sys.executable, "-c", STAND_STILL], timeout=60, check=True)


def test_nothing_is_collected_while_frames_of_other_threads_are_walked():
    """A finalizer would let these threads run, and end while the interpreter makes an object for
    one of their frames.
    """
    gate, walked = threading.Event(), []

    def deep(depth: int) -> None:
        deep(depth - 1) if depth else gate.wait(PATIENCE)

    def note(phase: str, info: object) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is stacks_module._describe_thread.__code__:
                walked.append(phase)
            frame = frame.f_back

    thread = threading.Thread(target=deep, args=(40,), daemon=True)
    thread.start()
    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        assert len(locate([thread.ident or 0], depth=30)[0]["stack"]) == 30  # type: ignore[arg-type]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
        gate.set()
        thread.join(PATIENCE)
    assert not walked


def test_location_of_a_thread_in_a_library():
    gate = threading.Event()

    def user_function():
        gate.wait(PATIENCE)

    thread = threading.Thread(target=user_function, daemon=True)
    thread.start()
    place = _settled(thread, "wait")
    gate.set()
    thread.join(PATIENCE)
    assert place["call"] == ""
    assert "test_stacks.py" in str(place["where"])
    assert "user_function" in str(place["where"])


@pytest.mark.parametrize(
    "folder", [*site.getsitepackages(), site.getusersitepackages(), "/a/source/tree"]
)
def test_libraries_in_any_folder(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of the user, and of the system where a virtual environment sees them."""
    monkeypatch.setattr(stacks_module, "_LIBRARIES", [*stacks_module._LIBRARIES])
    if folder.startswith("/a"):
        add_library(folder)
    library: dict[str, Any] = {}
    exec(
        compile(
            "def call_library(gate, patience):\n    gate.wait(patience)",
            os.path.join(folder, "library.py"),
            "exec",
        ),
        library,
    )
    gate = threading.Event()

    def user_function() -> None:
        library["call_library"](gate, PATIENCE)

    thread = threading.Thread(target=user_function, daemon=True)
    thread.start()
    place = _settled(thread, "wait")
    gate.set()
    thread.join(PATIENCE)
    assert "user_function" in str(place["where"])


def test_location_of_a_library_thread():
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, args=(PATIENCE,), daemon=True)
    thread.start()
    place = _settled(thread, "wait")
    gate.set()
    thread.join(PATIENCE)
    assert "threading.py" in str(place["where"])


def test_location_of_a_call_through_a_library():
    """Such as DDP's backward pass."""
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    exec(
        compile(
            "def all_reduce(wait):\n    wait(20.0)\n",
            stacks_module._PACKAGE + "comm/calls.py",
            "exec",
        ),
        ours,
    )
    exec(
        compile(
            "def backward(call, wait):\n    call(wait)\n",
            stacks_module._LIBRARIES[-1] + "torch/ddp.py",
            "exec",
        ),
        theirs,
    )
    gate = threading.Event()

    def user_function():
        theirs["backward"](ours["all_reduce"], gate.wait)

    thread = threading.Thread(target=user_function, daemon=True)
    thread.start()
    place = _settled(thread, "wait")
    gate.set()
    thread.join(PATIENCE)
    assert place["call"] == "all_reduce"
    assert "user_function" in str(place["where"])


def test_location_of_a_thread_that_waits_in_this_package():
    code = compile(
        "def all_reduce(wait):\n    wait(20.0)\n", stacks_module._PACKAGE + "comm/calls.py", "exec"
    )
    names: dict[str, Any] = {}
    exec(code, names)

    def user_function(gate):
        names["all_reduce"](gate.wait)

    gate = threading.Event()
    thread = threading.Thread(target=user_function, args=(gate,), daemon=True)
    thread.start()
    place = _settled(thread, "wait")
    gate.set()
    thread.join(PATIENCE)
    assert place["call"] == "all_reduce"
    assert "test_stacks.py" in str(place["where"])
    assert "user_function" in str(place["where"])


def test_several_threads_of_which_one_does_not_exist() -> None:
    gate = threading.Event()

    def user_function() -> None:
        gate.wait(PATIENCE)

    thread = threading.Thread(target=user_function, daemon=True)
    thread.start()
    there = _settled(thread, "wait")
    other, here = locate([thread.ident or 0, 1, threading.get_ident()])
    gate.set()
    thread.join(PATIENCE)
    assert other == there
    assert "test_several_threads" in str(here["where"])
    assert locate([1]) == []


@pytest.mark.parametrize(
    "look",
    [lambda: locate([threading.get_ident()]), blocked_ops.only_application_thread],
    ids=["locate", "only_thread"],
)
def test_sampling_retains_no_frames_without_gc(
    look: Callable[[], object],
) -> None:
    class Large:
        pass

    def step() -> weakref.ref[Large]:
        large = Large()
        look()
        return weakref.ref(large)

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()
