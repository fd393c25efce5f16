"""The frame codec and the handshake of streams."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miraccl.errors import AuthenticationError, ProtocolError
from miraccl.wire import stream as ws
from miraccl.wire.stream import Frame, FrameType, HandshakeState, decode_frame, encode_frame

GOOD = [
    Frame(FrameType.DATA, 0, 3, -5, 100, 0, 100, 2),
    Frame(FrameType.DATA, 63, 1 << 61, 1 << 62, 1 << 40, 1 << 39, ws.MIN_SEGMENT_BYTES, 1 << 61),
    Frame(FrameType.DATA, 1, 0, 0, 0),
    Frame(FrameType.ANNOUNCE, 0, 4, -1, 1 << 30, ack=4),
    Frame(FrameType.CTS, 0, 4, 0, 1 << 30),
    Frame(FrameType.CREDIT, 2, ack=9),
    Frame(FrameType.CLOSE, 0, 17),
    Frame(FrameType.ABORT, 0, length=ws.MAX_TEXT_BYTES),
]


@pytest.mark.parametrize("frame", GOOD, ids=lambda f: f.type.name)
def test_frame_round_trip(frame):
    assert len(encode_frame(frame)) == ws.HEADER_BYTES
    assert decode_frame(b"xx" + encode_frame(frame), 2) == frame


@pytest.mark.parametrize(
    "frame",
    [
        Frame(FrameType.DATA, 0, 0, 0, 100, 50, 51),
        Frame(FrameType.DATA, 0, 0, 0, 1 << 20, 0, 100),
        Frame(FrameType.DATA, 0, 0, 0, 1 << 20, 1 << 20, 0),
        Frame(FrameType.DATA, 0, 0, 0, 1 << 40, 0, ws.MAX_SEGMENT_BYTES + 1),
        Frame(FrameType.DATA, 0, 0, 0, ws.MAX_MESSAGE_BYTES + 1, 0, ws.MIN_SEGMENT_BYTES),
        Frame(FrameType.DATA, 0, ws.MAX_MESSAGE_NUMBER + 1, 0, 1, 0, 1),
        Frame(FrameType.DATA, 0, 0, 0, 1, 0, 1, ws.MAX_MESSAGE_NUMBER + 1),
        Frame(FrameType.CTS, 0, 0, 0, 10, 0, 10),
        Frame(FrameType.CTS, 0, 0, 1, 10),
        Frame(FrameType.CREDIT, 0, 1),
        Frame(FrameType.CLOSE, 0, 1, 0, 1),
        Frame(FrameType.ANNOUNCE, 0, 1, 0, 10, 10),
        Frame(FrameType.ABORT, 0, length=ws.MAX_TEXT_BYTES + 1),
    ],
    ids=str,
)
def test_frame_that_contradicts_itself_is_refused(frame):
    with pytest.raises(ProtocolError, match=frame.type.name):
        decode_frame(encode_frame(frame))


@pytest.mark.parametrize(
    ("at", "value", "what"), [(0, 0, "starts with"), (2, 0, "type 0"), (2, 7, "type 7")]
)
def test_bytes_that_are_no_frame_are_refused(at, value, what):
    data = bytearray(encode_frame(GOOD[0]))
    data[at] = value
    with pytest.raises(ProtocolError, match=what):
        decode_frame(data)


@given(
    st.binary(min_size=ws.HEADER_BYTES, max_size=ws.HEADER_BYTES),
    st.sampled_from(GOOD),
    st.booleans(),
)
def test_decoded_frame_encodes_to_the_same_bytes(noise, frame, whole):
    """Any bytes: either refused with ProtocolError, or a frame that this codec would have
    written.
    """
    data = noise if whole else encode_frame(frame)[:3] + noise[3:]
    try:
        decoded = decode_frame(data)
    except ProtocolError:
        return
    assert encode_frame(decoded) == data


# --- handshake ---

KEY = ws.derive_key(b"secret", b"job")
IDENTITY = ws.StreamIdentity(initiator=1, acceptor=2, stream=0, nstreams=2)


def initiator(key: bytes = KEY, identity: ws.StreamIdentity = IDENTITY) -> ws.InitiatorHandshake:
    return ws.InitiatorHandshake(key=key, nonce=b"i" * 32, deadline=10.0, identity=identity)


def acceptor(key: bytes = KEY, rank: int = 2, nonce: bytes = b"a" * 32) -> ws.AcceptorHandshake:
    return ws.AcceptorHandshake(key=key, nonce=nonce, deadline=10.0, rank=rank)


def test_both_sides_agree():
    a, b = initiator(), acceptor()
    welcome = b.receive(a.receive(b.receive(a.hello)))
    assert a.receive(welcome) == b""
    assert a.done
    assert b.done
    assert a.identity == b.identity == IDENTITY
    assert a.needs == b.needs == 0


def test_initiator_learns_at_once_that_the_acceptor_has_another_secret():
    a, b = initiator(), acceptor(key=ws.derive_key(b"other", b"job"))
    challenge = b.receive(a.hello)
    with pytest.raises(AuthenticationError, match="rank 2 does not know the secret"):
        a.receive(challenge)
    assert a.state is HandshakeState.FAILED


def test_another_job_with_the_same_secret_is_rejected():
    with pytest.raises(AuthenticationError, match="does not know the secret"):
        initiator().receive(
            acceptor(key=ws.derive_key(b"secret", b"other job")).receive(initiator().hello)
        )


@pytest.mark.parametrize("at", [0, 31])
def test_acceptor_refuses_a_wrong_proof(at):
    a, b = initiator(), acceptor()
    proof = bytearray(a.receive(b.receive(a.hello)))
    proof[at] ^= 1
    with pytest.raises(AuthenticationError, match="calls itself rank 1"):
        b.receive(bytes(proof))
    assert b.state is HandshakeState.FAILED
    assert b.identity is None


def test_initiator_refuses_a_wrong_welcome():
    a, b = initiator(), acceptor()
    a.receive(b.receive(a.hello))
    with pytest.raises(AuthenticationError):
        a.receive(b"\0" * 32)
    assert not a.done


def test_replayed_proof_is_refused():
    a, b = initiator(), acceptor()
    proof = a.receive(b.receive(a.hello))
    again = acceptor(nonce=b"b" * 32)
    again.receive(a.hello)
    with pytest.raises(AuthenticationError):
        again.receive(proof)


def test_reflected_messages_are_refused():
    """Somebody without the secret answers with what it has heard: the acceptor's MAC is no proof of
    an initiator.
    """
    a, b = initiator(), acceptor()
    challenge = b.receive(a.hello)
    with pytest.raises(AuthenticationError):
        b.receive(challenge[-32:])


@pytest.mark.parametrize("field", ["initiator", "stream"])
def test_identity_is_covered_by_the_proof(field):
    """A middleman changes who calls or which stream it is."""
    a, b = initiator(), acceptor()
    other = ws.StreamIdentity(**{**vars(IDENTITY), field: 3 if field == "initiator" else 1})
    with pytest.raises(AuthenticationError):
        a.receive(b.receive(initiator(identity=other).hello))


def test_acceptor_refuses_a_call_for_another_rank_and_nonsense():
    with pytest.raises(AuthenticationError, match="asked rank 5 for rank 2"):
        acceptor(rank=5).receive(initiator().hello)
    with pytest.raises(AuthenticationError, match="does not speak"):
        acceptor().receive(b"GET / HTTP/1.1\r\n".ljust(ws.HELLO_BYTES, b"\n"))
    hello = bytearray(initiator().hello)
    hello[18:20] = (65).to_bytes(2, "little")
    with pytest.raises(ProtocolError, match="at most 64"):
        acceptor().receive(bytes(hello))


def test_deadline_ends_the_handshake():
    machine = acceptor()
    assert not machine.expire(9.9)
    assert machine.expire(10.0)
    assert machine.state is HandshakeState.FAILED
    assert machine.needs == 0


def test_an_unauthenticated_peer_cannot_make_the_acceptor_read_more_than_a_handshake():
    assert ws.HANDSHAKE_BYTES < 128
    machine = acceptor()
    total = machine.needs
    machine.receive(initiator().hello)
    assert total + machine.needs == ws.HANDSHAKE_BYTES


@given(
    st.binary(min_size=ws.HELLO_BYTES, max_size=ws.HELLO_BYTES), st.binary(min_size=32, max_size=32)
)
def test_no_bytes_make_an_acceptor_believe(hello, proof):
    machine = acceptor()
    for data in (b"MIRACCL1" + hello[8:], proof):
        try:
            machine.receive(data)
        except (AuthenticationError, ProtocolError):
            assert machine.state is HandshakeState.FAILED
            return
    raise AssertionError("a random proof was believed")


def test_every_handshake_state_has_a_way_out():
    for state in set(HandshakeState) - {HandshakeState.DONE, HandshakeState.FAILED}:
        assert ws.HANDSHAKE_TABLE[state, "bad"] is HandshakeState.FAILED
        assert len([1 for s, _ in ws.HANDSHAKE_TABLE if s is state]) == 2


@pytest.mark.parametrize("numbers", [{"stream": 2}, {"nstreams": 65}, {"acceptor": 1}])
def test_identity_refuses_what_cannot_be(numbers):
    with pytest.raises(ProtocolError):
        ws.StreamIdentity(**{**vars(IDENTITY), **numbers})
