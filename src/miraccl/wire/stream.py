"""Bytes of a TCP stream between two proxies: the frame header and the handshake before the first
one.

- A frame is 48 bytes of header and at most ``MAX_SEGMENT_BYTES`` of payload. ``decode_frame``
  rejects everything that this module would not have encoded; the meaning of a frame in the state of
  a connection is checked by ``wire.proxy``.
- Before the first frame both sides prove that they know the job's secret: nonces of both sides,
  HMAC-SHA-256 over the whole transcript, labels for the two roles so that a message cannot be
  reflected, constant-time comparison. Messages of the handshake have fixed sizes and a side reads
  no further than the next one: an unauthenticated peer costs at most ``HANDSHAKE_BYTES`` and a
  deadline.
- Data carry no MAC per byte: the handshake keeps out unauthenticated peers and mix-ups, not an
  attacker who can rewrite TCP segments.

The form of the machines (bytes in, bytes out, a deadline, no clock) follows h11 and aioquic; the
handshake is the textbook challenge-response with mutual authentication (ISO/IEC 9798-4, three
passes, and a fourth that confirms).
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import NamedTuple

from miraccl.errors import AuthenticationError, ProtocolError

MAGIC = 0x4D43
"""First two bytes of each frame, ``CM`` on the wire."""
_HEADER = struct.Struct("<HBBIQqQQQ")
HEADER_BYTES = _HEADER.size
MAX_SEGMENT_BYTES = 1 << 26
MIN_SEGMENT_BYTES = 1 << 16
"""Smallest segment of a message, except the last; NCCL's ``MIN_CHUNKSIZE`` in ``net_socket.cc`` is
equal."""
MAX_MESSAGE_BYTES = 1 << 46
MAX_MESSAGE_NUMBER = 1 << 62
MAX_STREAMS = 64
MAX_TEXT_BYTES = 240


class FrameType(enum.IntEnum):
    """Kind of a frame. The numbers are wire format and are never reused."""

    DATA = 1
    """``length`` bytes of message ``message`` follow, starting at byte ``offset``."""
    ANNOUNCE = 2
    """Message ``message`` of ``nbytes`` is larger than a slot and waits for a CTS."""
    CTS = 3
    """Clear to send: the receiver has a buffer of ``nbytes`` for message ``message``."""
    CREDIT = 4
    """Carries only ``ack``."""
    CLOSE = 5
    """Last frame of this stream; ``message`` messages were sent in total."""
    ABORT = 6
    """The sender gives up; ``length`` bytes of UTF-8 are the reason."""


class Frame(NamedTuple):
    """Frame header. A tuple, not a dataclass, because several are made per message.

    Attributes:
        message: Number of the message, from 0 per direction.
        signature: Signature of the operation.
        nbytes: Size of the whole message.
        offset, length: Segment of the message in this frame, in bytes.
        ack: Messages of the other direction that this side's executor has consumed.
    """

    type: FrameType
    stream: int
    message: int = 0
    signature: int = 0
    nbytes: int = 0
    offset: int = 0
    length: int = 0
    ack: int = 0


_TYPES = {int(t): t for t in FrameType}


def encode_frame(frame: Frame) -> bytes:
    """Return the 48 bytes of a header."""
    kind, stream, message, signature, nbytes, offset, length, ack = frame
    return _HEADER.pack(MAGIC, kind, stream, length, message, signature, nbytes, offset, ack)


def decode_frame(data: bytes | bytearray | memoryview, offset_bytes: int = 0) -> Frame:
    """Return the header at an offset of ``data``.

    Raises ``ProtocolError`` naming the field that no encoder of this module produces.
    """
    magic, kind, stream, length, message, signature, nbytes, offset, ack = _HEADER.unpack_from(
        data, offset_bytes
    )
    if magic != MAGIC:
        raise ProtocolError(f"frame starts with {magic:#06x} instead of {MAGIC:#06x}")
    known = _TYPES.get(kind)
    if known is None:
        raise ProtocolError(f"frame type {kind} is unknown")
    frame = Frame(known, stream, message, signature, nbytes, offset, length, ack)
    problem = _header_error(frame)
    if problem:
        raise ProtocolError(f"{known.name} frame: {problem}")
    return frame


def _header_error(frame: Frame) -> str:
    """Return the first error in the fields of a header, "" if there is none."""
    if frame.message > MAX_MESSAGE_NUMBER or frame.ack > MAX_MESSAGE_NUMBER:
        return "message number out of range"
    if frame.nbytes > MAX_MESSAGE_BYTES:
        return f"message of {frame.nbytes} bytes"
    if frame.type is FrameType.DATA:
        return _segment_error(frame)
    limit = MAX_TEXT_BYTES if frame.type is FrameType.ABORT else 0
    if frame.length > limit:
        return f"{frame.length} bytes of payload, at most {limit} are allowed"
    used = _USED[frame.type]
    for name, value in (
        ("message", frame.message),
        ("signature", frame.signature),
        ("nbytes", frame.nbytes),
        ("offset", frame.offset),
    ):
        if value and name not in used:
            return f"{name} is {value} instead of 0"
    return ""


_USED: dict[FrameType, tuple[str, ...]] = {
    FrameType.ANNOUNCE: ("message", "signature", "nbytes"),
    FrameType.CTS: ("message", "nbytes"),
    FrameType.CREDIT: (),
    FrameType.CLOSE: ("message",),
    FrameType.ABORT: (),
}


def _segment_error(frame: Frame) -> str:
    if frame.length > MAX_SEGMENT_BYTES:
        return f"segment of {frame.length} bytes"
    end = frame.offset + frame.length
    if end > frame.nbytes:
        return f"segment [{frame.offset}, {end}) of a message of {frame.nbytes} bytes"
    if frame.length < MIN_SEGMENT_BYTES and end != frame.nbytes:
        return f"segment of {frame.length} bytes is not the last"
    if frame.length == 0 and frame.nbytes:
        return "empty segment"
    return ""


# --- handshake

NONCE_BYTES = 32
MAC_BYTES = 32
_GREETING = b"MIRACCL1"
_HELLO = struct.Struct(f"<8sIIHH{NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"<8s{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = _CHALLENGE.size + MAC_BYTES
HANDSHAKE_BYTES = HELLO_BYTES + MAC_BYTES
"""Upper bound of the bytes that an acceptor reads from an unauthenticated peer."""


def derive_key(secret: bytes, job: bytes) -> bytes:
    """Return the key of all streams of one communicator.

    ``job`` separates communicators with one secret.
    """
    return hmac.digest(
        secret, b"miraccl tcp stream key 1\0" + hashlib.sha256(job).digest(), "sha256"
    )


@dataclass(frozen=True, kw_only=True)
class StreamIdentity:
    """Stream number and pair of ranks of a stream. The initiator connects, the acceptor listens."""

    initiator: int
    acceptor: int
    stream: int
    nstreams: int

    def __post_init__(self) -> None:
        if not 0 <= self.stream < self.nstreams <= MAX_STREAMS:
            raise ProtocolError(
                f"stream {self.stream} of {self.nstreams}, at most {MAX_STREAMS} are allowed"
            )
        if self.initiator == self.acceptor:
            raise ProtocolError(f"rank {self.initiator} connects to itself")


class HandshakeState(enum.Enum):
    WAIT_HELLO = "wait hello"
    WAIT_CHALLENGE = "wait challenge"
    WAIT_PROOF = "wait proof"
    WAIT_WELCOME = "wait welcome"
    DONE = "done"
    FAILED = "failed"


HANDSHAKE_TABLE: dict[tuple[HandshakeState, str], HandshakeState] = {
    (HandshakeState.WAIT_HELLO, "good hello"): HandshakeState.WAIT_PROOF,
    (HandshakeState.WAIT_PROOF, "good proof"): HandshakeState.DONE,
    (HandshakeState.WAIT_CHALLENGE, "good challenge"): HandshakeState.WAIT_WELCOME,
    (HandshakeState.WAIT_WELCOME, "good welcome"): HandshakeState.DONE,
    **{
        (state, "bad"): HandshakeState.FAILED
        for state in (
            HandshakeState.WAIT_HELLO,
            HandshakeState.WAIT_CHALLENGE,
            HandshakeState.WAIT_PROOF,
            HandshakeState.WAIT_WELCOME,
        )
    },
}


class Handshake:
    """One side of one stream's handshake.

    Read exactly ``needs`` bytes, pass them to ``receive``, send its result. All rejections raise
    ``AuthenticationError`` or ``ProtocolError`` and leave the machine FAILED.

    Attributes:
        deadline: End of the handshake on the caller's clock; see ``expire``.
        identity: Complete once the state is DONE.
    """

    def __init__(self, *, key: bytes, nonce: bytes, deadline: float, state: HandshakeState) -> None:
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"cannot use a nonce of {len(nonce)} bytes: allowed are {NONCE_BYTES}")
        self.state = state
        self.deadline = deadline
        self.identity: StreamIdentity | None = None
        self._key = key
        self._nonce = nonce
        self._transcript = b""

    @property
    def done(self) -> bool:
        return self.state is HandshakeState.DONE

    @property
    def needs(self) -> int:
        """Size in bytes of the next message, 0 if there is none."""
        return {
            HandshakeState.WAIT_HELLO: HELLO_BYTES,
            HandshakeState.WAIT_CHALLENGE: CHALLENGE_BYTES,
            HandshakeState.WAIT_PROOF: MAC_BYTES,
            HandshakeState.WAIT_WELCOME: MAC_BYTES,
        }.get(self.state, 0)

    def receive(self, data: bytes) -> bytes:
        """Process the next message and return the bytes to send, possibly none."""
        if not self.needs or len(data) != self.needs:
            raise ValueError(f"cannot process {len(data)} bytes: the next message has {self.needs}")
        try:
            return self._receive(data)
        except (AuthenticationError, ProtocolError):
            self._move("bad")
            raise

    def expire(self, now: float) -> bool:
        """End the handshake if its deadline has passed; return True if the machine is FAILED."""
        if self.needs and now >= self.deadline:
            self._move("bad")
        return self.state is HandshakeState.FAILED

    def _receive(self, data: bytes) -> bytes:
        raise NotImplementedError

    def _move(self, trigger: str) -> None:
        self.state = HANDSHAKE_TABLE[self.state, trigger]

    def _mac(self, role: bytes) -> bytes:
        return hmac.digest(self._key, role + b"\0" + self._transcript, "sha256")

    def _check(self, role: bytes, mac: bytes, who: str) -> None:
        if not hmac.compare_digest(self._mac(role), mac):
            raise AuthenticationError(f"{who} does not know the secret of this job")


class InitiatorHandshake(Handshake):
    """Side that connects; it sends ``hello`` first."""

    def __init__(
        self, *, key: bytes, nonce: bytes, deadline: float, identity: StreamIdentity
    ) -> None:
        super().__init__(
            key=key, nonce=nonce, deadline=deadline, state=HandshakeState.WAIT_CHALLENGE
        )
        self._identity = identity
        self.hello = _HELLO.pack(
            _GREETING,
            identity.initiator,
            identity.acceptor,
            identity.stream,
            identity.nstreams,
            nonce,
        )
        self._transcript = self.hello

    def _receive(self, data: bytes) -> bytes:
        who = f"the process that answers for rank {self._identity.acceptor}"
        if self.state is HandshakeState.WAIT_WELCOME:
            self._check(b"welcome", data, who)
            self._move("good welcome")
            return b""
        greeting, _nonce = _CHALLENGE.unpack_from(data)
        if greeting != _GREETING:
            raise AuthenticationError(f"{who} does not speak this protocol")
        self._transcript += data[: _CHALLENGE.size]
        self._check(b"acceptor", data[_CHALLENGE.size :], who)
        self.identity = self._identity
        self._move("good challenge")
        return self._mac(b"initiator")


class AcceptorHandshake(Handshake):
    """Side that listens, on ``rank``."""

    def __init__(self, *, key: bytes, nonce: bytes, deadline: float, rank: int) -> None:
        super().__init__(key=key, nonce=nonce, deadline=deadline, state=HandshakeState.WAIT_HELLO)
        self._rank = rank
        self._claim: StreamIdentity | None = None

    def _receive(self, data: bytes) -> bytes:
        if self.state is HandshakeState.WAIT_PROOF:
            self._check(
                b"initiator",
                data,
                f"the process that calls itself rank {self._claim and self._claim.initiator}",
            )
            self.identity = self._claim
            self._move("good proof")
            return self._mac(b"welcome")
        greeting, initiator, acceptor, stream, nstreams, _nonce = _HELLO.unpack(data)
        if greeting != _GREETING:
            raise AuthenticationError("an unauthenticated peer does not speak this protocol")
        if acceptor != self._rank:
            raise AuthenticationError(
                f"an unauthenticated peer asked rank {self._rank} for rank {acceptor}"
            )
        self._claim = StreamIdentity(
            initiator=initiator, acceptor=acceptor, stream=stream, nstreams=nstreams
        )
        challenge = _CHALLENGE.pack(_GREETING, self._nonce)
        self._transcript = data + challenge
        self._move("good hello")
        return challenge + self._mac(b"acceptor")
