"""Put, get and signals within a communicator, and NIXL's interface."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl.compat.nixl import nixl_agent, nixl_agent_config
from tests.support.ranks import run_ranks


def ring_of_puts() -> bool:
    with miraccl.init(timeout=20) as comm:
        memory = np.zeros(64, np.int32)
        window = comm.window(memory)
        right, left = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
        comm.put(np.full(4, comm.rank, np.int32), right, window, offset=16, signal=3)
        comm.wait_signal(left, 3)
        good = bool((memory[4:8] == left).all())
        back = comm.get(np.zeros(4, np.int32), right, window, offset=16)
        good = good and bool((back == comm.rank).all())
        comm.signal(left)
        comm.wait_signal(right)
        with pytest.raises(miraccl.InvalidUsage, match="has 256 bytes"):
            comm.put(memory, right, window, offset=4)
        with pytest.raises(miraccl.CollectiveTimeout, match="signal 9"):
            comm.wait_signal(left, 9, timeout=0.01)
        comm.barrier()
        window.close()
        return good


@pytest.mark.multiprocess
def test_a_ring_of_puts() -> None:
    assert run_ranks(ring_of_puts, 3) == [True] * 3


def test_signals_need_a_window() -> None:
    with miraccl.init() as comm, pytest.raises(miraccl.InvalidUsage, match="make a window first"):
        comm.signal(0)


def test_agents_listen_in_the_range_of_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = int(taken.getsockname()[1])
        monkeypatch.setenv("MIRACCL_NET_PORT_RANGE", f"{first}-{first + 20}")
        with miraccl.Agent("a", host="127.0.0.1", secret="s") as agent:
            assert first < int(agent.address.rpartition(":")[2]) <= first + 20


def nixl_pair() -> tuple[Any, Any]:
    config = nixl_agent_config(backends=["UCX"], transfer_timeout=10)
    return nixl_agent("a", config, secret="s"), nixl_agent("b", config, secret="s")


def test_nixl_transfers() -> None:
    a, b = nixl_pair()
    here, there = np.arange(4096, dtype=np.uint8), np.zeros(4096, np.uint8)
    a.register_memory([(here.ctypes.data, 4096, 0, "")], "DRAM")
    registered = b.register_memory([(there.ctypes.data, 4096, 0, "")], "DRAM")
    assert a.add_remote_agent(b.get_agent_metadata()) == "b"
    local = a.get_xfer_descs([(here.ctypes.data + i * 64, 64, 0) for i in range(4)], "DRAM")
    remote = a.deserialize_descs(
        b.get_serialized_descs(
            b.get_xfer_descs([(there.ctypes.data + i * 128, 64, 0) for i in range(4)], "DRAM")
        )
    )
    handle = a.initialize_xfer("WRITE", local, remote, "b", b"done")
    state = a.transfer(handle)
    while state == "PROC":
        state = a.check_xfer_state(handle)
    assert state == "DONE"
    notifications: dict[str, list[bytes]] = {}
    while not notifications:
        notifications = b.get_new_notifs()
    assert notifications == {"a": [b"done"]}
    for i in range(4):
        assert (there[i * 128 : i * 128 + 64] == here[i * 64 : i * 64 + 64]).all()
    side, other = a.prep_xfer_dlist("", local), a.prep_xfer_dlist("b", remote)
    here[:] = 0
    prepared = a.make_prepped_xfer("READ", side, [1], other, [2])
    while a.transfer(prepared) == "PROC":
        pass
    assert (here[64:128] == there[256:320]).all()
    assert a.estimate_xfer_cost(prepared)[0] > 0
    b.deregister_memory(registered)
    before = there.copy()
    assert a.transfer(handle) == "ERR", "a deregistered range is refused, not written"
    assert (there == before).all()
    with pytest.raises(miraccl.InvalidUsage, match="has not registered"):
        a.initialize_xfer("READ", local, a.get_xfer_descs([(8, 64, 0)] * 4, "DRAM"), "b")
    a.send_notif("b", b"bye")
    while not (notifications := b.get_new_notifs()):
        pass
    a.release_xfer_handle(handle)
    a.remove_remote_agent("b")
    for agent in (a, b):
        agent.close()
