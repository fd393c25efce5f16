"""The search kernel as a C function, compiled by ``native.library``.

Only its compiler imports this module, because the import loads Numba. ``search(address)`` takes the
address of a table of int64 with one row (address, lengths) per array of the state, in the order of
``ChannelSearchState``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from llvmlite import ir

from miraccl.graph.search.kernel.state import DIMENSIONS, RECORDS, ROW, ChannelSearchState
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


# In compiled code a state is the address of its table, and attributes are looked up in the table.
# Passing thirteen arrays, some of eight words each, from function to function would cost more than
# the search itself.
class SearchStateType(types.Type):  # type: ignore[misc]
    """Numba type of a state: the address of its table."""

    def __init__(self) -> None:
        super().__init__(name="Board")


SEARCH_STATE = SearchStateType()


@extending.register_model(SearchStateType)
class SearchStateModel(extending.models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, type: Any) -> None:
        super().__init__(manager, type, ir.IntType(64))


@extending.intrinsic  # type: ignore[untyped-decorator]
def as_search_state(typingctx: Any, address: Any) -> Any:
    return SEARCH_STATE(types.int64), lambda context, builder, signature, args: args[0]


@extending.intrinsic  # type: ignore[untyped-decorator]
def table_row(typingctx: Any, state: Any, row: Any) -> Any:
    """Return a pointer to a row of the table."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        offset = builder.mul(args[1], ir.Constant(ir.IntType(64), ROW * 8))
        return builder.inttoptr(builder.add(args[0], offset), context.get_value_type(types.voidptr))

    return types.voidptr(SEARCH_STATE, types.int64), emit


@extending.intrinsic  # type: ignore[untyped-decorator]
def pointer(typingctx: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), emit


def _attribute(row: int, name: str, dtype: Any, dimensions: int) -> None:
    """Register ``state.<name>`` with the compiler."""

    def one(state: Any) -> Any:
        entry = carray(table_row(state, row), ROW, np.int64)
        return carray(pointer(entry[0]), entry[1], dtype)

    def two(state: Any) -> Any:
        entry = carray(table_row(state, row), ROW, np.int64)
        return carray(pointer(entry[0]), (entry[1], entry[2]), dtype)

    def three(state: Any) -> Any:
        entry = carray(table_row(state, row), ROW, np.int64)
        return carray(pointer(entry[0]), (entry[1], entry[2], entry[3]), dtype)

    def implementation(state: Any) -> Any:
        return (one, two, three)[dimensions - 1]

    extending.overload_attribute(SearchStateType, name)(implementation)


for _row, _name in enumerate(ChannelSearchState._fields):
    _attribute(_row, _name, RECORDS[_row], DIMENSIONS[_row])


def search(address: int, unused: int) -> int:
    """Walk on the state of a table and return the number of visits."""
    state = as_search_state(address)
    walk(state)
    return int(state.header[0].visits)


COMPILER = "numba"  # structured arrays
EXPORTS = {"search": search}
"""C functions of this source, see ``native.compiler``."""
