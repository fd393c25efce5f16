"""Communicators over TCP: simulated hosts, mixed transports, network namespaces, unauthenticated
peers.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import miraccl
from miraccl.bootstrap.link import SocketLink
from miraccl.bootstrap.session import LinkSession
from miraccl.errors import PeerDied
from miraccl.schedule import catalog
from miraccl.transport.base import FifoPair
from miraccl.transport.socket import ConnectInfo, SocketTransport
from tests.diagnosis import fault_ranks
from tests.runtime import sweep_ranks
from tests.runtime.test_collectives import ALGORITHMS, COUNTS, once
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
seeds = st.integers(0, 1 << 30)


@pytest.mark.parametrize(("nranks", "ranks_per_host"), [(2, 1), (3, 1), (4, 2), (5, 2), (5, 4)])
@once
@given(seed=seeds)
def test_collectives_between_hosts(nranks: int, ranks_per_host: int, seed: int) -> None:
    """Hosts are uneven as well: the last has one rank, whose slots would be larger."""
    run_ranks(sweep_ranks.random_cases, nranks, seed, 25, "", False, COUNTS, True, ranks_per_host)


@pytest.mark.parametrize(
    "algo", [a for a in ALGORITHMS if not catalog.get(a).needs_addressable_memory]
)
@once
@given(seed=seeds)
def test_every_algorithm_between_hosts(algo: str, seed: int) -> None:
    run_ranks(sweep_ranks.random_cases, 4, seed, 6, algo, False, COUNTS, True, 2)


def large(ranks_per_host: int) -> None:
    """Run messages of several network pieces and odd sizes over both transports."""
    sweep_ranks.act_as_hosts(ranks_per_host)
    with miraccl.init(timeout=30) as comm:
        n, r = comm.nranks, comm.rank
        names = [choice.name for choice in comm._core.fabric.choices.values()]
        assert names.count("shm") == ranks_per_host - 1
        assert names.count("tcp") == n - ranks_per_host
        x = np.arange(5_000_001, dtype=np.float32) % 1000 + r
        out = np.zeros_like(x)
        comm.sendrecv(x, (r + 1) % n, out, (r - 1) % n)
        assert (out == np.arange(x.size) % 1000 + (r - 1) % n).all()
        y = (np.arange(3_000_017) % 100 + r).astype(np.int32)
        comm.all_reduce(y)
        assert (y == n * (np.arange(y.size) % 100) + n * (n - 1) // 2).all()
        assert comm.local_rank == r % ranks_per_host
        for nbytes in (1 << 20, (1 << 20) + 1, (4 << 20) + 4097, (16 << 20) - 1):
            exchange_in_turn(comm, (r + n // 2) % n, nbytes)


def exchange_in_turn(comm: miraccl.Communicator, peer: int, nbytes: int) -> None:
    """Send a message to a rank and receive one: alone, then both at once."""
    mine = (np.arange(nbytes) % 251 + comm.rank).astype(np.uint8)
    theirs = (np.arange(nbytes) % 251 + peer).astype(np.uint8)
    out, both = np.zeros_like(mine), np.zeros_like(mine)
    if comm.rank < peer:
        comm.send(mine, peer)
        comm.recv(out, peer)
    else:
        comm.recv(out, peer)
        comm.send(mine, peer)
    assert (out == theirs).all()
    comm.sendrecv(mine, peer, both, peer)
    assert (both == theirs).all()


@pytest.mark.parametrize(("nranks", "ranks_per_host"), [(2, 1), (4, 2)])
def test_large_messages(nranks: int, ranks_per_host: int) -> None:
    run_ranks(large, nranks, ranks_per_host)


def departure_before_messages() -> None:
    """Let the notice that rank 1 has left overtake its message."""
    sweep_ranks.act_as_hosts(1)
    with miraccl.init(timeout=30) as comm:
        faults, gone = comm._core.faults, comm._core.context.gone
        x = np.full(2_000_000, float(comm.rank))
        if comm.rank == 1:
            comm.send(x, 0)
            return
        faults._peer_left(1, "for a test")
        assert not gone[1]
        comm.recv(x, 1)
        assert (x == 1).all()
        fault_ranks.wait_until(lambda: bool(gone[1]))  # its connection has ended
        with pytest.raises(PeerDied, match="rank 1 has left"):
            comm.recv(x, 1)


def test_messages_of_a_peer_that_has_left_arrive() -> None:
    run_ranks(departure_before_messages, 2)


def refused() -> str:
    sweep_ranks.act_as_hosts(1)
    with miraccl.init(algo="two_shot_put", timeout=10) as comm:
        x = np.ones(1000, np.float32)
        try:
            comm.all_reduce(x)
        except miraccl.InvalidUsage as error:
            return str(error)
        return ""


def test_addressable_algorithms_are_rejected_between_hosts() -> None:
    for text in run_ranks(refused, 2):
        assert "two_shot_put" in text
        assert "memory that peers can address" in text


# ---- strangers


GARBAGE = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    random.Random(3).randbytes(700),
    b"\0" * 64,
    b"\xff" * 4096,
)


def intrude(door: tuple[str, int], data: bytes) -> socket.socket | None:
    """Return a connection to a port that took ``data``."""
    sock = socket.socket(socket.AF_INET6 if ":" in door[0] else socket.AF_INET)
    sock.settimeout(0.2)
    try:
        sock.connect(door)
        sock.send(data)
    except OSError:
        sock.close()
        return None
    return sock


def intrude_first(strangers: list[socket.socket]) -> None:
    """Let strangers, which are added to the list, reach the ports of this rank's peers before it
    does. The transports listen only while they connect.
    """
    connect = SocketTransport.connect

    def late(transport: SocketTransport, infos: Mapping[int, bytes]) -> dict[int, FifoPair]:
        for info in infos.values():
            for door in ConnectInfo.decode(info).addresses:
                strangers.extend(filter(None, (intrude(door, data) for data in GARBAGE)))
        return connect(transport, infos)

    SocketTransport.connect = late  # type: ignore[assignment, method-assign]  # own process


def under_garbage(ranks_per_host: int) -> tuple[int, int]:
    """Send garbage from rank 0 to the ports of the job while it connects and collectives run;
    return the strangers at the control plane and at the transports.
    """
    sweep_ranks.act_as_hosts(ranks_per_host)
    strangers: list[socket.socket] = []
    if int(os.environ["MIRACCL_RANK"]) == 0:
        intrude_first(strangers)
    with miraccl.init(timeout=30) as comm:
        session = comm._core.session
        assert isinstance(session, LinkSession)
        link = session._link
        assert isinstance(link, SocketLink)
        door = link._sock.getpeername()[:2]
        done = threading.Event()
        sent = 0

        def pester() -> None:
            nonlocal sent
            rng = random.Random(3)
            kept: list[socket.socket] = []
            while not done.is_set():
                stranger = intrude(door, rng.choice(GARBAGE))
                if stranger is not None:
                    sent += 1
                    kept.append(stranger)
                if len(kept) > 30:
                    kept.pop(rng.randrange(30)).close()
            for sock in kept:
                sock.close()

        thread = threading.Thread(target=pester, daemon=True)
        if comm.rank == 0:
            thread.start()
        for turn in range(150):
            if comm.rank == 0:
                fault_ranks.wait_until(lambda: sent > turn // 10)  # noqa: B023
            x = np.full(turn * 97 + 1, float(comm.rank))
            assert (comm.all_reduce(x) == comm.nranks * (comm.nranks - 1) / 2).all()
        part = comm.split(0)  # new connections and a new meeting, with strangers at the door
        assert part is not None
        assert part.all_reduce(np.ones(3))[0] == comm.nranks
        part.finalize()
        done.set()
        if comm.rank == 0:
            thread.join(20)
            assert not thread.is_alive()
        return sent, len(strangers)


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_garbage_at_the_ports_of_a_running_communicator(ranks_per_host: int) -> None:
    sent, strangers = run_ranks(under_garbage, 2 * ranks_per_host, ranks_per_host)[0]
    assert sent > 10
    assert strangers >= 2 * len(GARBAGE) * ranks_per_host  # when it connects, and in the split


# ---- namespaces


@pytest.fixture(params=["10.78.0.{}/24", "fd78::{}/64"], ids=["IPv4", "IPv6"])
def namespaces(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, str]]:
    """Two namespaces on a veth pair: (first, second, address of the first)."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the ip command")
    names = [f"mcnet{os.getpid()}{side}" for side in "ab"]

    def ip(*words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], check=check, capture_output=True, timeout=20)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip(
                "link",
                "add",
                "eth0",
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                names[1],
            )
            for index, name in enumerate(names, 1):
                address = request.param.format(index)
                ip(
                    "-n",
                    name,
                    "addr",
                    "add",
                    address,
                    "dev",
                    "eth0",
                    *(["nodad"] if ":" in address else []),
                )
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield names[0], names[1], request.param.format(1).partition("/")[0]
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


