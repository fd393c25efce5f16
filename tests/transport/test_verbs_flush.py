"""Flush sequences on host memory of a simulated device."""

from __future__ import annotations

import pytest

from miraccl.errors import SystemFailure
from miraccl.native import verbs_abi as abi
from miraccl.sim.verbs import SimulatedVerbs
from miraccl.tools.doctor_verbs import common_abilities
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.transport.hca_devices import HcaCapabilities
from miraccl.transport.verbs_device import VerbsDevice
from miraccl.transport.verbs_flush import FLUSHABLE, FlushQueue, flush_facts
from miraccl.wire.verbs.flush import FlushMethod, decide_flush


@pytest.fixture
def device():
    verbs = SimulatedVerbs(["sim0"])
    ((hca, port),) = verbs.ports("sim0")
    device = VerbsDevice.open(verbs.library, hca, port)
    yield device, verbs
    device.close()
    verbs.close()


@pytest.mark.parametrize("method", [FlushMethod.READ, FlushMethod.ATOMIC])
def test_flush(device, method):
    device, verbs = device
    requests = []
    verbs.wire.on_deliver = lambda pair, request: requests.append((request.opcode, request.remote))
    memory = PrivateMemory(4096)
    memory_at(memory.address, 4096)[:] = b"x" * 4096
    rkey = device.register(memory.address, 4096, FLUSHABLE)[1]
    queue = FlushQueue(device, method)
    queue.open()
    for nbytes in (4096, 1001, 5):
        queue.flush(memory.address, nbytes, rkey)
    assert bytes(memory_at(memory.address, 4096)) == b"x" * 4096
    read, atomic = abi.WR_RDMA_READ, abi.WR_ATOMIC_FETCH_AND_ADD
    if method is FlushMethod.READ:
        assert requests == [(read, memory.address + n - 1) for n in (4096, 1001, 5)]
    else:
        # the last aligned 8 bytes inside the buffer; 5 bytes have none
        places = [(atomic, memory.address + n) for n in (4088, 992)]
        assert requests == [*places, (read, memory.address + 4)]
    queue.close()
    queue.close()


def test_fetch_and_add_drops_the_old_value_into_a_null_region():
    """A device with ``ibv_alloc_null_mr`` needs no local word; its address is 0."""
    verbs = SimulatedVerbs(["sim0"], null_mr=True)
    ((hca, port),) = verbs.ports("sim0")
    device = VerbsDevice.open(verbs.library, hca, port)
    requests = []
    verbs.wire.on_deliver = lambda pair, request: requests.append(request)
    memory = PrivateMemory(4096)
    rkey = device.register(memory.address, 4096, FLUSHABLE)[1]
    before = len(verbs.wire.regions)
    queue = FlushQueue(device, FlushMethod.ATOMIC)
    queue.open()
    queue.flush(memory.address, 4096, rkey)
    queue.flush(memory.address, 5, rkey)  # has no aligned word: a read, which needs a byte
    assert [request.segments[0][0] == 0 for request in requests] == [True, False]
    queue.close()
    assert len(verbs.wire.regions) == before
    device.close()
    verbs.close()


def test_null_region_is_not_made_without_the_table(device):
    device, _ = device
    assert device.make_null_registration() == 0


@pytest.mark.parametrize(
    ("abilities", "method"),
    [
        ([], "read"),
        ([{"null_mr": True}], "atomic"),
        ([{"null_mr": True}, {}], "read"),
        ([{"null_mr": True, "data_direct": True}], "data direct"),
    ],
)
def test_doctor_decides_by_what_all_devices_can(abilities, method, tmp_path):
    probed = dict.fromkeys(
        (
            "on_demand_paging",
            "dma_buf",
            "relaxed_ordering",
            "peer_memory",
            "null_mr",
            "data_direct",
        ),
        False,
    ) | dict.fromkeys(("inline_bytes", "max_qps", "max_cqe", "max_mrs"), 1)
    devices = [HcaCapabilities(**(probed | each)) for each in abilities]
    decision = decide_flush(flush_facts(80, tmp_path, **common_abilities(devices)))
    assert decision.method.value == method
    assert decision.reason


def test_memory_that_may_not_be_read_is_named(device):
    device, _ = device
    memory = PrivateMemory(4096)
    rkey = device.register(memory.address, 4096, abi.ACCESS_LOCAL_WRITE)[1]
    queue = FlushQueue(device)
    queue.open()
    with pytest.raises(SystemFailure, match="cannot flush through sim0:1: status 10"):
        queue.flush(memory.address, 4096, rkey)
    queue.close()
    with pytest.raises(ValueError, match="cannot flush by gdrcopy through a queue pair"):
        FlushQueue(device, FlushMethod.GDRCOPY).open()
