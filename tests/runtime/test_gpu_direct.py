"""Messages from and to GPU memory by RDMA: simulated adapters, and memory that no CPU can touch.

The "GPU memory" of ``HiddenGpu`` is an anonymous file whose address is mapped without any access:
a load or store by the CPU ends the process. The adapters find it through the descriptor, as they
find a dma-buf.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from miraccl import clock
from miraccl.errors import CollectiveMismatch, CollectiveTimeout, MiracclError
from miraccl.runtime.multinode.gpu_direct import GpuDirect, GpuSlots
from miraccl.runtime.multinode.message_rounds import StagedMessage
from miraccl.transport.verbs import VerbsOptions
from miraccl.transport.verbs_gpu_access import GpuAccess, GpuTraits
from miraccl.transport.verbs_gpu_memory import GpuRegistration, RegistrationDecision
from miraccl.types import Collective, DType
from tests.gpu import direct_ranks
from tests.support.ranks import run_ranks
from tests.transport.verbs_world import VerbsWorld, build_verbs_world

SLOT = 1 << 20
TRAITS = GpuTraits(bus_id="0000:1b:00.0", sm=80, dma_buf=True, writes_ordering=0)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    *[ctypes.c_int] * 3,
    ctypes.c_long,
]


class HiddenGpu:
    """The part of ``executor.cuda.gpu.Gpu`` that slots need; ``seen`` is the GPU's view.

    ``protection``: of the memory at its address; none keeps the CPU away.
    """

    def __init__(self, protection: int = 0) -> None:
        self.protection = protection
        self.files: dict[int, tuple[int, mmap.mmap]] = {}

    relaxed_capture = staticmethod(nullcontext)

    def allocate(self, nbytes: int) -> int:
        fd = os.memfd_create("gpu")
        os.ftruncate(fd, nbytes)
        address = int(_libc.mmap(None, nbytes, self.protection, mmap.MAP_SHARED, fd, 0))
        self.files[address] = fd, mmap.mmap(fd, nbytes)
        return address

    def free(self, address: int) -> None:
        fd, view = self.files.pop(address)
        _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(len(view)))
        os.close(fd)

    def export_dma_buf(self, address: int, nbytes: int) -> int:
        return os.dup(self.files[address][0])

    def seen(self, address: int, nbytes: int) -> memoryview:
        start = max(a for a in self.files if a <= address)
        return memoryview(self.files[start][1])[address - start : address - start + nbytes]

    def read(self, address: int, nbytes: int) -> bytes:
        return bytes(self.seen(address, nbytes))


class Core:
    """The part of ``CoreAccess`` that ``GpuDirect`` needs."""

    def __init__(self, rank: int, timeout: float) -> None:
        self.rank, self.timeout, self.fault = rank, timeout, None

    def check(self, name: str) -> None:
        pass

    def departure_of(self, peer: int) -> MiracclError | None:
        return None

    def wait_for_graph(self) -> tuple[str, ...]:
        return ()

    def break_with(self, error: MiracclError) -> MiracclError:
        return error

    def message_mismatch(
        self, peer: int, mine: tuple[int, int], theirs: tuple[int, int], text: str = ""
    ) -> MiracclError:
        return CollectiveMismatch(text or f"{mine} and {theirs}", rank=self.rank, peer=peer)


class Ranks:
    """Two connected ranks on simulated adapters, ``devices`` each, or those of ``world``."""

    def __init__(
        self,
        *,
        devices: int = 1,
        timeout: float = 30.0,
        way: GpuRegistration = GpuRegistration.DMABUF,
        world: VerbsWorld | None = None,
        **simulated: Any,
    ) -> None:
        nranks = 2
        self.world = world or build_verbs_world(
            nranks,
            devices=[devices] * nranks,
            options=VerbsOptions(in_place_only=True),
            **simulated,
        )
        decision = RegistrationDecision(way=way, reason="a test")
        # Peer memory is registered by its address, at which the simulated adapter accesses it.
        protection = mmap.PROT_READ | mmap.PROT_WRITE if way is GpuRegistration.PEER_MEMORY else 0
        self.gpus = [HiddenGpu(protection) for _ in range(nranks)]
        self.direct: list[GpuDirect] = []
        for rank, gpu in enumerate(self.gpus):
            transport: Any = self.world.transports[rank]
            core: Any = Core(rank, timeout)
            fake: Any = gpu
            losses: Any = types.SimpleNamespace(
                get=lambda peer, rank=rank: dict(self.world.losses[rank]).get(peer)
            )
            access = GpuAccess(gpu=TRAITS, registration=decision)
            self.direct.append(GpuDirect(core, fake, transport, access, losses))
        infos = {rank: t.setup() for rank, t in self.world.transports.items()}
        for direct in self.direct:
            direct.prepare(SLOT)

        def connect(rank: int) -> None:
            self.direct[rank].connect({peer: i for peer, i in infos.items() if peer != rank})

        self.world.in_parallel(connect)

    def slots(self, rank: int) -> GpuSlots:
        return self.direct[rank].slots_for(SLOT)

    def close(self) -> None:
        for direct in self.direct:
            direct.close()
            direct.close()
        for gpu in self.gpus:
            assert not gpu.files
        self.world.close()


@pytest.fixture
def make() -> Iterator[Any]:
    opened: list[Ranks] = []

    def build(*args: Any, **settings: Any) -> Ranks:
        opened.append(Ranks(*args, **settings))
        return opened[-1]

    yield build
    for ranks in opened:
        ranks.close()


def messages(sizes: Sequence[int], peer: int, receives: bool) -> list[StagedMessage]:
    """Return messages of these sizes that follow one another in a slot, at multiples of 64."""
    found, host = list[StagedMessage](), 0
    for nbytes in sizes:
        found.append(StagedMessage(receives, peer, host, nbytes, DType.UINT8, nbytes))
        host += -(-nbytes // 64) * 64
    return found


def exchange(ranks: Ranks, sizes: Sequence[int], rounds: int = 1) -> None:
    """Send messages from rank 0 to rank 1 and back, and compare them."""
    rng = random.Random(1)
    total = sum(-(-n // 64) * 64 for n in sizes)
    for number in range(rounds):
        data = [rng.randbytes(total) for _ in range(2)]

        def work(rank: int, data: Sequence[bytes] = data, slot: int = 2 * number % 4) -> None:
            slots, gpu = ranks.slots(rank), ranks.gpus[rank]
            start = slots.address + slot * slots.nbytes
            gpu.seen(start, total)[:] = data[rank]
            gpu.seen(start + total, total)[:] = bytes(total)
            peer, out = 1 - rank, messages(sizes, 1 - rank, False)
            into = [
                StagedMessage(True, peer, total + m.host, m.count, m.dtype, m.transfer_count)
                for m in out
            ]
            ranks.direct[rank].run([*out, *into], slots, slot, None)
            for sent, got in zip(out, into, strict=True):
                want = data[peer][sent.host : sent.host + sent.count]
                assert gpu.read(start + got.host, got.count) == want, sent

        ranks.world.in_parallel(work)


@pytest.mark.parametrize("devices", [1, 2])
def test_no_cpu_touches_a_payload(make: Any, devices: int) -> None:
    """Every size: in a row, of a slot, split over queue pairs; more messages than fit a ring."""
    ranks = make(devices=devices)
    exchange(ranks, [1, 31, 32, 33, 63, 64, 65, 4096, 32768, 100_001, 200_000], rounds=3)
    exchange(ranks, [100] * 50)


def test_peer_memory(make: Any) -> None:
    exchange(make(way=GpuRegistration.PEER_MEMORY), [1, 64, 100_001])


@pytest.mark.parametrize(("disabled", "visible"), [("0", True), ("1", False)])
def test_receives_are_flushed(
    make: Any, monkeypatch: pytest.MonkeyPatch, disabled: str, visible: bool
) -> None:
    """The adapters of this test hold writes to GPU memory back until they read from it."""
    monkeypatch.setenv("MIRACCL_GDR_FLUSH_DISABLE", disabled)
    ranks = make(flush=True, devices=2)
    sizes = [100_000, 200_000, 64]
    if visible:
        exchange(ranks, sizes, rounds=2)
    else:
        with pytest.raises(AssertionError):
            exchange(ranks, sizes)


def test_messages_survive_a_failing_queue_pair(make: Any) -> None:
    ranks = make(devices=2)
    exchange(ranks, [200_000] * 3)
    for number in sorted(ranks.world.verbs.wire.pairs)[:1]:
        ranks.world.verbs.wire.fail_request(number, 12, 129)
    exchange(ranks, [200_000] * 3, rounds=4)


@pytest.mark.parametrize("how", ["port", "quiet port", "device"])
def test_messages_survive_a_failing_adapter(
    make: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The others are flushed, and the one that comes back is as well."""
    monkeypatch.setenv("MIRACCL_NET_FORCE_FLUSH", "1")
    ranks = make(devices=3, flush=True)
    wire = ranks.world.verbs.wire
    exchange(ranks, [200_000] * 3, rounds=2)
    started = clock.monotonic()
    if how == "device":
        wire.kill_device("sim1r1")
    else:
        wire.port_down("sim1r1", quietly=how == "quiet port")
    exchange(ranks, [200_000] * 3, rounds=4)
    assert clock.monotonic() - started < 5
    if how == "device":
        return
    wire.mend()
    for rank in (0, 1):
        working = ranks.world.transports[rank].working_devices
        ranks.world.wait(lambda working=working: working() == {0, 1, 2}, "it stays away")
    exchange(ranks, [200_000] * 3, rounds=4)


