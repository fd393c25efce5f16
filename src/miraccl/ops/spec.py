"""Public operations as records: arguments, blocks, root, in-place form and result.

The argument check (``ops.check``), the fast-path tables for CPU and GPU memory, and the table of
operations in the documentation are made from these records. A new operation is one record here, a
method of ``api.operations`` and its schedules.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from miraccl.types import Collective


class Blocks(enum.Enum):
    """Blocks of a buffer: one, or one per rank."""

    ONE = "one"
    PER_RANK = "one per rank"


class Root(enum.Enum):
    """Buffer that only the root of a rooted operation has."""

    NONE = "no root"
    HAS_INPUT = "only the root has the input"
    HAS_RESULT = "only the root has the result"


class FastForm(enum.Enum):
    """Compiled entry that runs an operation, by the order of its arguments.

    The value is the name of the entry in ``executor.cpu.kernels.engine``; ``options`` stands for
    ``async_op, stream``.
    """

    COLLECTIVE = "collective"  # (x, out, op or root, options)
    REDUCE = "reduce"  # (x, out, op, options, root)
    ROOTED = "rooted"  # (x, out, root, in counts, out counts, options)
    UNEVEN = "uneven"  # (x, out, root, in counts, out counts, options)
    UNEVEN_REDUCE = "uneven_reduce"  # (x, out, op, options, counts)
    MESSAGE = "send_recv"  # (x, peer, options)
    MESSAGE_PAIR = "sendrecv"  # (x, dst, out, src, options)
    NONE = "none"  # several runs, whose order Python decides


class Writers(enum.IntEnum):
    """Ranks that write to ``x`` if no ``out`` is passed."""

    NONE = 0
    ALL = 1
    ROOT = 2
    OTHERS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class OpSpec:
    """One public operation.

    Attributes:
        name: Name of the method.
        collective: Collective that it runs; ``SEND_RECV`` for messages.
        arguments: Names of its arguments in order, without ``async_op`` and ``stream``; an
            operation with arrays begins with ``x``.
        fast_form: Compiled entry that runs it.
        fast_arguments: Arguments of that entry in order: names, None, or 0.
        input, output: Blocks of ``x`` and of the result.
        root: Buffer that only the root has.
        uneven: The caller passes the counts of the blocks.
        summary: Result in a few words, for the documentation.
    """

    name: str
    collective: Collective
    arguments: tuple[str, ...]
    fast_form: FastForm
    fast_arguments: tuple[str | int | None, ...]
    summary: str
    input: Blocks = Blocks.ONE
    output: Blocks = Blocks.ONE
    root: Root = Root.NONE
    uneven: bool = False

    # Derived once: the check of a call reads these, which is faster than properties.
    out_at: int = field(init=False, repr=False)
    """Position of ``out`` in ``arguments``; 0 if the operation does not have it."""
    root_at: int = field(init=False, repr=False)
    op_at: int = field(init=False, repr=False)
    array_positions: tuple[int, ...] = field(init=False, repr=False)
    one_input: bool = field(init=False, repr=False)
    one_output: bool = field(init=False, repr=False)
    input_on_root: bool = field(init=False, repr=False)
    """Only the root passes ``x``."""
    result_on_root: bool = field(init=False, repr=False)
    """Only the root has a result."""
    defaults_to_x: bool = field(init=False, repr=False)
    """The result is in ``x`` if no ``out`` is passed; else it is allocated."""
    x_writers: Writers = field(init=False, repr=False)
    _fast_order: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        def position(name: str) -> int:
            return self.arguments.index(name) if name in self.arguments else 0

        one_input, one_output = self.input is Blocks.ONE, self.output is Blocks.ONE
        defaults_to_x = one_input and one_output and not self.uneven and not self.is_message
        writers = {Root.NONE: Writers.ALL, Root.HAS_RESULT: Writers.ROOT}
        known = (*self.arguments, "async_op", "stream", None, 0)
        derived = {
            "out_at": position("out"),
            "root_at": position("root"),
            "op_at": position("op"),
            "array_positions": tuple(
                i
                for i, name in enumerate(self.arguments)
                if name in ("x", "out", "indices", "values")
            ),
            "one_input": one_input,
            "one_output": one_output,
            "input_on_root": self.root is Root.HAS_INPUT and not defaults_to_x,
            "result_on_root": self.root is Root.HAS_RESULT,
            "defaults_to_x": defaults_to_x,
            "x_writers": writers.get(self.root, Writers.OTHERS) if defaults_to_x else Writers.NONE,
            "_fast_order": operator.itemgetter(*map(known.index, self.fast_arguments or (0,))),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def is_message(self) -> bool:
        """True for sends and receives."""
        return self.collective is Collective.SEND_RECV

    def get(self, args: Sequence[Any], argument: str) -> Any:
        """Return the value of ``argument`` in ``args``, which are in the operation's order."""
        return args[self.arguments.index(argument)]

    def fast_call_arguments(self, args: Sequence[Any], async_op: bool, stream: Any) -> Any:
        """Return the arguments of the compiled entry for a call with ``args``."""
        return self._fast_order((*args, async_op, stream, None, 0))

    def result(self, args: Sequence[Any], rank: int) -> Any:
        """Return the result of a completed call on ``rank`` whose ``out`` was given if needed."""
        out = args[self.out_at] if self.out_at else None
        if self.is_message:
            return out if self.out_at else args[0] if "src" in self.arguments else None
        if self.result_on_root and rank != args[self.root_at]:
            return args[0] if self.defaults_to_x else None
        return args[0] if out is None and self.defaults_to_x else out


