"""The check of an operation's arguments, the same for CPU and GPU memory.

It follows from the ``OpSpec``: the buffers that a rank has, their blocks and counts, the in-place
form and the result. An ``ArrayReader`` reads the arrays of one kind of memory. Argument errors are
``InvalidUsage``, raised before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from miraccl.errors import InvalidUsage
from miraccl.ops.arguments import counts_of, peer_rank, resolve_operator
from miraccl.ops.spec import OpSpec, Writers
from miraccl.types import DType, Operator, RedOp


class BufferArray(Protocol):
    """Contiguous memory of an array."""

    @property
    def address(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> DType: ...


B = TypeVar("B", bound=BufferArray)


class ArrayReader(Protocol[B]):
    """Access to arrays in one kind of memory, on one rank."""

    rank: int
    nranks: int

    def view(self, obj: Any, name: str, op: str, stream: Any, writes: bool) -> B:
        """Return the memory of argument ``name`` of ``op``, used in ``stream``.

        ``writes``: the operation writes to it.
        """

    def allocate(self, spec: OpSpec, x: Any, source: B, count: int) -> Any:
        """Return a result array of ``count`` elements for the input ``x``."""


class CheckedCall(NamedTuple, Generic[B]):
    """Checked arguments of a collective on one rank.

    A rank without one of the two buffers has the other one in its place, and no blocks of it.

    Attributes:
        count: Elements of a block; of an uneven operation those of this rank's own block.
        sends, receives: Of an uneven operation, the elements by rank of the blocks of input and
            output; the same list unless each rank knows only its own counts.
        in_place: ``source`` and ``target`` overlap in the operation's in-place form.
        result: Return value of the call.
    """

    spec: OpSpec
    source: B
    target: B
    count: int  # type: ignore[assignment]  # elements; hides tuple.count
    sends: Sequence[int]
    receives: Sequence[int]
    operator: Operator
    root: int
    in_place: bool
    result: Any

    def in_counts(self, rank: int, nranks: int) -> Sequence[int]:
        """Return the elements of the blocks of ``source``; empty if the rank has no input."""
        if self.spec.one_input:
            return (self.sends[rank] if self.sends else self.count,)
        if self.spec.input_on_root and rank != self.root:
            return ()
        return self.sends or (self.count,) * nranks

    def out_counts(self, rank: int, nranks: int) -> Sequence[int]:
        """Return the elements of the blocks of ``target``; empty if the rank has no result."""
        if self.spec.one_output:
            return (self.receives[rank] if self.receives else self.count,)
        if self.spec.result_on_root and rank != self.root:
            return ()
        return self.receives or (self.count,) * nranks

    def common_counts(self, nranks: int) -> Sequence[int]:
        """Return the block counts by rank that all ranks know; empty if there are none."""
        if not self.spec.uneven:
            return (self.count,) * nranks
        return self.sends if self.sends is self.receives else ()


class CheckedTransfer(NamedTuple, Generic[B]):
    """A checked send or receive."""

    receives: bool
    peer: int
    memory: B


def check(
    spec: OpSpec, reader: ArrayReader[B], args: Sequence[Any], stream: Any = None
) -> CheckedCall[B]:
    """Check the arguments of a collective, given in the order of ``spec.arguments``.

    Raises:
        InvalidUsage: An argument is not allowed.
        SystemFailure: No memory for the result.
    """
    name, rank, nranks = spec.name, reader.rank, reader.nranks
    x, out = args[0], args[spec.out_at] if spec.out_at else None
    root, at_root = 0, True
    if spec.root_at:
        root = peer_rank(args[spec.root_at], "root", nranks, name)
        at_root = root == rank
    sends, receives = _counts(spec, reader, args) if spec.uneven else ((), ())
    source: B | None = None
    count = 0
    if at_root or not spec.input_on_root:
        writers = spec.x_writers
        writes = out is None and (
            writers is _ALL or (writers is not _NONE and at_root is (writers is _ROOT))
        )
        source = reader.view(x, "x", name, stream, writes)
        count = source.count
        if sends:
            _check_count(spec, "x", source, sends, spec.one_input, rank)
        elif not spec.one_input:
            if count % nranks:
                raise _uneven_error(spec, count, nranks)
            count //= nranks
    op = _SUM
    if spec.op_at:
        op = args[spec.op_at]
        if (type(op) is not RedOp or op is _PREMUL_SUM) and source is not None:
            resolve_operator(op, source.dtype, name)
    if source is not None and (
        (out is None and spec.defaults_to_x) or (spec.result_on_root and not at_root)
    ):
        result = x if spec.defaults_to_x else None
        call: CheckedCall[B] = _new(
            CheckedCall, (spec, source, source, count, sends, receives, op, root, True, result)
        )
        return call
    if out is None:
        if source is None:
            raise InvalidUsage(f"{name}: non-root ranks must pass out, the array for their share")
        out = reader.allocate(
            spec, x, source, _total(receives, count, spec.one_output, rank, nranks)
        )
    target = reader.view(out, "out", name, stream, True)
    in_place = False
    if source is None:
        source, count = target, target.count
    else:
        if source.dtype is not target.dtype:
            raise _dtype_error(spec, source, target)
        if not receives and target.count != (count if spec.one_output else count * nranks):
            raise _out_count_error(spec, target, count, nranks)
        offset = target.address - source.address
        # Bounds for the largest elements first: the properties of the dtype cost 0.3 us.
        if (
            -MAX_ITEMSIZE * target.count < offset < MAX_ITEMSIZE * source.count
            and target.count
            and source.count
            and ((offset < source.nbytes) if offset > 0 else (-offset < target.nbytes))
        ):
            _check_in_place(spec, source.dtype, offset, sends, receives, rank, count)
            in_place = True
    if receives:
        _check_count(spec, "out", target, receives, spec.one_output, rank)
    call = _new(
        CheckedCall, (spec, source, target, count, sends, receives, op, root, in_place, out)
    )
    return call


MAX_ITEMSIZE = max(dtype.itemsize for dtype in DType)
_new: Any = tuple.__new__  # the constructor of a NamedTuple takes 0.25 us more
_NONE, _ALL, _ROOT = Writers.NONE, Writers.ALL, Writers.ROOT
_SUM, _PREMUL_SUM = RedOp.SUM, RedOp.PREMUL_SUM  # reading a member of an enum takes 0.1 us


def check_transfers(
    spec: OpSpec, reader: ArrayReader[B], args: Sequence[Any], stream: Any = None
) -> list[CheckedTransfer[B]]:
    """Check the arguments of a ``send``, ``recv`` or ``sendrecv``."""
    name, nranks = spec.name, reader.nranks
    transfers = [
        CheckedTransfer(
            receives,
            peer_rank(args[peer_at], peer, nranks, name),
            reader.view(args[array_at], array, name, stream, receives),
        )
        for array, array_at, peer, peer_at, receives in _MESSAGES[name]
    ]
    if len(transfers) > 1 and overlaps(transfers[0].memory, transfers[1].memory):
        raise InvalidUsage(f"{name}: x and out must not overlap: it has no in-place form")
    return transfers


#: (array argument and its position, peer argument and its position, receives) of the messages
_MESSAGES = {
    "send": (("x", 0, "dst", 1, False),),
    "recv": (("x", 0, "src", 1, True),),
    "sendrecv": (("x", 0, "dst", 1, False), ("out", 2, "src", 3, True)),
}


def overlaps(a: BufferArray, b: BufferArray) -> bool:
    """Return True if two buffers share memory."""
    first, second = a.address, b.address
    if first < second:
        return b.count != 0 and second < first + a.nbytes
    return a.count != 0 and b.count != 0 and first < second + b.nbytes


def _counts(
    spec: OpSpec, reader: ArrayReader[Any], args: Sequence[Any]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the counts by rank of an uneven operation's input and output."""
    name, rank, nranks = spec.name, reader.rank, reader.nranks
    if spec.arguments[1] == "counts":
        counts = counts_of(args[1], "counts", nranks, name)
        return counts, counts
    sends = counts_of(args[1], "send_counts", nranks, name)
    receives = counts_of(args[2], "recv_counts", nranks, name)
    if sends[rank] != receives[rank]:
        raise InvalidUsage(
            f"{name}: counts of a rank to itself differ: send_counts[{rank}] is {sends[rank]}, "
            f"recv_counts[{rank}] is {receives[rank]}"
        )
    return sends, receives