@pytest.mark.parametrize("nbytes", [16, 100, 100_000])
def test_counts_that_differ_are_named(make: Any, nbytes: int) -> None:
    ranks, errors = make(timeout=5.0), dict[int, MiracclError]()

    def work(rank: int) -> None:
        (message,) = messages([nbytes if rank == 0 else nbytes + 7], 1 - rank, rank == 1)
        try:
            ranks.direct[rank].run([message], ranks.slots(rank), 0, None)
        except MiracclError as error:
            errors[rank] = error

    ranks.world.in_parallel(work)
    assert isinstance(errors[1], CollectiveMismatch)
    assert errors[1].peer == 0


def test_messages_of_different_collectives_are_named(make: Any) -> None:
    """One rank has begun a collective more: its message must not pass for the one before."""
    ranks, errors = make(timeout=5.0), dict[int, MiracclError]()

    def work(rank: int) -> None:
        kind, slots = (Collective.ALL_TO_ALL, 0), ranks.slots(rank)
        for again in range(2 if rank == 0 else 1):
            mine = messages([1000], 1 - rank, rank == 1) if again or rank == 1 else []
            try:
                ranks.direct[rank].run(mine, slots, 0, kind, (0, 1))
            except MiracclError as error:
                errors[rank] = error

    ranks.world.in_parallel(work)
    assert "waits in collective 1" in errors[1].message
    assert "message of collective 2" in errors[1].message


