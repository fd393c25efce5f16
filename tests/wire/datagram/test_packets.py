"""The packet format: round trips, and rejection of everything else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miraccl.errors import ProtocolError
from miraccl.wire.datagram.packets import (
    FLAG_KEY_PHASE,
    MAX_NUMBER,
    Abort,
    Ack,
    Data,
    Grant,
    Packet,
    Probe,
    Record,
    decode,
    encode,
)


@st.composite
def acks(draw: st.DrawFn) -> Ack:
    edges = sorted(draw(st.sets(st.integers(0, 1 << 20), min_size=2, max_size=40)))
    edges = edges[: len(edges) // 2 * 2][:64]
    ranges = tuple(zip(edges[::2], edges[1::2], strict=True))[::-1]
    u32 = st.integers(0, 0xFFFFFFFF)
    return Ack(draw(st.integers(0, 15)), ranges, draw(u32), draw(u32), draw(u32))


DATA = st.builds(
    Data,
    st.integers(0, 63),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 1 << 20),
    st.binary(min_size=1, max_size=80),
    st.sampled_from((b"", bytes(range(48)))),
)
RECORDS = st.one_of(
    DATA,
    acks(),
    st.builds(Grant, st.integers(0, MAX_NUMBER - 1)),
    st.builds(Probe, st.integers(0, 60)),
    st.builds(Abort, st.binary(max_size=240)),
)
PACKETS = st.builds(
    Packet,
    st.integers(0, 15),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, MAX_NUMBER - 1),
    st.lists(RECORDS, min_size=1, max_size=4).map(tuple),
    st.sampled_from((0, FLAG_KEY_PHASE)),
)


def plain(record: Record) -> Record:
    if isinstance(record, Data):
        return Data(
            record.stream, record.frame, record.offset, bytes(record.payload), record.header
        )
    return record


@given(PACKETS)
def test_a_packet_survives_the_wire(packet: Packet) -> None:
    found = decode(encode(packet))
    assert tuple(map(plain, found.records)) == packet.records
    assert (found.path, found.connection, found.number, found.flags) == (
        packet.path,
        packet.connection,
        packet.number,
        packet.flags,
    )


@given(PACKETS, st.randoms(use_true_random=False))
def test_mutated_packets_are_rejected_or_canonical(packet: Packet, draw: random.Random) -> None:
    data = bytearray(encode(packet))
    for _ in range(draw.randrange(1, 4)):
        kind = draw.randrange(3)
        at = draw.randrange(len(data))
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and len(data) > 1:
            del data[at:]
        else:
            data.insert(at, draw.randrange(256))
        if not data:
            data.append(0)
    try:
        found = decode(data)
    except ProtocolError:
        return
    assert encode(found) == bytes(data)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d[:10], "at least 16"),
        (lambda d: bytes([0x20]) + d[1:], "version"),
        (lambda d: d[:1] + bytes([16]) + d[2:], "path 16"),
        (lambda d: d + bytes([99]), "record type 99"),
        (lambda d: d[:-1], "bytes"),
    ],
)
def test_errors_name_what_is_wrong(change: object, text: str) -> None:
    data = encode(Packet(1, 2, 3, (Data(0, 0, 0, b"abc", bytes(48)),)))
    with pytest.raises(ProtocolError, match=text):
        decode(change(data))  # type: ignore[operator]
