"""The words that compiled code and Python share: no two fields of a record in one place, and the FIFO as transports define it."""

from __future__ import annotations

import pytest

from miraccl.executor.cpu.kernels import layout as at
from miraccl.transport import fifo

RECORDS = ("CTX", "CONN", "PLAN", "RUN", "STEP", "OP")


@pytest.mark.parametrize("record", RECORDS)
def test_fields_have_places_of_their_own_inside_the_record(record: str) -> None:
    size = getattr(at, f"{record}_SIZE")
    fields = {
        name: value
        for name, value in vars(at).items()
        if name.startswith(f"{record}_")
        and name != f"{record}_SIZE"
        and not name.startswith("STEP_ASIDE")
    }
    assert len(fields) > 5
    assert len(set(fields.values())) == len(fields), sorted((v, k) for k, v in fields.items())
    assert all(value % at.WORD == 0 and 0 <= value <= size - at.WORD for value in fields.values())


def test_control_page_words_do_not_overlap() -> None:
    names = [
        n
        for n in vars(at)
        if n.startswith("BOARD_") or n in ("CTRL_SLEEP", "CTRL_BELL", "CTRL_ABORT")
    ]
    places = [getattr(at, n) for n in names]
    assert len(set(places)) == len(places)
    assert max(places) < at.PAGE
    assert at.CTRL_ABORT // at.LINE != at.CTRL_SLEEP // at.LINE


def test_fifo_is_the_one_of_the_transports() -> None:
    assert at.NSLOTS == fifo.NSLOTS
    assert at.LINE == fifo.LINE_BYTES
    assert at.PAGE == fifo.PAGE_BYTES
    assert at.INLINE_BYTES == fifo.INLINE_BYTES
    words = fifo.WORD_BYTES
    assert fifo.WORD_FLAG * words == at.POST_FLAG
    assert fifo.WORD_SIGNATURE * words == at.POST_SIG
    assert fifo.WORD_NBYTES * words == at.POST_BYTES
    assert fifo.WORD_MODE * words == at.POST_MODE
    assert fifo.WORD_ADDRESS * words == at.POST_ADDR
    assert fifo.WORD_INLINE * words == at.POST_INLINE
    assert fifo.RETURNED_OFFSET == fifo.TAIL_OFFSET + at.TAIL_RETURNED
    shared = {"SLOT", "INLINE", "WINDOW", "ADDRESS", "LANDED", "OVERSIZE", "SIGNAL", "MOVED"}
    assert {mode.name for mode in fifo.Mode} == shared
    for mode in fifo.Mode:
        assert getattr(at, f"MODE_{mode.name}") == mode


def test_results_of_kernels_differ() -> None:
    codes = [v for n, v in vars(at).items() if n.startswith("ERR_")] + [
        at.OK,
        at.NEED_PLAN,
        at.BUSY,
    ]
    assert len(set(codes)) == len(codes)
