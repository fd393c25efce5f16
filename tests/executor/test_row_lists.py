"""Compiled scan and lists of rows against their specification, ``schedule.rows``."""

from __future__ import annotations

import numpy as np

from miraccl.executor.cpu import row_lists
from miraccl.schedule import row_schedules
from miraccl.schedule.rows import select_rows


def _packed(bits: np.ndarray) -> np.ndarray:
    words = np.zeros(row_lists.words_for(len(bits)) * 8, np.uint8)
    packed = np.packbits(bits, bitorder="little")
    words[: len(packed)] = packed
    return words.view(np.int64)


def test_scan() -> None:
    rng = np.random.default_rng(1)
    for nbytes in (1, 7, 8, 255, 256, 257, 4096, 10_001, 70_003):
        for row in (1, 3, 8, 64, 100, 256, 300, 4096):
            data = rng.integers(0, 256, nbytes, np.uint8) * (rng.random(nbytes) < 4 / row)
            rows = -(-nbytes // row)
            padded = np.pad(data, (0, rows * row - nbytes)).reshape(rows, row)
            want = np.asarray(padded.any(axis=1))
            bitmap = np.full(row_lists.words_for(rows) + 1, -1, np.int64)
            found = row_lists.scan(data.ctypes.data, nbytes, row, bitmap)
            assert np.array_equal(bitmap[:-1], _packed(want)), (nbytes, row)
            assert found == want.sum() == row_lists.count(bitmap[:-1])


def test_every_bit_counts() -> None:
    for value in (-0.0, np.nan, np.float32(1e-45)):
        data = np.zeros(1000, np.float32)
        data[777] = value
        bitmap = np.zeros(3, np.int64)
        assert row_lists.scan(data.ctypes.data, data.nbytes, 64, bitmap) == 1
        assert bitmap[0] == 1 << (777 * 4 // 64)


def test_larger_rows() -> None:
    rng = np.random.default_rng(2)
    for rows in (1, 63, 64, 65, 255, 256, 257, 1000):
        bits = rng.random(rows) < 0.1
        want = np.asarray(np.pad(bits, (0, -rows % 4)).reshape(-1, 4).any(axis=1))
        assert np.array_equal(row_lists.coarsen(_packed(bits)), _packed(want))


def test_lists() -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        nranks, rows = int(rng.integers(1, 6)), int(rng.integers(1, 300))
        schedule = row_schedules.build(nranks, int(rng.choice([1, 4])))
        bits = rng.random((nranks, rows)) < rng.random()
        found = row_lists.select(
            schedule,
            [_packed(each) for each in bits],
            row_bytes=64,
            total_bytes=64 * rows - 3,
            slot_bytes=64 * int(rng.integers(1, 9)),
            count_elements=64 * rows - 3,
            agreed=0,
        )
        lists, starts, _ = found.owned
        starts = starts.reshape(len(schedule.tables), schedule.parts, found.nrounds + 1)
        want = select_rows(schedule, bits, 64, 64 * rows - 3)
        for table, parts in enumerate(want.lists):
            for part, expected in enumerate(parts):
                begins = starts[table, part]
                assert np.array_equal(lists[begins[0] : begins[-1]], expected)
                assert (np.diff(begins) >= 0).all()
