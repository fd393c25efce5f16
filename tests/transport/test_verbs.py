"""Verbs transport on simulated devices: the conformance kit, orders of completions, and faults."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time

import pytest

from miraccl.errors import SystemFailure
from miraccl.native import verbs_abi as abi
from miraccl.proxy.kernels.progress_engine import DRIVE_POLL
from miraccl.runtime.window import WindowAllocator
from miraccl.sim.verbs_wire import Request, Wire
from miraccl.transport.fifo import Mode, PrivateMemory, memory_at
from miraccl.transport.registry import VERBS
from miraccl.transport.verbs import VerbsOptions
from miraccl.transport.verbs_device import QpSettings
from miraccl.transport.verbs_ports import options_from_environment
from miraccl.wire.proxy_records import LossKind
from miraccl.wire.stream import FrameType
from miraccl.wire.verbs.policy import PIECES, ROTATE, SPLIT
from miraccl.wire.verbs.rows import ROW_BYTES
from tests.transport.conformance import TransportConformance, pattern
from tests.transport.verbs_world import SLOT, build_verbs_world


class TestVerbs(TransportConformance):
    spec = VERBS

    def build(self, nranks):
        return build_verbs_world(nranks)


class TestVerbsManyPathsAnyOrder(TransportConformance):
    """Two ports on each side, four queue pairs each, whose requests are executed in any order."""

    spec = VERBS

    def build(self, nranks):
        return build_verbs_world(
            nranks,
            devices=[2] * nranks,
            options=VerbsOptions(qps_per_connection=4),
            wire=Wire(order=random.Random(nranks).randrange),
            inline=False,
        )


class TestVerbsOneQueuePair(TransportConformance):
    spec = VERBS

    def build(self, nranks):
        return build_verbs_world(
            nranks, options=VerbsOptions(qps_per_connection=1, copy_bytes=0), spin_ns=20_000
        )


@contextlib.contextmanager
def held(engine):
    """Keep the engine's thread from moving anything."""
    entered, leave = threading.Event(), threading.Event()

    def wait():
        entered.set()
        leave.wait(10)

    caller = threading.Thread(target=lambda: engine._call(wait))
    caller.start()
    entered.wait(10)
    try:
        yield
    finally:
        leave.set()
        caller.join()


@pytest.fixture
def make():
    worlds = []

    def make(nranks=2, **options):
        world = build_verbs_world(nranks, **options)
        worlds.append(world)
        world.connect()
        return world

    yield make
    for world in worlds:
        world.close()


def transfer(world, nbytes, count=1, source=0, destination=1, seed=0):
    """Send large messages in place and check every byte."""
    way = world.only_way(source, destination)
    memory, target = PrivateMemory(nbytes), PrivateMemory(nbytes)
    for i in range(count):
        memory_at(memory.address, nbytes)[:] = pattern(nbytes, seed + i)
        way.recv.clear_to_send(target.address, nbytes)
        assert way.send.post_address(memory.address, nbytes, signature=i)
        data, message = way.take()
        assert message.mode is Mode.LANDED
        assert data == pattern(nbytes, seed + i)
        world.wait(lambda: way.send.released == way.send.posted, "memory was not given back")
    return way


# --- data


@pytest.mark.parametrize("policy", [SPLIT, ROTATE, PIECES])
@pytest.mark.parametrize("devices", [(1, 1), (2, 2), (3, 1)])
def test_large_messages_over_all_paths(make, policy, devices):
    options = VerbsOptions(qps_per_connection=2, policy=policy, piece_bytes=1 << 17)
    world = make(devices=devices, options=options, wire=Wire(order=random.Random(1).randrange))
    used = set()
    world.verbs.wire.on_deliver = lambda pair, request: used.add(pair.number)
    transfer(world, (1 << 20) + 77, count=3)
    assert len(used) >= 2 * max(devices)


