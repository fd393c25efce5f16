"""Admission of connections to the hub: the handshake up to the proof of the secret.

An unauthenticated connection costs little. At most one frame of ``MAX_HANDSHAKE_BYTES`` is stored
for each and two are parsed; it is dropped at the handshake deadline. When ``bound`` of them are
pending, a newcomer evicts one: the oldest that has sent nothing for ``SILENT_SECONDS``, else the
oldest that has not answered the challenge for ``IDLE_SECONDS``. Until then newcomers wait in the
kernel's queue (``may_admit``), so that a thousand ranks that start at once do not push each other
out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from miraccl.errors import AuthenticationError, ProtocolError
from miraccl.wire import framing
from miraccl.wire.auth import (
    MAX_RANKS,
    VERSION,
    Challenge,
    Handshake,
    Hello,
    HubRejectedNotice,
    Proof,
    Unsupported,
    peek_version,
)
from miraccl.wire.bootstrap import PEER_TRANSITIONS, Connected, PeerState, advance
from miraccl.wire.framing import FrameReader, encode, encode_frame

SILENT_SECONDS, IDLE_SECONDS = 0.02, 0.5
#: Bound of the notes that unauthenticated connections can leave.
MAX_NOTES = 8
_SECOND: dict[int, type[Any]] = {Proof.KIND: Proof, HubRejectedNotice.KIND: HubRejectedNotice}


@dataclass(kw_only=True)
class UnauthenticatedPeer:
    """A connection in state HELLO or PROOF; in state JOIN it is about to become a peer.

    ``since``: time of its arrival.
    """

    conn: int
    address: str
    nonce: bytes
    since: float
    deadline: float
    state: PeerState = PeerState.HELLO
    reader: FrameReader = field(default_factory=FrameReader)
    hello: Hello | None = None
    handshake: Handshake | None = None


class Admission:
    """The pending connections of a hub, in order of arrival.

    ``secret``: 32 bytes; ``timeout``: seconds for a handshake; ``bound``: largest number of pending
    connections.
    """

    def __init__(self, *, secret: bytes, timeout: float, bound: int) -> None:
        self.pending: dict[int, UnauthenticatedPeer] = {}  # in order of arrival
        self.notes: list[str] = []
        self._secret, self._timeout, self._bound = secret, timeout, bound

    def note(self, text: str) -> None:
        """Record a fact that may explain a missing rank."""
        if text not in self.notes and len(self.notes) < MAX_NOTES:
            self.notes.append(text)

    def may_admit(self, now: float) -> bool:
        """Return True if there is capacity for one more, or a connection that may be evicted."""
        return len(self.pending) < self._bound or self.evictable(now) is not None

    def evictable(self, now: float) -> UnauthenticatedPeer | None:
        """Return the connection that makes room for another, None if all need more time."""
        for state, seconds in ((PeerState.HELLO, SILENT_SECONDS), (PeerState.PROOF, IDLE_SECONDS)):
            oldest = next((s for s in self.pending.values() if s.state is state), None)
            if oldest is not None and now - oldest.since >= seconds:
                return oldest
        return None

    def admit(self, event: Connected) -> UnauthenticatedPeer | None:
        """Add a connection; return the one that is evicted for it, if any. The bound always
        holds.
        """
        evicted = None
        if len(self.pending) >= self._bound:
            silent = (s for s in self.pending.values() if s.state is PeerState.HELLO)
            evicted = (
                self.evictable(event.now) or next(silent, None) or next(iter(self.pending.values()))
            )
            del self.pending[evicted.conn]
        self.pending[event.conn] = UnauthenticatedPeer(
            conn=event.conn,
            address=event.peer,
            nonce=event.nonce,
            since=event.now,
            deadline=event.now + self._timeout,
        )
        return evicted

    def handle_frame(self, peer: UnauthenticatedPeer, frame: bytes) -> bytes:
        """Handle a frame of the handshake; return the bytes to send back. After the proof the state
        is
        JOIN.

        Raises ``ProtocolError`` or ``AuthenticationError`` if the connection is to be dropped;
        ``WrongVersion`` carries a reply.
        """
        if peer.state is PeerState.HELLO:
            return self._hello(peer, frame)
        self._proof(peer, framing.decode(frame, _SECOND))
        return b""

    def _hello(self, peer: UnauthenticatedPeer, frame: bytes) -> bytes:
        version = peek_version(frame)
        if version is None:
            raise ProtocolError("not a Hello")
        if version != VERSION:
            self.note(
                f"a connection from {_host_of(peer.address)} speaks version {version}, "
                f"this is version {VERSION}"
            )
            raise WrongVersion(f"version {version}, this is version {VERSION}")
        hello = framing.decode(frame, {Hello.KIND: Hello})
        if not 0 <= hello.rank < hello.nranks <= MAX_RANKS:
            raise ProtocolError(f"rank {hello.rank} of {hello.nranks}")
        peer.state = advance(PEER_TRANSITIONS, peer.state, "Hello")
        peer.hello, peer.handshake = hello, Handshake(self._secret, hello, peer.nonce)
        return encode_frame(encode(Challenge(nonce=peer.nonce, proof=peer.handshake.hub_proof())))

    def _proof(self, peer: UnauthenticatedPeer, proof: Proof | HubRejectedNotice) -> None:
        assert peer.handshake is not None
        assert peer.hello is not None
        try:
            if isinstance(proof, HubRejectedNotice):
                raise AuthenticationError("the member has another secret")
            peer.handshake.check_member(proof.proof)
        except AuthenticationError:
            claim = f"it claimed to be rank {peer.hello.rank} of {peer.hello.nranks}"
            self.note(
                f"a connection from {_host_of(peer.address)} did not know the secret ({claim})"
            )
            raise
        peer.state = advance(PEER_TRANSITIONS, peer.state, "Proof")

    def validate_state(self) -> None:
        assert len(self.pending) <= self._bound
        for conn, peer in self.pending.items():
            assert peer.conn == conn
            assert peer.state in (PeerState.HELLO, PeerState.PROOF)
            assert (
                (peer.handshake is None) == (peer.hello is None) == (peer.state is PeerState.HELLO)
            )
            assert peer.reader.limit == framing.MAX_HANDSHAKE_BYTES


class WrongVersion(ProtocolError):
    """A Hello of another version; the reply names ours."""

    @staticmethod
    def reply() -> bytes:
        return encode_frame(encode(Unsupported()))


def _host_of(address: str) -> str:
    return address.rpartition(":")[0] or address
