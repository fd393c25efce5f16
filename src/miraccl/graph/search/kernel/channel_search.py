"""The kernel as a C function, for ``native.library``: importing this file imports Numba, and only its compiler does.

``search(address)`` takes the address of a table of int64 with a row (address, lengths) for each array of the board, in the order of
``Board``. In compiled code a board is that one address, and its attributes are looked up in the table: handing thirteen arrays, some
eight words each, from function to function would cost more than the search.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from llvmlite import ir

from miraccl.graph.search.kernel.state import DIMENSIONS, RECORDS, ROW, Board
from miraccl.graph.search.kernel.walk import WALK
from miraccl.graph.search.kernel.walk import search as walk

numba: Any = import_module(
    "numba"
)  # its annotations do not describe intrinsics and overloads, so it stays untyped here
extending: Any = import_module("numba.extending")
carray = numba.carray
types: Any = numba.types


for function in WALK:
    extending.register_jitable(error_model="numpy")(function)


class BoardType(types.Type):  # type: ignore[misc]
    """The type of a board in compiled code: the address of its table."""

    def __init__(self) -> None:
        super().__init__(name="Board")


BOARD = BoardType()


@extending.register_model(BoardType)
class BoardModel(extending.models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, type: Any) -> None:
        super().__init__(manager, type, ir.IntType(64))


@extending.intrinsic  # type: ignore[untyped-decorator]
def as_board(typingctx: Any, address: Any) -> Any:
    return BOARD(types.int64), lambda context, builder, signature, args: args[0]


@extending.intrinsic  # type: ignore[untyped-decorator]
def table_row(typingctx: Any, board: Any, row: Any) -> Any:
    """Pointer to a row of the table."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        offset = builder.mul(args[1], ir.Constant(ir.IntType(64), ROW * 8))
        return builder.inttoptr(builder.add(args[0], offset), context.get_value_type(types.voidptr))

    return types.voidptr(BOARD, types.int64), emit


@extending.intrinsic  # type: ignore[untyped-decorator]
def pointer(typingctx: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), emit


def _attribute(row: int, name: str, dtype: Any, dimensions: int) -> None:
    """Make ``board.<name>`` known to the compiler."""

    def one(board: Any) -> Any:
        entry = carray(table_row(board, row), ROW, np.int64)
        return carray(pointer(entry[0]), entry[1], dtype)

    def two(board: Any) -> Any:
        entry = carray(table_row(board, row), ROW, np.int64)
        return carray(pointer(entry[0]), (entry[1], entry[2]), dtype)

    def three(board: Any) -> Any:
        entry = carray(table_row(board, row), ROW, np.int64)
        return carray(pointer(entry[0]), (entry[1], entry[2], entry[3]), dtype)

    def implementation(board: Any) -> Any:
        return (one, two, three)[dimensions - 1]

    extending.overload_attribute(BoardType, name)(implementation)


for _row, _name in enumerate(Board._fields):
    _attribute(_row, _name, RECORDS[_row], DIMENSIONS[_row])


def search(address: int, unused: int) -> int:
    """Walk on the board of a table; returns the visits made."""
    board = as_board(address)
    walk(board)
    return int(board.state[0].visits)


EXPORTS = {"search": search}
"""C functions of this source, see ``native.compiler``."""
