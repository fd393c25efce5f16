"""Execution of the search kernel: compiled (default) or interpreted."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from miraccl.graph.search.kernel import walk
from miraccl.graph.search.kernel.state import ROW, ChannelSearchState

Walk = Callable[[ChannelSearchState], None]


def walk_interpreted(state: ChannelSearchState) -> None:
    """Run the kernel as ordinary Python, the reference for the compiled version (1000x slower)."""
    walk.search(state)


def walk_compiled(state: ChannelSearchState) -> None:
    """Run the kernel as machine code.

    The first call of a process loads it; the first call on a machine compiles it.
    """
    table = np.zeros((len(state), ROW), np.int64)
    for i, array in enumerate(state):
        table[i, 0] = array.ctypes.data
        table[i, 1 : 1 + array.ndim] = array.shape
    _entry()(table.ctypes.data, 0)


@functools.cache
def _entry() -> Any:
    from miraccl.native import library

    address = library("miraccl.graph.search.kernel.channel_search").address("miraccl_search")
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(address)
