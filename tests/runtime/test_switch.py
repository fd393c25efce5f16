"""Software switches: `miraccl aggregator --listen` as a process, and communicators that use it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from miraccl.bootstrap.switch import SwitchRequest, parse_address
from miraccl.errors import InvalidUsage
from miraccl.planning.nccl_hints import collnet_hints
from miraccl.types import Collective
from tests.runtime import switch_ranks
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess
SECRET = "switch test"


@contextmanager
def switch(most: int = 8) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a switch; yield its address and process."""
    command = [sys.executable, "-m", "miraccl", "aggregator", "--listen", "127.0.0.1:0"]
    environ = {**os.environ, "MIRACCL_SECRET": SECRET}
    process = subprocess.Popen(
        [*command, "--most", str(most)], env=environ, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "listens at 127.0.0.1:" in line, line
        yield line.rsplit(None, 1)[1], process
    finally:
        process.terminate()
        process.communicate(timeout=10)


def environ(address: str) -> dict[str, str]:
    return {
        "MIRACCL_SWITCH": address,
        "MIRACCL_SECRET": SECRET,
        "MIRACCL_AGGREGATION": "always",
    }


def test_operations_of_two_communicators() -> None:
    with switch() as (address, _):
        results = run_ranks(switch_ranks.operations, 2, env=environ(address))
    assert results == [["star", "star_gather", "star_scatter"]] * 2


def test_collnet_is_executed() -> None:
    """A collective whose plan is CollNet runs through the switch, without a measurement."""
    with switch() as (address, _):
        asked = {"NCCL_ALGO": "allreduce:CollNetChain"}
        for mode in ("auto", "never"):
            env = environ(address) | asked | {"MIRACCL_AGGREGATION": mode}
            for sums, gathers in run_ranks(switch_ranks.collnet, 2, env=env):
                through = sums == ("star", "aggregators were requested (NCCL_ALGO=CollNetChain)")
                assert through is (mode == "auto")
                if mode == "never":
                    assert "star" not in gathers[0]


def test_collnet_hints() -> None:
    assert collnet_hints("allreduce:CollNetDirect") == {Collective.ALL_REDUCE: "CollNetDirect"}
    assert set(collnet_hints("CollNetChain,CollNetDirect").values()) == {"CollNetDirect"}
    assert collnet_hints("Ring,CollNetDirect") == collnet_hints("^Ring") == {}
    assert collnet_hints("nonsense") == {}


def test_death(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with switch() as (address, process):
        pid_file.write_text(str(process.pid))
        results = run_ranks(switch_ranks.death, 2, str(pid_file), env=environ(address))
    for before, text, total, after in results:
        assert before == "star"
        assert text.startswith("PeerDied")
        assert "aggregator 0 ended" in text
        assert total == [2.0] * 3
        assert after != "star"


def test_refused() -> None:
    with switch(most=1) as (address, _):
        first, second = run_ranks(switch_ranks.refused, 2, "another", env=environ(address))
        assert "AuthenticationError" in first
        assert "secret" in second
        results = run_ranks(switch_ranks.full, 2, env=environ(address))
    for text in results:
        assert "it serves 1 communicators, the most that it may" in text


def test_addresses() -> None:
    assert parse_address("[::1]:80") == ("::1", 80)
    for text in ("a", "a:0", ":80", "a:65536", "a:b"):
        with pytest.raises(InvalidUsage, match=r"expected HOST:PORT"):
            parse_address(text)
    with pytest.raises(InvalidUsage, match="does not start with"):
        SwitchRequest(unique_id="no", rank=2, nranks=3, aggregators=1)
