"""Ranks on two hosts: network namespaces joined by a veth pair, with addresses of their own and a
link that can be cut.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.bootstrap.kit import PATIENCE

pytestmark = [pytest.mark.netns, pytest.mark.multiprocess]

_A, _B = f"mcbs{os.getpid()}a", f"mcbs{os.getpid()}b"

#: A rank: meets as its environment says, tells what it sees as JSON lines, ends when its input
#: does.
_RANK = """
import json, os, sys
from miraccl.bootstrap import PeerLeft, PeerLost, UniqueId
from miraccl.bootstrap import connect, create_hub, detect_launch, join_launch
def tell(**fields): print(json.dumps(fields), flush=True)
if os.environ.get("TEST_ROOT"):
    unique_id, root = create_hub()
    tell(unique_id=str(unique_id), hosts=[host for host, _ in unique_id.addresses])
    os.environ["MIRACCL_UNIQUE_ID"] = str(unique_id)
try:
    session = join_launch(detect_launch(os.environ), 60.0)
except Exception as error:
    tell(error=type(error).__name__, text=str(error))
    sys.exit(0)
session.on_event(lambda event: tell(event=type(event).__name__, rank=getattr(event, "rank", None)))
parts = [p.decode() for p in session.all_gather(b"r%d" % session.rank, "x")]
tell(addresses=session.addresses, hosts=len(set(session.hosts)), parts=parts)
sys.stdin.read()
session.close()
"""


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, timeout=PATIENCE)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces: eth0 10.77.0.1/.2 and fd77::1/::2 on a veth pair, and a docker0 that leads
    nowhere in each.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the ip command")
    _remove_stale()
    try:
        _ip("netns", "add", _A)
        _ip("netns", "add", _B)
        _ip("link", "add", "eth0", "netns", _A, "type", "veth", "peer", "name", "eth0", "netns", _B)
        for index, name in enumerate((_A, _B), 1):
            for words in (
                f"addr add 10.77.0.{index}/24 dev eth0",
                f"addr add fd77::{index}/64 dev eth0 nodad",
                "link add docker0 type veth peer name veth0",
                "link set veth0 up",
                f"addr add 172.31.{index}.1/24 dev docker0",
                "link set eth0 up",
                "link set docker0 up",
                "link set lo up",
            ):
                _ip("-n", name, *words.split())
    except (subprocess.SubprocessError, OSError) as error:
        _remove()
        pytest.skip(f"network namespaces are not possible here: {error}")
    yield _A, _B
    _remove()


def _remove() -> None:
    for name in (_A, _B):
        _ip("netns", "del", name, check=False)


def _remove_stale() -> None:
    """Namespaces of a test run that was killed."""
    names = subprocess.run(
        ["ip", "netns", "list"], check=False, capture_output=True, text=True, timeout=PATIENCE
    ).stdout.split()
    for name in names:
        pid = name.removeprefix("mcbs")[:-1]
        if name.startswith("mcbs") and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            _ip("netns", "del", name, check=False)


class _Rank:
    def __init__(self, host: str, **environ: str) -> None:
        command = ["ip", "netns", "exec", host, sys.executable, "-c", _RANK]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environ},
            text=True,
            bufsize=1,
        )

    def tells(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        assert ready, "a rank says nothing"
        line = self.process.stdout.readline()
        assert line, "a rank ended without a word"
        result: dict[str, Any] = json.loads(line)
        return result

    def hang_up(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def end(self) -> None:
        try:
            self.process.wait(20.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start() -> Iterator[Any]:
    ranks: list[_Rank] = []

    def make(host: str, rank: int, nranks: int, **environ: str) -> _Rank:
        ranks.append(_Rank(host, RANK=str(rank), WORLD_SIZE=str(nranks), **environ))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.hang_up()
    for rank in ranks:
        rank.end()


def test_two_hosts_meet_with_a_unique_id(hosts, start):
    first = start(hosts[0], 0, 3, TEST_ROOT="1")
    root = first.tells()
    assert root["hosts"] == ["10.77.0.1", "fd77::1", "127.0.0.1"]  # not docker0
    others = [start(hosts[1], rank, 3, MIRACCL_UNIQUE_ID=root["unique_id"]) for rank in (1, 2)]
    for rank in (first, *others):
        assert rank.tells() == {
            "addresses": ["10.77.0.1", "10.77.0.2", "10.77.0.2"],
            "hosts": 2,
            "parts": ["r0", "r1", "r2"],
        }
    others[0].process.kill()
    for rank in (first, others[1]):
        assert rank.tells() == {"event": "PeerLost", "rank": 1}
    first.process.kill()
    assert others[1].tells() == {"event": "PeerLost", "rank": 0}


@pytest.mark.parametrize(
    ("address", "expected"),
    [("10.77.0.1", ["10.77.0.1", "10.77.0.2"]), ("fd77::1", ["fd77::1", "fd77::2"])],
    ids=["v4", "v6"],
)
def test_two_hosts_meet_at_a_master_address(hosts, start, address, expected):
    common = {"MASTER_ADDR": address, "MASTER_PORT": "29500"}
    ranks = [start(hosts[1], 1, 2, **common), start(hosts[0], 0, 2, **common)]
    for rank in ranks:
        assert rank.tells() == {"addresses": expected, "hosts": 2, "parts": ["r0", "r1"]}


def test_configured_interface_is_announced(hosts, start):
    common = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29510", "NCCL_SOCKET_IFNAME": "=docker0"}
    ranks = [start(hosts[index], index, 2, **common) for index in range(2)]
    for rank in ranks:
        assert rank.tells()["addresses"] == ["172.31.1.1", "172.31.2.1"]


def test_ranks_of_one_host_use_loopback_unless_an_interface_is_named(hosts, start):
    for environ, expected in (({}, "127.0.0.1"), ({"MIRACCL_SOCKET_IFNAME": "eth"}, "10.77.0.1")):
        port = "29520" if environ else "29530"
        ranks = [
            start(hosts[0], rank, 2, MASTER_ADDR="10.77.0.1", MASTER_PORT=port, **environ)
            for rank in range(2)
        ]
        for rank in ranks:
            assert rank.tells() == {"addresses": [expected] * 2, "hosts": 1, "parts": ["r0", "r1"]}


def test_unknown_interface_is_reported_by_its_rank(hosts, start):
    rank = start(
        hosts[0], 0, 2, MASTER_ADDR="10.77.0.1", MASTER_PORT="29540", MIRACCL_SOCKET_IFNAME="wlan"
    )
    told = rank.tells()
    assert told["error"] == "InvalidUsage"
    assert (
        "available: lo, docker0, eth0" in told["text"]
        or "available: lo, eth0, docker0" in told["text"]
    )


def test_loopback_of_another_host_is_skipped(hosts, start):
    """A root that only listens on loopback is out of reach, and that is said at once."""
    first = start(hosts[0], 0, 2, TEST_ROOT="1", MIRACCL_SOCKET_IFNAME="lo")
    root = first.tells()
    assert set(root["hosts"]) <= {"127.0.0.1", "::1"}
    told = start(hosts[1], 1, 2, MIRACCL_UNIQUE_ID=root["unique_id"]).tells()
    assert told["error"] == "BootstrapError"
    assert "has only loopback addresses" in told["text"]
    first.process.kill()
