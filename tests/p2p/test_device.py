"""The kernel over extents on the emulator, and the tables that it gets."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.p2p import device
from tests.gpu.emulator import compiled, machine_library, needs_compiler


def emulated_scatter() -> Any:
    """Return the function ``emulate`` of the kernel."""
    from importlib import resources

    text = resources.files("miraccl.executor.cuda").joinpath("source/scatter.cuh").read_text()
    text = f'#define THREADS {device.THREADS}\n#include "machine.h"\n{text}'
    whole = f'{text}\n#define ENTRY scatter\n#include "launch.h"\n'
    key = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return ctypes.CDLL(str(compiled(f"scatter-{key}", whole, str(machine_library())))).emulate


def launch(table: Any, blocks: int) -> None:
    words = (ctypes.c_uint64 * 2)(table.ctypes.data, len(table))
    args = (ctypes.c_void_p * 1)(ctypes.addressof(words))
    grid = (ctypes.c_uint32 * 1)(blocks)
    emulated_scatter()(args, grid, 1, device.THREADS)


@needs_compiler
@pytest.mark.parametrize("align", [16, 4, 1])
def test_the_kernel_copies_every_extent(align: int) -> None:
    rng = np.random.default_rng(align)
    source = rng.integers(0, 256, 1 << 18, np.uint8)
    target, expected = np.zeros(1 << 18, np.uint8), np.zeros(1 << 18, np.uint8)
    rows = []
    for block in range(24):
        nbytes = int(rng.integers(0, 8192 // align)) * align
        src = int(rng.integers(0, ((1 << 18) - 8192) // align)) * align
        dst = block * 8192
        expected[dst : dst + nbytes] = source[src : src + nbytes]
        rows.append((source.ctypes.data + src, target.ctypes.data + dst, nbytes))
    launch(np.array(rows, np.int64), blocks=5)
    assert (target == expected).all()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 5 * device.PIECE_BYTES)
        ),
        max_size=8,
    )
)
def test_cutting_keeps_every_byte_in_order(rows: list[tuple[int, int, int]]) -> None:
    table = np.array(rows, np.int64).reshape(-1, 3)
    pieces = device.cut(table)
    assert not len(pieces) or pieces[:, 2].max() <= device.PIECE_BYTES
    found = iter(pieces.tolist())
    for src, dst, nbytes in rows:
        done = 0
        while done < nbytes:
            piece = next(found)
            if piece[2] == 0:
                continue
            assert piece[:2] == [src + done, dst + done]
            done += piece[2]
        assert done == nbytes
