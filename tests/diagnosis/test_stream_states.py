"""GPU streams as further nodes of the wait-for graph, which CPU jobs leave out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from miraccl.bootstrap import Session
from miraccl.diagnosis import blocked_ops
from miraccl.diagnosis.stream_states import stream_states, wait_for_host
from miraccl.diagnosis.waits import BlockedState, Wait, WaitForOperation

LAUNCH = WaitForOperation(key="gpu", awaited=("1/gpu/1",), op="all_reduce", number=1)


class FakeStream:
    """A stream that waits in a launch, or is idle."""

    name = "0/gpu/0"
    session: Session | None = None
    needs_probe = True

    def __init__(self) -> None:
        self.wait: Wait = LAUNCH
        self.seen: Mapping[str, BlockedState] = {}

    def probe(self) -> None:
        self.seen = {self.name: BlockedState([self.wait])}

    def report(self, program: Wait | None) -> Mapping[str, BlockedState]:
        return self.seen


@pytest.fixture
def stream() -> Iterator[FakeStream]:
    stream = FakeStream()
    stream_states.add(stream)
    yield stream
    stream_states.remove(stream)


def test_waits_of_a_stream_are_those_of_its_last_probe(stream: FakeStream) -> None:
    assert blocked_ops.needs_probe()
    assert blocked_ops.local_waits(probe=False) == []
    assert blocked_ops.local_waits(probe=True) == [("0/gpu/0", LAUNCH, None)]
    assert "0/gpu/0" in blocked_ops.local_report()["states"]
    stream_states.remove(stream)
    assert blocked_ops.local_waits(probe=True) == []
    assert not blocked_ops.needs_probe()


def test_idle_stream_does_not_wake_the_detector(stream: FakeStream) -> None:
    stream.wait = wait_for_host(LAUNCH, "0")
    assert blocked_ops.local_waits(probe=True) == []


def test_cpu_jobs_have_no_further_nodes() -> None:
    program = (
        "import miraccl, numpy, sys\n"
        "with miraccl.init() as comm: comm.all_reduce(numpy.ones(3))\n"
        "assert 'miraccl.diagnosis.stream_states' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
