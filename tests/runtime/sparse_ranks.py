"""Rank functions of the tests of sparse collectives."""

from __future__ import annotations

from typing import Any

import numpy as np

import miraccl
from miraccl import DType, PreMulSum, RedOp
from miraccl.errors import MiracclError
from miraccl.runtime import sparse
from tests.runtime.reference import DTYPES, OPERATORS, wild

SPECIAL = (-0.0, np.nan, 1e-45, -1e-45, np.inf)


def sparse_input(
    rng: np.random.Generator, dtype: DType, count: int, block: int, density: float
) -> np.ndarray:
    """Return arbitrary bits in a share of the blocks; some have only -0.0, NaN or subnormals."""
    x = np.zeros(count, DTYPES[dtype])
    held = np.flatnonzero(rng.random(-(-count // block)) < density) * block
    values = wild(rng, dtype, block)
    for start in held.tolist():
        x[start : start + block] = np.roll(values, start)[: count - start]
        if rng.random() < 0.3 and dtype is DType.FLOAT32:
            x[start : start + block] = 0
            x[start] = rng.choice(SPECIAL)
    return x


#: compiled by most tests anyway
USUAL_TYPES = (DType.FLOAT32, DType.BFLOAT16, DType.INT32)
USUAL_OPERATORS = (RedOp.SUM, RedOp.AVG, RedOp.MIN)


def random_cases(
    seed: int, cases: int, buffsize: int, per_host: int = 0, usual: bool = True
) -> list[str]:
    """Compare random sparse sums with the deterministic dense ones, bit by bit.

    ``usual``: a few types and operators only; each pair is compiled on first use.
    """
    from tests.runtime.sweep_ranks import act_as_hosts

    act_as_hosts(per_host)
    if per_host:
        sparse.MIN_PIECE_BYTES = 1 << 20  # several pieces of a small array
    algorithms = set()
    with miraccl.init(deterministic=True, buffsize=buffsize) as comm:
        common = np.random.default_rng(seed)
        for _ in range(cases):
            types = USUAL_TYPES if usual else tuple(DType)
            operators = USUAL_OPERATORS if usual else OPERATORS
            dtype = types[common.integers(len(types))]
            op: Any = operators[common.integers(len(operators))]
            if dtype.is_float and common.random() < 0.1:
                op = PreMulSum(float(common.choice([-1.0, 0.5, 0.0])))
            block = int(common.choice([1, 3, 16, 64, 100, 256]))
            count = int(common.choice([0, 1, 5, block, 40 * block - 1, 300 * block + 7]))
            density = float(common.choice([0.0, 0.01, 0.1, 0.5, 0.99, 1.0]))
            if per_host:  # smaller or fuller ones are sent whole
                block, count, density = 256, (1 << 20) + 3, min(density, 0.1)
            rng = np.random.default_rng([seed, int(common.integers(1 << 30)), comm.rank])
            held = 0.0 if common.random() < 0.2 and comm.rank == 0 else density
            x = sparse_input(rng, dtype, count, block, held)
            want = comm.all_reduce(x.copy(), op=op)
            given = block if common.random() < 0.5 and block * dtype.itemsize <= 4096 else None
            hint = None if common.random() < 0.8 else 0.0
            out = np.full_like(x, 3) if common.random() < 0.5 else None
            got = comm.all_reduce_sparse(x, op, out=out, block=given, density=hint)
            assert got is (x if out is None else out)
            plan: Any = comm.last_plan
            algorithms.add(plan.algo)
            where = (seed, dtype, op, block, count, density, plan)
            assert np.array_equal(got.view(np.uint8), want.view(np.uint8)), where
    return sorted(algorithms)


def failing_scan() -> str:
    """Let the scan of the second piece fail on rank 0; return the error of each rank."""
    from tests.runtime.sweep_ranks import act_as_hosts

    act_as_hosts(1)
    sparse.MIN_PIECE_BYTES = 1 << 20
    scan, calls = sparse.PieceScanner._scan, []

    def fail(scanner: sparse.PieceScanner, number: int) -> None:
        calls.append(number)
        if number == 1:
            raise MemoryError("of the test")
        scan(scanner, number)

    with miraccl.init(timeout=60) as comm:
        if comm.rank == 0:
            vars(sparse)["PieceScanner"] = type("Failing", (sparse.PieceScanner,), {"_scan": fail})
        x = np.zeros(1 << 20, np.float32)
        x[comm.rank] = 1
        try:
            comm.all_reduce_sparse(x)
        except MiracclError as error:
            return str(error)
        return f"no error after {calls}"


def different_arguments(fields: list[str]) -> list[str]:
    """Return the errors of ranks that pass different values of one argument, for each of them."""
    return [_different(field) for field in fields]


def _different(field: str) -> str:
    with miraccl.init() as comm:
        x = np.zeros(4096 + (comm.rank if field == "count" else 0), np.float32)
        if field == "dtype" and comm.rank:
            x = x.astype(np.int32)
        more: dict[str, Any] = {}
        if field in ("block", "density") and comm.rank:
            more[field] = {"block": 32, "density": 0.25}[field]
        op = RedOp.MAX if field == "operator" and comm.rank else RedOp.SUM
        try:
            comm.all_reduce_sparse(x, op, **more)
        except MiracclError as error:
            return str(error)
    return ""


def random_coo(seed: int, cases: int) -> int:
    """Compare random sums of rows with NumPy."""
    with miraccl.init(buffsize=1) as comm:
        common = np.random.default_rng(seed)
        for _ in range(cases):
            size = int(common.choice([1, 7, 1000, 1 << 40]))
            shape = [(), (3,), (2, 2)][common.integers(3)]
            kind = np.int32 if size < 1 << 31 and common.random() < 0.5 else np.int64
            dtype = [np.float32, np.int32, np.float16][common.integers(3)]
            most = int(common.choice([0, 1, 5, 300]))
            base = int(common.integers(1 << 30))
            lists = []
            for rank in range(comm.nranks):
                rng = np.random.default_rng([base, rank])
                number = int(rng.integers(0, most + 1))
                rows = rng.integers(0, min(size, 1 << int(rng.integers(1, 41))), number)
                if rng.random() < 0.3:
                    rows = np.unique(rows)
                values = rng.integers(-8, 9, (len(rows), *shape)).astype(dtype)
                lists.append((rows.astype(kind), values))
            i, v = comm.all_reduce_coo(*lists[comm.rank], size)
            union, inverse = np.unique(np.concatenate([r for r, _ in lists]), return_inverse=True)
            want = np.zeros((len(union), *shape), np.float64)
            np.add.at(want, inverse.reshape(-1), np.concatenate([w for _, w in lists]))
            assert i.dtype == kind
            assert np.array_equal(i, union), (seed, base)
            assert v.dtype == dtype
            assert np.array_equal(v, want.astype(dtype)), (seed, base)
    return cases


def refused_coo() -> list[str]:
    """Return the errors of arguments that are not allowed, and of ranks that differ."""
    found = []
    rows = np.ones((2, 4), np.float32)
    with miraccl.init() as comm:
        for indices, values, size in (
            (np.array([0, 9]), rows, 9),
            (np.array([-1, 0]), rows, 9),
            (np.array([0.0, 1.0]), rows, 9),
            (np.array([0]), rows, 9),
            (np.array([0, 1]), rows, 1 << 63),
            (np.array([0, 1]), rows, 10 + comm.rank),
        ):
            try:
                comm.all_reduce_coo(indices, values, size)
            except MiracclError as error:
                found.append(str(error))
    return found


def plans() -> tuple[Any, ...]:
    """Return the plans of a sparse, a dense and a window array, of an async call and of a group."""
    with miraccl.init() as comm:
        x = np.zeros(1 << 22, np.float32)  # 16 MiB; rows pay for larger arrays only
        x[comm.rank * 1000] = 1
        work = comm.all_reduce_sparse(x, block=256, async_op=True)
        assert work.wait() is x
        rows = comm.last_plan
        full = np.ones(1 << 22, np.float32)
        comm.all_reduce_sparse(full, block=256)
        dense = comm.last_plan
        assert (full == comm.nranks).all()
        window = comm.empty(1 << 20)
        window[:] = 1
        comm.all_reduce_sparse(window)
        in_window = comm.last_plan
        assert (window == comm.nranks).all()
        comm.all_reduce(x)
        return rows, dense, in_window, comm.last_plan


def refused() -> list[str]:
    """Return the errors of arguments that are not allowed."""
    found = []
    with miraccl.init() as comm:
        x = np.zeros(100, np.float32)
        for more in ({"block": 0}, {"block": 1 << 40}, {"block": True}, {"density": 1.5}):
            try:
                comm.all_reduce_sparse(x, **more)
            except MiracclError as error:
                found.append(str(error))
        try:
            with miraccl.group():
                comm.all_reduce_sparse(x)
        except MiracclError as error:
            found.append(str(error))
        try:
            comm.all_reduce_sparse(x, out=np.zeros(7, np.float32))
        except MiracclError as error:
            found.append(str(error))
        rows: Any
        rows, dense = comm.explain("all_reduce_sparse", 64 << 20, density=0.001, block=256)
        assert rows.chosen
        assert rows.algo == "sparse_two_shot"
        assert 0 < rows.break_even <= 1
        assert dense.predicted_us > rows.predicted_us
        assert comm.explain("all_reduce_sparse", 64 << 20, density=1.0)[0].algo == dense.algo
    return found
