"""Where a thread is, in terms of the user's program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from miraccl.bootstrap import stacks as stacks_module
from miraccl.bootstrap.stacks import locate
from tests.bootstrap.kit import PATIENCE


def _place_of(call: Callable[[Any], None]) -> dict[str, object]:
    """Where a thread is while ``call(event)`` waits for the event."""
    started, go = threading.Event(), threading.Event()

    class Signal(threading.Event):
        def wait(self, timeout=None):
            started.set()
            return go.wait(timeout)

    thread = threading.Thread(target=call, args=(Signal(),), daemon=True)
    thread.start()
    assert started.wait(PATIENCE)
    assert thread.ident is not None
    place = locate(thread.ident)
    go.set()
    thread.join(PATIENCE)
    assert place is not None
    return place


def test_a_thread_in_the_users_program():
    def user_function(event):
        event.wait(PATIENCE)

    place = _place_of(user_function)
    assert place["call"] == ""
    assert any("user_function" in line and "test_stacks.py" in line for line in place["stack"])  # type: ignore[attr-defined]


def test_a_thread_that_waits_in_this_package_is_where_it_called_us():
    code = compile("def all_reduce(wait):\n    wait(20.0)\n", stacks_module._PACKAGE + "comm/calls.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)

    def user_function(gate):
        names["all_reduce"](gate.wait)

    gate = threading.Event()
    thread = threading.Thread(target=user_function, args=(gate,), daemon=True)
    thread.start()
    place: dict[str, object] = {}
    for _ in range(5000):
        place = locate(thread.ident or 0) or {}
        if place.get("call") == "all_reduce":
            break
        thread.join(0.001)
    gate.set()
    thread.join(PATIENCE)
    assert place["call"] == "all_reduce"
    assert "test_stacks.py" in str(place["where"])
    assert "user_function" in str(place["where"])


def test_a_thread_that_does_not_exist():
    assert locate(1) is None
