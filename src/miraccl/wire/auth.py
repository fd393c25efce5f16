"""Mutual proof of the job's secret, and the keys derived from it.

Three plain messages, then only sealed ones::

    member                                   hub
    Hello(version, rank, nranks, nonce_m) -->
                                         <-- Challenge(nonce_h, proof_h)
    Proof(proof_m)                       -->
    sealed frames                       <--> sealed frames

``proof_x = HMAC-SHA256(secret, role_x | version | rank | nranks | nonce_m | nonce_h)``. Both sides
prove the secret over fresh nonces, bound to role, rank and job size, so a proof can be neither
replayed nor reflected (ISO/IEC 9798-4, three pass mutual authentication). The hub proves first: a
member never proves itself to a server that does not know the secret, and a member with a wrong
secret learns so at once. The keys of the two directions are HMACs of the same transcript under
other labels (extract and expand as in RFC 5869).

A member whose connection was cut before it received ``Accepted`` reconnects and says so in its
nonce: 16 random bytes, then 16 bytes of an HMAC over these and the nonce of the last connection.
The hub may not have noticed the cut yet.

A sealed frame is ``u64 sequence | message | 16 bytes of HMAC-SHA256`` (truncated as in RFC 4868).
The control plane is authenticated, not encrypted: no confidential data is sent over it.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from typing import ClassVar

from miraccl.errors import AuthenticationError, ProtocolError
from miraccl.wire.framing import encode_frame

#: Version of the control protocol. Both sides must have the same.
VERSION = 2
MAGIC = b"MRCL"
#: Largest job: a bound for tables, not a measurement.
MAX_RANKS = 1 << 20
NONCE_BYTES = 32
SECRET_BYTES = 32
MAC_BYTES = 16
_SEQUENCE = struct.Struct(">Q")
_TRANSCRIPT_HEAD = struct.Struct(">HII")


@dataclass(frozen=True, kw_only=True)
class Hello:
    """First message of a member.

    Magic and version come first in every version of the protocol, so that the answer can name the
    difference.
    """

    magic: bytes = MAGIC
    version: int = VERSION
    rank: int
    nranks: int
    nonce: bytes

    KIND: ClassVar[int] = 1
    LAYOUT: ClassVar[tuple[tuple[str, str], ...]] = (
        ("magic", "b4"),
        ("version", "u16"),
        ("rank", "u32"),
        ("nranks", "u32"),
        ("nonce", "b32"),
    )


@dataclass(frozen=True, kw_only=True)
class Challenge:
    nonce: bytes
    proof: bytes

    KIND: ClassVar[int] = 2
    LAYOUT: ClassVar[tuple[tuple[str, str], ...]] = (("nonce", "b32"), ("proof", "b32"))


@dataclass(frozen=True, kw_only=True)
class Proof:
    proof: bytes

    KIND: ClassVar[int] = 3
    LAYOUT: ClassVar[tuple[tuple[str, str], ...]] = (("proof", "b32"),)


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """Plain answer to a Hello of another version; it reveals only the version."""

    version: int = VERSION

    KIND: ClassVar[int] = 4
    LAYOUT: ClassVar[tuple[tuple[str, str], ...]] = (("version", "u16"),)


@dataclass(frozen=True, kw_only=True)
class HubRejectedNotice:
    """Plain notice of a member that the hub's proof is wrong.

    It proves nothing; the hub only mentions it when ranks are missing.
    """

    KIND: ClassVar[int] = 5
    LAYOUT: ClassVar[tuple[tuple[str, str], ...]] = ()


def make_nonce(secret: bytes, random: bytes, last: bytes = b"") -> bytes:
    """Return the nonce of a Hello from 32 fresh random bytes.

    ``last``: nonce of the connection that was cut, if there was one.
    """
    return random[:MAC_BYTES] + _reconnect_mac(secret, last, random[:MAC_BYTES]) if last else random


def is_reconnect(secret: bytes, nonce: bytes, last: bytes) -> bool:
    """Return True if ``nonce`` comes from the member whose connection had the nonce ``last``."""
    return hmac.compare_digest(nonce[MAC_BYTES:], _reconnect_mac(secret, last, nonce[:MAC_BYTES]))


def _reconnect_mac(secret: bytes, last: bytes, random: bytes) -> bytes:
    return hmac.digest(secret, b"miraccl again\0" + last + random, "sha256")[:MAC_BYTES]


def peek_version(body: bytes) -> int | None:
    """Return the version in a Hello of any version, None if the frame is not a Hello."""
    if len(body) < 7 or body[0] != Hello.KIND or body[1:5] != MAGIC:
        return None
    return int.from_bytes(body[5:7], "big")


class Handshake:
    """Transcript that both sides know after Hello and Challenge, and the proofs and keys from it.

    ``secret``: 32 bytes. Checks raise ``AuthenticationError`` for a wrong proof.
    """

    def __init__(self, secret: bytes, hello: Hello, hub_nonce: bytes) -> None:
        self._secret = secret
        self._transcript = (
            _TRANSCRIPT_HEAD.pack(hello.version, hello.rank, hello.nranks) + hello.nonce + hub_nonce
        )

    def _mac(self, label: bytes) -> bytes:
        return hmac.digest(self._secret, b"miraccl " + label + b"\0" + self._transcript, "sha256")

    def hub_proof(self) -> bytes:
        return self._mac(b"hub")

    def member_proof(self) -> bytes:
        return self._mac(b"member")

    def check_hub(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self.hub_proof()):
            raise AuthenticationError("the control plane there has another secret than this rank")

    def check_member(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self.member_proof()):
            raise AuthenticationError("the member has another secret")

    def hub_side(self) -> tuple[Sealer, Opener]:
        return Sealer(self._mac(b"key from hub")), Opener(self._mac(b"key from member"))

    def member_side(self) -> tuple[Sealer, Opener]:
        return Sealer(self._mac(b"key from member")), Opener(self._mac(b"key from hub"))


class Sealer:
    """Numbers and authenticates the messages of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.sequence = 0

    def seal(self, body: bytes) -> bytes:
        """Return the whole frame of one message."""
        numbered = _SEQUENCE.pack(self.sequence) + body
        frame = encode_frame(numbered + hmac.digest(self._key, numbered, "sha256")[:MAC_BYTES])
        self.sequence += 1  # after encode_frame: a message that is too long was not sent
        return frame


class Opener:
    """Checks and strips what a ``Sealer`` added.

    Raises ``ProtocolError`` for any frame that was altered, repeated, lost or reordered.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.sequence = 0

    def open(self, frame: bytes) -> bytes:
        if len(frame) < _SEQUENCE.size + MAC_BYTES:
            raise ProtocolError("a sealed frame is too short")
        numbered, mac = frame[:-MAC_BYTES], frame[-MAC_BYTES:]
        if not hmac.compare_digest(hmac.digest(self._key, numbered, "sha256")[:MAC_BYTES], mac):
            raise ProtocolError("a frame was altered in transit or is not from this peer")
        (sequence,) = _SEQUENCE.unpack_from(numbered)
        if sequence != self.sequence:
            raise ProtocolError(f"got frame {sequence}, expected frame {self.sequence}")
        self.sequence += 1
        return numbered[_SEQUENCE.size :]