def _total(counts: Sequence[int], count: int, one: bool, rank: int, nranks: int) -> int:
    """Return the elements of a buffer."""
    if one:
        return counts[rank] if counts else count
    return sum(counts) if counts else count * nranks


def _check_in_place(
    spec: OpSpec,
    dtype: DType,
    offset: int,
    sends: Sequence[int],
    receives: Sequence[int],
    rank: int,
    count: int,
) -> None:
    """Raise unless ``out``, ``offset`` bytes after ``x``, is the in-place form: a rank's own
    block.
    """
    if not spec.one_input and not spec.one_output:
        raise InvalidUsage(f"{spec.name}: x and out must not overlap: it has no in-place form")
    expected = 0
    if not spec.one_output:
        expected = -(sum(receives[:rank]) if receives else rank * count)
    elif not spec.one_input:
        expected = sum(sends[:rank]) if sends else rank * count
    if offset != expected * dtype.itemsize:
        raise InvalidUsage(f"{spec.name}: x and out overlap in another way than its in-place form")


def _check_count(
    spec: OpSpec, name: str, buffer: BufferArray, counts: Sequence[int], one: bool, rank: int
) -> None:
    """Raise if a buffer of an uneven operation has another count than ``counts`` say."""
    expected = counts[rank] if one else sum(counts)
    if buffer.count != expected:
        argument = "counts"
        if spec.arguments[1] != "counts":
            argument = "send_counts" if name == "x" else "recv_counts"
        why = f"{argument}[{rank}]" if one else f"the sum of {argument}"
        raise _count_error(spec, name, buffer, expected, why)


def _out_count_error(spec: OpSpec, target: BufferArray, count: int, nranks: int) -> InvalidUsage:
    if spec.one_input == spec.one_output:
        why = "as many as x"
    else:
        why = f"x shared by {nranks} ranks" if spec.one_output else f"{nranks} times x"
    return _count_error(spec, "out", target, count if spec.one_output else count * nranks, why)


def _count_error(
    spec: OpSpec, name: str, buffer: BufferArray, count: int, why: str
) -> InvalidUsage:
    return InvalidUsage(
        f"{spec.name}: {name} has {buffer.count} elements, but needs {count} ({why})"
    )


def _uneven_error(spec: OpSpec, count: int, nranks: int) -> InvalidUsage:
    return InvalidUsage(
        f"{spec.name}: x has {count} elements, not divisible by {nranks} ranks",
        hint=f"use {spec.name}_v",
    )


def _dtype_error(spec: OpSpec, source: BufferArray, target: BufferArray) -> InvalidUsage:
    return InvalidUsage(
        f"{spec.name}: x and out have different dtypes, "
        f"{source.dtype.label} and {target.dtype.label}"
    )
