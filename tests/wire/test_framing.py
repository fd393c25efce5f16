"""Frames, fields and messages: what is encoded is decoded, and nothing else is."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miraccl.errors import InvalidUsage, ProtocolError
from miraccl.wire import auth, bootstrap_messages, framing
from miraccl.wire.bootstrap_messages import TO_HUB, TO_MEMBER, Gather, Join, NoticeMessage, Welcome

RECORDS: list[Any] = [
    *{**TO_HUB, **TO_MEMBER}.values(),
    auth.Hello,
    auth.Challenge,
    auth.Proof,
    auth.Unsupported,
    auth.HubRejectedNotice,
]

_u32 = st.integers(0, 2**32 - 1)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "u16": st.integers(0, 2**16 - 1),
    "u32": _u32,
    "u64": st.integers(0, 2**64 - 1),
    "flag": st.booleans(),
    "time": st.floats(0, 1e9),
    "b4": st.binary(min_size=4, max_size=4),
    "b32": st.binary(min_size=32, max_size=32),
    "bytes": st.binary(max_size=40),
    "text": st.text(max_size=20),
    "u32s": st.lists(_u32, max_size=5).map(tuple),
    "texts": st.lists(st.text(max_size=9), max_size=4).map(tuple),
    "blobs": st.lists(st.binary(max_size=9), max_size=4).map(tuple),
}


def _records() -> st.SearchStrategy[Any]:
    return st.sampled_from(RECORDS).flatmap(
        lambda record: st.builds(record, **{name: _FIELDS[codec] for name, codec in record.LAYOUT})
    )


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_layout_names_the_fields_of_its_record(record):
    assert [name for name, _ in record.LAYOUT] == [
        field.name for field in dataclasses.fields(record)
    ]


def test_kinds_are_unique():
    assert len({record.KIND for record in RECORDS}) == len(RECORDS)


@given(_records())
def test_a_record_survives_the_wire(record):
    assert framing.decode(framing.encode(record), {type(record).KIND: type(record)}) == record


@given(_records(), st.data())
def test_a_shortened_or_lengthened_message_is_refused(record, data):
    body = framing.encode(record)
    kinds = {type(record).KIND: type(record)}
    with pytest.raises(ProtocolError):
        framing.decode(body + b"\0", kinds)
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(ProtocolError):
        framing.decode(body[:cut], kinds)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_decode_to_a_record_or_a_protocol_error(body):
    for kinds in (TO_HUB, TO_MEMBER):
        try:
            record = framing.decode(body, kinds)
        except ProtocolError:
            continue
        assert framing.encode(record) == body  # there is one way to write a record


@given(
    st.lists(st.binary(max_size=50), max_size=8),
    st.lists(st.integers(1, 30), min_size=1, max_size=200),
)
def test_a_stream_cut_anywhere_gives_the_same_frames(bodies, cuts):
    stream = b"".join(map(framing.encode_frame, bodies))
    reader = framing.FrameReader()
    seen: list[bytes] = []
    at = 0
    for cut in [*cuts, len(stream)]:
        reader.feed(stream[at : at + cut])
        at += cut
        seen += iter(reader.next_frame, None)
    assert seen == bodies
    assert not reader._buffer


def test_a_long_frame_is_refused_at_its_header():
    reader = framing.FrameReader(limit=100)
    reader.feed(struct.pack(">I", 101))
    with pytest.raises(ProtocolError, match="101 bytes"):
        reader.next_frame()


def test_a_frame_that_is_too_long_is_not_sent():
    with pytest.raises(InvalidUsage):
        framing.encode_frame(bytes(framing.MAX_FRAME_BYTES + 1))


def test_false_list_length_is_rejected_early():
    body = bytes([Welcome.KIND]) + struct.pack(">I", 0) + struct.pack(">I", 2**31)
    with pytest.raises(ProtocolError, match="longer than its message"):
        framing.decode(body, TO_MEMBER)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_time_is_a_plain_number_of_seconds(seconds):
    body = framing.encode(Gather(group=0, tag="t", round=0, timeout=seconds, data=b""))
    with pytest.raises(ProtocolError, match="duration"):
        framing.decode(body, TO_HUB)


def test_text_is_utf8_and_a_flag_is_a_bit():
    body = framing.encode(
        Join(
            host="ab",
            network="n",
            token=b"",
            pid=1,
            addresses=(),
            loopback=True,
            timeout_total=1,
            timeout_left=1,
            standby_port=1,
        )
    )
    assert body.count(b"ab") == 1
    with pytest.raises(ProtocolError, match="UTF-8"):
        framing.decode(body.replace(b"ab", b"\xff\xfe"), TO_HUB)
    with pytest.raises(ProtocolError, match="flag"):
        framing.decode(body[:-21] + b"\x02" + body[-20:], TO_HUB)


def test_number_out_of_range_is_rejected_by_the_sender():
    with pytest.raises(InvalidUsage, match="cannot encode"):
        framing.encode(NoticeMessage(group=-1, rank=0, seq=0, payload=b""))


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=6), _json, max_size=4))
def test_a_payload_survives_the_wire(payload):
    assert framing.decode_json(framing.encode_json(payload)) == payload


@pytest.mark.parametrize(
    "payload", [{"x": float("nan")}, {"x": object()}, {"x": {1, 2}}, [1], "text"]
)
def test_a_payload_that_is_not_plain_is_refused_by_the_sender(payload):
    with pytest.raises(InvalidUsage):
        framing.encode_json(payload)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[1]",
        b"1",
        b"{",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"\xff\xfe",
        b'{"a":' + b"[" * 100_000,
        b'{"a": ' + b"9" * 9999 + b"}",
    ],
)
def test_a_payload_that_is_not_an_object_is_refused_by_the_receiver(data):
    with pytest.raises(ProtocolError):
        framing.decode_json(data)


def test_every_message_is_documented_as_one_direction_or_both():
    both = set(bootstrap_messages.TO_HUB) & set(bootstrap_messages.TO_MEMBER)
    names = {TO_HUB[kind].__name__ for kind in both}
    assert names == {"NoticeMessage", "StatusQuery", "StatusReply", "LeaveGroup"}
