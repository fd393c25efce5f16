"""Exchanges with direct reads of whole blocks: rounds are cut alike on all ranks, data is
complete.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl.api.measure import EXCHANGE_GAIN, _first_gain
from miraccl.executor.cpu.kernels import layout
from miraccl.ops.request import PlanRequest
from miraccl.planning.cost_model import CommunicatorShape, CpuConstants
from miraccl.planning.planner import WHOLE_BLOCK_BYTES, Overrides, Planner
from miraccl.schedule import catalog
from miraccl.types import Collective, DType, RedOp
from tests.support.ranks import run_ranks

SLOT = 64 << 10
BLOCK = 3 << 20


def round_bytes(
    collective: Collective, algo: str, nranks: int = 4, block: int = BLOCK, **request: Any
) -> int:
    """Return the bytes of a block that a rank moves per round."""
    planner = Planner(
        rank=0,
        shape=CommunicatorShape(nranks=nranks),
        slot_bytes=SLOT,
        constants=CpuConstants(),
        overrides=Overrides(algo=algo),
        exchange_copy=1 << 20,
    )
    counts = (block,) * nranks
    run = planner.make_run(
        PlanRequest(
            collective=collective,
            dtype=DType.UINT8,
            op=RedOp.SUM,
            root=0,
            in_counts=(block,) if collective is Collective.ALL_GATHER else counts,
            out_counts=counts,
            block_bytes=block,
            count=block,
            **request,
        )
    )
    return int(run.words[layout.RUN_ROUND_BYTES // 8])


@pytest.mark.parametrize(
    "algo",
    [
        a.name
        for a in catalog.algorithms_for(Collective.ALL_GATHER, 4)
        if not a.needs_addressable_memory
    ],
)
def test_rounds_do_not_depend_on_in_place(algo: str) -> None:
    apart = round_bytes(Collective.ALL_GATHER, algo)
    assert apart == round_bytes(Collective.ALL_GATHER, algo, in_place=True)
    assert apart <= SLOT or apart == WHOLE_BLOCK_BYTES


def test_blocks_are_read_whole_from_the_threshold_on() -> None:
    assert round_bytes(Collective.ALL_TO_ALL, "one_shot") == WHOLE_BLOCK_BYTES
    assert round_bytes(Collective.ALL_GATHER, "ring") == WHOLE_BLOCK_BYTES
    assert round_bytes(Collective.ALL_GATHER, "ring", block=(1 << 20) - 1) == SLOT
    assert round_bytes(Collective.ALL_TO_ALL, "one_shot", uneven=True) == SLOT


def exchange(nbytes: int) -> None:
    """Run all_gather (in place on rank 0 only) and all_to_all twice, with partial rounds."""
    with miraccl.init() as comm:
        member = comm._core
        assert member.fabric.addressable
        member.planner.exchange_copy = 4096
        comm.barrier()
        for again in range(2):
            out = np.zeros((comm.nranks, nbytes), np.uint8)
            mine = out[comm.rank] if comm.rank == 0 else np.zeros(nbytes, np.uint8)
            mine[:] = np.arange(nbytes, dtype=np.uint32) % 251 + comm.rank + again
            comm.all_gather(mine, out)
            mine[:1] = 0  # the peers have read it
            for rank in range(comm.nranks):
                same = out[rank] == (
                    np.arange(nbytes, dtype=np.uint32) % 251 + rank + again
                ).astype(np.uint8)
                assert same[1:].all()
                assert same[0] or (rank == comm.rank == 0)
            x = np.repeat(
                np.arange(comm.nranks, dtype=np.uint8) + comm.nranks * comm.rank, nbytes
            ).reshape(comm.nranks, nbytes)
            got = comm.all_to_all(x)
            x[:] = 255
            assert (
                got == (np.arange(comm.nranks) * comm.nranks + comm.rank).astype(np.uint8)[:, None]
            ).all()
        comm.finalize()


@pytest.mark.parametrize(
    ("nranks", "nbytes"), [(2, WHOLE_BLOCK_BYTES + 5000), (2, 70_001), (3, 300_000)]
)
def test_data_of_ranks_in_place_and_not(nranks: int, nbytes: int) -> None:
    run_ranks(exchange, nranks, nbytes)


@pytest.mark.parametrize(
    ("shares", "first"),
    [
        ((1.15, 1.05, 0.9, 0.85), 3),
        ((1.15, 0.9, 1.1, 1.1), -1),  # one size that happened to be fast
        ((0.9, 0.8, EXCHANGE_GAIN + 0.01, 0.8), 1),  # one that happened to be slow
        ((1.0, 1.0, 1.0, 1.0), -1),
    ],
)
def test_first_size_with_a_gain(shares: tuple[float, ...], first: int) -> None:
    assert _first_gain((1, 2, 3, 4), shares) == first
