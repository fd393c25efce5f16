"""Contract of a measured library: an operation bound to the buffers of one case.

miraccl and each peer have an ``Engine``. Imports numpy only; processes of a peer load this file by
its path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from miraccl.tools.perf.data import Array
from miraccl.tools.perf.spec import Case


@dataclass(frozen=True, kw_only=True)
class BoundOperation:
    """An operation with its buffers.

    - ``input``, ``output``: views, empty on ranks without one.
    - ``plan_names``: returns algorithm, protocol and number of channels of the last call.
    - ``owner``: object that keeps the memory alive.
    """

    call: Callable[[], Any]
    input: Array
    output: Array
    plan_names: Callable[[], tuple[str, str, int]] = lambda: ("", "", 0)
    owner: Any = None


class Engine(Protocol):
    """A library on one rank."""

    name: str
    rank: int
    nranks: int

    def barrier(self) -> None: ...

    def reduce_list(self, values: list[float], *, how: str) -> list[float]:
        """Return the element-wise ``max`` or ``sum`` over the ranks, equal on each."""
        ...

    def bind(self, case: Case, in_place: bool) -> BoundOperation | None:
        """Allocate and prepare; return None if the library does not have this form."""
        ...

    def close(self) -> None: ...


def place_buffers(
    case: Case, rank: int, in_place: bool, allocate: Callable[[int], Any]
) -> tuple[Any, Any]:
    """Return input and output of ``rank``, in place as NCCL defines it.

    In place, one is the rank's block of the other, or both are the same. ``allocate(elements)``
    returns a one-dimensional buffer that can be sliced. A rank without an input (scatter) or output
    (gather) gets an empty one. The output of reduce exists on every rank.
    """
    has_input = case.op != "scatter" or rank == case.root
    has_output = case.op != "gather" or rank == case.root
    needs_input, needs_output = case.input_count * has_input, case.output_count * has_output
    if not in_place or not (has_input and has_output):
        return allocate(needs_input), allocate(needs_output)
    whole = allocate(max(needs_input, needs_output))
    block = whole[rank * case.count : (rank + 1) * case.count]
    if needs_input == needs_output:
        return whole, whole
    return (block, whole) if needs_input < needs_output else (whole, block)
