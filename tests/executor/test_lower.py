"""From schedules to words: block tables, rounds, and runs that never leave their buffers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miraccl import Collective, DType, RedOp
from miraccl.errors import InvalidUsage
from miraccl.executor.cpu.context import set_counts
from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.p2p import item_size
from miraccl.executor.cpu.lower import BlockCounts, Run, describe_signature, lower, signature
from miraccl.executor.cpu.sizes import ALIGN, MIN_ALIGNED, chunk_bytes, size_class
from miraccl.schedule import catalog
from miraccl.schedule.ir import Op


@given(st.integers(0, 1 << 20), st.integers(1, 70), st.sampled_from([1, 2, 4, 8]))
def test_chunks_cover_a_block_without_overlap(count: int, parts: int, itemsize: int) -> None:
    nbytes = count * itemsize
    size = chunk_bytes(nbytes, parts, itemsize)
    assert size % itemsize == 0
    assert size >= itemsize
    assert size * parts >= nbytes
    assert size < MIN_ALIGNED or size % ALIGN == 0
    cuts = [min(part * size, nbytes) for part in range(parts + 1)]
    assert cuts[0] == 0
    assert cuts[-1] == nbytes
    assert all(a % itemsize == 0 for a in cuts)


@given(st.integers(0, 1 << 50))
def test_classes_of_sizes_are_few_and_close(nbytes: int) -> None:
    least = size_class(nbytes)
    assert least <= nbytes < least + max(1, least // 4)
    assert size_class(least) == least
    assert size_class(nbytes + 1) >= least


@pytest.mark.parametrize("nbytes", [0, 32, 4096, 32 << 10, 96 << 10, 1 << 20])
def test_thresholds_are_where_classes_begin(nbytes: int) -> None:
    assert size_class(nbytes) == nbytes


def make(
    algo: str,
    collective: Collective,
    nranks: int,
    rank: int,
    count: int,
    slot_bytes: int = 8192,
    root: int = 0,
) -> Run:
    schedule = catalog.build(algo, collective, nranks, root)
    run = make_run(algo, collective, nranks, rank, 4 * count, slot_bytes, root)
    ins = [count] * (schedule.input_chunks // schedule.parts)
    outs = [count] * (schedule.output_chunks // schedule.parts)
    set_counts(run, BlockCounts(ins, outs, agreed=count, reported=count))
    return run


def make_run(
    algo: str,
    collective: Collective,
    nranks: int,
    rank: int,
    block_bytes: int,
    slot_bytes: int = 8192,
    root: int = 0,
) -> Run:
    """Without counts."""
    program = lower(catalog.build(algo, collective, nranks, root), rank)
    return Run(
        program,
        dtype=DType.FLOAT32,
        block_bytes=block_bytes,
        slot_bytes=slot_bytes,
        round_bytes=slot_bytes // program.schedule.widest // 64 * 64,
        direct=-1,
        template=signature(collective, DType.FLOAT32, RedOp.SUM, root, 0),
        stream_from=1 << 20,
    )


def word(run: Run, place: int) -> int:
    return int(run.words[place // 8])


@given(
    st.lists(st.lists(st.integers(0, 90_000), min_size=4, max_size=4), min_size=1, max_size=3),
    st.sampled_from(["one_shot", "ring"]),
)
def test_a_run_takes_new_counts_and_keeps_nothing_of_the_old(
    lists: list[list[int]], algo: str
) -> None:
    """A gather of uneven blocks; the window run that it may give way to has the same counts."""
    run, other = (make_run(name, Collective.ALL_GATHER, 4, 1, 0) for name in (algo, "two_shot_put"))
    run.set_window_path(other, [0, 2, 3])
    for counts in lists:
        set_counts(run, BlockCounts(counts[1:2], counts, agreed=sum(counts), reported=77))
        for each in (run, other):
            assert each.in_blocks.tolist() == [[0, 4 * counts[1], chunk_bytes(4 * counts[1], 1, 4)]]
            assert each.out_blocks[:, 0].tolist() == [4 * sum(counts[:i]) for i in range(4)]
            assert each.out_blocks[:, 1].tolist() == [4 * c for c in counts]
            assert each.out_blocks[:, 2].tolist() == [chunk_bytes(4 * c, 1, 4) for c in counts]
            assert word(each, layout.RUN_OUT_BYTES) == 4 * sum(counts)
            assert word(each, layout.RUN_IN_BYTES) == 4 * counts[1]
            assert word(each, layout.RUN_STREAM) == (4 * sum(counts) + 4 * counts[1] >= 1 << 20)
            assert word(each, layout.RUN_NROUNDS) == max(
                1, -(-4 * max(counts) // word(each, layout.RUN_ROUND_BYTES))
            )
            assert word(each, layout.RUN_TEMPLATE) == signature(
                Collective.ALL_GATHER, DType.FLOAT32, RedOp.SUM, 0, sum(counts)
            )
            assert word(each, layout.RUN_COUNT) == 77


COLLECTIVES = [c for c in Collective if c is not Collective.SEND_RECV]
EVERYTHING = [
    (name, c) for name in catalog.names() for c in COLLECTIVES if catalog.get(name).supports(c, 6)
]


@pytest.mark.parametrize(("algo", "collective"), EVERYTHING, ids=str)
def test_all_ranks_cut_rounds_alike(algo: str, collective: Collective) -> None:
    for count in (0, 1, 100, 2048, 2049, 12_345):
        runs = [make(algo, collective, 6, rank, count) for rank in range(6)]
        assert (
            len(
                {(word(run, layout.RUN_NROUNDS), word(run, layout.RUN_ROUND_BYTES)) for run in runs}
            )
            == 1
        )
        piece = word(runs[0], layout.RUN_ROUND_BYTES)
        schedule = runs[0].program.schedule
        if collective is not Collective.BARRIER:
            # small chunks lie close together in a message: a network sends the gaps, too
            chunk = chunk_bytes(4 * count, schedule.parts, 4)
            assert {word(run, layout.RUN_STRIDE) for run in runs} == {
                min(piece, -(-chunk // 64) * 64)
            }
        assert piece * schedule.widest <= 8192
        assert word(runs[0], layout.RUN_NROUNDS) >= 1
        if collective is not Collective.BARRIER:
            assert word(runs[0], layout.RUN_NROUNDS) * piece >= min(
                chunk_bytes(4 * count, schedule.parts, 4), max(1, 4 * count)
            )


@pytest.mark.parametrize(("algo", "collective"), EVERYTHING, ids=str)
def test_programs_say_what_schedules_say(algo: str, collective: Collective) -> None:
    schedule = catalog.build(algo, collective, 6, 2 if collective.rooted else 0)
    for rank in (0, 5):
        program = lower(schedule, rank)
        steps = [step for channel in schedule.channels for step in channel[rank]]
        assert program.nsteps == len(steps)
        for row, step in zip(program.steps, steps):
            assert row[layout.STEP_OP // 8] == step.op
            assert row[layout.STEP_RECV // 8] == (-1 if step.recv_peer is None else step.recv_peer)
            assert row[layout.STEP_SEND // 8] == (-1 if step.send_peer is None else step.send_peer)
            assert row[layout.STEP_CHUNKS // 8] == step.chunks
            npeers = int(row[layout.STEP_NPEERS // 8])
            assert npeers == (schedule.nranks if step.op is Op.BARRIER else len(step.peers))
            if step.peers:
                first = (int(row[layout.STEP_PEERS // 8]) - program.peers.ctypes.data) // 8
                assert tuple(program.peers[first : first + npeers]) == step.peers
        assert sorted(set(program.sends.tolist())) == sorted(
            {s.send_peer for s in steps if s.send_peer is not None and s.op.sends}
        )


def test_a_slot_too_small_for_a_step_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="too many for slots"):
        make("bruck", Collective.ALL_TO_ALL, 66, 0, 1000, slot_bytes=2048)  # 33 chunks in a message
    make("bruck", Collective.ALL_TO_ALL, 64, 0, 1000, slot_bytes=2048)


def test_scratch_has_room_for_all_chunks() -> None:
    for count in (0, 1, 5, 1000):
        run = make("pat", Collective.ALL_GATHER, 6, 1, count)
        chunk = int(run.words[layout.RUN_SCRATCH_CHUNK // 8])
        assert run.scratch.nbytes >= run.program.schedule.scratch_chunks * chunk
        assert chunk >= 4 * count
        assert run.words[layout.RUN_SCRATCH_BLOCK // 8] == 4 * count


@given(
    st.sampled_from([c for c in Collective if c is not Collective.SEND_RECV]),
    st.sampled_from(list(DType)),
    st.sampled_from(list(RedOp)),
    st.integers(0, 4095),
    st.integers(0, 1 << 62),
)
def test_signatures_fit_a_word_and_can_be_read(
    collective: Collective, dtype: DType, op: RedOp, root: int, count: int
) -> None:
    sig = signature(collective, dtype, op, root, count)
    assert 0 <= sig < 1 << 63
    assert sig & 0xFFFF == 0
    fields = describe_signature(sig | 1234)
    assert fields["sequence number"] == "1234"
    assert fields["collective"] == collective.label
    assert fields["dtype"] == dtype.label
    assert fields["operator"] == op.name.lower()
    assert fields["root"] == str(root)
    assert signature(collective, dtype, op, root, count + 1) != sig


def test_signatures_that_nobody_makes_are_described() -> None:
    assert "unknown" in describe_signature((1 << 63) - 1)["collective"]


def test_the_engine_knows_the_size_of_every_type() -> None:
    assert [item_size.py_func(int(dtype)) for dtype in DType] == [dtype.itemsize for dtype in DType]


def test_words_are_zero_where_nothing_was_set() -> None:
    run = make("ring", Collective.ALL_REDUCE, 3, 1, 10)
    assert run.words.dtype == np.int64
    assert run.words[layout.RUN_FOLD // 8] == 0
    assert run.words[layout.RUN_IN_BYTES // 8] == 40
    assert run.words[layout.RUN_OUT_BYTES // 8] == 40
