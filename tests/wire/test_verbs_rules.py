"""Pure rules of the verbs transport: rows, distribution, addresses, flush, statuses."""

from __future__ import annotations

import ipaddress
import random

import pytest

from miraccl.errors import ProtocolError
from miraccl.transport.verbs_info import PeerInfo, PortInfo, VerbsInfo
from miraccl.wire.verbs import rows
from miraccl.wire.verbs.flush import FlushFacts, FlushMethod, decide_flush
from miraccl.wire.verbs.gids import GidWish, PortGid, choose_gids
from miraccl.wire.verbs.policy import (
    ALIGN,
    PIECES,
    ROTATE,
    SPLIT,
    piece_bytes,
    stream_of_piece,
)
from miraccl.wire.verbs.status import describe_status

# --- rows


def test_immediates_name_every_row_of_a_full_window() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        processed = draw.choice((0, 1, rows.SEQUENCE_MASK, 1 << 40)) + draw.randrange(200)
        stream = draw.randrange(rows.MAX_STREAMS)
        for sequence in (processed + 1, processed + rows.NROWS):
            count = draw.randrange(1, rows.NROWS + 1)
            immediate = rows.encode_immediate(stream, sequence, count)
            assert rows.immediate_count(immediate) == count
            assert 0 <= immediate < 1 << 32
            assert rows.immediate_stream(immediate) == stream
            low = immediate & rows.SEQUENCE_MASK
            assert rows.expand_sequence(low, rows.SEQUENCE_MASK, processed) == sequence


def test_counts_survive_the_wrap_of_their_low_bits() -> None:
    for known in (0, (1 << 32) - 3, 5 << 32):
        for more in (0, 1, rows.NROWS):
            flags = rows.row_flags(rows.KIND_FRAME, rows.IN_SLOT, 7, known + more)
            assert rows.expand_done((flags >> 32) & 0xFFFFFFFF, known) == known + more
            assert (flags & 0xFF, flags >> 8 & 0xFF, flags >> 16 & 0xFF) == (1, rows.IN_SLOT, 7)


def test_credit_cannot_be_shut_out_by_frames() -> None:
    """Two sides that send as much as they may, and process rows in any order, never block."""
    for seed in range(50):
        draw = random.Random(seed)
        posted, processed, reported, done = [0, 0], [0, 0], [0, 0], [0, 0]

        for _ in range(3000):
            side = draw.randrange(2)
            other = 1 - side
            if draw.random() < 0.5 and processed[side] < posted[other]:
                processed[side] += 1  # a row of the other side, with its report
                done[side] = reported[other]
                if processed[side] - reported[side] >= rows.REPORT_ROWS and rows.may_post(
                    posted[side], done[side], 0
                ):
                    posted[side], reported[side] = posted[side] + 1, processed[side]
            elif rows.may_post(posted[side], done[side], rows.RESERVED_ROWS):
                posted[side], reported[side] = posted[side] + 1, processed[side]
            assert posted[side] - done[side] <= rows.NROWS
        for _ in range(1000):  # both stop to send and process what is there
            for side in (0, 1):
                while processed[side] < posted[1 - side]:
                    processed[side] += 1
                    done[side] = max(done[side], reported[1 - side])
                if processed[side] - reported[side] >= rows.REPORT_ROWS and rows.may_post(
                    posted[side], done[side], 0
                ):
                    posted[side], reported[side] = posted[side] + 1, processed[side]
        assert all(rows.may_post(posted[s], done[s], rows.RESERVED_ROWS) for s in (0, 1))


# --- distribution


@pytest.mark.parametrize("policy", [SPLIT, ROTATE, PIECES])
@pytest.mark.parametrize("nstreams", [1, 2, 3, 8])
def test_pieces_cover_a_message_and_are_aligned(policy: int, nstreams: int) -> None:
    for nbytes in (1, 65536, 65537, 1 << 20, (1 << 22) + 12345):
        piece = piece_bytes(policy, nbytes, nstreams, 1 << 16, 1 << 22)
        offset, streams = 0, set()
        while offset < nbytes:
            length = min(piece, nbytes - offset)
            assert offset % ALIGN == 0
            streams.add(stream_of_piece(policy, 5, offset, piece, nstreams))
            offset += length
        if policy == SPLIT and nbytes >= nstreams << 16:
            assert len(streams) == nstreams
        if policy == ROTATE:
            assert streams == {5 % nstreams}


# --- addresses


def gid(index: int, address: str, kind: str = "roce2", prefix: int = 0) -> PortGid:
    parsed = ipaddress.ip_address(address)
    if parsed.version == 4:
        parsed = ipaddress.IPv6Address(f"::ffff:{parsed}")
    return PortGid(index=index, raw=parsed.packed, type=kind, prefix=prefix)


