"""Test cases of collectives: every rank draws the same inputs from a case, runs it and checks its
part.

User buffers lie between guard bytes, at addresses that are aligned to the element only; inputs that
must not change are compared afterwards. A case therefore fails if a result is wrong, or a byte next
to a buffer or an input was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miraccl import Communicator, DType, PreMulSum, RedOp
from tests.runtime import reference as ref

GUARD = 96
FILL = 0xA5
EVEN = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
)
UNEVEN = ("all_gather_v", "reduce_scatter_v", "all_to_all_v", "gather_v", "scatter_v")
REDUCING = ("all_reduce", "reduce_scatter", "reduce", "reduce_scatter_v")
ROOTED = ("broadcast", "reduce", "gather", "scatter", "gather_v", "scatter_v")
IN_PLACE = tuple(
    name for name in (*EVEN, *UNEVEN) if name not in ("broadcast", "all_to_all", "all_to_all_v")
)


@dataclass(frozen=True)
class Case:
    """One call of a collective.

    Attributes:
        count: Elements per block.
        wild: Inputs have all bit patterns (only for a fixed order of additions).
    """

    name: str
    dtype: DType
    count: int
    seed: int
    op: RedOp = RedOp.SUM
    root: int = 0
    in_place: bool = False
    wild: bool = False
    window: bool = False
    give_out: bool = True

    def __str__(self) -> str:
        extra = "".join(f" {w}" for w in ("in_place", "wild", "window") if getattr(self, w)) + (
            "" if self.give_out else " no out"
        )
        shape = f"{self.count} x {self.dtype.label} {self.op.name}"
        return f"{self.name} {shape} root {self.root} seed {self.seed}{extra}"


class Buffers:
    """Arrays between guard bytes; window memory has the rest of its page as guard."""

    def __init__(self, comm: Communicator, rng: np.random.Generator, window: bool) -> None:
        self._comm, self._rng, self._window = comm, rng, window
        self._raw: list[tuple[np.ndarray, int, int]] = []

    def empty(self, dtype: DType, count: int) -> np.ndarray:
        nbytes = count * dtype.itemsize
        skew = int(self._rng.integers(0, 9)) * dtype.itemsize
        total = GUARD + skew + nbytes + GUARD
        in_window = self._window and self._rng.random() < 0.8  # not all buffers of all ranks
        raw = self._comm.empty(total, np.uint8) if in_window else np.empty(total, np.uint8)
        raw[:] = FILL
        self._raw.append((raw, GUARD + skew, nbytes))
        return raw[GUARD + skew : GUARD + skew + nbytes].view(ref.DTYPES[dtype])

    def filled(self, dtype: DType, values: np.ndarray) -> np.ndarray:
        array = self.empty(dtype, values.size)
        array.view(np.uint8)[:] = values.view(np.uint8)
        return array

    def check(self) -> None:
        for raw, start, nbytes in self._raw:
            beside = np.concatenate([raw[:start], raw[start + nbytes :]])
            where = np.flatnonzero(raw != FILL)[:8] - start
            assert (beside == FILL).all(), (
                f"bytes beside a buffer of {nbytes} bytes were written: {where}"
            )


def expect(what: str, got: Any, want: np.ndarray, op: RedOp = RedOp.SUM) -> None:
    wrong = ref.differing(got, want, zeros_alike=op in (RedOp.MIN, RedOp.MAX))
    if wrong.size:
        i = int(wrong[0])
        first = f"[{i}]: {got.reshape(-1)[i]!r}, not {want.reshape(-1)[i]!r}"
        raise AssertionError(
            f"{what}: {wrong.size} of {want.size} elements are wrong, the first is {first}"
        )


def perform(comm: Communicator, case: Case) -> None:
    """Run a case on this rank and check everything visible to this rank."""
    rng = np.random.default_rng(case.seed)
    own = np.random.default_rng([case.seed, comm.rank])
    buffers = Buffers(comm, own, case.window)
    try:
        _RUN[case.name](comm, case, rng, buffers)
        buffers.check()
    except AssertionError as error:
        raise AssertionError(
            f"rank {comm.rank} of {comm.nranks}, plan {comm.last_plan}: {case}: {error}"
        ) from None


def _draw(case: Case, rng: np.random.Generator, counts: Sequence[int]) -> list[np.ndarray]:
    return [(ref.wild if case.wild else ref.tame)(rng, case.dtype, n) for n in counts]


def _op(case: Case, nranks: int) -> tuple[Any, list[float], Callable[[int], Any]]:
    """Return (operator for the reference, scalars, operator of a rank)."""
    if case.op is not RedOp.PREMUL_SUM:
        return case.op, [], lambda rank: case.op
    scalars = [[1.0, 2.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0][r % 9] for r in range(nranks)]
    return PreMulSum(1.0), scalars, lambda rank: PreMulSum(scalars[rank])


def _counts(case: Case, rng: np.random.Generator, nranks: int) -> list[int]:
    """Return uneven counts around ``case.count``, some of them 0."""
    counts = rng.integers(0, 2 * case.count + 1, nranks) * (rng.random(nranks) < 0.8)
    return [int(c) for c in counts]


def _all_reduce(comm: Communicator, case: Case, rng: np.random.Generator, buffers: Buffers) -> None:
    values = _draw(case, rng, [case.count] * comm.nranks)
    op, scalars, mine = _op(case, comm.nranks)
    want = ref.reduce_arrays(values, op, scalars)
    x = buffers.filled(case.dtype, values[comm.rank])
    if case.in_place:
        assert comm.all_reduce(x, op=mine(comm.rank)) is x
        return expect("x", x, want, case.op)
    out = buffers.empty(case.dtype, case.count)
    assert comm.all_reduce(x, out, mine(comm.rank)) is out
    expect("out", out, want, case.op)
    expect("x (must not change)", x, values[comm.rank])


def _reduce(comm: Communicator, case: Case, rng: np.random.Generator, buffers: Buffers) -> None:
    values = _draw(case, rng, [case.count] * comm.nranks)
    op, scalars, mine = _op(case, comm.nranks)
    x = buffers.filled(case.dtype, values[comm.rank])
    is_root = comm.rank == case.root
    out = buffers.empty(case.dtype, case.count) if is_root and not case.in_place else None
    got = comm.reduce(x, case.root, out, mine(comm.rank))
    if is_root:
        expect("result", got, ref.reduce_arrays(values, op, scalars), case.op)
    if not (is_root and case.in_place):
        expect("x (must not change)", x, values[comm.rank])


def _broadcast(comm: Communicator, case: Case, rng: np.random.Generator, buffers: Buffers) -> None:
    values = _draw(case, rng, [case.count] * comm.nranks)
    x = buffers.filled(case.dtype, values[comm.rank])
    if comm.rank == case.root and case.seed % 2:
        x.setflags(write=False)
    assert comm.broadcast(x, case.root) is x
    expect("x", x, values[case.root])


def _all_gather(comm: Communicator, case: Case, rng: np.random.Generator, buffers: Buffers) -> None:
    values = _draw(case, rng, [case.count] * comm.nranks)
    want = np.concatenate(values)
    if not case.give_out and not case.in_place:
        return expect(
            "result", comm.all_gather(buffers.filled(case.dtype, values[comm.rank])), want
        )
    out = buffers.empty(case.dtype, want.size)
    if case.in_place:
        x = out[comm.rank * case.count : (comm.rank + 1) * case.count]
        x[:] = values[comm.rank]
    else:
        x = buffers.filled(case.dtype, values[comm.rank])
    assert comm.all_gather(x, out) is out
    expect("out", out, want)
    if not case.in_place:
        expect("x (must not change)", x, values[comm.rank])


def _all_gather_v(
    comm: Communicator, case: Case, rng: np.random.Generator, buffers: Buffers
) -> None:
    counts = _counts(case, rng, comm.nranks)
    values = _draw(case, rng, counts)
    want = np.concatenate(values)
    out = buffers.empty(case.dtype, want.size)
    start = sum(counts[: comm.rank])
    if case.in_place:
        x = out[start : start + counts[comm.rank]]
        x[:] = values[comm.rank]
    else:
        x = buffers.filled(case.dtype, values[comm.rank])
    got = comm.all_gather_v(x, counts, out if case.give_out or case.in_place else None)
    expect("out", got, want)


def _scattered(
    comm: Communicator,
    case: Case,
    rng: np.random.Generator,
    buffers: Buffers,
    counts: list[int],
    uneven: bool,
) -> None:
    values = _draw(case, rng, [sum(counts)] * comm.nranks)
    op, scalars, mine = _op(case, comm.nranks)
    start = sum(counts[: comm.rank])
    share = slice(start, start + counts[comm.rank])
    want = ref.reduce_arrays(values, op, scalars)[share]
    x = buffers.filled(case.dtype, values[comm.rank])
    out = x[share] if case.in_place else buffers.empty(case.dtype, want.size)
    given = out if case.give_out or case.in_place else None
    if uneven:
        got = comm.reduce_scatter_v(x, counts, given, mine(comm.rank))
    else:
        got = comm.reduce_scatter(x, given, mine(comm.rank))
    expect("out", got, want, case.op)
    if not case.in_place:
        expect("x (must not change)", x, values[comm.rank])


def _reduce_scatter(
    comm: Communicator, case: Case, rng: np.random.Generator, buffers: Buffers
) -> None:
    _scattered(comm, case, rng, buffers, [case.count] * comm.nranks, False)


def _reduce_scatter_v(
    comm: Communicator, case: Case, rng: np.random.Generator, buffers: Buffers
) -> None:
    _scattered(comm, case, rng, buffers, _counts(case, rng, comm.nranks), True)


def _all_to_all(comm: Communicator, case: Case, rng: np.random.Generator, buffers: Buffers) -> None:
    n, c = comm.nranks, case.count
    values = _draw(case, rng, [c * n] * n)
    x = buffers.filled(case.dtype, values[comm.rank])
    out = buffers.empty(case.dtype, c * n) if case.give_out else None
    got = comm.all_to_all(x, out)
    expect("out", got, np.concatenate([v[comm.rank * c : (comm.rank + 1) * c] for v in values]))
    expect("x (must not change)", x, values[comm.rank])


def _all_to_all_v(
    comm: Communicator, case: Case, rng: np.random.Generator, buffers: Buffers
) -> None:
    n, me = comm.nranks, comm.rank
    matrix = [_counts(case, rng, n) for _ in range(n)]
    values = _draw(case, rng, [sum(row) for row in matrix])
    x = buffers.filled(case.dtype, values[me])
    receives = [matrix[r][me] for r in range(n)]
    out = buffers.empty(case.dtype, sum(receives)) if case.give_out else None
    got = comm.all_to_all_v(x, matrix[me], receives, out)
    want = [values[r][sum(matrix[r][:me]) : sum(matrix[r][: me + 1])] for r in range(n)]
    expect("out", got, np.concatenate(want))
    expect("x (must not change)", x, values[me])


def _gathered(
    comm: Communicator,
    case: Case,
    rng: np.random.Generator,
    buffers: Buffers,
    counts: list[int],
    uneven: bool,
) -> None:
    values = _draw(case, rng, counts)
    is_root = comm.rank == case.root
    out = buffers.empty(case.dtype, sum(counts)) if is_root else None
    start = sum(counts[: comm.rank])
    if is_root and case.in_place:
        assert out is not None
        x = out[start : start + counts[comm.rank]]
        x[:] = values[comm.rank]
    else:
        x = buffers.filled(case.dtype, values[comm.rank])
    if not case.give_out and not case.in_place:
        out = None
    got = comm.gather_v(x, counts, case.root, out) if uneven else comm.gather(x, case.root, out)
    if is_root:
        expect("out", got, np.concatenate(values))
    else:
        assert got is None
        expect("x (must not change)", x, values[comm.rank])


def _gather(comm: Communicator, case: Case, rng: np.random.Generator, buffers: Buffers) -> None:
    _gathered(comm, case, rng, buffers, [case.count] * comm.nranks, False)


def _gather_v(comm: Communicator, case: Case, rng: np.random.Generator, buffers: Buffers) -> None:
    _gathered(comm, case, rng, buffers, _counts(case, rng, comm.nranks), True)


def _shared(
    comm: Communicator,
    case: Case,
    rng: np.random.Generator,
    buffers: Buffers,
    counts: list[int],
    uneven: bool,
) -> None:
    (values,) = _draw(case, rng, [sum(counts)])
    is_root = comm.rank == case.root
    start = sum(counts[: comm.rank])
    share = slice(start, start + counts[comm.rank])
    x = buffers.filled(case.dtype, values) if is_root else None
    if is_root and case.in_place:
        assert x is not None
        out = x[share]
    else:
        out = buffers.empty(case.dtype, counts[comm.rank])
    given = None if is_root and not case.give_out and not case.in_place else out
    got = (
        comm.scatter_v(x, counts, case.root, given) if uneven else comm.scatter(x, case.root, given)
    )
    expect("out", got, values[share])
    if is_root:
        assert x is not None
        expect("x (must not change)", x, values)


def _scatter(comm: Communicator, case: Case, rng: np.random.Generator, buffers: Buffers) -> None:
    _shared(comm, case, rng, buffers, [case.count] * comm.nranks, False)


def _scatter_v(comm: Communicator, case: Case, rng: np.random.Generator, buffers: Buffers) -> None:
    _shared(comm, case, rng, buffers, _counts(case, rng, comm.nranks), True)


_RUN: dict[str, Callable[[Communicator, Case, np.random.Generator, Buffers], None]] = {
    name: globals()[f"_{name}"] for name in (*EVEN, *UNEVEN)
}


def random_case(
    rng: np.random.Generator,
    nranks: int,
    counts: Sequence[int],
    names: Sequence[str],
    *,
    ordered: Callable[[Case], bool],
) -> Case:
    """Draw a case from ``rng``; ``ordered`` restricts it to additions in rank order, for any
    input.
    """
    from dataclasses import replace

    name = str(rng.choice(names))
    dtype = DType(int(rng.integers(len(DType))))
    operators = (*ref.compiled_operators(dtype), RedOp.PREMUL_SUM)
    case = Case(
        name=name,
        dtype=dtype,
        count=int(rng.choice(counts)),
        seed=int(rng.integers(1 << 30)),
        op=operators[int(rng.integers(len(operators)))] if name in REDUCING else RedOp.SUM,
        root=int(rng.integers(nranks)) if name in ROOTED else 0,
        in_place=name in IN_PLACE and bool(rng.integers(2)),
        window=bool(rng.random() < 0.25),
        give_out=bool(rng.random() < 0.8),
    )
    return replace(case, wild=name not in REDUCING or ordered(case))