def test_a_peer_that_sends_nothing_ends_at_the_deadline(make: Any) -> None:
    ranks = make(timeout=0.2)
    with pytest.raises(CollectiveTimeout, match=r"timeout of 0.2 s while waiting for rank 1"):
        ranks.direct[0].run(messages([1000], 1, True), ranks.slots(0), 0, None)


def test_a_lost_peer_ends_the_wait(make: Any) -> None:
    ranks = make(timeout=20.0)
    started = clock.monotonic()
    end = threading.Timer(0.1, lambda: ranks.world.transports[1].abort("a test ends"))
    end.start()
    with pytest.raises(MiracclError, match="rank 1"):
        ranks.direct[0].run(messages([1000], 1, True), ranks.slots(0), 0, None)
    assert clock.monotonic() - started < 10
    end.join()


# ---- the whole communicator


@pytest.mark.multiprocess
@pytest.mark.parametrize("hosts", ["AB", "ABC", "AABB"])
def test_operations(hosts: str) -> None:
    """Which operations go from GPU memory, and that all of them are right."""
    (used,) = run_ranks(direct_ranks.operations, 1, hosts, timeout=120.0)
    moved = {"send/recv", "broadcast", "all_gather", "all_to_all", "gather", "scatter"}
    uneven = {"all_to_all_v", "gather_v", "scatter_v"}
    if hosts != "AABB":  # else a block would cross the network once for each rank of a host
        uneven |= {"all_gather_v"}
    by_size = {
        count: {name for (name, each), algo in used.items() if each == count and algo == "direct"}
        for _, count in used
    }
    assert by_size.pop(direct_ranks.BIG) == moved | uneven
    for small in by_size.values():
        # An all_reduce of one element has no part between hosts on some ranks, and no plan then.
        assert small - {"all_reduce"} == {"send/recv"} | uneven


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("refuse", "reason"),
    [
        ("register", "rank 1: cannot make a registration of"),
        ("far", "rank 0: cannot access GPU memory by RDMA: the path between GPU and adapter0 is"),
        ("unreadable", "rank 1: cannot use GPU memory on adapter1"),
    ],
)
def test_one_rank_without_access_stages_all(refuse: str, reason: str) -> None:
    (found,) = run_ranks(direct_ranks.refused, 1, refuse, timeout=60.0)
    assert reason in found


@pytest.mark.multiprocess
@pytest.mark.parametrize("hosts", ["AB", "AABB"])
def test_rank_that_has_left_is_not_waited_for(hosts: str) -> None:
    """What it has sent before arrives; a message that it does not send is an error at once."""
    (text,) = run_ranks(direct_ranks.exits, 1, hosts, timeout=60.0)
    assert text.startswith("PeerDied: ")
    assert f"rank {len(hosts) - 1} has left the communicator" in text
