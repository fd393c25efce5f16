"""Proofs, keys and sealed frames."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miraccl.errors import AuthenticationError, ProtocolError
from miraccl.wire.auth import MAC_BYTES, Handshake, Hello, Opener, Sealer, peek_version
from miraccl.wire.framing import HEADER, MAX_HANDSHAKE_BYTES, encode

SECRET = bytes(range(32))
HELLO = Hello(rank=1, nranks=4, nonce=b"m" * 32)
NONCE = b"h" * 32


def test_both_sides_of_a_handshake_agree():
    member, hub = Handshake(SECRET, HELLO, NONCE), Handshake(SECRET, HELLO, NONCE)
    member.check_hub(hub.hub_proof())
    hub.check_member(member.member_proof())
    for (sealer, _), (_, opener) in (
        (member.member_side(), hub.hub_side()),
        (hub.hub_side(), member.member_side()),
    ):
        for body in (b"", b"x", b"y" * 1000):
            assert opener.open(sealer.seal(body)[HEADER.size :]) == body


@pytest.mark.parametrize(
    "other",
    [
        Handshake(b"\0" * 32, HELLO, NONCE),
        Handshake(SECRET, dataclasses.replace(HELLO, rank=2), NONCE),
        Handshake(SECRET, dataclasses.replace(HELLO, nranks=5), NONCE),
        Handshake(SECRET, dataclasses.replace(HELLO, version=3), NONCE),
        Handshake(SECRET, dataclasses.replace(HELLO, nonce=b"n" * 32), NONCE),
        Handshake(SECRET, HELLO, b"i" * 32),
    ],
)
def test_a_proof_is_bound_to_secret_rank_size_version_and_both_nonces(other):
    right = Handshake(SECRET, HELLO, NONCE)
    with pytest.raises(AuthenticationError):
        right.check_member(other.member_proof())
    with pytest.raises(AuthenticationError):
        right.check_hub(other.hub_proof())


def test_a_proof_cannot_be_reflected():
    handshake = Handshake(SECRET, HELLO, NONCE)
    with pytest.raises(AuthenticationError):
        handshake.check_member(handshake.hub_proof())
    with pytest.raises(AuthenticationError):
        handshake.check_hub(handshake.member_proof())


def test_directions_have_different_keys():
    handshake = Handshake(SECRET, HELLO, NONCE)
    sealer, opener = handshake.member_side()
    with pytest.raises(ProtocolError, match="altered"):
        opener.open(sealer.seal(b"to the hub")[HEADER.size :])


def _sealed(count: int) -> list[bytes]:
    sealer = Sealer(b"key")
    return [sealer.seal(bytes([i]) * i)[HEADER.size :] for i in range(count)]


@given(st.integers(0, 4), st.data())
def test_flipped_bit_is_detected(which, data):
    frames = _sealed(5)
    opener = Opener(b"key")
    for frame in frames[:which]:
        opener.open(frame)
    victim = bytearray(frames[which])
    bit = data.draw(st.integers(0, len(victim) * 8 - 1))
    victim[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        opener.open(bytes(victim))


@given(st.permutations(range(5)))
def test_only_the_sent_order_is_accepted(order):
    opener, frames = Opener(b"key"), _sealed(5)
    for position, index in enumerate(order):
        if position == index:
            opener.open(frames[index])
        else:
            with pytest.raises(
                ProtocolError, match=f"got frame {index}, expected frame {position}"
            ):
                opener.open(frames[index])
            break


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_not_a_sealed_frame(data):
    with pytest.raises(ProtocolError):
        Opener(b"key").open(data)


def test_a_repeated_frame_is_refused():
    opener, frames = Opener(b"key"), _sealed(2)
    opener.open(frames[0])
    with pytest.raises(ProtocolError, match="got frame 0, expected frame 1"):
        opener.open(frames[0])


def test_the_version_is_read_from_any_version_of_hello():
    body = encode(HELLO)
    assert peek_version(body) == HELLO.version
    assert peek_version(body[:5] + b"\x01\x02" + b"other fields") == 0x0102
    assert peek_version(b"GET / HTTP/1.1") is None
    assert peek_version(b"") is None


def test_handshake_messages_fit_the_frame_limit():
    assert len(encode(HELLO)) <= MAX_HANDSHAKE_BYTES
    assert MAC_BYTES == 16
