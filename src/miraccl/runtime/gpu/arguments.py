"""Argument checks of operations on GPU memory, shared by the one-host and the multi-node
communicator.

Every check raises ``InvalidUsage`` before anything is sent or enqueued.
"""

from __future__ import annotations

from typing import Any

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda.gpu import Gpu
from miraccl.ops.arguments import peer_rank
from miraccl.runtime.gpu.memory import DeviceMemory, device_view
from miraccl.types import Collective


class DeviceArguments:
    """Argument checks as a mixin of communicators."""

    rank: int
    nranks: int
    gpu: Gpu

    def _check_out(
        self, out: Any, source: DeviceMemory, count: int, op_name: str, stream: Any
    ) -> DeviceMemory:
        """Return the memory of ``out``, which must have ``count`` elements of the dtype of
        ``source``.

        ``stream``: stream in which the operation uses the memory.
        """
        target = device_view(out, "out", op_name, stream, self.gpu)
        if target.dtype is not source.dtype or target.count != count:
            found = f"{target.count} x {target.dtype.label}"
            text = f"{op_name}: out has {found}, but needs {count} x {source.dtype.label}"
            raise InvalidUsage(text, rank=self.rank)
        return target

    def _equal_share(self, source: DeviceMemory, op_name: str) -> int:
        """Return the elements of one rank's share; raise if ``source`` cannot be split evenly."""
        if source.count % self.nranks:
            raise InvalidUsage(
                f"{op_name}: x has {source.count} elements, not divisible by {self.nranks} ranks",
                rank=self.rank,
            )
        return source.count // self.nranks

    @staticmethod
    def _overlaps(a: DeviceMemory, b: DeviceMemory) -> bool:
        if a.address > b.address:
            a, b = b, a
        return b.count != 0 and a.address + a.nbytes > b.address

    def _check_in_place(
        self, whole: DeviceMemory, block: DeviceMemory, first: int, op_name: str
    ) -> None:
        """Raise if ``block`` overlaps ``whole`` anywhere but ``first`` elements into it (in-place
        form).
        """
        if (
            self._overlaps(whole, block)
            and block.address - whole.address != first * whole.dtype.itemsize
        ):
            raise InvalidUsage(
                f"{op_name}: input and output overlap other than in its in-place form",
                rank=self.rank,
            )

    def _check_disjoint(self, source: DeviceMemory, target: DeviceMemory, op_name: str) -> None:
        """Raise if the buffers overlap; for operations without an in-place form."""
        if self._overlaps(source, target):
            raise InvalidUsage(
                f"{op_name} has no in-place form: x and out must not overlap", rank=self.rank
            )

    def _writes_result(self, collective: Collective, root: int) -> bool:
        """Return True if this rank's target is written."""
        if collective is Collective.BROADCAST:
            return self.rank != root
        return collective not in (Collective.REDUCE, Collective.GATHER) or self.rank == root

    def _check_writable(
        self, target: DeviceMemory, collective: Collective, root: int, op_name: str
    ) -> None:
        """Raise if this rank has a result and ``target`` is read-only."""
        if target.read_only and self._writes_result(collective, root):
            raise self._read_only_error(op_name)

    def _read_only_error(self, op_name: str) -> InvalidUsage:
        """Return the error for a read-only result array."""
        hint = "pass a writable array as out; JAX arrays are immutable"
        return InvalidUsage(
            f"{op_name}: cannot write the result: the array is read-only", rank=self.rank, hint=hint
        )

    def _check_root(self, root: Any, op_name: str) -> int:
        return peer_rank(root, "root", self.nranks, op_name)
