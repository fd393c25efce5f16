"""One rank's end of the control connection as a machine: handshake, join, then messages.

It opens and seals frames and enforces the order of the protocol; the layer above interprets the
messages. A hub that violates the protocol is not a hub: the member then ends the connection.
"""

from __future__ import annotations

from typing import Any

from miraccl.errors import AuthenticationError, ProtocolError
from miraccl.wire import framing
from miraccl.wire.auth import (
    VERSION,
    Challenge,
    Handshake,
    Hello,
    HubRejectedNotice,
    Opener,
    Proof,
    Sealer,
    Unsupported,
)
from miraccl.wire.bootstrap import (
    MEMBER_TRANSITIONS,
    Disconnected,
    Drop,
    HubLost,
    HubProved,
    HubRejected,
    MemberState,
    MessageArrived,
    Received,
    Send,
    SendMessage,
    Start,
    Tick,
    advance,
)
from miraccl.wire.bootstrap_messages import TO_MEMBER, Goodbye, HubClosing, Join, Rejoin
from miraccl.wire.framing import FrameReader, encode, encode_frame

_HANDSHAKE = (MemberState.NEW, MemberState.HELLO, MemberState.PROVED)
_PLAIN: dict[int, type[Any]] = {Challenge.KIND: Challenge, Unsupported.KIND: Unsupported}


class MemberMachine:
    """State machine of one member.

    ``nonce``: 32 bytes of ``auth.make_nonce``. ``log``, if given, collects the inputs for
    ``replay``.
    """

    def __init__(
        self, *, secret: bytes, rank: int, nranks: int, nonce: bytes, log: list[Any] | None = None
    ) -> None:
        self.state = MemberState.NEW
        self._hello = Hello(rank=rank, nranks=nranks, nonce=nonce)
        self._secret = secret
        self._log = log
        self._reader = FrameReader()
        self._handshake: Handshake | None = None
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self._out: list[Any] = []

    @property
    def nonce(self) -> bytes:
        return self._hello.nonce

    def handle(self, event: Start | Received | Disconnected | SendMessage | Tick) -> list[Any]:
        """Take one input; return ``Send``, ``Drop``, ``HubProved``, ``HubRejected``,
        ``MessageArrived`` and ``HubLost`` records in order.
        """
        if self._log is not None:
            self._log.append(event)
        self._out = []
        if self.state is MemberState.CLOSED:
            return []
        if isinstance(event, Received):
            self._received(event.data)
        elif isinstance(event, SendMessage):
            self._send_message(event.message)
        elif isinstance(event, Disconnected):
            self._lost(event.reason)
        elif isinstance(event, Start):
            self.state = advance(MEMBER_TRANSITIONS, self.state, "start")
            self._out.append(Send(data=encode_frame(encode(self._hello))))
        return self._out

    def deadline(self) -> float | None:
        """Return None: the hub keeps the deadlines of joins and gathers."""
        return None

    def validate_state(self) -> None:
        early = self.state in (MemberState.NEW, MemberState.HELLO)
        assert self.state is MemberState.CLOSED or early == (self._handshake is None)
        joined = self.state in (
            MemberState.JOINING,
            MemberState.REJOINING,
            MemberState.WAITING,
            MemberState.UP,
            MemberState.LEAVING,
        )
        assert not joined or (self._sealer is not None and self._opener is not None)
        assert self._reader.limit == framing.MAX_HANDSHAKE_BYTES or not early

    # --- in
    # ------------------------------------------------------------

    def _received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (
                self.state is not MemberState.CLOSED
                and (frame := self._reader.next_frame()) is not None
            ):
                self._frame(frame)
        except AuthenticationError as error:
            self._out.append(Send(data=encode_frame(encode(HubRejectedNotice()))))
            self._reject("secret", error.message)
        except ProtocolError as error:
            if self.state in _HANDSHAKE:
                self._reject("stranger", error.message)
            else:
                self._out.append(Drop(reason=error.message))
                self._lost(error.message)

    def _frame(self, frame: bytes) -> None:
        if self.state in _HANDSHAKE:
            self._handshake_frame(framing.decode(frame, _PLAIN))
            return
        assert self._opener is not None
        message = framing.decode(self._opener.open(frame), TO_MEMBER)
        if self.state is MemberState.LEAVING:
            return
        self.state = advance(MEMBER_TRANSITIONS, self.state, type(message).__name__)
        if isinstance(message, HubClosing):
            self._out += [
                Drop(reason=message.reason),
                HubLost(state=MemberState.UP, left=True, reason=message.reason),
            ]
        else:
            self._out.append(MessageArrived(message=message))

    def _handshake_frame(self, message: Any) -> None:
        state = advance(MEMBER_TRANSITIONS, self.state, type(message).__name__)
        if isinstance(message, Unsupported):
            self._reject(
                "version", f"the hub speaks version {message.version}, this is version {VERSION}"
            )
            return
        handshake = Handshake(self._secret, self._hello, message.nonce)
        handshake.check_hub(message.proof)
        self._handshake, self.state = handshake, state
        self._out.append(HubProved())

    def _reject(self, kind: str, reason: str) -> None:
        self.state = MemberState.CLOSED
        self._out += [Drop(reason=reason), HubRejected(kind=kind, reason=reason)]

    def _lost(self, reason: str) -> None:
        state, self.state = self.state, advance(MEMBER_TRANSITIONS, self.state, "lost")
        self._out.append(HubLost(state=state, left=state is MemberState.LEAVING, reason=reason))

    # --- out
    # ------------------------------------------------------------

    def _send_message(self, message: Any) -> None:
        if isinstance(message, Join):
            self._prove(message, "join")
            return
        if isinstance(message, Rejoin):
            self._prove(message, "rejoin")
            return
        if isinstance(message, Goodbye):
            self.state = advance(MEMBER_TRANSITIONS, self.state, "leave")
            if self.state is MemberState.CLOSED:
                self._out.append(Drop(reason=message.reason))
                return
        else:
            self.state = advance(MEMBER_TRANSITIONS, self.state, "send")
        self._seal(message)

    def _prove(self, message: Join | Rejoin, event: str) -> None:
        self.state = advance(MEMBER_TRANSITIONS, self.state, event)
        assert self._handshake is not None
        self._out.append(
            Send(data=encode_frame(encode(Proof(proof=self._handshake.member_proof()))))
        )
        self._sealer, self._opener = self._handshake.member_side()
        self._reader.limit = framing.MAX_FRAME_BYTES
        self._seal(message)

    def _seal(self, message: Any) -> None:
        assert self._sealer is not None
        self._out.append(Send(data=self._sealer.seal(encode(message))))
