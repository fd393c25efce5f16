"""Transfers as schedules of two ranks: meaning, proof, time, text and picture."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.p2p import extents
from miraccl.p2p.transfer_plan import Rates, TransferPlan, cut_calls, make_plan
from miraccl.schedule.ir import Op
from miraccl.schedule.transfer_schedule import TransferSchedule, build
from miraccl.sim.transfer_time import simulate_transfer
from miraccl.tools.schedule_draw import draw_svg

RATES = Rates(start_us=3.0, call_us=2.0, extent_us=0.5, us_byte=0.01)


def plan_of(
    moved: extents.Extents, writes: bool, *, max_bytes: int = 100, parts: Any = None, **rates: float
) -> TransferPlan:
    return make_plan(
        moved,
        parts or [moved],
        writes=writes,
        max_bytes=max_bytes,
        max_extents=3,
        method="process",
        reason="test",
        kind="write" if writes else "read",
        peer="target",
        rates=Rates(**(asdict(RATES) | rates)),
    )


def blocks_of(rng: Any, writes: bool, *, twice: bool = False) -> tuple[extents.Extents, Any, Any]:
    """Return the extents of random blocks of 16 bytes, and the local and remote blocks."""
    count = int(rng.integers(1, 20))
    target = rng.permutation(24)[:count].astype(np.int32)
    source = rng.integers(0, 24, count, dtype=np.int32)
    if twice:
        target = np.append(target, target[rng.integers(count)]).astype(np.int32)
        source = np.append(source, source[:1])
    local, remote = (source, target) if writes else (target, source)
    made = extents.from_blocks(
        local=0,
        local_blocks=local,
        local_count=24,
        remote_blocks=remote,
        remote_count=24,
        block_nbytes=16,
        writes=writes,
        op_name="test",
    )
    return made, source, target


@pytest.mark.parametrize("writes", [True, False])
def test_meaning(writes: bool) -> None:
    rng = np.random.default_rng(7)
    for _ in range(40):
        moved, source, target = blocks_of(rng, writes)
        plan = plan_of(moved, writes, max_bytes=int(rng.integers(1, 120)))
        plan.verify()
        memory = rng.integers(0, 256, (2, 24, 16), dtype=np.uint8)
        expected = memory[1].copy()
        expected[target] = memory[0][source]
        result = plan.schedule.interpret(memory[0].ravel(), memory[1].ravel())
        assert (result.reshape(24, 16) == expected).all()


@pytest.mark.parametrize("writes", [True, False])
def test_compiled_check_and_proof_agree_on_overlap(writes: bool) -> None:
    rng = np.random.default_rng(8)
    for _ in range(20):
        with pytest.raises(InvalidUsage, match="target of two blocks"):
            blocks_of(rng, writes, twice=True)
        count = int(rng.integers(2, 8))
        table = np.zeros((count, 3), np.int64)
        table[:, 0] = np.arange(count) * 100
        table[:, 1] = rng.integers(0, 60, count)
        table[:, 2] = rng.integers(1, 20, count)
        written = np.zeros(100, int)
        for _, start, nbytes in table.tolist():
            written[start : start + nbytes] += 1
        made = build("write" if writes else "read", table, [[1] * count])
        if written.max() > 1:
            with pytest.raises(ScheduleError, match="belongs"):
                made.verify()
        else:
            made.verify()


def test_extents_of_another_run_are_checked() -> None:
    made = build("write", [[0, 0, 8], [8, 8, 8]], [[2]])
    made.verify()
    made.extents[1, 1] = 4
    with pytest.raises(ScheduleError, match="chunks 0 and 1 overlap"):
        made.verify()


@pytest.mark.parametrize("staged", [0.0, 0.004])
@pytest.mark.parametrize("writes", [True, False])
def test_simulated_time_is_the_predicted_one(writes: bool, staged: float) -> None:
    moved = extents.single(0, 0, 1000)
    half = [extents.single(0, 0, 400), extents.single(400, 400, 600)]
    for parts in ([moved], half):
        plan = plan_of(moved, writes, parts=parts, copy_us=staged)
        plan.verify()
        assert plan.schedule.schedule.nchannels == len(parts)
        times = simulate_transfer(plan.schedule, **asdict(plan.rates))
        # The copies after a staged read do not delay the signal.
        last = max(step.end for step in times.steps)
        assert times.time_us == last
        assert times.time_us == pytest.approx(
            plan.predicted_us if not staged or writes else max(plan.predicted_us - 3.0, last)
        )


def test_calls_have_as_many_bytes_as_permitted() -> None:
    table = np.array([[0, 0, 250], [300, 300, 10], [400, 400, 10], [500, 500, 10]], np.int64)
    rows, counts = cut_calls(table, 100, 3)
    assert rows[:, 2].tolist() == [100, 100, 50, 10, 10, 10]
    assert counts == (1, 1, 3, 1)
    assert rows[1].tolist() == [100, 100, 100]


def test_text_and_picture() -> None:
    made = build("read", [[0, 64, 8], [32, 0, 8]], [[1], [1]])
    again = TransferSchedule.parse(made.dump())
    assert again.schedule == made.schedule
    assert (again.extents == made.extents).all()
    assert again.schedule.ops == {Op.GET, Op.SIGNAL, Op.WAIT}
    assert "reads a chunk" in draw_svg(again.schedule)
    with pytest.raises(ScheduleError, match="1 extents for 2 chunks"):
        TransferSchedule.parse(made.dump().replace("# extent 1", "# nothing"))


def test_wrong_arguments() -> None:
    with pytest.raises(InvalidUsage, match="0 extents"):
        build("write", np.empty((0, 3)), [])
    with pytest.raises(InvalidUsage, match="kind"):
        build("move", [[0, 0, 1]], [[1]])
    with pytest.raises(InvalidUsage, match="in its calls"):
        build("write", [[0, 0, 1]], [[2]])
