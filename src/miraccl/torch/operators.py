"""Reduction operators of torch on torch types, in terms of what miraccl reduces.

- bool is an 8-bit integer of 0 and 1: SUM, MAX and BOR become the maximum (as in c10d's NCCL
  backend), PRODUCT, MIN and BAND the minimum.
- Complex numbers are pairs of reals, which is correct for sums only.
- 16-bit integers are reduced as 32-bit integers and truncated, which equals 16-bit arithmetic.
- miraccl has no bitwise operators: ranks exchange their bytes and fold them locally, at the traffic
  and memory of an all_gather (all_to_all for reduce_scatter).

Arrays are those of ``tensors.Staged``: NumPy arrays for CPU memory, flat tensors for GPU memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from miraccl.errors import InvalidUsage
from miraccl.torch.tensors import NATIVE, SMALL_FLOATS, WIDENED, ElementEncoding
from miraccl.types import PreMulSum, RedOp

if TYPE_CHECKING:
    from miraccl.api.communicator import Communicator

_Kind = dist.ReduceOp.RedOpType
_VALUES = {
    _Kind.SUM: RedOp.SUM,
    _Kind.AVG: RedOp.AVG,
    _Kind.PRODUCT: RedOp.PROD,
    _Kind.MIN: RedOp.MIN,
    _Kind.MAX: RedOp.MAX,
    _Kind.PREMUL_SUM: RedOp.PREMUL_SUM,
}
_PLAIN = {kind.value: op for kind, op in _VALUES.items() if op is not RedOp.PREMUL_SUM}
_BOOLS = {
    _Kind.SUM: RedOp.MAX,
    _Kind.MAX: RedOp.MAX,
    _Kind.BOR: RedOp.MAX,
    _Kind.PRODUCT: RedOp.MIN,
    _Kind.MIN: RedOp.MIN,
    _Kind.BAND: RedOp.MIN,
}
_BITWISE = {_Kind.BAND: "bitwise_and", _Kind.BOR: "bitwise_or", _Kind.BXOR: "bitwise_xor"}
_COMPLEX_OPS = (_Kind.SUM, _Kind.AVG, _Kind.PREMUL_SUM)


@dataclass(frozen=True, kw_only=True)
class ReductionPlan:
    """A reduction in terms of miraccl: operator ``op`` on arrays with ``encoding``, or a local
    ``fold``.

    ``fold`` names a NumPy and torch function of two byte arrays.
    """

    encoding: ElementEncoding
    op: RedOp | PreMulSum = RedOp.SUM
    fold: str | None = None


def reduction_plan(op: Any, dtype: Any, where: str) -> ReductionPlan:
    """Return the plan for a ``ReduceOp`` on tensors of ``dtype``.

    Raises:
        InvalidUsage: The operator is not defined for this type.
    """
    kind = getattr(op, "op", op)
    found = _find_plan(kind, dtype, where)
    if found.op is not RedOp.PREMUL_SUM:
        return found
    return ReductionPlan(
        encoding=found.encoding, op=PreMulSum(op.__getstate__()[1])
    )  # PyTorch 2.11 has no op.factor


def plain_operator(op: Any) -> RedOp | None:
    """Return the built-in operator equal to ``op``, or None if there is none."""
    return _PLAIN.get(op.op.value)


@functools.cache
def _find_plan(kind: Any, dtype: Any, where: str) -> ReductionPlan:
    if dtype is torch.bool and kind in _BOOLS:
        return ReductionPlan(encoding=ElementEncoding.BYTES, op=_BOOLS[kind])
    if kind in _BITWISE and not dtype.is_floating_point and not dtype.is_complex:
        return ReductionPlan(encoding=ElementEncoding.BYTES, fold=_BITWISE[kind])
    if dtype.is_complex and kind not in _COMPLEX_OPS:
        raise _unsupported(kind, dtype, where)
    if (
        not dtype.is_complex
        and dtype not in NATIVE
        and dtype not in SMALL_FLOATS
        and dtype not in WIDENED
    ):
        raise _unsupported(kind, dtype, where)
    if kind not in _VALUES:
        raise _unsupported(kind, dtype, where)
    return ReductionPlan(
        encoding=ElementEncoding.WIDE if dtype in WIDENED else ElementEncoding.VALUES,
        op=_VALUES[kind],
    )


def _unsupported(kind: Any, dtype: Any, where: str) -> InvalidUsage:
    return InvalidUsage(
        f"{where}: ReduceOp.{getattr(kind, 'name', kind)} is not supported for {dtype}",
        hint="see docs/guide/pytorch-types.md",
    )


# ---- reductions of flat arrays by a recipe


def all_reduce(comm: Communicator, x: Any, plan: ReductionPlan) -> None:
    """Reduce ``x`` over all ranks, in place."""
    if plan.fold is None:
        comm.all_reduce(x, op=plan.op)
    else:
        _fold(plan.fold, comm.all_gather(x), x)


def reduce(comm: Communicator, x: Any, root: int, plan: ReductionPlan) -> None:
    """Reduce ``x`` to the root, in place there."""
    if plan.fold is None:
        comm.reduce(x, root, op=plan.op)
        return
    parts = comm.gather(x, root)
    if comm.rank == root:
        _fold(plan.fold, parts, x)


def reduce_scatter(comm: Communicator, x: Any, out: Any, plan: ReductionPlan) -> None:
    """Reduce ``x`` and scatter equal shares to ``out``."""
    if plan.fold is None:
        comm.reduce_scatter(x, out, plan.op)
    else:
        _fold(plan.fold, comm.all_to_all(x), out)


def reduce_scatter_v(
    comm: Communicator, x: Any, counts: list[int], out: Any, plan: ReductionPlan
) -> None:
    """Reduce ``x`` and scatter ``counts[r]`` elements to rank r."""
    if plan.fold is None:
        comm.reduce_scatter_v(x, counts, out, plan.op)
    else:
        _fold(plan.fold, comm.all_to_all_v(x, counts, [counts[comm.rank]] * comm.nranks), out)


def _fold(name: str, parts: Any, out: Any) -> None:
    if isinstance(out, np.ndarray):
        if out.size:
            getattr(np, name).reduce(parts.reshape(-1, out.size), axis=0, out=out)
    elif out.numel():
        rows = parts.view(-1, out.numel())
        out.copy_(rows[0])
        for row in rows[1:]:
            getattr(torch, name)(out, row, out=out)
