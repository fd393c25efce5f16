"""The kernel as a C function, for ``native.library``: importing this file imports Numba, and only its compiler does.

``search(address)`` takes the address of a table of int64: for each array of the board its address, then its lengths. It returns
the visits made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic, register_jitable

from miraccl.graph.search import kernel
from miraccl.graph.search.board import FRAME, GPU, GRAPH, HOP, LINK, NET, PATH, STATE, Board

for function in kernel.FUNCTIONS:
    register_jitable(error_model="numpy")(function)

I64 = np.int64
walk = kernel.search


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typingctx: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), emit


@register_jitable  # type: ignore[untyped-decorator]
def board_at(t: Any) -> Any:
    """The board that a table describes; its rows are (address, rows, columns, planes), in the order of ``Board``."""
    return Board(
        carray(pointer(t[0, 0]), t[0, 1], STATE),
        carray(pointer(t[1, 0]), t[1, 1], GRAPH),
        carray(pointer(t[2, 0]), (t[2, 1], t[2, 2], t[2, 3]), I64),
        carray(pointer(t[3, 0]), (t[3, 1], t[3, 2], t[3, 3]), I64),
        carray(pointer(t[4, 0]), (t[4, 1], t[4, 2]), I64),
        carray(pointer(t[5, 0]), t[5, 1], LINK),
        carray(pointer(t[6, 0]), t[6, 1], HOP),
        carray(pointer(t[7, 0]), (t[7, 1], t[7, 2]), PATH),
        carray(pointer(t[8, 0]), t[8, 1], GPU),
        carray(pointer(t[9, 0]), t[9, 1], NET),
        carray(pointer(t[10, 0]), t[10, 1], I64),
        carray(pointer(t[11, 0]), t[11, 1], FRAME),
        carray(pointer(t[12, 0]), (t[12, 1], t[12, 2]), I64),
    )


def search(address: int, arrays: int) -> int:
    board = board_at(carray(pointer(address), (arrays, 4), I64))
    walk(board)
    return board.state[0].visits


EXPORTS = {"search": search}
"""C functions of this source, see ``native.compiler``."""