def test_control_rows_have_a_traffic_class_of_their_own(make):
    """With ``NCCL_IB_FIFO_TC`` a CTS never waits behind payload (nccl PR#1194)."""
    options = VerbsOptions(qps_per_connection=2, control_class=96, qp=QpSettings(traffic_class=32))
    world = make(options=options)
    requests: dict[int, list[Request]] = {32: [], 96: []}
    world.verbs.wire.on_deliver = lambda pair, request: requests[pair.traffic_class].append(request)
    transfer(world, 1 << 18, count=3)
    assert sum(request.nbytes for request in requests[32]) >= 3 << 18
    assert {request.nbytes % ROW_BYTES for request in requests[96]} == {0}
    rows = [request.data for request in requests[96] if request.data]  # those sent alone
    assert any(row[2] == FrameType.CTS for row in rows)
    assert not any(row[2] == FrameType.DATA for row in rows)


def test_control_rows_survive_their_queue_pair(make):
    world = make(options=VerbsOptions(qps_per_connection=1, control_class=96))
    transfer(world, 1 << 18)
    world.verbs.wire.cut(pairs_of(world, 1)[1])
    transfer(world, 1 << 18, count=3, seed=5)
    assert world.losses == {0: [], 1: []}


@pytest.mark.parametrize("inline", [True, False])
def test_adaptive_routing_leaves_the_immediate_alone(make, inline):
    """The rule of NCCL above ``IB_AR_THRESHOLD``, for payloads of more than 8 KiB."""
    world = make(options=VerbsOptions(qps_per_connection=1, adaptive=1), inline=inline)
    sent = []
    world.verbs.wire.on_deliver = lambda pair, request: sent.append(request)
    transfer(world, 1 << 18)
    payload = [request.nbytes for request in sent].index(1 << 18)
    chain = [(request.opcode, request.nbytes) for request in sent[payload : payload + 3]]
    rows = chain[1][1]  # one, or several that were ready together
    assert rows % ROW_BYTES == 0
    assert chain == [
        (abi.WR_RDMA_WRITE, 1 << 18),
        (abi.WR_RDMA_WRITE, rows),
        (abi.WR_RDMA_WRITE_WITH_IMM, 0),
    ]
    sent.clear()
    way = world.only_way(0, 1)
    way.post(pattern(8192))
    assert way.take()[0] == pattern(8192)
    assert all(r.nbytes for r in sent if r.opcode == abi.WR_RDMA_WRITE_WITH_IMM)


@pytest.mark.parametrize(
    ("kind", "adaptive", "apart"), [("ib", -1, True), ("roce", -1, False), ("roce", 1, True)]
)
def test_adaptive_routing_is_expected_of_infiniband(kind, adaptive, apart):
    options = VerbsOptions(adaptive=adaptive, adaptive_bytes=100)
    assert (options.apart_bytes(kind) == 100) == apart


def test_settings_of_nccl_are_read():
    environ = {
        "NCCL_IB_FIFO_TC": "96",
        "NCCL_IB_AR_THRESHOLD": "1",
        "NCCL_IB_ADAPTIVE_ROUTING": "1",
    }
    options = options_from_environment(environ)
    assert (options.control_class, options.adaptive_bytes, options.adaptive) == (96, 1, 1)
    assert options.control_pairs == 1


# --- driving


def test_messages_posted_together_are_posted_by_few_calls(make):
    """Eight messages need one call, and a request each for their payload and one for all rows."""
    world = make(options=VerbsOptions(qps_per_connection=1))
    way = world.way(0, 1)
    for i in range(8):
        way.post(pattern(100, i))
    for i in range(8):
        assert way.take()[0] == pattern(100, i)
    before = world.engines[0].counters()
    with held(world.engines[0]):
        for i in range(8):
            way.post(pattern(100, i))
    for i in range(8):
        assert way.take()[0] == pattern(100, i)
    after = world.engines[0].counters()
    assert 9 <= after["requests"] - before["requests"] < 16
    assert after["posts"] - before["posts"] < 8


