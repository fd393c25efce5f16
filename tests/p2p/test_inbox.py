"""Inbox: a thread that waits is woken by what another thread has taken from the rings."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from miraccl.native.atomics import bound
from miraccl.p2p import segment_layout as layout
from miraccl.p2p.native_calls import notify
from miraccl.p2p.notify import Inbox, PairSegment
from miraccl.p2p.registration import RegionTable

LIMIT_S = 20.0  # seconds


def remove(inbox: Inbox, pair: PairSegment) -> None:
    inbox.remove_pair(pair)


def take_another(inbox: Inbox, pair: PairSegment) -> None:
    assert inbox.pop(lambda found: found.data == b"another") is None


@pytest.mark.parametrize("take", [remove, take_another])
def test_a_sleeper_is_woken_by_the_thread_that_drains_the_ring(
    take: Callable[[Inbox, PairSegment], None],
) -> None:
    """A doorbell that rang before the sleep began, as in a race of the two threads."""
    table, elsewhere = RegionTable(), RegionTable()
    inbox, pair = Inbox(table), PairSegment("peer", bytes(32))
    inbox.add_pair(pair)
    woken = threading.Event()

    def sleep() -> None:
        inbox.wait(10 * LIMIT_S)
        woken.set()

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    load_word = bound("load_word")
    while not load_word(table.doorbell + layout.DOORBELL_SLEEPERS) & 0xFFFFFFFF:
        assert thread.is_alive()
    assert notify("post_record")(pair.address, elsewhere.doorbell, 0, 0, b"last", 4) == 1
    take(inbox, pair)
    assert woken.wait(LIMIT_S)
    thread.join(LIMIT_S)
    found = inbox.pop()
    assert found is not None
    assert found.data == b"last"
