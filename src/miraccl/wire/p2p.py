"""Protocol of one-sided transfers: mutual proof, introduction, and the frames of a stream.

An agent connects to another one by one or more TCP streams. Each starts with the three messages of
``wire.auth`` over a key that is derived from the secret for this protocol, so a proof of the
bootstrap is worth nothing here. Two sealed messages follow::

    initiator                                    target
    Hello, Proof                            <--> Challenge
    Introduction (sealed)                   -->
                                            <--  AgentWelcome (sealed)
    requests: PUT, GET, NOTIFY, END         -->
                                            <--  replies: ACK, DATA

Requests name a region by slot, generation and key; the target checks them, the rights and every
extent before it moves a byte (``Target``). Replies come in the order of the requests. Nothing here
has sockets, clocks or threads; ``p2p.kernels.serve`` is the compiled counterpart of ``Target``.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import ClassVar

from miraccl.errors import AuthenticationError, ProtocolError
from miraccl.wire import auth, framing
from miraccl.wire.framing import FrameReader, encode_frame

#: First bytes of a Hello; the control plane of ranks has others.
MAGIC = b"MRCA"
VERSION = 1
MAX_MESSAGE_BYTES = 8192
AGENT_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """First sealed message of an initiator.

    ``agent``: random identifier of the agent; a restarted one has another. ``address``: host:port
    at which it listens. ``connection``: number that all streams of one connection share.
    ``attempt``: how often the connection was opened before; the target first ends the streams of
    earlier attempts, so that nothing they carried is written later than what follows.
    """

    name: str
    agent: bytes
    address: str
    host: str
    pid: int
    connection: int
    stream: int
    attempt: int = 0

    KIND: ClassVar[int] = 16
    LAYOUT: ClassVar[tuple[tuple[str, str], ...]] = (
        ("name", "text"),
        ("agent", "b32"),
        ("address", "text"),
        ("host", "text"),
        ("pid", "u64"),
        ("connection", "u64"),
        ("stream", "u32"),
        ("attempt", "u32"),
    )


@dataclass(frozen=True, kw_only=True)
class AgentWelcome:
    """Answer of a target. Descriptors are numbers in its process; 0 and no inode: not offered.

    ``probe`` is the address of a word with the value ``probe_value``: an initiator that can read it
    is on the same host and may access the target's memory.
    """

    name: str
    agent: bytes
    host: str
    pid: int
    table_fd: int
    table_inode: int
    pair_fd: int
    pair_inode: int
    probe: int
    probe_value: int

    KIND: ClassVar[int] = 17
    LAYOUT: ClassVar[tuple[tuple[str, str], ...]] = (
        ("name", "text"),
        ("agent", "b32"),
        ("host", "text"),
        ("pid", "u64"),
        ("table_fd", "u32"),
        ("table_inode", "u64"),
        ("pair_fd", "u32"),
        ("pair_inode", "u64"),
        ("probe", "u64"),
        ("probe_value", "u64"),
    )


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Last sealed message: the initiator has mapped what it can use."""

    mapped: bool

    KIND: ClassVar[int] = 18
    LAYOUT: ClassVar[tuple[tuple[str, str], ...]] = (("mapped", "flag"),)


def protocol_secret(secret: bytes) -> bytes:
    """Derive the secret of this protocol from that of the job."""
    return hmac.digest(secret, b"miraccl p2p 1", "sha256")