def test_small_messages_share_a_queue_pair_with_a_single_core(make, monkeypatch):
    monkeypatch.setattr("miraccl.proxy.verbs.connection_memory.has_one_core", lambda: True)
    world = make(options=VerbsOptions(qps_per_connection=4))
    way, engine = world.way(0, 1), world.engines[0]
    way.post(pattern(100, 8))
    assert way.take()[0] == pattern(100, 8)
    before = engine.counters()["posts"]
    with held(engine):
        for i in range(8):
            way.post(pattern(100, i))
    for i in range(8):
        assert way.take()[0] == pattern(100, i)
    assert engine.counters()["posts"] - before < 4


def test_executor_drives_the_connections(make, monkeypatch):
    """``drive`` posts and polls in the caller's thread, beside the engine's."""
    monkeypatch.setattr("miraccl.proxy.verbs.engine.has_one_core", lambda: False)
    world = make(options=VerbsOptions(qps_per_connection=1))
    ways = world.way(0, 1), world.way(1, 0)
    call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
    drives = [world.engines[rank].driver(overlap=False)[:2] for rank in (0, 1)]
    for i in range(50):
        way = ways[i % 2]
        assert way.send.post(pattern(3000, i), signature=i)
        deadline = time.monotonic() + 10
        while not way.recv.peek():
            for function, argument in drives:
                call(function)(argument, DRIVE_POLL, 0, 0)
            assert time.monotonic() < deadline
        assert way.take()[0] == pattern(3000, i)
    assert all(world.engines[rank].counters()["driven"] > 0 for rank in (0, 1))
    drive = world.transports[0].driver(overlap=False)  # the runtime's
    assert drive == world.engines[0].driver(overlap=False)
    assert world.losses == {0: [], 1: []}


def test_registrations_of_single_messages_end_with_them(make):
    world = make()
    verbs = world.verbs
    before = len(verbs.wire.regions)
    transfer(world, 1 << 18, count=3)
    world.wait(lambda: len(verbs.wire.regions) == before, "a registration stays")
    assert world.engines[0].counters()["registrations"] == 3


def test_regions_are_registered_once(make):
    world = make()
    memory, target = PrivateMemory(1 << 18), PrivateMemory(1 << 18)
    world.engines[0].add_region(memory.address, 1 << 18)
    world.engines[1].add_region(target.address, 1 << 18)
    way = world.way(0, 1)
    for _ in range(3):
        way.recv.clear_to_send(target.address, 1 << 18)
        assert way.send.post_address(memory.address, 1 << 18)
        way.take()
    assert [world.engines[r].counters()["registrations"] for r in (0, 1)] == [0, 0]
    world.engines[0].remove_region(memory.address)
    way.recv.clear_to_send(target.address, 1 << 18)
    assert way.send.post_address(memory.address, 1 << 18)
    way.take()
    assert world.engines[0].counters()["registrations"] == 1


class Region:
    """Window memory of 1 MiB that counts the pages it gives back."""

    def __init__(self):
        self.private, self.nbytes, self.removed = PrivateMemory(1 << 20), 1 << 20, []
        self.address = self.private.address

    def memory(self, offset, nbytes):
        return (ctypes.c_char * nbytes).from_address(self.address + offset)

    def resident_bytes(self, offset, nbytes):
        return nbytes

    def remove(self, offset, nbytes):
        self.removed.append((offset, nbytes))


def test_payloads_in_a_window_stay_registered_until_they_are_freed(make):
    world = make()
    way, target = world.way(0, 1), PrivateMemory(1 << 18)
    region = Region()
    window = WindowAllocator(region)
    world.transports[0].watch_window(window)
    engine, regions = world.engines[0], world.verbs.wire.regions
    before = len(regions)

    def send(array):
        way.recv.clear_to_send(target.address, array.nbytes)
        assert way.send.post_address(array.ctypes.data, array.nbytes)
        data, _ = way.take()
        assert data == array.tobytes()
        world.wait(lambda: way.send.released == way.send.posted, "memory was not given back")

    first, second = (window.empty((1 << 18,), "u1") for _ in range(2))
    for value in range(3):
        first[:] = value
        send(first)
        send(second)
        world.wait(lambda: len(regions) >= before + 1, "nothing was kept")
    assert engine.counters()["registrations"] <= 3
    world.wait(lambda: len(regions) == before + 2, "the second payload was not kept")
    kept = engine.counters()["registrations"]
    send(first)
    assert engine.counters()["registrations"] == kept
    del first
    world.wait(lambda: region.removed == [(0, 1 << 18)], "the pages were not given back")
    assert len(regions) == before + 1
    again = window.empty((1 << 18,), "u1")  # the same block
    again[:] = 9
    send(again)
    send(second)
    world.wait(lambda: len(regions) == before + 2, "the block was not registered anew")


