"""Log lines of MIRACCL_DEBUG=info for new communicators."""

from __future__ import annotations

import os
import subprocess

import pytest

import miraccl
from miraccl import trace
from miraccl.runtime import summary
from miraccl.transport.base import Endpoint, PathStatus
from miraccl.transport.registry import UDP, TransportChoice, allowed, choose
from tests.support.ranks import run_ranks
from tests.support.warm_python import warm_python

PROGRAM = """
import miraccl
with miraccl.init() as comm:
    comm.split(0, comm.rank).finalize()
"""

NO_VERBS = "not verbs: no usable InfiniBand or RoCE port (miraccl net devices says why)"


def choices(rank: int, hosts: tuple[int, ...]) -> dict[int, TransportChoice]:
    ends = [
        Endpoint(rank=r, hostid=str(h), pid=r, addresses=("10.0.0.1",)) for r, h in enumerate(hosts)
    ]
    return {e.rank: choose(ends[rank], e, allowed()) for e in ends if e.rank != rank}


@pytest.mark.parametrize(
    ("rank", "hosts", "text"),
    [
        (0, (0,), "rank 0 of 1: alone"),
        (1, (0, 0, 0, 0), "rank 1 of 4: shared memory with 0 2-3"),
        (2, (0, 0, 1, 1, 2), "rank 2 of 5: shared memory with 3; TCP from 10.0.0.1 with 0-1 4"),
        (0, (0, 1), "rank 0 of 2: TCP from 10.0.0.1 with 1"),
    ],
)
def test_connections_of_ranks(rank: int, hosts: tuple[int, ...], text: str) -> None:
    assert summary.describe_rank(rank, choices(rank, hosts), "10.0.0.1") == text


def test_transports_are_explained() -> None:
    found = choices(2, (0, 0, 1, 1, 2))
    assert summary.describe_transports(found) == (
        "shm to 3 (same host); tcp to 0-1 4 (addresses of a common family, "
        f"{NO_VERBS}, not udp: {UDP.on_request})"
    )
    assert summary.explain_transports(found) == [
        "  to 0-1 4: tcp, addresses of a common family (not shm: not on one host; "
        f"{NO_VERBS}; not udp: {UDP.on_request})",
        f"  to 3: shm, same host (not tcp: shm is preferred; {NO_VERBS})",
    ]


def test_paths_that_carry_nothing_are_named() -> None:
    def path(peer: int, number: int, state: str) -> PathStatus:
        here, there = f"10.0.{number}.1:5", f"10.0.{number}.2:7"
        return PathStatus(
            peer=peer, transport="udp", path=number, state=state, local=here, remote=there
        )

    paths = [path(1, 0, "OPEN"), path(1, 1, "PROBING"), path(2, 0, "OPEN"), path(2, 1, "SUSPECT")]
    assert summary.explain_dead_paths(paths) == [
        "  to 1: 1 of 2 paths work; not 10.0.1.1:5 to 10.0.1.2:7 (PROBING)"
    ]


def test_peers_that_lose_packets_are_named() -> None:
    def path(peer: int, sent: int, resent: int, transport: str = "tcp") -> PathStatus:
        return PathStatus(
            peer=peer, transport=transport, path=0, sent_bytes=sent, resent_bytes=resent
        )

    few, many = summary.RESENT_FROM_BYTES // 4, summary.RESENT_FROM_BYTES
    paths = [
        *(path(1, many, many // 100), path(1, many, many // 50)),  # two streams
        path(2, many, many // 1000),
        path(3, few, few // 2),
        path(4, many, many // 10, "udp"),
    ]
    assert summary.explain_losses(paths) == [
        "  to 1: 1.5% of the bytes were sent again: compare TCP with MIRACCL_NET=udp, which "
        "tolerates loss (miraccl net bench --net udp)"
    ]
    assert summary.explain_losses([]) == []


@pytest.mark.multiprocess
def test_a_communicator_explains_its_transports() -> None:
    env = {"MIRACCL_IB_DISABLE": "1"}  # the same text on hosts with such ports
    for rank, (text, transports) in enumerate(run_ranks(summaries, 2, env=env)):
        assert text.splitlines() == [
            f"rank {rank} of 2: shared memory with {1 - rank}",
            f"  to {1 - rank}: shm, same host (not tcp: shm is preferred; {NO_VERBS})",
        ]
        assert transports == {f"shm to {1 - rank} (same host)"}


def summaries() -> tuple[str, set[str]]:
    with miraccl.init() as comm:
        candidates = comm.explain("all_reduce", 1024)
        return comm.summary(), {candidate.transports for candidate in candidates}


def test_connections_of_gpus() -> None:
    text = summary.describe_gpu(
        1, 3, {0: "vmm", 2: "host", 3: "vmm"}, (0, 2, 1, 3), "as searched", 128
    )
    assert (
        text == "rank 1 on GPU 3: vmm with 0 3; host with 2; ring 0 2 1 3 (as searched); "
        "kernels take up to 128 multiprocessors"
    )
    assert summary.describe_gpu(0, 0, {}, (0,), "one", 8).startswith("rank 0 on GPU 0: alone; ")


@pytest.mark.multiprocess
def test_each_rank_logs_each_communicator() -> None:
    command = [warm_python(), "-m", "miraccl", "run", "-n", "2", "--", warm_python(), "-c", PROGRAM]
    for level, lines in (("info", 4), ("warn", 0)):
        env = {**os.environ, "MIRACCL_DEBUG": level, "MIRACCL_DEBUG_SUBSYS": "init"}
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
        for rank in range(2):
            assert (
                done.stderr.count(f": rank {rank} of 2: shared memory with {1 - rank}\n")
                == lines // 2
            )


@pytest.mark.parametrize(("level", "lines"), [("warn", 0), ("info", 1)])
def test_summary_is_formatted_only_at_info_level(
    level: str, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(summary, "describe_rank", lambda rank, *_: made.append(rank))
    monkeypatch.setattr(
        trace.logger("init"), "isEnabledFor", lambda wanted: trace.LEVELS[level] <= wanted
    )
    miraccl.init().finalize()
    assert len(made) == lines
