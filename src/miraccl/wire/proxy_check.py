"""Invariants of a link, checked by tests after each event."""

from __future__ import annotations

from miraccl.wire.proxy import ProxyLink
from miraccl.wire.proxy_receiver import ReceiveHalf
from miraccl.wire.proxy_records import Placement
from miraccl.wire.proxy_sender import SendHalf
from miraccl.wire.proxy_states import RecvState, SendState


def validate_state(link: ProxyLink) -> None:
    """Raise ``AssertionError`` with the first invariant that does not hold."""
    _validate_sender(link.sender)
    _validate_receiver(link.receiver)
    assert link.sender.last_ack <= link.receiver.tail


def _validate_sender(sender: SendHalf) -> None:
    nslots = sender.config.nslots
    assert sender.released <= sender._sendable <= sender.next_post
    assert sender.next_post - sender.released <= nslots
    assert sorted(sender._messages) == list(range(sender.released, sender.next_post))
    assert list(sender._to_send) == sorted(
        m for m, r in sender._messages.items() if r.state is SendState.SENDING
    )
    assert len(sender._grants) <= nslots
    for message, record in sender._messages.items():
        assert (record.state is SendState.WAIT_CREDIT) == (message >= sender._sendable)
        assert 0 <= record.queued <= record.nbytes
        assert record.unwritten == sum(m == message for queue in sender._queued for m, _ in queue)
        if record.queued:
            assert message < sender.credit + nslots
    for stream, queue in enumerate(sender._queued):
        assert sender._queued_bytes[stream] == sum(n for _, n in queue)


def _validate_receiver(receiver: ReceiveHalf) -> None:
    config = receiver.config
    assert receiver.tail <= receiver.delivered
    for message, record in receiver._messages.items():
        assert receiver.tail <= message < receiver.tail + config.nslots
        assert (record.state is RecvState.DELIVERED) == (message < receiver.delivered)
        assert record.placement is not Placement.SLOT or record.nbytes <= config.recv_slot_bytes
        assert (
            record.placement is not Placement.POSTED or record.nbytes <= receiver._posted[message]
        )
        claimed = sum(high - low for low, high in record.ranges)
        arriving = sum(a[1] for a in receiver._arriving if a and a[0] == message)
        assert (
            record.placement is Placement.OVERSIZE
            or claimed - arriving == record.nbytes - record.missing
        )
        assert all(a[1] < b[0] for a, b in zip(record.ranges, record.ranges[1:]))