def test_memory_that_cannot_be_registered_is_named(make):
    world = make()
    world.verbs.register_limit = world.verbs.registered + 1000
    way = world.way(0, 1)
    memory = PrivateMemory(1 << 18)
    way.recv.clear_to_send(memory.address, 1 << 18)
    world.wait(lambda: world.losses[1], "the loss was not reported")
    assert world.losses[1][0][1].kind is LossKind.INTERNAL
    assert "ulimit -l" in str(world.losses[1][0][1])
    world.wait(lambda: world.losses[0], "the peer was not told")
    assert world.losses[0][0][1].kind is LossKind.ABORTED


def test_completion_queues_never_overflow(make):
    world = make(options=VerbsOptions(qps_per_connection=2))
    way, back = world.way(0, 1), world.way(1, 0)
    for i in range(300):
        way.post(pattern(40, i))
        back.post(pattern(4000, i))
        assert way.take()[0] == pattern(40, i)
        assert back.take()[0] == pattern(4000, i)
    queues = {pair.queue for pair in world.verbs.wire.pairs.values()}
    assert sum(queue.overflowed for queue in queues) == 0


def test_engine_sleeps_when_nothing_moves(make):
    world = make()
    way = world.way(0, 1)
    way.post(b"x" * 40)
    way.take()
    engine = world.engines[0]
    world.wait(lambda: engine.counters()["sleeps"] > 0)
    rounds = engine.counters()["rounds"]
    time.sleep(0.05)
    assert engine.counters()["rounds"] - rounds < 20


# --- connecting


def test_rank_that_connects_late_is_awaited():
    world = build_verbs_world(2)
    infos = {rank: transport.setup() for rank, transport in world.transports.items()}
    late = threading.Timer(0.4, lambda: world.connect_rank(1, {0: infos[0]}))
    late.start()
    world.connect_rank(0, {1: infos[1]})
    late.join()
    way = world.way(0, 1)
    way.post(b"x" * 100)
    assert way.take()[0] == b"x" * 100
    assert world.engines[0].routes(1) == [0, 1]
    world.close()


def test_path_that_never_works_is_left_out():
    world = build_verbs_world(2, options=VerbsOptions(qps_per_connection=3))
    infos = {rank: transport.setup() for rank, transport in world.transports.items()}
    world.verbs.wire.cut(pairs_of(world, 0)[1])
    world.verbs.wire.cut(pairs_of(world, 1)[1])
    world.in_parallel(lambda rank: world.connect_rank(rank, {1 - rank: infos[1 - rank]}))
    transfer(world, 1 << 18)
    assert world.engines[0].routes(1)[1] != 1
    assert world.losses == {0: [], 1: []}
    world.close()


def test_peer_that_cannot_be_reached_is_named():
    world = build_verbs_world(2, deadline=0.5)
    infos = {rank: transport.setup() for rank, transport in world.transports.items()}
    with pytest.raises(SystemFailure, match="cannot connect to rank 1: sim0:1 to sim1:1"):
        world.connect_rank(0, {1: infos[1]})
    world.close()


# --- faults


def pairs_of(world, rank):
    """Queue pairs of a rank in the order of its connection."""
    conn = world.transports[rank]._connections[1 - rank]
    return [qp.number for qp in conn.qps]