@pytest.mark.netns
@pytest.mark.parametrize("net", ["tcp", "udp"])
def test_ranks_in_network_namespaces(namespaces: tuple[str, str, str], net: str) -> None:
    first, second, address = namespaces
    ranks = []
    for rank in range(4):
        env = {
            **os.environ,
            "MIRACCL_RANK": str(rank),
            "MIRACCL_NRANKS": "4",
            "MIRACCL_LOCAL_RANK": str(rank % 2),
            "MIRACCL_SECRET": "of the test",
            "MIRACCL_NET": net,
            "MIRACCL_HOSTID": f"host{rank // 2}",
            "MASTER_ADDR": address,
            "MASTER_PORT": "29431",
        }
        command = [
            "ip",
            "netns",
            "exec",
            first if rank < 2 else second,
            sys.executable,
            "-m",
            "tests.runtime.netns_rank",
        ]
        ranks.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = []
    try:
        for process in ranks:
            outputs.append(process.communicate(timeout=90)[0])
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait(10)
    family = ":" if ":" in address else "."
    for rank, (process, output) in enumerate(zip(ranks, outputs)):
        assert process.returncode == 0, output
        last = output.strip().splitlines()[-1]
        assert last.startswith("fine"), output
        near = rank ^ 1
        assert f"({near}, 'shm')" in last
        assert last.count(f", '{net}')") == 2
        assert address in last
        assert family in address
