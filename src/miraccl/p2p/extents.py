"""Extents of a transfer: what moves between local memory and a region, sorted and merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage
from miraccl.p2p.kernels.extents_layout import OVERLAP, RADIX
from miraccl.p2p.native_calls import EXTENTS, entry

_WORDS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Extents:
    """Table of (local address, offset in the region, bytes), sorted by target.

    Attributes:
        table: int64 array of shape (n, 3).
        blocks: Number of blocks before they were merged.
        total: Bytes of all extents.
    """

    table: Any
    total: int
    blocks: int
    block_nbytes: int

    @property
    def count(self) -> int:
        return len(self.table)

    @property
    def address(self) -> int:
        return int(self.table.__array_interface__["data"][0])


def single(local: int, offset: int, nbytes: int) -> Extents:
    """Return one extent; none for no bytes."""
    rows = [[local, offset, nbytes]] if nbytes else []
    table = np.array(rows, np.int64).reshape(-1, _WORDS)
    return Extents(table=table, total=nbytes, blocks=1, block_nbytes=max(nbytes, 1))


def block_list(blocks: Any, name: str, count: int, op_name: str) -> Any:
    """Return block indices as a contiguous int32 array; a slice or range counts as strided.

    Raises:
        InvalidUsage: They are not whole numbers that fit into 32 bits.
    """
    if isinstance(blocks, slice):
        blocks = range(*blocks.indices(count))
    if isinstance(blocks, range):
        blocks = np.arange(blocks.start, blocks.stop, blocks.step, dtype=np.int64)
    array = np.asarray(blocks)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidUsage(
            f"cannot {op_name}: {name} has shape {array.shape} and dtype {array.dtype}; allowed "
            "are one axis of whole numbers, a range or a slice"
        )
    if array.dtype != np.int32:
        if array.min() < -(1 << 31) or array.max() >= 1 << 31:
            raise InvalidUsage(f"cannot {op_name}: a number in {name} does not fit into 32 bits")
        array = array.astype(np.int32)
    return np.ascontiguousarray(array)


def from_blocks(
    *,
    local: int,
    local_blocks: Any,
    local_count: int,
    remote_blocks: Any,
    remote_count: int,
    block_nbytes: int,
    writes: bool,
    op_name: str,
) -> Extents:
    """Return the extents of two lists of blocks of one size.

    Args:
        local: Address of local block 0.
        local_count, remote_count: Number of blocks that exist on each side.
        writes: True if the remote blocks are the target.

    Raises:
        InvalidUsage: The lists differ in length, a block does not exist, or a target block occurs
            twice.
    """
    count = len(local_blocks)
    if count != len(remote_blocks):
        raise InvalidUsage(
            f"cannot {op_name}: {count} local blocks and {len(remote_blocks)} remote ones"
        )
    table = np.empty((count, _WORDS), np.int64)
    if not count:
        return Extents(table=table, total=0, blocks=0, block_nbytes=block_nbytes)
    scratch = np.empty(4 * count + RADIX, np.int64)
    at = scratch.__array_interface__["data"][0]
    words = np.array(
        [
            local_blocks.__array_interface__["data"][0],
            remote_blocks.__array_interface__["data"][0],
            count,
            block_nbytes,
            local_count,
            remote_count,
            local,
            table.__array_interface__["data"][0],
            int(writes),
            at,
            at + 16 * count,
            at + 32 * count,
        ],
        np.int64,
    )
    made = entry(EXTENTS, "build_extents")(words.__array_interface__["data"][0])
    if made < 0:
        raise _error(made, local_blocks, remote_blocks, local_count, remote_count, op_name)
    return Extents(
        table=table[:made] if made > count // 2 else table[:made].copy(),
        total=count * block_nbytes,
        blocks=count,
        block_nbytes=block_nbytes,
    )


def _error(
    made: int, local_blocks: Any, remote_blocks: Any, nlocal: int, nremote: int, op_name: str
) -> InvalidUsage:
    if made <= OVERLAP:
        return InvalidUsage(
            f"cannot {op_name}: block {OVERLAP - made} is the target of two blocks of the list"
        )
    index, is_remote = divmod(-1 - made, 2)
    blocks, count = (remote_blocks, nremote) if is_remote else (local_blocks, nlocal)
    where = "remote" if is_remote else "local"
    return InvalidUsage(
        f"cannot {op_name}: entry {index} of the list is {where} block {int(blocks[index])}; the "
        f"{where} memory has blocks 0 to {count - 1}"
    )
