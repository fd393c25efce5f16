"""Grants: never beyond the budget, totals only grow, nobody starves."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from miraccl.wire.datagram.credit import QUANTUM_BYTES, UNSOLICITED_BYTES, Grantor
from miraccl.wire.datagram.flow import DatagramFlow
from miraccl.wire.datagram.flow_records import FlowConfig
from miraccl.wire.datagram.packets import Grant
from miraccl.wire.datagram.path import BURST_NS


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


def test_a_grant_held_back_by_pacing_has_a_timer() -> None:
    flow = DatagramFlow(FlowConfig(connection=1, peer_connection=2))
    now, wait = 1_000_000, 10_000_000
    flow.paths[0]._release = now + wait + BURST_NS
    flow.grant(100_000)
    assert flow.next_packet(now) is None
    assert flow.timer(now) == now + wait
    sent = flow.next_packet(now + wait)
    assert sent is not None
    assert Grant(100_000) in sent.records


def test_equal_transfers_take_turns() -> None:
    grantor = Grantor(3 * UNSOLICITED_BYTES)
    for sender in (0, 1):
        grantor.want(sender, 1 << 20)
    for _ in range(8):
        grantor.issue(0)
        first, second = (grantor.senders[s] for s in (0, 1))
        assert abs(first.granted - second.granted) <= QUANTUM_BYTES
        for sender, record in grantor.senders.items():
            grantor.on_received(sender, record.granted - record.received)
