"""Cycles of ranks that wait for each other in messages: every cycle is reported, and nothing else.

On emulated GPUs: ranks find cycles long before the deadline, and programs that end are never
reported, even with frequent checks and weak memory.
"""

from __future__ import annotations

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.message_lowering import LoweredMessages, P2pMessage, lower_messages
from miraccl.executor.cuda.source import Framing
from miraccl.types import DType
from tests.gpu.emulator import EmulatedMachine, launch, needs_compiler, patch_kernels, weak_memory
from tests.gpu.emulator.exchange import THREADS, EmulatedSend, blocks_of, hold_table, run
from tests.gpu.test_messages import FRAMES, pool_rules, rules, shrink_pool

pytestmark = needs_compiler


def reported_cycle(where: EmulatedMachine, rank: int) -> list[int]:
    """Return the ranks of the cycle that a rank has reported, itself first."""
    host = where.host[rank]
    found = [rank, int(host[layout.HOST_PEER])]
    while (after := int(host[layout.HOST_CYCLE]) >> 4 * found[-1] & 15) != rank:
        found.append(after)
    return found


LONG = 3 * 2 * layout.FIFO_ROWS * layout.ROW_BYTES  # more than two row FIFOs hold
RIGHT = {
    "a message before": [EmulatedSend(0, 1, 40), EmulatedSend(1, 0, LONG)],
    "all at once": [EmulatedSend(a, b, LONG) for a in range(3) for b in range(3)],
}
CYCLES: dict[str, tuple[int, list[EmulatedSend], dict[int, list[int]]]] = {
    # ranks, messages that one side calls, the cycle that each rank reports
    "receives": (
        2,
        [EmulatedSend(1, 0, 40, half=0), EmulatedSend(0, 1, 4000, half=1)],
        {0: [0, 1], 1: [1, 0]},
    ),
    "sends": (
        2,
        [EmulatedSend(0, 1, LONG, half=0), EmulatedSend(1, 0, LONG, half=1)],
        {0: [0, 1], 1: [1, 0]},
    ),
    "a ring of receives": (
        4,
        [EmulatedSend((r + 1) % 4, r, 40, half=r) for r in range(4)],
        {r: [(r + i) % 4 for i in range(4)] for r in range(4)},
    ),
    "a ring of sends": (
        3,
        [EmulatedSend(r, (r + 1) % 3, LONG, half=r) for r in range(3)],
        {r: [(r + i) % 3 for i in range(3)] for r in range(3)},
    ),
    "of both": (
        3,
        [
            EmulatedSend(0, 1, LONG, half=0),
            EmulatedSend(2, 1, 9, half=1),
            EmulatedSend(0, 2, 9, half=2),
        ],
        {0: [0, 1, 2], 1: [1, 2, 0], 2: [2, 0, 1]},
    ),
    "with a group": (
        3,
        [
            EmulatedSend(1, 0, 9, half=0),
            EmulatedSend(0, 1, 9, half=1),
            EmulatedSend(1, 2, LONG),
            EmulatedSend(2, 1, LONG),
        ],
        {0: [0, 1], 1: [1, 0]},
    ),
}


@pytest.mark.parametrize(
    ("frame", "pool"),
    [(Framing.LINE, False), (Framing.PAIR, False), (Framing.LINE, True)],
    ids=["line", "pair", "bulk"],
)
@pytest.mark.parametrize("case", CYCLES)
def test_cycles_are_reported(
    monkeypatch: pytest.MonkeyPatch, case: str, pool: bool, frame: Framing
) -> None:
    """Long before the deadline, also after valid messages."""
    nranks, sends, cycles = CYCLES[case]
    if pool:
        shrink_pool(monkeypatch)
    where = EmulatedMachine(nranks, timeout_s=60)
    for before in RIGHT.values():
        right_before = [send for send in before if max(send.src, send.dst) < nranks]
        assert [text for text in run(where, pool_rules(nranks, frame), right_before) if text] == []
    where.timeout_ns = int(15e9)
    run(where, pool_rules(nranks, frame), sends)
    errors = where.errors()
    assert [rank for rank in range(nranks) if errors[rank] == layout.ERROR_CYCLE] == list(cycles)
    # a report ends what its rank still exchanges with ranks outside the cycle; those time out
    assert set(errors) <= {0, layout.ERROR_CYCLE, layout.ERROR_TIMEOUT}
    assert {rank: reported_cycle(where, rank) for rank in cycles} == cycles


def test_a_rank_that_waits_for_a_cycle_is_not_in_it() -> None:
    """Its host is notified by theirs."""
    where = EmulatedMachine(3, timeout_s=1.5)
    run(
        where,
        rules(3),
        [
            EmulatedSend(1, 0, 9, half=0),
            EmulatedSend(0, 1, 9, half=1),
            EmulatedSend(1, 2, 9, half=2),
        ],
    )
    assert where.errors() == [layout.ERROR_CYCLE, layout.ERROR_CYCLE, layout.ERROR_TIMEOUT]


MAY_PROCEED = {
    "the other one sends, too": [EmulatedSend(0, 1, LONG, half=0), EmulatedSend(1, 0, 40)],
    "nobody has begun": [EmulatedSend(1, 0, 40, half=0), EmulatedSend(2, 1, 40, half=1)],
    "the last one holds nobody": [
        EmulatedSend(1, 0, 40, half=0),
        EmulatedSend(2, 1, 40, half=1),
        EmulatedSend(1, 2, 40),
    ],
}


@pytest.mark.parametrize("case", MAY_PROCEED)
def test_waits_for_ranks_that_may_proceed_last_until_the_deadline(case: str) -> None:
    where = EmulatedMachine(3, timeout_s=0.5)
    run(where, rules(3), MAY_PROCEED[case])
    assert set(where.errors()) == {0, layout.ERROR_TIMEOUT}


