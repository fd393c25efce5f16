"""Transfers between two processes of one host, by shared memory and by TCP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl.native.atomics import store_release
from miraccl.p2p import segment_layout as layout
from miraccl.p2p.descriptors import RemoteMemory
from miraccl.p2p.notify import Notification
from miraccl.transport.region import Rights
from tests.p2p.kit import Remote, RemoteError, remote_agent

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module", params=["job", "target"])
def trust(request: pytest.FixtureRequest) -> str:
    """Trust of both agents: with ``target`` all transfers go by TCP."""
    return str(request.param)


@pytest.fixture(scope="module")
def target(trust: str) -> Iterator[Remote]:
    with remote_agent(MIRACCL_P2P_TRUST=trust) as remote:
        yield remote


@pytest.fixture
def agent(trust: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[miraccl.Agent]:
    monkeypatch.setenv("MIRACCL_P2P_TRUST", trust)
    with miraccl.Agent("initiator", secret="test", timeout=10) as made:
        yield made


@pytest.fixture
def shared(trust: str) -> None:
    """For tests of shared memory between agents."""
    if trust == "target":
        pytest.skip("with trust in the target alone there is no shared memory")


def method(trust: str, window: bool) -> str:
    return "tcp" if trust == "target" else "window" if window else "process"


def numbered(nbytes: int) -> Any:
    return (np.arange(nbytes) % 241).astype(np.uint8)


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("nbytes", [1, 4097, 3 << 20, 17 << 20])
def test_write_and_read(
    target: Remote, agent: miraccl.Agent, trust: str, window: bool, nbytes: int
) -> None:
    blob = target.offer("x", (nbytes,), window=window)
    with agent.connect(target.address) as peer:
        data = numbered(nbytes)
        transfer = peer.write(data, blob, notify=b"written")
        assert transfer.explain().method == method(trust, window)
        transfer.wait()
        assert target.call("checksum", name="x") == zlib.crc32(data.tobytes())
        got = target.call("notification")
        assert got == {
            "peer": "initiator",
            "tag": transfer.number,
            "data": b"written".hex(),
            "error": None,
        }
        back = np.zeros_like(data)
        peer.read(back, blob).wait()
        assert (back == data).all()
    target.call("deregister", name="x")


@pytest.mark.parametrize("window", [False, True])
def test_blocks(target: Remote, agent: miraccl.Agent, window: bool) -> None:
    blob = target.offer("kv", (40, 64), window=window)
    local = np.repeat(np.arange(30, dtype=np.uint8)[:, None], 64, 1)
    src, dst = [3, 4, 5, 9, 1], np.array([11, 12, 13, 0, 39], np.int32)
    with agent.connect(target.address) as peer:
        transfer = peer.writev(local, blob, src_blocks=src, dst_blocks=dst)
        transfer.wait()
        plan = transfer.explain()
        assert (plan.blocks, plan.extents) == (5, 3)
        plan.verify()
        assert peer.explain_write(local, blob, src_blocks=src, dst_blocks=dst).schedule.dump() == (
            plan.schedule.dump()
        )
        reading = peer.explain_read(
            local[:3].copy(), blob, src_blocks=[4, 5, 9], dst_blocks=[2, 1, 0]
        )
        assert reading.schedule.nbytes == 192
        assert reading.extents == 3
        expected = np.zeros((40, 64), np.uint8)
        expected[dst] = local[src]
        assert target.call("bytes", name="kv") == expected.tobytes().hex()
        back = np.zeros((3, 64), np.uint8)
        peer.readv(back, blob, src_blocks=slice(11, 14), dst_blocks=range(3)).wait()
        assert (back == local[3:6]).all()
        prepared = peer.prepare("write", local, blob, local_blocks=[7], remote_blocks=[20])
        for _ in range(3):
            prepared.start().wait()
        assert bytes.fromhex(target.call("bytes", name="kv"))[20 * 64] == 7


@pytest.mark.parametrize("nbytes", [100, 2048, 5000])
def test_windows_of_any_alignment(
    shared: None, target: Remote, agent: miraccl.Agent, nbytes: int
) -> None:
    """Targets up to 40 bytes behind the source, modulo a page: some are copied by vectors."""
    blob = RemoteMemory.decode(target.offer("w", (3 * 4096,), window=True))
    peer = agent.connect(target.address)
    memory = agent.empty(3 * 4096)
    for shift in (0, 1, 7, 16, 31, 32, 40):
        local = memory[shift : shift + nbytes]
        for start in (0, 3, 48):
            remote = replace(blob, offset=start, nbytes=nbytes, block_nbytes=nbytes)
            local[:] = numbered(nbytes) + shift
            peer.write(local, remote).wait()
            expected = bytes(local)
            memory[:] = 255
            peer.read(local, remote).wait()
            assert bytes(local) == expected
            assert (memory[shift + nbytes :] == 255).all()
            assert (memory[:shift] == 255).all()


@pytest.mark.parametrize("one_core", [False, True])
def test_round_trips(target: Remote, agent: miraccl.Agent, one_core: bool) -> None:
    """Both sides on one core: a receiver that polls would keep the sender from running."""
    cores, count = os.sched_getaffinity(0), 20
    try:
        if one_core:
            for pid in (0, target.pid):
                os.sched_setaffinity(pid, [min(cores)])
        peer = agent.connect(target.address)
        target.call("start_echo", address=agent.address, count=count)
        ready = agent.wait_notification()
        assert ready is not None
        assert ready.data == b"ready"
        for number in range(count):
            data = bytes([number]) * (number * 700)
            peer.notify(data)
            found = agent.wait_notification()
            assert found is not None
            assert type(found) is Notification
            assert (found.peer, found.tag, found.data, found.error) == ("target", 0, data, None)
            assert hash(found) == hash(tuple(found))
    finally:
        for pid in (0, target.pid):
            os.sched_setaffinity(pid, cores)


def test_rows_of_a_descriptor(target: Remote, agent: miraccl.Agent) -> None:
    remote = RemoteMemory.decode(target.offer("rows", (8, 16)))
    with agent.connect(target.address) as peer:
        peer.write(np.full(32, 5, np.uint8), remote.rows(2, 4)).wait()
    expected = np.zeros((8, 16), np.uint8)
    expected[2:4] = 5
    assert target.call("bytes", name="rows") == expected.tobytes().hex()
    with pytest.raises(miraccl.InvalidUsage, match="has 8 rows"):
        remote.rows(4, 9)


def test_requests_that_are_refused(target: Remote, agent: miraccl.Agent) -> None:
    remote = RemoteMemory.decode(target.offer("guarded", (100,), access="r"))
    data = np.zeros(100, np.uint8)
    with agent.connect(target.address) as peer:
        with pytest.raises(miraccl.InvalidUsage, match="right"):
            peer.write(data, remote).wait()
        with pytest.raises(miraccl.InvalidUsage, match="local has 99 bytes, remote 100"):
            peer.read(data[:99], remote)
        with pytest.raises(miraccl.InvalidUsage, match=r"rang|outside the region of 100"):
            peer.read(data, replace(remote, offset=1)).wait()
        # A descriptor that was changed to claim a right: the owner's table decides.
        with pytest.raises(miraccl.InvalidUsage, match="right"):
            peer.write(data, replace(remote, rights=Rights.WRITE)).wait()
        with pytest.raises(miraccl.StaleDescriptor) as caught:
            peer.read(data, replace(remote, key=bytes(16))).wait()
        assert caught.value.reason == "key"
        with pytest.raises(miraccl.StaleDescriptor, match="deregistered"):
            peer.read(data, replace(remote, generation=remote.generation + 2)).wait()
        with pytest.raises(miraccl.AgentLost, match="another process"):
            peer.read(data, replace(remote, agent=bytes(32)))
        for blocks in ([[0], [100]], [[-1], [0]]):
            with pytest.raises(miraccl.InvalidUsage, match="entry 0 of the list is"):
                peer.readv(data, remote, src_blocks=blocks[1], dst_blocks=blocks[0])
        with pytest.raises(miraccl.InvalidUsage, match="block 7 is the target of two"):
            peer.readv(data, remote, src_blocks=[1, 2], dst_blocks=[7, 7])


def test_stale_after_registration_at_the_same_address(target: Remote, agent: miraccl.Agent) -> None:
    old = target.offer("again", (64,))
    with agent.connect(target.address) as peer:
        prepared = peer.prepare("write", np.full(64, 1, np.uint8), old)
        target.call("deregister", name="again")
        new = bytes.fromhex(target.call("register", name="again"))
        with pytest.raises(miraccl.StaleDescriptor):
            prepared.start().wait()
        with pytest.raises(miraccl.StaleDescriptor):
            peer.write(np.full(64, 1, np.uint8), old).wait()
        assert target.call("bytes", name="again") == "00" * 64
        peer.write(np.full(64, 2, np.uint8), new).wait()
        assert target.call("bytes", name="again") == "02" * 64


@pytest.mark.parametrize("nbytes", [256, 1 << 16])
def test_deregister_under_a_flood(
    target: Remote, agent: miraccl.Agent, trust: str, nbytes: int
) -> None:
    """No byte arrives after ``deregister`` has returned, even among 100,000 short transfers."""
    memory = np.zeros(nbytes, np.uint8)
    registration = agent.register(memory)
    target.call("connect", address=agent.address)
    target.call("make", name="flood", shape=[nbytes], dtype="uint8", window=False)
    target.call("fill", name="flood", value=1)
    target.call(
        "start_flood", address=agent.address, blob=registration.advertise().hex(), name="flood"
    )
    wanted = 1 if nbytes > 256 else 100_000 if trust == "job" else 1_000
    while target.call("flood_count") < wanted:
        pass
    registration.deregister()
    memory[:] = 0
    result = target.call("end_flood")
    assert result["error"] == "StaleDescriptor"
    assert result["done"] >= wanted
    assert not memory.any()


def test_deregister_names_a_stopped_peer(shared: None, agent: miraccl.Agent) -> None:
    """A peer that is stopped in the middle of an access is named; its end releases the memory."""
    memory = np.zeros(1 << 26, np.uint8)
    with remote_agent("stopped") as other:
        other.call("connect", address=agent.address)
        (pair,) = agent._inbox.pairs
        registration = agent.register(memory)
        # Deterministic stand-in for a stop within the copy: its access line stays announced.
        other.signal(signal.SIGSTOP)
        store_release(pair.address, registration.slot + 1)
        with pytest.raises(miraccl.TransferTimeout, match="'stopped' still accesses"):
            registration.deregister(timeout=0.05)
        other.signal(signal.SIGKILL)
        registration.deregister(timeout=5)
        got = agent.wait_notification(5)
        assert got is not None
        assert isinstance(got.error, miraccl.AgentLost)


def test_killed_target(agent: miraccl.Agent) -> None:
    with remote_agent("killed") as other:
        blob, window = other.offer("x", (64,)), other.offer("w", (64,), window=True)
        peer = agent.connect(other.address)
        data = np.zeros(64, np.uint8)
        peer.write(data, blob).wait()
        other.signal(signal.SIGKILL)
        while peer.lost is None:
            pass
        for remote in (blob, window):
            with pytest.raises(miraccl.AgentLost):
                peer.write(data, remote).wait()
        with pytest.raises(miraccl.AgentLost):
            peer.notify(b"x" * 1000)


def test_restarted_target_needs_a_new_descriptor(agent: miraccl.Agent) -> None:
    with remote_agent("first") as first:
        blob = first.offer("x", (64,))
    with remote_agent("second") as second:
        peer = agent.connect(second.address)
        with pytest.raises(miraccl.AgentLost):
            peer.write(np.zeros(64, np.uint8), blob)


def test_full_ring_has_a_deadline(shared: None, agent: miraccl.Agent) -> None:
    with remote_agent("reader") as other, agent.connect(other.address) as peer:
        for _ in range(layout.RING_BYTES // 8016):
            peer.notify(bytes(8000))
        with pytest.raises(miraccl.TransferTimeout, match="has not read its notifications"):
            peer.notify(bytes(8000), deadline=0.05)
        assert other.call("notification")["data"] == "00" * 8000
        with pytest.raises(miraccl.InvalidUsage, match="allowed are up to"):
            peer.notify(bytes(1 << 20))


def test_cancelled_and_late_transfers_are_told(target: Remote, agent: miraccl.Agent) -> None:
    nbytes = 64 << 20
    blob = target.offer("large", (nbytes,))
    data = np.full(nbytes, 9, np.uint8)
    with agent.connect(target.address) as peer:
        transfer = peer.write(data, blob, notify=b"a")
        cancelled = transfer.cancel()
        if cancelled:
            assert isinstance(transfer.exception(), miraccl.TransferCancelled)
            before = target.call("checksum", name="large")
            kind, _, block, reason = target.call("notification")["error"]
            assert (kind, reason) == ("TransferCancelled", "cancelled")
            assert block >= 0
            assert target.call("checksum", name="large") == before
        late = peer.write(data, blob, deadline=1e-4)
        assert isinstance(late.exception(), miraccl.TransferTimeout)
        with pytest.raises(miraccl.TransferTimeout):
            late.wait()
    target.call("deregister", name="large")


def test_await(target: Remote, agent: miraccl.Agent) -> None:
    blob = target.offer("awaited", (8 << 20,))

    async def run() -> None:
        with agent.connect(target.address) as peer:
            await peer.write(np.full(8 << 20, 3, np.uint8), blob)
            with pytest.raises(miraccl.TransferTimeout):
                await peer.write(np.full(8 << 20, 3, np.uint8), blob, deadline=1e-5)

    asyncio.run(run())


def test_a_wrong_secret_is_refused(target: Remote) -> None:
    with (
        miraccl.Agent("stranger", secret="other", timeout=5) as stranger,
        pytest.raises(miraccl.AuthenticationError, match="another secret"),
    ):
        stranger.connect(target.address)


def test_read_only_windows_are_mapped_read_only(
    shared: None, target: Remote, agent: miraccl.Agent
) -> None:
    blob = target.offer("ro", (4096,), window=True, access="r")
    with agent.connect(target.address) as peer:
        peer.read(np.zeros(4096, np.uint8), blob).wait()
        address = next(iter(peer._path._windows.values())).address
        assert protection_of(address) == "r--s"


def protection_of(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, protection, *_ = line.split()
        start, end = (int(text, 16) for text in bounds.split("-"))
        if start <= address < end:
            return protection
    raise AssertionError("the address is not mapped")


def test_a_closed_agent_wakes_no_other_file() -> None:
    """The number of its eventfd may be another file's by now."""
    agent = miraccl.Agent("closed", secret="s")
    before = agent._control._wake
    agent.close()
    made = os.eventfd(0, os.EFD_NONBLOCK)
    other = made if made == before else os.dup2(made, before)
    try:
        with socket.socket() as sock:
            agent._control.forget(sock)
        agent.close()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        for fd in {made, other}:
            os.close(fd)


def test_arguments_of_an_agent() -> None:
    with pytest.raises(miraccl.InvalidUsage, match="secret"):
        miraccl.Agent("x", secret=b"short")
    with pytest.raises(miraccl.InvalidUsage, match="name"):
        miraccl.Agent("", secret="s")
    with miraccl.Agent("x", secret="s") as made:
        with pytest.raises(miraccl.InvalidUsage, match="host:port"):
            made.connect("nowhere")
        with pytest.raises(miraccl.InvalidUsage, match="not contiguous"):
            made.register(np.zeros((4, 4))[:, ::2])
        with pytest.raises(miraccl.InvalidUsage, match="'r', 'w' and 'rw'"):
            made.register(np.zeros(4), "x")
    with pytest.raises(miraccl.InvalidUsage, match="is closed"):
        made.register(np.zeros(4))


def test_errors_of_commands_are_raised(target: Remote) -> None:
    with pytest.raises(RemoteError, match="KeyError"):
        target.call("bytes", name="absent")
