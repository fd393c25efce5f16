"""Payloads with several receivers: copied once into a slot that all read, never overwritten."""

from __future__ import annotations

import numpy as np
import pytest

import miraccl
from miraccl import Collective, Communicator
from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.lower import lower
from miraccl.schedule import catalog
from tests.runtime.test_life import in_threads

NRANKS = 4


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the engine before a deadline runs."""
    miraccl.init().finalize()


def payload(root: int, number: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng((root, number)).integers(0, 256, nbytes, np.uint8)


def broadcasts(comm: Communicator, seed: int, blocked: bool) -> list[int]:
    """Run bursts of broadcasts and gathers; return the number of each burst's next slot."""
    context, used = comm._core.context, []
    if blocked:  # as if a receiver had never read what is in the slots
        context._fanout_tails[:, (comm.rank + 1) % NRANKS] = 1 << 40
    rng = np.random.default_rng(seed)
    for burst in range(12):
        nbytes = int(rng.choice([8, 1023, 1024, 5000, 65536, 65537, 200_000]))
        root = int(rng.integers(NRANKS))
        for number in range(int(rng.integers(1, 25))):
            x = np.zeros(nbytes, np.uint8)
            if comm.rank == root:
                x[:] = payload(root, burst * 100 + number, nbytes)
            comm.broadcast(x, root)
            assert np.array_equal(x, payload(root, burst * 100 + number, nbytes))
        out = comm.all_gather(
            payload(comm.rank, burst, nbytes), np.zeros((NRANKS, nbytes), np.uint8)
        )
        assert all(np.array_equal(out[r], payload(r, burst, nbytes)) for r in range(NRANKS))
        used.append(context.get(layout.CTX_FANOUT_NEXT))
    comm.barrier()
    if not blocked:
        tails = context._send[:, layout.CONN_COUNT // 8]  # all messages have been consumed
        assert (context._fanout_tails <= tails).all()
    return used


@pytest.mark.parametrize("blocked", [False, True])
def test_every_receiver_gets_every_payload(blocked: bool) -> None:
    used = in_threads(NRANKS, lambda comm: broadcasts(comm, 7, blocked), algo="one_shot")
    assert any(map(any, used)) is not blocked


def test_sends_of_one_chunk_are_marked() -> None:
    def marks(algo: str, collective: Collective) -> list[int]:
        program = lower(catalog.build(algo, collective, NRANKS, 0), 0)
        return [int(step[layout.STEP_FANOUT // 8]) for step in program.steps]

    first, rest = layout.FIRST_OF_FANOUT, layout.REST_OF_FANOUT
    assert marks("one_shot", Collective.BROADCAST) == [first, rest, rest, 0]
    # other chunks to all, then the sum of one chunk to all
    assert marks("two_shot", Collective.ALL_REDUCE) == [0, 0, 0, 0, first, rest, rest, 0, 0, 0]
    assert not any(marks("ring", Collective.ALL_GATHER))
    assert not any(marks("one_shot", Collective.ALL_TO_ALL))
