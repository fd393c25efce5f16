"""What is timed: a library bound to the buffers of one case.

``Engine`` is the little that the measurement needs of a communication library; miraccl and each peer has one.  Needs numpy;
processes of a peer load this file by its path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from miraccl.tools.perf.data import Array
from miraccl.tools.perf.spec import Case


@dataclass(frozen=True, kw_only=True)
class BoundOperation:
    """One operation with its buffers. ``input`` and ``output`` are views; empty where a rank has none.

    ``owner`` keeps the memory alive; ``chosen`` says with which algorithm, protocol and channels the last call ran.
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
        """Element-wise ``max`` or ``sum`` over the ranks, the same on each."""
        ...

    def bind(self, case: Case, in_place: bool) -> BoundOperation | None:
        """Allocate and prepare; None if the library does not have this form."""
        ...

    def close(self) -> None: ...


def place_buffers(
    case: Case, rank: int, in_place: bool, allocate: Callable[[int], Any]
) -> tuple[Any, Any]:
    """Input and output of ``rank``, as NCCL defines in place: one is the rank's block of the other, or both are the same.

    ``allocate(elements)`` makes a one-dimensional buffer that can be sliced.  A rank that takes no part in a side (input of
    scatter, output of gather) gets an empty one.  The output of reduce exists on every rank.
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
