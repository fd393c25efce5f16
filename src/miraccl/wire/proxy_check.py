"""Everything that must always hold in a link; for tests, which look after each event."""

from __future__ import annotations

from miraccl.wire.proxy import Link
from miraccl.wire.proxy_records import Placement
from miraccl.wire.proxy_states import RecvState, SendState


def validate_state(link: Link) -> None:
    """Raises ``AssertionError`` with the first invariant that does not hold."""
    config = link.config
    assert link.released <= link._sendable <= link.next_post
    assert link.next_post - link.released <= config.nslots
    assert sorted(link._out) == list(range(link.released, link.next_post))
    assert link._told <= link.tail <= link.delivered
    assert list(link._to_send) == sorted(m for m, r in link._out.items() if r.state is SendState.SENDING)
    assert len(link._grants) <= config.nslots
    for message, out in link._out.items():
        assert (out.state is SendState.WAIT_CREDIT) == (message >= link._sendable)
        assert 0 <= out.queued <= out.nbytes
        assert out.untaken == sum(m == message for queue in link._queued for m, _ in queue)
        if out.queued:
            assert message < link.credit + config.nslots
    for stream, queue in enumerate(link._queued):
        assert link._queued_bytes[stream] == sum(n for _, n in queue)
    for message, record in link._in.items():
        assert link.tail <= message < link.tail + config.nslots
        assert (record.state is RecvState.DELIVERED) == (message < link.delivered)
        assert record.placement is not Placement.SLOT or record.nbytes <= config.recv_slot_bytes
        assert record.placement is not Placement.WANTED or record.nbytes <= link._wants[message]
        claimed = sum(high - low for low, high in record.pieces)
        arriving = sum(a[1] for a in link._arriving if a and a[0] == message)
        assert record.placement is Placement.OVERSIZE or claimed - arriving == record.nbytes - record.missing
        assert all(a[1] < b[0] for a, b in zip(record.pieces, record.pieces[1:]))