LINK = gid(0, "fe80::1", "roce1")
TABLE = [LINK, gid(1, "fe80::1"), gid(2, "10.0.0.1", "roce1"), gid(3, "10.0.0.1")]


def test_both_sides_choose_the_same_pair() -> None:
    other = [gid(4, "10.0.0.2"), gid(7, "fe80::2"), gid(9, "10.0.0.2", "roce1")]
    choice, mirrored = choose_gids(TABLE, other), choose_gids(other, TABLE)
    assert choice.pair == (TABLE[3], other[0])
    assert mirrored.pair == (other[0], TABLE[3])
    assert choice.reason == "RoCE v2, IPv4, one network"


def test_tables_that_need_different_entries_still_connect() -> None:
    """A host without IPv4 and a host with both: NCCL needs one index for all."""
    other = [gid(0, "fe80::2"), gid(5, "fd00::2")]
    table = [*TABLE, gid(6, "fd00::1")]
    choice = choose_gids(table, other)
    assert choice.pair is not None
    assert [each.index for each in choice.pair] == [6, 5]


def test_reasons_without_a_pair() -> None:
    assert choose_gids([], TABLE).reason == "a port has no GID"
    assert "IPv4 and IPv6" in choose_gids([gid(0, "10.0.0.1")], [gid(0, "fd00::1")]).reason
    for wish in (GidWish(range="192.168.0.0/16"), GidWish(index=99)):
        choice = choose_gids(TABLE, [gid(0, "fd00::1")], wish)
        assert choice.pair is None
        assert "settings exclude all GIDs of a port (0: roce1 fe80::1, 1: roce2" in choice.reason


@pytest.mark.parametrize(
    ("wish", "index"),
    [
        (GidWish(index=2), 2),
        (GidWish(version=1), 2),
        (GidWish(family=6), 1),
        (GidWish(range="10.0.0.0/8", version=2), 3),
    ],
)
def test_settings_restrict_the_choice(wish: GidWish, index: int) -> None:
    pair = choose_gids(TABLE, TABLE, wish).pair
    assert pair is not None
    assert pair[0].index == index


# --- flush


@pytest.mark.parametrize(
    ("facts", "method", "word"),
    [
        (FlushFacts(), FlushMethod.NONE, "host memory"),
        (FlushFacts(memory="gpu"), FlushMethod.READ, "read"),
        (FlushFacts(memory="gpu", compute_capability=90), FlushMethod.NONE, "9.0"),
        (FlushFacts(memory="gpu", compute_capability=90, c2c=True), FlushMethod.READ, "read"),
        (FlushFacts(memory="gpu", writes_ordering=100), FlushMethod.NONE, "driver"),
        (FlushFacts(memory="gpu", disabled=True), FlushMethod.NONE, "setting"),
        (FlushFacts(memory="gpu", gdrcopy=True), FlushMethod.GDRCOPY, "gdrcopy"),
        (FlushFacts(memory="gpu", null_mr=True), FlushMethod.ATOMIC, "fetch-and-add"),
        (FlushFacts(memory="gpu", vendor="amd", null_mr=True), FlushMethod.READ, "read"),
        (FlushFacts(memory="gpu", data_direct=True), FlushMethod.DATA_DIRECT, "data-direct"),
        (
            FlushFacts(memory="gpu", compute_capability=100, forced=True, disabled=True),
            FlushMethod.READ,
            "asked for",
        ),
    ],
)
def test_flush(facts: FlushFacts, method: FlushMethod, word: str) -> None:
    decision = decide_flush(facts)
    assert decision.method is method
    assert word in decision.reason


# --- statuses and descriptions


def test_status_names_number_vendor_and_action() -> None:
    text = describe_status(12, 129)
    for words in ("status 12", "retry counter", "vendor error 129", "timed out", "IB_TIMEOUT"):
        assert words in text
    assert describe_status(99) == "completion status 99"


def info() -> VerbsInfo:
    port = PortInfo(name="sim0:1", kind="roce", lid=0, mtu=5, gids=tuple(TABLE))
    peer = PeerInfo(qps=((17, 3), (18, 4)), slots=1 << 40, rows=1 << 41, text=5, keys=(9,))
    return VerbsInfo(slot_bytes=8192, ports=(port,), peers={1: peer, 3: peer})


def test_description_survives_its_encoding() -> None:
    assert VerbsInfo.decode(info().encode()) == info()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"version": 2', b'"version": 1'),
        (b'"keys": [9]', b'"keys": []'),
        (b"[17, 3]", b"[16777216, 3]"),
        (b'"slot_bytes": 8192', b'"slot_bytes": 1000'),
        (b"fe80", b"fe"),
    ],
)
def test_damaged_descriptions_are_rejected(old: bytes, new: bytes) -> None:
    data = info().encode()
    assert old in data
    with pytest.raises(ProtocolError):
        VerbsInfo.decode(data.replace(old, new))
