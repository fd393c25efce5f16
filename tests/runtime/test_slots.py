"""Slots that change hands: every message is complete, and every slot has exactly one owner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl import Communicator
from miraccl.executor.cpu.context import words_at
from miraccl.executor.cpu.kernels import layout
from tests.runtime import cases
from tests.runtime.test_life import in_threads

PIECE = 64 << 10  # of a message between two ranks of a host


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the engine before a deadline runs; that takes a busy machine a minute."""
    miraccl.init().finalize()


def bytes_of(word: int) -> list[int]:
    return list(int(word).to_bytes(8, "little"))


def slots_of(comm: Communicator, peer: int) -> list[int]:
    """Return the slots this rank may use towards a peer, once all its messages were consumed."""
    row = comm._core.context._send[peer]
    returned = bytes_of(words_at(int(row[layout.CONN_TAIL_ADDR // 8]) + layout.TAIL_RETURNED, 1)[0])
    sent = bytes_of(row[layout.CONN_SENT // 8])
    free = bytes_of(row[layout.CONN_FREE // 8])[: int(row[layout.CONN_NFREE // 8])]
    return free + [(other or own) - 1 for own, other in zip(sent, returned, strict=True) if own]


def message(source: int, number: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng((source, number)).integers(0, 256, nbytes, np.uint8)


def converse(comm: Communicator, swap: int, seed: int) -> list[list[int]]:
    """Run the same random message program on two ranks; return the slots of each after every
    part.
    """
    comm._core.context.set(layout.CTX_SWAP, swap)
    rng, peer, owned, number = np.random.default_rng(seed), 1 - comm.rank, [], 0

    def send(nbytes: int) -> None:
        comm.send(message(comm.rank, number, nbytes), peer)

    def receive(nbytes: int) -> None:
        got = np.zeros(nbytes, np.uint8)
        comm.recv(got, peer)
        assert np.array_equal(got, message(peer, number, nbytes))

    for _ in range(60):
        nbytes = int(rng.choice([0, 8, 33, 4096, PIECE - 1, PIECE, 3 * PIECE + 5, 11 * PIECE]))
        way, burst = int(rng.integers(3)), int(rng.integers(1, 12)) if nbytes <= PIECE else 1
        for _ in range(burst):
            number += 1
            if way == 2:
                out = np.zeros((2, nbytes), np.uint8)
                comm.all_gather(message(comm.rank, number, nbytes), out)
                assert all(
                    np.array_equal(out[rank], message(rank, number, nbytes)) for rank in range(2)
                )
            elif way == comm.rank:
                send(nbytes)
            else:
                receive(nbytes)
        comm.barrier()  # everything has been taken
        owned.append(slots_of(comm, peer))
        comm.barrier()
    return owned


@pytest.mark.parametrize("seed", range(4))
def test_messages_arrive_and_every_slot_has_one_owner(seed: int) -> None:
    first, second = in_threads(2, lambda comm: converse(comm, 1, seed))
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + [number ^ layout.NSLOTS for number in theirs]) == list(
            range(2 * layout.NSLOTS)
        )
        assert len(mine) == layout.NSLOTS
    assert any(number >= layout.NSLOTS for owned in first for number in owned)


def test_slots_do_not_change_hands_by_default() -> None:
    for owned in in_threads(2, lambda comm: converse(comm, 0, 5)):
        assert all(sorted(numbers) == list(range(layout.NSLOTS)) for numbers in owned)


def test_ranks_need_not_agree() -> None:
    """One rank keeps the slots that it reads, the other returns each."""
    first, second = in_threads(2, lambda comm: converse(comm, comm.rank, 6))
    assert all(
        len(mine) == len(theirs) == layout.NSLOTS
        for mine, theirs in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("nranks", [2, 3, 4])
def test_collectives(nranks: int) -> None:
    def perform(comm: Communicator) -> Any:
        comm._core.context.set(layout.CTX_SWAP, 1)
        rng = np.random.default_rng(nranks)
        for _ in range(30):
            counts = [0, 1, 5, 129, 5000, 70_000]
            case = cases.random_case(
                rng, comm.nranks, counts, [*cases.EVEN, *cases.UNEVEN], ordered=lambda case: False
            )
            cases.perform(comm, case)

    in_threads(nranks, perform)