@pytest.mark.parametrize("fault", ["status", "lost ack", "cut", "both cut", "remote status"])
@pytest.mark.parametrize("seed", range(3))
def test_queue_pair_that_fails_is_replaced(make, fault, seed):
    draw = random.Random(seed)
    world = make(options=VerbsOptions(qps_per_connection=3), wire=Wire(order=draw.randrange))
    wire, qp = world.verbs.wire, draw.randrange(3)
    here, there = pairs_of(world, 0)[qp], pairs_of(world, 1)[qp]
    way, back = world.only_way(0, 1), world.only_way(1, 0)
    posted = [0, 0]
    total = 60
    sizes = [8, 5000, SLOT, 100]

    def strike():
        if fault == "status":
            wire.fail_request(here, 12, 129)
        elif fault == "lost ack":
            wire.lose_acknowledgements(here)
        elif fault == "remote status":
            wire.fail_request(there, 5)
        else:
            wire.cut(here)
            if fault == "both cut":
                wire.cut(there)

    taken = [0, 0]
    start = time.monotonic()
    while taken != [total, total]:
        assert time.monotonic() - start < 10, taken
        for i, each in enumerate((way, back)):
            if posted[i] < total:
                data = pattern(sizes[posted[i] % 4], 1000 * i + posted[i])
                posted[i] += each.send.post(data, signature=posted[i])
            if each.recv.peek():
                data, message = each.take()
                assert data == pattern(sizes[taken[i] % 4], 1000 * i + taken[i])
                assert message.signature == taken[i]
                taken[i] += 1
        if posted[0] == 20:
            strike()
        world.news.wait(0.001)
        world.news.clear()
    transfer(world, 1 << 19, count=2, seed=seed)
    assert world.losses == {0: [], 1: []}


def test_failed_queue_pair_comes_back(make):
    world = make(options=VerbsOptions(qps_per_connection=2))
    wire = world.verbs.wire
    wire.cut(pairs_of(world, 0)[1])
    transfer(world, 1 << 18)
    world.wait(lambda: world.engines[0].routes(1) == [0, 0], "the stream did not move")
    transfer(world, 1 << 18)
    wire.mend()
    for rank in (0, 1):
        world.wait(lambda r=rank: world.engines[r].routes(1 - r) == [0, 1], "it stays away")
    transfer(world, 1 << 18, count=2)
    assert world.losses == {0: [], 1: []}


@pytest.mark.parametrize("how", ["port", "quiet port", "device"])
def test_one_of_two_devices_fails(make, how):
    world = make(devices=(2, 2), options=VerbsOptions(qps_per_connection=2))
    transfer(world, 1 << 18)
    wire = world.verbs.wire
    start = time.monotonic()
    if how == "device":
        wire.kill_device("sim0")
    else:
        wire.port_down("sim0", quietly=how == "quiet port")
    transfer(world, 1 << 18, count=3, seed=5)
    transfer(world, 1 << 18, count=3, source=1, destination=0, seed=9)
    assert time.monotonic() - start < 2
    assert world.losses == {0: [], 1: []}


def test_one_of_four_ports_is_enough_until_the_others_come_back(make):
    """Ports of both sides fail one after another; later all streams are on their own pairs."""
    world = make(devices=(4, 4), options=VerbsOptions(qps_per_connection=1))
    wire = world.verbs.wire
    transfer(world, 1 << 18)
    for number, device in enumerate(["sim0", "sim1r1", "sim0r2"]):
        wire.port_down(device, quietly=number == 2)
        transfer(world, 1 << 18, count=2, seed=number)
        transfer(world, 1 << 18, count=2, source=1, destination=0, seed=number)
    world.wait(lambda: world.engines[0].routes(1) == [3, 3, 3, 3], "streams stay on dead pairs")
    wire.mend()
    for rank in (0, 1):
        world.wait(lambda r=rank: world.engines[r].routes(1 - r) == [0, 1, 2, 3], "one stays away")
    transfer(world, 1 << 18, count=2)
    assert world.losses == {0: [], 1: []}


