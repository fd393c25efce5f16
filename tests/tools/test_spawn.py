"""Forked ranks: results, failures and deadlines."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Any

import pytest

from miraccl.errors import SystemFailure
from miraccl.tools.spawn import RankContext, RankOutcome, Ranks
from tests.support.fault_injection import limit_descriptors, open_files


def run(
    target: Any, nranks: int, *args: Any, timeout: float = 30.0, grace: float = 30.0
) -> list[RankOutcome]:
    with Ranks(
        target, nranks, args, environ=lambda rank: {"SPAWN_TEST": str(rank)}, capture=True
    ) as ranks:
        ranks.wait(time.monotonic() + timeout, grace=grace)
    return ranks.outcomes


def _answer(context: RankContext, factor: int) -> tuple[int, str]:
    print("hello")
    return context.rank * factor, os.environ["SPAWN_TEST"]


def _fail_on_one(context: RankContext) -> None:
    if context.rank == 1:
        raise ValueError("a reason")
    signal.pause()


def _killed(context: RankContext) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leave(context: RankContext, code: Any) -> None:
    sys.exit(code)


def _never_end(context: RankContext) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context.emit("ignores everything")
    while True:
        signal.pause()


def _echo(context: RankContext) -> None:
    while (message := context.receive()) != "stop":
        context.emit((context.rank, message))


def _big(context: RankContext) -> bytes:
    print("x" * 300_000)
    return b"y" * 5_000_000


def test_results_environment_and_output() -> None:
    outcomes = run(_answer, 3, 10)
    assert [o.value for o in outcomes] == [(0, "0"), (10, "1"), (20, "2")]
    assert all(o.ok and o.output == "hello\n" for o in outcomes)


def test_huge_deadlines() -> None:
    assert [o.value for o in run(_answer, 2, 10, timeout=1e300)] == [(0, "0"), (10, "1")]


def test_large_results_and_output_do_not_block() -> None:
    (outcome,) = run(_big, 1)
    assert len(outcome.value) == 5_000_000
    assert len(outcome.output) == 300_001


def test_the_first_failure_is_reported_and_the_others_are_stopped() -> None:
    with Ranks(_fail_on_one, 3, capture=True) as ranks:
        assert not ranks.wait(time.monotonic() + 30, grace=0.0)
        failure = ranks.first_failure()
    assert failure is not None
    assert failure.describe() == "rank 1: ValueError: a reason"
    assert "_fail_on_one" in failure.error
    assert [o.status is not None and o.status < 0 for o in ranks.outcomes] == [True, False, True]


class _PeerTrouble(Exception):
    fault = "peer"


def _report_a_peer(context: RankContext) -> None:
    """Rank 0 reports a failed peer, then rank 1 reports the cause; rank 2 never exits."""
    if context.rank == 0:
        raise _PeerTrouble("somebody died")
    context.receive()
    if context.rank == 1:
        raise ValueError("the cause")
    signal.pause()


def test_the_cause_is_reported_rather_than_its_effects() -> None:
    with Ranks(_report_a_peer, 3, capture=True) as ranks:
        while ranks.outcomes[0].status is None:
            ranks.poll(30)
        first = ranks.first_failure()
        assert first is not None
        assert first.rank == 0
        ranks.send(1, "go")
        ranks.send(2, "go")
        while ranks.outcomes[1].status is None:
            ranks.poll(30)
        ranks.stop(grace=0)
        cause = ranks.first_failure()
    assert cause is not None
    assert cause.summary == "ValueError: the cause"
    assert ranks.outcomes[2].stopped


def test_a_killed_rank_and_exit_statuses() -> None:
    (killed,) = run(_killed, 1)
    assert killed.describe() == "rank 0 was killed by SIGKILL"
    assert run(_leave, 1, 7)[0].describe() == "rank 0 exited with status 7"
    assert run(_leave, 1, None)[0].ok


def _interrupted(context: RankContext) -> bool:
    """SIGINT reaches the child right after the fork, and the parent; only the parent continues."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent, fork, (read_fd, write_fd) = os.getpid(), os.fork, os.pipe()

    def forked() -> int:
        pid = fork()
        os.kill(os.getpid(), signal.SIGINT)
        return pid

    os.fork = forked
    with contextlib.suppress(KeyboardInterrupt):
        run(_answer, 1, 10)
    if os.getpid() != parent:
        os.write(write_fd, b"a child continues")
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        os.wait()
    os.close(write_fd)
    return os.read(read_fd, 1) == b""


def test_ctrl_c_during_start_reaches_the_parent_only() -> None:
    (outcome,) = run(_interrupted, 1)
    assert outcome.value is True, outcome.describe()


def test_a_rank_that_ignores_sigterm_is_killed_at_the_deadline() -> None:
    with Ranks(_never_end, 1) as ranks:
        while not ranks.poll(30):
            pass
        assert not ranks.wait(time.monotonic() + 0.01)
    assert ranks.outcomes[0].status == -signal.SIGKILL


def test_no_process_is_left() -> None:
    with Ranks(_never_end, 2) as ranks:
        pids = ranks.pids
    for pid in pids:
        assert not os.path.exists(f"/proc/{pid}"), "a rank outlived the block that started it"


def test_messages_both_ways() -> None:
    got: list[Any] = []
    with Ranks(_echo, 2) as ranks:
        ranks.send(1, {"a": 1})
        while not got:
            got += ranks.poll(30)
        for rank in (0, 1):
            ranks.send(rank, "stop")
        assert ranks.wait(time.monotonic() + 30)
    assert got == [(1, (1, {"a": 1}))]
    assert all(o.ok for o in ranks.outcomes)


@pytest.mark.parametrize(
    "count", range(8)
)  # 1 for the parent, 3 per rank, 2 more while one is started
def test_a_shortage_of_descriptors_is_reported_and_cleaned_up(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, fork = open_files(), os.fork
    forked: list[int] = []

    def forks() -> int:
        forked.append(fork())
        return forked[-1]

    monkeypatch.setattr(os, "fork", forks)
    with limit_descriptors(count), pytest.raises(SystemFailure, match="Too many open files"):
        Ranks(_never_end, 2, capture=True)
    assert open_files() <= files
    assert not any(os.path.exists(f"/proc/{pid}") for pid in forked)