def test_stale_wait_words_form_no_cycle() -> None:
    where = EmulatedMachine(2, timeout_s=0.5)
    run(where, rules(2), [EmulatedSend(1, 0, 40)], only=[0])
    assert where.errors() == [layout.ERROR_TIMEOUT, 0]
    for words in (
        *where.host,
        where.memory[0][layout.STATE_OFFSET + 8 * layout.STATE_WAIT_FAILED :][:8],
    ):
        words[:] = 0  # as if the wait had not ended by its deadline
    where.timeout_ns = int(20e9)
    assert [text for text in run(where, rules(2), [EmulatedSend(1, 0, 40)]) if text] == []
    where.timeout_ns = int(0.5e9)
    run(where, rules(2), [EmulatedSend(0, 1, 40)], only=[1])
    assert where.errors() == [0, layout.ERROR_TIMEOUT]


@pytest.mark.parametrize("signature", [0, 77], ids=["plain", "collective"])
def test_nothing_is_sent_behind_a_failed_wait(signature: int) -> None:
    """It may depend on the missing message: neither header row nor row count advances."""
    where = EmulatedMachine(2, timeout_s=0.5)
    run(where, rules(2), [EmulatedSend(1, 0, 40)], only=[0], signatures=[signature] * 2)
    rings = where.memory[1][layout.ROW_FIFOS_OFFSET :][: layout.ROW_FIFOS_BYTES].copy()
    run(where, rules(2), [EmulatedSend(0, 1, 40)], only=[0], signatures=[signature] * 2)
    assert (where.memory[1][layout.ROW_FIFOS_OFFSET :][: layout.ROW_FIFOS_BYTES] == rings).all()
    assert not where.memory[0][layout.ROWS_SENT_OFFSET : layout.ROWS_RECEIVED_OFFSET].any()


# ---- programs that end

SIZES = (0, 9, 40, 1000, 4999, 20_000, 60_000)


FREQUENT_CHECKS = {
    "++w.polls >= WARP_SPINS_BEFORE_CHECK": "++w.polls >= 2",
    "++w.polls < SPINS_BEFORE_CHECK": "++w.polls < 3",
}


@pytest.fixture
def flaw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make checks frequent and replace the first fragment of kernel source by the second."""
    text, instead = request.param
    patch_kernels(monkeypatch, FREQUENT_CHECKS | {text: instead})


def failures_of(seed: int, pool: bool, timeout_s: float = 30.0) -> str:
    """Run messages in a deadlock-free order, in random launches; return the failures."""
    rng = random.Random(seed)
    nranks, frame = rng.choice([2, 3, 4]), rng.choice(FRAMES)
    ends = [rng.sample(range(nranks), 2) for _ in range(rng.randint(5, 30))]
    if rng.random() < 0.4:  # a ring
        ends = [[src, (src + 1) % nranks] for src, _ in ends]
    sources = [np.frombuffer(rng.randbytes(rng.choice(SIZES)), np.uint8) for _ in ends]
    targets = [np.full(source.size, 0x5A, np.uint8) for source in sources]
    where, found, keep = EmulatedMachine(nranks, timeout_s), pool_rules(nranks, frame), []
    programs: list[list[LoweredMessages]] = []
    for rank in range(nranks):
        mine = []
        for (src, dst), source, target in zip(ends, sources, targets, strict=True):
            if src == rank:
                mine.append(
                    P2pMessage(False, dst, source.ctypes.data, source.size, int(DType.UINT8))
                )
            if dst == rank:
                mine.append(
                    P2pMessage(True, src, target.ctypes.data, target.size, int(DType.UINT8))
                )
        programs.append([])
        while mine:
            together = rng.choice([1, 1, 1, 2, 3, 6])
            programs[-1].append(lower_messages(mine[:together], where.comm_args(rank), found))
            mine = mine[together:]
    room = max(lowered.capacity for program in programs for lowered in program)
    spec = replace(found.kernel_spec(pool, room), threads=THREADS)

    def follow(program: list[LoweredMessages]) -> None:
        for lowered in program:
            keep.append(hold_table(lowered))
            launch(spec, [lowered.args + bytes(room)], [blocks_of(lowered)])

    with ThreadPoolExecutor(nranks) as ranks:
        list(ranks.map(follow, programs))
    wrong = sum(
        not np.array_equal(source, target) for source, target in zip(sources, targets, strict=True)
    )
    return (
        f"seed {seed}: errors {where.errors()}, {wrong} messages wrong"
        if wrong or any(where.errors())
        else ""
    )


@pytest.mark.parametrize("pool", [False, True], ids=["warp queues", "bulk"])
@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("flaw", [("", "")], indirect=True, ids=["none"])
@pytest.mark.usefixtures("flaw")
def test_programs_that_end_have_no_cycle(
    monkeypatch: pytest.MonkeyPatch, weak: bool, pool: bool
) -> None:
    if pool:
        shrink_pool(monkeypatch)
    for seed in range(1, 9):
        with weak_memory(seed) if weak else contextlib.nullcontext():
            assert not failures_of(seed, pool)


WITHOUT_SERVED = ("if (!(served >> r & 1) && load_word(count)", "if (load_word(count)")
WITHOUT_COUNT = ("load_word(count) < (reported & WAIT_COUNT)", "true")


@pytest.mark.parametrize(
    "flaw", [WITHOUT_SERVED, WITHOUT_COUNT], indirect=True, ids=["who helps", "counts"]
)
@pytest.mark.usefixtures("flaw")
def test_a_rank_that_may_proceed_is_not_held() -> None:
    """Without a part of the rule, cycles are reported that do not exist."""
    assert any(failures_of(seed, False, 2.0) for seed in range(1, 200))
