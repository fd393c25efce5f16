"""Launches without cuda.bindings: arguments of the C function, pointers and stream of each call."""

from __future__ import annotations

from miraccl import native
from tests.gpu.fake_launch import SHAPE, LaunchRecorder


def test_a_launch_passes_its_arguments() -> None:
    driver = LaunchRecorder((700, -3))
    record = driver.record(1 << 46)
    run = native.builtin(
        "launch",
        native.library("miraccl.fastpath.cuda.call").address(native.PREFIX + "launch"),
    )
    assert run(record, 1 << 44, (1 << 44) + 8, 77) == 700
    assert run(record, 5, 6, 0) == -3
    assert driver.seen[0] == (1 << 46, 0, *SHAPE, 77, 1 << 44, (1 << 44) + 8)
    assert driver.seen[1][-3:] == (0, 5, 6)