def _collective(
    name: str, collective: Collective, arguments: str, third: str | int, **more: Any
) -> OpSpec:
    fast = ("x", "out" if "out" in arguments else None, third, "async_op", "stream")
    return OpSpec(
        name=name,
        collective=collective,
        arguments=tuple(arguments.split()),
        fast_form=FastForm.COLLECTIVE,
        fast_arguments=fast,
        **more,
    )


def _blocks(
    name: str,
    collective: Collective,
    arguments: str,
    in_counts: str | None,
    out_counts: str | None,
    form: FastForm = FastForm.UNEVEN,
    **more: Any,
) -> OpSpec:
    root = "root" if "root" in arguments else None
    return OpSpec(
        name=name,
        collective=collective,
        arguments=tuple(arguments.split()),
        fast_form=form,
        fast_arguments=("x", "out", root, in_counts, out_counts, "async_op", "stream"),
        uneven=form is FastForm.UNEVEN,
        **more,
    )


ALL_REDUCE = _collective(
    "all_reduce",
    Collective.ALL_REDUCE,
    "x out op",
    "op",
    summary="the reduction on every rank, in `x` or `out`",
)
REDUCE = OpSpec(
    name="reduce",
    collective=Collective.REDUCE,
    arguments=("x", "root", "out", "op"),
    fast_form=FastForm.REDUCE,
    fast_arguments=("x", "out", "op", "async_op", "stream", "root"),
    root=Root.HAS_RESULT,
    summary="the reduction on the root, in `x` or `out`",
)
BROADCAST = _collective(
    "broadcast",
    Collective.BROADCAST,
    "x root",
    "root",
    root=Root.HAS_INPUT,
    summary="`x` of the root in every `x`",
)
ALL_GATHER = _collective(
    "all_gather",
    Collective.ALL_GATHER,
    "x out",
    0,
    output=Blocks.PER_RANK,
    summary="`x` of all ranks, one after another",
)
REDUCE_SCATTER = _collective(
    "reduce_scatter",
    Collective.REDUCE_SCATTER,
    "x out op",
    "op",
    input=Blocks.PER_RANK,
    summary="block r of the reduction on rank r",
)
ALL_TO_ALL = _collective(
    "all_to_all",
    Collective.ALL_TO_ALL,
    "x out",
    0,
    input=Blocks.PER_RANK,
    output=Blocks.PER_RANK,
    summary="block j of rank i becomes block i of rank j",
)
GATHER = _blocks(
    "gather",
    Collective.GATHER,
    "x root out",
    None,
    None,
    FastForm.ROOTED,
    output=Blocks.PER_RANK,
    root=Root.HAS_RESULT,
    summary="`x` of all ranks on the root",
)
SCATTER = _blocks(
    "scatter",
    Collective.SCATTER,
    "x root out",
    None,
    None,
    FastForm.ROOTED,
    input=Blocks.PER_RANK,
    root=Root.HAS_INPUT,
    summary="block r of the root's `x` on rank r; non-root ranks pass `out`",
)
ALL_GATHER_V = _blocks(
    "all_gather_v",
    Collective.ALL_GATHER,
    "x counts out",
    None,
    "counts",
    output=Blocks.PER_RANK,
    summary="`counts[r]` elements of each rank r",
)
REDUCE_SCATTER_V = OpSpec(
    name="reduce_scatter_v",
    collective=Collective.REDUCE_SCATTER,
    arguments=("x", "counts", "out", "op"),
    fast_form=FastForm.UNEVEN_REDUCE,
    fast_arguments=("x", "out", "op", "async_op", "stream", "counts"),
    input=Blocks.PER_RANK,
    uneven=True,
    summary="`counts[r]` elements of the reduction on rank r",
)
ALL_TO_ALL_V = _blocks(
    "all_to_all_v",
    Collective.ALL_TO_ALL,
    "x send_counts recv_counts out",
    "send_counts",
    "recv_counts",
    input=Blocks.PER_RANK,
    output=Blocks.PER_RANK,
    summary="this rank's own counts, to and from each rank",
)
GATHER_V = _blocks(
    "gather_v",
    Collective.GATHER,
    "x counts root out",
    None,
    "counts",
    output=Blocks.PER_RANK,
    root=Root.HAS_RESULT,
    summary="`counts[r]` elements of each rank r on the root",
)
SCATTER_V = _blocks(
    "scatter_v",
    Collective.SCATTER,
    "x counts root out",
    "counts",
    None,
    input=Blocks.PER_RANK,
    root=Root.HAS_INPUT,
    summary="`counts[r]` elements of the root's `x` on rank r",
)
BARRIER = OpSpec(
    name="barrier",
    collective=Collective.BARRIER,
    arguments=(),
    fast_form=FastForm.COLLECTIVE,
    fast_arguments=("async_op", "stream"),
    summary="returns when all ranks have called it",
)
SEND = OpSpec(
    name="send",
    collective=Collective.SEND_RECV,
    arguments=("x", "dst"),
    fast_form=FastForm.MESSAGE,
    fast_arguments=("x", "dst", "async_op", "stream"),
    summary="`x` to rank `dst`",
)
RECV = OpSpec(
    name="recv",
    collective=Collective.SEND_RECV,
    arguments=("x", "src"),
    fast_form=FastForm.MESSAGE,
    fast_arguments=("x", "src", "async_op", "stream"),
    summary="a message of rank `src` in `x`",
)
SENDRECV = OpSpec(
    name="sendrecv",
    collective=Collective.SEND_RECV,
    arguments=("x", "dst", "out", "src"),
    fast_form=FastForm.MESSAGE_PAIR,
    fast_arguments=("x", "dst", "out", "src", "async_op", "stream"),
    summary="`x` to rank `dst`, and a message of rank `src` in `out`",
)
ALL_REDUCE_SPARSE = OpSpec(
    name="all_reduce_sparse",
    collective=Collective.ALL_REDUCE,
    arguments=("x", "op", "out", "block", "density"),
    fast_form=FastForm.NONE,
    fast_arguments=(),
    summary="the reduction of arrays in which most blocks are zero, in `x` or `out`",
)
ALL_REDUCE_COO = OpSpec(
    name="all_reduce_coo",
    collective=Collective.ALL_REDUCE,
    arguments=("indices", "values", "size"),
    fast_form=FastForm.NONE,
    fast_arguments=(),
    summary="the union of rows named by indices, and their sums, as new arrays",
)
#: Operations on CPU memory that are compositions of several runs, by name.
COMPOSED_OPS: dict[str, OpSpec] = {spec.name: spec for spec in (ALL_REDUCE_SPARSE, ALL_REDUCE_COO)}

#: Operations of one run, by name.
OPS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        ALL_REDUCE,
        REDUCE,
        BROADCAST,
        ALL_GATHER,
        REDUCE_SCATTER,
        ALL_TO_ALL,
        GATHER,
        SCATTER,
        ALL_GATHER_V,
        REDUCE_SCATTER_V,
        ALL_TO_ALL_V,
        GATHER_V,
        SCATTER_V,
        BARRIER,
        SEND,
        RECV,
        SENDRECV,
    )
}