class InitiatorSide:
    """Handshake of a connecting agent: bytes in, bytes out.

    Args:
        secret: 32 bytes of ``protocol_secret``.
        nonce: 32 fresh random bytes.

    Attributes:
        welcome: The target's answer, None until it came.
    """

    def __init__(self, secret: bytes, nonce: bytes, introduction: Introduction) -> None:
        self._secret, self._introduction = secret, introduction
        self._hello = auth.Hello(magic=MAGIC, version=VERSION, rank=0, nranks=0, nonce=nonce)
        self._reader = FrameReader()
        self._opener: auth.Opener | None = None
        self._sealer: auth.Sealer | None = None
        self.welcome: AgentWelcome | None = None

    def start(self) -> bytes:
        return encode_frame(framing.encode(self._hello))

    def receive(self, data: bytes) -> bytes:
        """Process received bytes; return bytes to send. Raises ``MiracclError`` to give up."""
        self._reader.feed(data)
        out = b""
        while (frame := self._reader.next_frame()) is not None:
            out += self._frame(frame)
        return out

    def ready(self, mapped: bool) -> bytes:
        """Return the bytes that end the handshake."""
        assert self._sealer is not None
        return self._sealer.seal(framing.encode(Ready(mapped=mapped)))

    def _frame(self, frame: bytes) -> bytes:
        if self._opener is None:
            return self._challenged(frame)
        if self.welcome is not None:
            raise ProtocolError("the target sent more than one welcome")
        body = self._opener.open(frame)
        self.welcome = framing.decode(body, {AgentWelcome.KIND: AgentWelcome})
        return b""

    def _challenged(self, frame: bytes) -> bytes:
        kinds: dict[int, type[auth.Challenge | auth.Unsupported]] = {
            auth.Challenge.KIND: auth.Challenge,
            auth.Unsupported.KIND: auth.Unsupported,
        }
        message = framing.decode(frame, kinds)
        if isinstance(message, auth.Unsupported):
            raise ProtocolError(
                f"the agent there speaks version {message.version} of the protocol, this one "
                f"{VERSION}"
            )
        handshake = auth.Handshake(self._secret, self._hello, message.nonce)
        try:
            handshake.check_hub(message.proof)
        except AuthenticationError:
            raise AuthenticationError("the agent there has another secret") from None
        self._sealer, self._opener = handshake.member_side()
        self._reader.limit = MAX_MESSAGE_BYTES
        proof = encode_frame(framing.encode(auth.Proof(proof=handshake.member_proof())))
        return proof + self._sealer.seal(framing.encode(self._introduction))


class TargetSide:
    """Handshake of a listening agent: bytes in, bytes out.

    Attributes:
        introduction: The initiator's, None until it has proven the secret and sent it.
        ready: The last message, None until it came.
    """

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        self._secret, self._nonce = secret, nonce
        self._reader = FrameReader()
        self._handshake: auth.Handshake | None = None
        self._opener: auth.Opener | None = None
        self._sealer: auth.Sealer | None = None
        self.introduction: Introduction | None = None
        self.ready: Ready | None = None

    @property
    def proven(self) -> bool:
        return self._opener is not None

    @property
    def rest(self) -> bytes:
        """Bytes that came behind the last message: the first requests."""
        return self._reader.rest()

    def receive(self, data: bytes) -> bytes:
        """Process received bytes; return bytes to send. Raises ``MiracclError`` to give up."""
        self._reader.feed(data)
        out = b""
        while self.ready is None and (frame := self._reader.next_frame()) is not None:
            out += self._frame(frame)
        return out

    def welcome(self, message: AgentWelcome) -> bytes:
        assert self._sealer is not None
        return self._sealer.seal(framing.encode(message))

    def _frame(self, frame: bytes) -> bytes:
        if self._handshake is None:
            return self._greeted(frame)
        if self._opener is None:
            proof = framing.decode(frame, {auth.Proof.KIND: auth.Proof})
            self._handshake.check_member(proof.proof)
            self._sealer, self._opener = self._handshake.hub_side()
            self._reader.limit = MAX_MESSAGE_BYTES
            return b""
        body = self._opener.open(frame)
        if self.introduction is None:
            self.introduction = framing.decode(body, {Introduction.KIND: Introduction})
        else:
            self.ready = framing.decode(body, {Ready.KIND: Ready})
        return b""

    def _greeted(self, frame: bytes) -> bytes:
        hello = framing.decode(frame, {auth.Hello.KIND: auth.Hello})
        if hello.magic != MAGIC or hello.rank or hello.nranks:
            raise ProtocolError("the connection is not from an agent")
        if hello.version != VERSION:
            return encode_frame(framing.encode(auth.Unsupported(version=VERSION)))
        self._handshake = auth.Handshake(self._secret, hello, self._nonce)
        challenge = auth.Challenge(nonce=self._nonce, proof=self._handshake.hub_proof())
        return encode_frame(framing.encode(challenge))
