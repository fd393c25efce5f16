"""Request for a plan: the properties of an operation that all ranks choose by."""

from __future__ import annotations

from dataclasses import dataclass

from miraccl.types import Collective, DType, RedOp


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Properties of an operation that its run depends on.

    Attributes:
        in_counts, out_counts: Elements per block on this rank; empty for uneven operations, whose
            counts come with each call.
        block_bytes: Common size of the blocks; for uneven operations the size class
            (``sizes.size_class``) of the largest block of any rank.
        count: Elements of a block, as all ranks know it; 0 for uneven operations.
        in_place: True if output and input overlap in the operation's in-place form.
    """

    collective: Collective
    dtype: DType
    op: RedOp
    root: int
    in_counts: tuple[int, ...]
    out_counts: tuple[int, ...]
    block_bytes: int
    count: int
    in_place: bool = False
    uneven: bool = False
