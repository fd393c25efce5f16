"""Verbs transport on Soft-RoCE: the conformance kit, failed queue pairs and rails, real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from miraccl.native.verbs_abi import load_library
from miraccl.topo.hca import Hca, Port, read_hcas
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.transport.registry import VERBS
from miraccl.transport.verbs import VerbsOptions
from miraccl.transport.verbs_device import VerbsDevice
from miraccl.transport.verbs_flush import FLUSHABLE, FlushQueue
from miraccl.transport.verbs_gpu_memory import GpuRegistration
from miraccl.transport.verbs_packets import PairKind
from miraccl.wire.verbs.flush import FlushMethod
from tests.runtime.test_gpu_direct import Ranks, exchange
from tests.transport.conformance import TransportConformance
from tests.transport.test_verbs import transfer
from tests.transport.verbs_world import VerbsWorld, build_ranks

ROOT = Path(__file__).resolve().parents[2]


def rails(rank: int) -> list[tuple[Hca, Port]]:
    """Return the ports of a rank: rxe<rank> and rxe<rank>r<rail>, as ``lab rdma`` names them."""
    return [
        (hca, hca.ports[0])
        for hca in read_hcas()
        if hca.name.partition("r")[0] == "" and hca.name[3:].partition("r")[0] == str(rank)
    ]


def build(nranks: int, count: int = 1, **options: object) -> VerbsWorld:
    world = VerbsWorld(transports={})
    available = {int(h.name[3:].partition("r")[0]) for h in read_hcas()}
    # Three ranks on two devices: two of them share one.
    ports = [rails(rank % len(available))[:count] for rank in range(nranks)]
    build_ranks(world, load_library(), ports, **options)  # type: ignore[arg-type]
    return world


class TestSoftRoce(TransportConformance):
    spec = VERBS

    def build(self, nranks: int) -> VerbsWorld:
        return build(nranks)


def test_messages_in_place_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of GPU memory, on host memory: messages wait for their CTS, a read flushes."""
    monkeypatch.setenv("MIRACCL_NET_FORCE_FLUSH", "1")
    ranks = Ranks(
        world=build(2, 2, options=VerbsOptions(in_place_only=True)),
        way=GpuRegistration.PEER_MEMORY,
    )
    try:
        exchange(ranks, [1, 32, 33, 64, 100_001, 400_000], rounds=3)
        exchange(ranks, [100] * 50)
    finally:
        ranks.close()


class TestSoftRoceTwoRails(TransportConformance):
    spec = VERBS

    def build(self, nranks: int) -> VerbsWorld:
        return build(nranks, 2, options=VerbsOptions(qps_per_connection=2))


class TestSoftRoceUd(TransportConformance):
    spec = VERBS

    def build(self, nranks: int) -> VerbsWorld:
        return build(nranks, kind=PairKind.UD)


class TestSoftRoceUc(TransportConformance):
    spec = VERBS

    def build(self, nranks: int) -> VerbsWorld:
        return build(nranks, 2, kind=PairKind.UC)


@pytest.mark.parametrize("kind", list(PairKind))
def test_unreliable_pair_that_fails_is_used_again(kind: PairKind) -> None:
    world = build(2, 2, kind=kind, options=VerbsOptions(qps_per_connection=1))
    try:
        world.connect()
        transfer(world, 1 << 18)
        for pairs in world.transports[0]._pairs.values():  # type: ignore[attr-defined]
            pairs[0].to_error()
        transfer(world, 1 << 18, count=2, seed=3)
        assert world.losses == {0: [], 1: []}
    finally:
        world.close()


@pytest.mark.parametrize("method", [FlushMethod.READ, FlushMethod.ATOMIC])
def test_flush(method: FlushMethod) -> None:
    ((hca, port),) = rails(0)[:1]
    device = VerbsDevice.open(load_library(), hca, port)
    try:
        memory = PrivateMemory(4096)
        memory_at(memory.address, 4096)[:] = b"x" * 4096
        rkey = device.register(memory.address, 4096, FLUSHABLE)[1]
        queue = FlushQueue(device, method)
        queue.open()
        queue.flush(memory.address, 4096, rkey)
        queue.close()
        assert bytes(memory_at(memory.address, 4096)) == b"x" * 4096
    finally:
        device.close()


@pytest.fixture
def pair() -> Iterator[VerbsWorld]:
    world = build(2, 2, options=VerbsOptions(qps_per_connection=1))
    world.connect()
    yield world
    world.close()


def test_queue_pair_killed_in_a_message(pair: VerbsWorld) -> None:
    """The data are right within a second, and the queue pair comes back."""
    transfer(pair, 1 << 20)
    conn = pair.transports[0]._connections[1]  # type: ignore[attr-defined]
    start = time.monotonic()
    conn.qps[0].to_error()
    transfer(pair, 1 << 20, count=2, seed=3)
    assert time.monotonic() - start < 5
    pair.wait(
        lambda: [pair.engines[r].routes(1 - r) for r in (0, 1)] == [[0, 1]] * 2, "it stays away"
    )
    transfer(pair, 1 << 20)
    assert pair.losses == {0: [], 1: []}


def test_rail_that_goes_down_and_comes_back(pair: VerbsWorld) -> None:
    transfer(pair, 1 << 20)
    subprocess.run(["ip", "link", "set", "r0r1", "down"], check=True)
    try:
        transfer(pair, 1 << 20, count=2, seed=7)
    finally:
        subprocess.run(["ip", "link", "set", "r0r1", "up"], check=True)
    transfer(pair, 1 << 20, count=2, seed=11)
    assert pair.losses == {0: [], 1: []}


PROGRAM = """
import os
import numpy as np, miraccl
from miraccl.executor.cpu.kernels import layout
os.environ["MIRACCL_HOSTID"] = "host" + os.environ["MIRACCL_RANK"]
os.environ["MIRACCL_IB_HCA"] = "=rxe" + os.environ["MIRACCL_RANK"]
with miraccl.init() as comm:
    for n in (1, 1000, 300_000):
        x = np.arange(n, dtype=np.float32) + comm.rank
        comm.all_reduce(x)
        assert (x == np.arange(n, dtype=np.float32) * comm.nranks + 1).all()
    summary = str(comm.summary())
    assert "verbs" in summary, summary
    assert comm._core.context.get(layout.CTX_DRIVE) != 0
print("right")
"""


@pytest.mark.parametrize("kind", ["rc", "uc", "ud"])
def test_collectives_of_two_processes(tmp_path: Path, kind: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "miraccl", "run", "-n", "2", str(program)],
        cwd=ROOT,
        env={
            "PYTHONPATH": str(ROOT / "src"),
            "PATH": "/usr/bin:/bin",
            "MIRACCL_NET": "verbs",
            "MIRACCL_IB_QP_TYPE": kind,
            # compiled code of the host; without it each kind compiles for a minute
            **{k: v for k, v in os.environ.items() if k == "MIRACCL_CACHE_DIR"},
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == 2
