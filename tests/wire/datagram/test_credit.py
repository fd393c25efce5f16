"""Grants: never beyond the budget, totals only grow, nobody starves."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from miraccl.wire.datagram.credit import QUANTUM_BYTES, UNSOLICITED_BYTES, Grantor


@given(st.integers(0, 1 << 30), st.integers(1, 12), st.sampled_from((0, 10**8)))
def test_everything_wanted_is_granted_within_the_budget(seed: int, n: int, rate: int) -> None:
    draw = random.Random(seed)
    budget = n * UNSOLICITED_BYTES + draw.randrange(QUANTUM_BYTES, 1 << 20)
    grantor = Grantor(budget, rate)
    for sender in range(n):
        grantor.want(sender, draw.randrange(1, 2 << 20))
    granted = dict.fromkeys(range(n), UNSOLICITED_BYTES)
    now = 0
    for _ in range(100_000):
        for sender, total in grantor.issue(now):
            assert total > granted[sender]
            granted[sender] = total
        assert sum(s.outstanding for s in grantor.senders.values()) <= budget
        open_ = [s for s, r in grantor.senders.items() if r.received < min(r.wanted, r.granted)]
        if not open_:
            if all(r.received == r.wanted for r in grantor.senders.values()):
                break
            now = grantor.timer(now)
            assert now, "a backlog without a timer"
            continue
        sender = draw.choice(open_)
        record = grantor.senders[sender]
        grantor.on_received(sender, min(9000, min(record.wanted, record.granted) - record.received))
        now += 1000
    assert all(r.received == r.wanted for r in grantor.senders.values())


def test_the_shortest_transfer_is_granted_first() -> None:
    grantor = Grantor(2 * UNSOLICITED_BYTES + QUANTUM_BYTES)
    grantor.want(0, 10 << 20)
    grantor.want(1, UNSOLICITED_BYTES + QUANTUM_BYTES)
    assert grantor.issue(0) == [(1, UNSOLICITED_BYTES + QUANTUM_BYTES)]