@pytest.mark.parametrize("status", [*range(1, 24), 99])
def test_every_status_moves_the_stream(make, status):
    """Whatever a completion says, the other queue pair carries the messages, once."""
    world = make(options=VerbsOptions(qps_per_connection=2))
    world.verbs.wire.fail_request(pairs_of(world, 0)[0], status, 200 + status)
    transfer(world, 1 << 18, count=2, seed=status)
    assert world.losses == {0: [], 1: []}


def test_last_path_fails_with_edge_and_advice(make):
    world = make(options=VerbsOptions(qps_per_connection=2))
    for number in pairs_of(world, 0):
        world.verbs.wire.fail_request(number, 12, 129)
    way = world.way(0, 1)
    way.post(b"x" * 100)
    for i in range(6):
        way.send.post(pattern(5000, i))
    world.wait(lambda: world.losses[0], "the loss was not reported")
    peer, loss = world.losses[0][0]
    assert (peer, loss.kind) == (1, LossKind.RESET)
    for words in ("sim0:1 to sim1:1 of rank 1", "status 12", "vendor error 129", "cable"):
        assert words in str(loss)


@pytest.mark.parametrize("seed", range(25))
def test_rows_that_are_not_what_was_sent(make, seed):
    """One row is other bytes: the messages are right, or the link ends and says why."""
    draw = random.Random(seed)
    world = make(options=VerbsOptions(qps_per_connection=2))
    left = draw.randrange(2, 30)

    def corrupt(pair, request):
        nonlocal left
        if request.opcode != abi.WR_RDMA_WRITE_WITH_IMM or not request.nbytes:
            return
        left -= 1
        if left == 0:
            row = memory_at(request.remote, ROW_BYTES)
            word = 8 * draw.randrange(8)  # header, number and flags; what follows is payload
            row[word : word + 8] = draw.choice([b"\xff" * 8, bytes(8), draw.randbytes(8)])

    world.verbs.wire.on_deliver = corrupt
    way, sizes = world.only_way(0, 1), [8, 5000, SLOT, 100]
    posted = taken = 0
    until = time.monotonic() + 10
    while taken < 40 and not any(world.losses.values()):
        assert time.monotonic() < until, "neither messages nor an error"
        if posted < 40:
            posted += way.send.post(pattern(sizes[posted % 4], posted), signature=posted)
        if way.recv.peek() is not None:
            data, message = way.take()
            assert message.signature != taken or data == pattern(sizes[taken % 4], taken)
            taken += 1
        world.news.wait(0.0005)
        world.news.clear()
    for _, loss in [*world.losses[0], *world.losses[1]]:
        assert "violated the protocol" in str(loss)


def test_peer_that_vanishes_is_a_reset(make):
    world = make()
    for number in pairs_of(world, 1):
        world.verbs.wire.pairs.pop(number)
    world.way(0, 1).post(b"x" * 100)
    world.wait(lambda: world.losses[0], "the loss was not reported")
    assert world.losses[0][0][1].kind is LossKind.RESET


def test_abort_carries_its_text(make):
    world = make()
    world.transports[0].abort("rank 0 has had enough")
    world.wait(lambda: world.losses[1], "the abort was not reported")
    kind, text = world.losses[1][0][1].kind, str(world.losses[1][0][1])
    assert kind is LossKind.ABORTED
    assert "rank 0 has had enough" in text


def test_close_by_one_side_is_reported_to_the_other(make):
    world = make()
    world.transports[0].close()
    world.wait(lambda: world.losses[1], "the end was not reported")
    assert world.losses[1][0][1].kind is LossKind.CLOSED


def test_different_numbers_of_queue_pairs_are_named():
    world = build_verbs_world(2)
    other = build_verbs_world(2, options=VerbsOptions(qps_per_connection=3))
    info = other.transports[1].setup()
    with pytest.raises(SystemFailure, match="3 queue pairs for 2 here"):
        world.transports[0].connect({1: info})
    for each in (world, other):
        each.close()
