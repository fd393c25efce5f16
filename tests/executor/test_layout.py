"""The words that compiled code and Python share: no two fields of a record in one place, and the
FIFO as transports define it.
"""

from __future__ import annotations

import pytest

from miraccl.executor.cpu.kernels import layout
from miraccl.transport import fifo

RECORDS = ("CTX", "CONN", "PLAN", "RUN", "STEP", "OP")


@pytest.mark.parametrize("record", RECORDS)
def test_fields_have_places_of_their_own_inside_the_record(record: str) -> None:
    size = getattr(layout, f"{record}_SIZE")
    fields = {
        name: value
        for name, value in vars(layout).items()
        if name.startswith(f"{record}_")
        and name != f"{record}_SIZE"
        and not name.startswith("STEP_ASIDE")
    }
    assert len(fields) > 5
    assert len(set(fields.values())) == len(fields), sorted((v, k) for k, v in fields.items())
    assert all(
        value % layout.WORD == 0 and 0 <= value <= size - layout.WORD for value in fields.values()
    )


def test_control_page_words_do_not_overlap() -> None:
    names = [
        n
        for n in vars(layout)
        if n.startswith("BOARD_") or n in ("CTRL_SLEEP", "CTRL_DOORBELL", "CTRL_ABORT")
    ]
    places = [getattr(layout, n) for n in names]
    assert len(set(places)) == len(places)
    assert max(places) < layout.PAGE
    assert layout.CTRL_ABORT // layout.LINE != layout.CTRL_SLEEP // layout.LINE


def test_fifo_is_the_one_of_the_transports() -> None:
    assert layout.NSLOTS == fifo.NSLOTS
    assert layout.LINE == fifo.LINE_BYTES
    assert layout.PAGE == fifo.PAGE_BYTES
    assert layout.INLINE_BYTES == fifo.INLINE_BYTES
    words = fifo.WORD_BYTES
    assert fifo.WORD_FLAG * words == layout.DESC_FLAG
    assert fifo.WORD_SIGNATURE * words == layout.DESC_SIG
    assert fifo.WORD_NBYTES * words == layout.DESC_BYTES
    assert fifo.WORD_MODE * words == layout.DESC_MODE
    assert fifo.WORD_ADDRESS * words == layout.DESC_ADDR
    assert fifo.WORD_INLINE * words == layout.DESC_INLINE
    assert fifo.RETURNED_OFFSET == fifo.TAIL_OFFSET + layout.TAIL_RETURNED
    shared = {"SLOT", "INLINE", "WINDOW", "ADDRESS", "LANDED", "OVERSIZE", "SIGNAL", "MOVED"}
    assert {mode.name for mode in fifo.Mode} == shared
    for mode in fifo.Mode:
        assert getattr(layout, f"MODE_{mode.name}") == mode


def test_results_of_kernels_differ() -> None:
    codes = [v for n, v in vars(layout).items() if n.startswith("ERR_")] + [
        layout.OK,
        layout.NOT_HANDLED,
        layout.BUSY,
    ]
    assert len(set(codes)) == len(codes)
