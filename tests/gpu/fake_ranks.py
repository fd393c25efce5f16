"""Actions of ranks in tests with a fake driver."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import Any

from miraccl.bootstrap import Session
from miraccl.bootstrap.launch import detect_launch, join_launch
from miraccl.executor.cuda.gpu import Gpu
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.transport.cuda_p2p import SymmetricMemory, WindowMemory
from tests.gpu.fake_cuda import FakeCuda

NBYTES = 3 << 20
FILLS = ((1 << 20, 4096, 0xFFFFFFFF),)


@contextlib.contextmanager
def session() -> Iterator[Session]:
    with join_launch(detect_launch(os.environ)) as world:
        yield world


def word(address: int) -> Any:
    return ctypes.c_uint32.from_address(address)


def talk(memory: SymmetricMemory, world: Session) -> None:
    """Every rank writes its number to every peer and reads theirs."""
    for peer in range(world.nranks):
        word(memory.outboxes[peer] + 64 * world.rank).value = 100 * world.rank + peer + 1
    world.barrier("written")
    for peer in range(world.nranks):
        assert word(memory.inboxes[peer] + 64 * peer).value == 100 * peer + world.rank + 1
        assert word(memory.inboxes[peer] + (1 << 20)).value == 0xFFFFFFFF
        assert word(memory.inboxes[peer] + (1 << 20) + 4096).value == 0
    world.barrier("read")


def connect(
    refuse: Sequence[str],
    deny: Sequence[Sequence[int]],
    environ: dict[str, dict[str, str]],
    window: bool,
) -> dict[str, Any]:
    """Create symmetric memory, use it, close it; return the outcome. ``environ``: by rank."""
    rank = int(os.environ["MIRACCL_RANK"])
    os.environ.update(environ.get(str(rank), {}))
    mine = [name for name in refuse if ":" not in name] + [
        n.partition(":")[2] for n in refuse if n.startswith(f"{rank}:")
    ]
    cuda = FakeCuda(
        refuse=mine, access=lambda a, b: [a, b] not in [list(pair) for pair in deny]
    ).install()
    with session() as world:
        gpu = Gpu(rank % int(os.environ.get("TEST_GPUS", "8")))
        opened = len(os.listdir("/proc/self/fd"))
        memory = SymmetricMemory(
            gpu, world.rank, world.nranks, NBYTES, FILLS, stages=SetupPhases(world)
        )
        talk(memory, world)
        extra = None
        if window:
            extra = memory.window(5000, SetupPhases(world))
            use_window(extra, world)
        result = {
            "kinds": memory.kinds,
            "why": memory.explain(),
            "descriptors": memory.descriptors,
            "pinned": memory.host_bytes(),
            "addressable": extra.addressable if extra else None,
        }
        if extra is not None:
            extra.close()
        memory.close()
        memory.close()
        assert not cuda.live
        assert not cuda.handles
        assert not cuda.pinned
        assert len(os.listdir("/proc/self/fd")) <= opened
        return result


def use_window(window: WindowMemory, world: Session) -> None:
    for peer, address in enumerate(window.addresses):
        if address:
            word(address + 4 * world.rank).value = peer + 10 * world.rank
    world.barrier("window written")
    for peer, address in enumerate(window.addresses):
        assert word(window.own + 4 * peer).value == (world.rank + 10 * peer if address else 0)
    world.barrier("window read")
