"""The hub of a job as a machine: admits ranks, then forwards control messages between them.

Connections that have not proved the secret are in ``bootstrap_admission``, the traffic of a running
job in ``bootstrap_groups``. Rules:

- Nothing that an unauthenticated peer sends reaches a rank.
- A rank that violates the protocol is dropped and counts as lost; input never makes the hub fail.
- A broadcast goes last to the ranks of the hub's own process, with which the hub may end.
- Messages of one connection keep the order of events: a rank sees the result of a gather before the
  loss that came later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from miraccl.errors import AuthenticationError, ProtocolError
from miraccl.wire import framing
from miraccl.wire.auth import Hello, Opener, Sealer, is_reconnect
from miraccl.wire.bootstrap import (
    JOB_TRANSITIONS,
    PEER_TRANSITIONS,
    CloseHub,
    Connected,
    Disconnected,
    Drop,
    Finished,
    JobState,
    PeerState,
    RankDead,
    Received,
    Send,
    Tick,
    advance,
    format_ranks,
)
from miraccl.wire.bootstrap_admission import Admission, UnauthenticatedPeer, WrongVersion
from miraccl.wire.bootstrap_groups import Groups
from miraccl.wire.bootstrap_messages import (
    TO_HUB,
    Accepted,
    Gone,
    Goodbye,
    HubClosing,
    Join,
    JoinRejected,
    RejectCode,
    Rejoin,
    Replayed,
    Resumed,
    Welcome,
    pack_gone,
    unpack_gone,
)
from miraccl.wire.framing import FrameReader, encode

#: Time (seconds) that the successor of a hub gives the survivors to come to it.
REJOIN_SECONDS = 5.0


@dataclass(kw_only=True)
class _Peer:
    """An authenticated connection. ``deadline``: that of its Join, then that of its rendezvous."""

    conn: int
    address: str
    hello: Hello
    sealer: Sealer
    opener: Opener
    reader: FrameReader
    deadline: float
    state: PeerState = PeerState.JOIN
    join: Join | None = None

    @property
    def rank(self) -> int:
        return self.hello.rank


class HubMachine:
    """State machine of the hub.

    ``secret``: 32 bytes. ``token`` names the hub's process. ``nranks``: learnt from the first rank
    if it is not given. ``handshake_timeout``: seconds; ``max_pending``: bound of unauthenticated
    connections; ``log``, if given, collects the inputs for ``replay``.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        token: bytes,
        nranks: int | None = None,
        handshake_timeout: float = 5.0,
        max_pending: int = 128,
        log: list[Any] | None = None,
    ) -> None:
        self.state = JobState.GATHERING
        self.nranks = nranks
        self._secret, self._token, self._log = secret, token, log
        self._admission = Admission(secret=secret, timeout=handshake_timeout, bound=max_pending)
        self._peers: dict[int, _Peer] = {}
        self._ranks: dict[int, _Peer] = {}
        self._gone: dict[int, Gone] = {}
        self._notified: set[int] = set()
        self._linger_until = 0.0
        self._failure: JoinRejected | None = None
        self._nranks_source = ""
        self._groups = Groups(self._broadcast)
        self._out: list[Any] = []
        self._own: set[int] = set()  # connections of the hub's own process
        # of a successor:
        self._tokens: tuple[bytes, ...] = ()
        self._recover_until = 0.0
        self._replaying: set[int] = set()  # ranks that have not sent Replayed

    @classmethod
    def successor(
        cls,
        *,
        secret: bytes,
        token: bytes,
        tokens: Sequence[bytes],
        gone: Iterable[Gone],
        now: float,
        log: list[Any] | None = None,
    ) -> HubMachine:
        """Return the machine of a hub that succeeds a lost one.

        ``tokens``: process tokens of the job by rank; ``gone``: ranks known to be gone. It waits
        for the others until ``now + REJOIN_SECONDS``.
        """
        hub = cls(secret=secret, token=token, nranks=len(tokens), log=log)
        hub.state = JobState.RECOVERING
        hub._tokens = tuple(tokens)
        hub._gone = {each.rank: each for each in gone}
        hub._recover_until = now + REJOIN_SECONDS
        return hub

    @property
    def missing(self) -> list[int]:
        """Ranks that have not rejoined yet; empty unless the machine recovers."""
        if self.state is not JobState.RECOVERING:
            return []
        return [
            rank
            for rank in range(len(self._tokens))
            if rank not in self._ranks and rank not in self._gone
        ]

    # --- inputs ---

    def handle(
        self, event: Connected | Received | Disconnected | Tick | CloseHub | RankDead
    ) -> list[Any]:
        """Take one input; return ``Send``, ``Drop`` and ``Finished`` records in order.

        Those for the hub's own process come last: it may exit as soon as it has received them.
        """
        if self._log is not None:
            self._log.append(event)
        self._out = []
        if isinstance(event, Received):
            self._received(event)
        elif isinstance(event, Connected):
            self._connected(event)
        elif isinstance(event, Disconnected):
            self._admission.pending.pop(event.conn, None)
            if event.conn in self._peers:
                self._remove(self._peers[event.conn], event.reason, event.now)
        elif isinstance(event, CloseHub):
            self._close(event.reason, event.now)
        elif isinstance(event, RankDead):
            self._rank_dead(event)
        else:
            self._tick(event.now)
        self._finish_if_done(event.now)
        return sorted(
            self._out,
            key=lambda output: 2 if isinstance(output, Finished) else int(output.conn in self._own),
        )

    def make_room(self, now: float) -> list[Any]:
        """Drop an unauthenticated connection because the process has no descriptor left."""
        self._out = []
        oldest = self._admission.evictable(now)
        if oldest is not None:
            self._admission.note(
                "the control plane ran out of descriptors (ulimit -n) with "
                f"{len(self._admission.pending)} unauthenticated connections"
            )
            self._dismiss(oldest, "no descriptor left")
        return self._out

    def may_accept(self, now: float) -> bool:
        """Return True if the next connection may be accepted now.

        Otherwise it should wait some milliseconds in the kernel's queue.
        """
        return self._admission.may_admit(now)

    def deadline(self) -> float | None:
        times = [pending.deadline for pending in self._admission.pending.values()]
        times += [peer.deadline for peer in self._peers.values() if peer.state is PeerState.JOIN]
        if self.state is JobState.GATHERING:
            times += [peer.deadline for peer in self._ranks.values()]
        elif self.state is JobState.RECOVERING:
            times.append(self._recover_until)
        elif self.state is JobState.FAILED:
            times.append(self._linger_until)
        return min([*times, *self._groups.deadlines()], default=None)

    def validate_state(self) -> None:
        self._admission.validate_state()
        assert not (self._admission.pending.keys() & self._peers.keys())
        for conn, peer in self._peers.items():
            assert peer.conn == conn
            assert peer.state in (PeerState.JOIN, PeerState.WAITING, PeerState.UP)
            if peer.state is not PeerState.JOIN:
                assert peer.join is not None or self._tokens
                assert self._ranks[peer.rank] is peer
                assert (peer.state is PeerState.UP) == (self.state is JobState.FORMED)
        for rank, peer in self._ranks.items():
            assert self.nranks is not None
            assert peer.rank == rank < self.nranks
            assert peer.conn in self._peers
        assert not (self._ranks.keys() & self._gone.keys())
        self._groups.validate_state()
        if self.state is JobState.FORMED:
            assert self.nranks == len(self._ranks) + len(self._gone)

    # --- connections ---

    def _connected(self, event: Connected) -> None:
        if self.state is JobState.FINISHED:
            self._out.append(Drop(conn=event.conn, reason="the hub has ended"))
            return
        evicted = self._admission.admit(event)
        if evicted is not None:
            self._out.append(Drop(conn=evicted.conn, reason="too many unauthenticated connections"))

    def _received(self, event: Received) -> None:
        pending = self._admission.pending.get(event.conn)
        if pending is not None:
            pending.reader.feed(event.data)
            self._continue_handshake(pending)
        peer = self._peers.get(event.conn)
        if peer is None:
            return
        if pending is None:
            peer.reader.feed(event.data)
        try:
            while (
                peer.state is not PeerState.GONE and (frame := peer.reader.next_frame()) is not None
            ):
                self._frame(peer, frame, event.now)
        except ProtocolError as error:
            self._drop(peer, error.message, event.now)

    def _continue_handshake(self, pending: UnauthenticatedPeer) -> None:
        """Handle frames until the peer has proved the secret; its later frames are sealed."""
        try:
            while (
                pending.state is not PeerState.JOIN
                and (frame := pending.reader.next_frame()) is not None
            ):
                answer = self._admission.handle_frame(pending, frame)
                if answer:
                    self._out.append(Send(conn=pending.conn, data=answer))
        except (ProtocolError, AuthenticationError) as error:
            if isinstance(error, WrongVersion):
                self._out.append(Send(conn=pending.conn, data=error.reply()))
            self._dismiss(pending, error.message)
            return
        if pending.state is PeerState.JOIN:
            self._promote(pending)

    def _dismiss(self, pending: UnauthenticatedPeer, reason: str) -> None:
        del self._admission.pending[pending.conn]
        self._out.append(Drop(conn=pending.conn, reason=reason))

    def _promote(self, pending: UnauthenticatedPeer) -> None:
        assert pending.handshake is not None
        assert pending.hello is not None
        del self._admission.pending[pending.conn]
        sealer, opener = pending.handshake.hub_side()
        pending.reader.limit = framing.MAX_FRAME_BYTES
        self._peers[pending.conn] = _Peer(
            conn=pending.conn,
            address=pending.address,
            hello=pending.hello,
            sealer=sealer,
            opener=opener,
            reader=pending.reader,
            deadline=pending.deadline,
        )

    def _frame(self, peer: _Peer, frame: bytes, now: float) -> None:
        message = framing.decode(peer.opener.open(frame), TO_HUB)
        state = advance(PEER_TRANSITIONS, peer.state, type(message).__name__)
        if isinstance(message, Join):
            self._join(peer, message, now)
        elif isinstance(message, Rejoin):
            self._rejoin(peer, message, now)
        elif isinstance(message, Replayed):
            self._replayed(peer.rank)
        elif isinstance(message, Goodbye):
            self._drop(peer, message.reason, now, left=True)
        else:
            peer.state = state
            self._groups.handle(peer.rank, message, now)

    # --- rendezvous ---

    def _join(self, peer: _Peer, join: Join, now: float) -> None:
        rank, nranks = peer.hello.rank, peer.hello.nranks
        peer.join = join
        if join.token == self._token:
            self._own.add(peer.conn)
        if self._tokens:
            text = f"rank {rank} is taken: the job at this control plane has formed"
            refused = JoinRejected(code=RejectCode.ALREADY_FORMED, text=text, ranks=(rank,))
            self._reject(peer, refused, now)
            return
        if self._failure is not None:
            self._linger_until = max(self._linger_until, now + join.timeout_left)
            self._reject(peer, self._failure, now)
            return
        if self.nranks is None:
            self.nranks, self._nranks_source = nranks, f"rank {rank}"
        if nranks != self.nranks:
            first = f"{self._nranks_source or 'the hub'} with nranks={self.nranks}"
            refused = JoinRejected(
                code=RejectCode.NRANKS,
                text=f"rank {rank} was started with nranks={nranks}, {first}",
                ranks=(rank,),
            )
            if self.state is JobState.GATHERING:
                self._linger_until = now + join.timeout_left
                self._fail(refused, now)
            self._reject(peer, refused, now)
            return
        before = self._ranks.get(rank)
        if before is not None and is_reconnect(self._secret, peer.hello.nonce, before.hello.nonce):
            if self.state is JobState.FORMED:
                self._reject_reconnect(peer, before, now)
                return
            self._out.append(Drop(conn=before.conn, reason=f"rank {rank} has reconnected"))
            self._discard(before)
        elif before is not None or rank in self._gone:
            self._reject_duplicate(peer, now)
            return
        self._ranks[rank] = peer
        peer.state = advance(PEER_TRANSITIONS, peer.state, "Join")
        peer.deadline = now + join.timeout_left
        self._send(peer, Accepted())
        if len(self._ranks) == self.nranks:
            self._complete()

    def _rejoin(self, peer: _Peer, message: Rejoin, now: float) -> None:
        rank = peer.rank
        if (
            self.state is JobState.GATHERING
            or peer.hello.nranks != self.nranks
            or message.token != self._tokens[rank]
        ):
            raise ProtocolError(f"rank {rank} is not a rank of this job")
        if message.token == self._token:
            self._own.add(peer.conn)
        before = self._ranks.get(rank)
        if self.state is not JobState.RECOVERING or rank in self._gone:
            text = f"the job has gone on without rank {rank}"
            self._reject(peer, JoinRejected(code=RejectCode.LOST, text=text, ranks=(rank,)), now)
            return
        if before is not None:
            self._out.append(Drop(conn=before.conn, reason=f"rank {rank} has reconnected"))
            self._discard(before)
        self._ranks[rank] = peer
        peer.state = advance(PEER_TRANSITIONS, peer.state, "Rejoin")
        # A rank that is here lives, whatever another one has seen of it.
        for gone in unpack_gone(message):
            if gone.rank < len(self._tokens) and gone.rank not in self._ranks:
                self._gone.setdefault(gone.rank, gone)
        self._resume_if_complete()

    def _rank_dead(self, event: RankDead) -> None:
        if event.rank in self.missing:
            self._gone[event.rank] = Gone(rank=event.rank, left=False, reason=event.reason)
            self._resume_if_complete()

    def _resume_if_complete(self) -> None:
        if self.missing:
            return
        self.state = advance(JOB_TRANSITIONS, self.state, "complete")
        self._groups.open_world(len(self._tokens), self._gone)
        self._replaying = set(self._ranks)
        for peer in self._ranks.values():
            peer.state = advance(PEER_TRANSITIONS, peer.state, "complete")
        self._broadcast(self._ranks, Resumed(**pack_gone(self._gone.values())))

    def _give_up_missing(self, now: float) -> None:
        """Continue without the ranks that did not rejoin, if the others are the majority.

        A minority may be on the wrong side of a network partition: it must not go on as a job of
        its own. Of two equal halves the one with the lowest rank is the majority.
        """
        missing, here = self.missing, len(self._ranks)
        lowest = min([*missing, *self._ranks], default=-1)
        if 2 * here < here + len(missing) or (here == len(missing) and lowest in missing):
            text = (
                f"cannot take over the control plane: only {format_ranks(list(self._ranks))} of "
                f"{here + len(missing)} living ranks can reach it, not {format_ranks(missing)}"
            )
            self._linger_until = now + REJOIN_SECONDS
            self._fail(JoinRejected(code=RejectCode.LOST, text=text, ranks=()), now)
            return
        for rank in missing:
            reason = f"it did not reach the new control plane within {REJOIN_SECONDS:g} s"
            self._gone[rank] = Gone(rank=rank, left=False, reason=reason)
        self._resume_if_complete()

    def _replayed(self, rank: int) -> None:
        """Note that a rank has sent all again; after the last one, ask for missing parts."""
        if rank in self._replaying:
            self._replaying.discard(rank)
            if not self._replaying:
                self._groups.request_missing()

    def _reject_reconnect(self, peer: _Peer, before: _Peer, now: float) -> None:
        """Reject a rank whose connection was cut before ``Welcome``: the job has started without
        it.
        """
        reason = "its connection was cut before the job formed"
        self._drop(before, reason, now)
        self._reject(
            peer,
            JoinRejected(
                code=RejectCode.DIED,
                text=f"rank {peer.rank} counts as dead: {reason}",
                ranks=(peer.rank,),
            ),
            now,
        )

    def _reject_duplicate(self, peer: _Peer, now: float) -> None:
        assert peer.join is not None
        if peer.rank in self._gone:
            self._reject_late(peer, self._gone[peer.rank], now)
            return
        first = self._ranks.get(peer.rank)
        if first is not None and first.join and first.join.token == peer.join.token:
            who = f"process {peer.join.pid} joined twice, as if two of its threads called init()"
        else:
            assert first is not None
            assert first.join is not None
            who = f"process {first.join.pid} from {first.address}"
            who += f" joined first, then process {peer.join.pid} from {peer.address}"
        text = f"rank {peer.rank} is taken: {who}"
        self._admission.note(text)
        formed = self.state is JobState.FORMED
        code = RejectCode.ALREADY_FORMED if formed else RejectCode.DUPLICATE
        refused = JoinRejected(code=code, text=text, ranks=(peer.rank,))
        self._reject(peer, refused, now)

    def _reject_late(self, peer: _Peer, gone: Gone, now: float) -> None:
        """Reject a rank of a job that runs without it: a process in its next job, for example."""
        assert peer.join is not None
        text = (
            f"rank {peer.rank} (process {peer.join.pid}) cannot join: "
            "the job at this control plane "
            f"has formed already and still runs; its rank {peer.rank} has "
            f"{'left' if gone.left else 'died'} ({gone.reason})"
        )
        refused = JoinRejected(code=RejectCode.ALREADY_FORMED, text=text, ranks=(peer.rank,))
        self._reject(peer, refused, now)

    def _complete(self) -> None:
        assert self.nranks is not None
        self.state = advance(JOB_TRANSITIONS, self.state, "complete")
        self._groups.open_world(self.nranks)
        members: list[bytes] = []
        for rank in range(self.nranks):
            peer = self._ranks[rank]
            assert peer.join is not None
            peer.state = advance(PEER_TRANSITIONS, peer.state, "complete")
            members.append(encode(peer.join))
        self._broadcast(self._ranks, Welcome(hub_token=self._token, members=tuple(members)))

    def _fail(self, failure: JoinRejected, now: float) -> None:
        """End the rendezvous: notify all ranks that are here, and later ones until the last
        deadline.
        """
        self.state = advance(JOB_TRANSITIONS, self.state, "fail")
        self._failure = failure
        for peer in self._connected_ranks(self._ranks):
            self._linger_until = max(self._linger_until, peer.deadline, now)
            self._reject(peer, failure, now)

    def _reject(self, peer: _Peer, refused: JoinRejected, now: float) -> None:
        self._send(peer, refused)
        if refused.code not in (RejectCode.DUPLICATE, RejectCode.ALREADY_FORMED):
            self._notified.add(peer.rank)
        self._drop(peer, refused.text, now)

    def _missing(self, late: _Peer) -> JoinRejected:
        assert self.nranks is not None
        assert late.join is not None
        missing = [rank for rank in range(self.nranks) if rank not in self._ranks]
        text = (
            f"{format_ranks(missing)} of {self.nranks} did not join within "
            f"the {late.join.timeout_total:.3g} s timeout of rank {late.rank}"
        )
        return JoinRejected(
            code=RejectCode.MISSING,
            text="; ".join([text, *self._admission.notes]),
            ranks=tuple(missing),
        )

    def _tick(self, now: float) -> None:
        for pending in [
            pending for pending in self._admission.pending.values() if pending.deadline <= now
        ]:
            self._dismiss(pending, "the handshake took too long")
        for peer in [
            peer
            for peer in self._peers.values()
            if peer.state is PeerState.JOIN and peer.deadline <= now
        ]:
            self._drop(peer, "the handshake took too long", now)
        if self.state is JobState.GATHERING:
            late = [peer for peer in self._ranks.values() if peer.deadline <= now]
            if late:
                self._fail(self._missing(late[0]), now)
        elif self.state is JobState.RECOVERING and now >= self._recover_until:
            self._give_up_missing(now)
        self._groups.tick(now)

    def _rank_gone(self, peer: _Peer, gone: Gone) -> None:
        """Remove a rank that left the running job or was lost."""
        self._gone[peer.rank] = gone
        self._discard(peer)
        self._broadcast(self._ranks, gone)
        self._groups.remove_rank(peer.rank)
        self._replayed(peer.rank)

    # --- ends ---

    def _drop(self, peer: _Peer, reason: str, now: float, *, left: bool = False) -> None:
        if peer.conn in self._peers:
            self._out.append(Drop(conn=peer.conn, reason=reason, linger=True))
            self._remove(peer, reason, now, left=left)

    def _remove(self, peer: _Peer, reason: str, now: float, *, left: bool = False) -> None:
        """Handle the end of a connection, which depends on its state."""
        state = peer.state
        if state is PeerState.UP:
            self._rank_gone(peer, Gone(rank=peer.rank, left=left, reason=reason))
            return
        self._discard(peer)
        if state is PeerState.WAITING and self.state is JobState.RECOVERING and left:
            self._gone[peer.rank] = Gone(rank=peer.rank, left=True, reason=reason)
            self._resume_if_complete()
        if state is PeerState.WAITING and self.state is JobState.GATHERING:
            verb = "left" if left else "died"
            code = RejectCode.LEFT if left else RejectCode.DIED
            text = f"rank {peer.rank} of {self.nranks} {verb} before all ranks had joined: {reason}"
            self._notified.add(peer.rank)
            self._linger_until = peer.deadline
            self._fail(JoinRejected(code=code, text=text, ranks=(peer.rank,)), now)

    def _discard(self, peer: _Peer) -> None:
        self._peers.pop(peer.conn, None)
        if self._ranks.get(peer.rank) is peer:
            del self._ranks[peer.rank]
        peer.state = advance(PEER_TRANSITIONS, peer.state, "drop")

    def _close(self, reason: str, now: float) -> None:
        if self.state is JobState.FINISHED:
            return
        if self.state in (JobState.GATHERING, JobState.RECOVERING) and self._ranks:
            self._fail(
                JoinRejected(
                    code=RejectCode.CLOSED,
                    text=f"the control plane closed before all ranks had joined: {reason}",
                    ranks=(),
                ),
                now,
            )
        self._broadcast(self._ranks, HubClosing(reason=reason))
        self._finish()

    def _finish_if_done(self, now: float) -> None:
        if self.state is JobState.FORMED and not self._ranks:
            self._finish()
        elif self.state is JobState.FAILED:
            everyone = self.nranks is not None and len(self._notified) >= self.nranks
            if everyone or now >= self._linger_until:
                self._finish()

    def _finish(self) -> None:
        word = {JobState.FORMED: "all gone", JobState.FAILED: "all notified"}.get(
            self.state, "close"
        )
        self.state = advance(JOB_TRANSITIONS, self.state, word)
        for peer in list(self._peers.values()):
            self._discard(peer)
            self._out.append(Drop(conn=peer.conn, reason="the hub has ended", linger=True))
        for pending in list(self._admission.pending.values()):
            self._dismiss(pending, "the hub has ended")
        self._groups.end()
        self._out.append(Finished())

    # --- sending ---

    def _send(self, peer: _Peer, message: Any) -> None:
        self._send_body(peer, encode(message))

    def _send_body(self, peer: _Peer, body: bytes) -> None:
        self._out.append(Send(conn=peer.conn, data=peer.sealer.seal(body)))

    def _broadcast(self, ranks: Iterable[int], message: Any) -> None:
        """Send a message to those of the ranks that are connected."""
        body = encode(message)
        for peer in self._connected_ranks(ranks):
            self._send_body(peer, body)

    def _connected_ranks(self, ranks: Iterable[int]) -> list[_Peer]:
        return [self._ranks[rank] for rank in ranks if rank in self._ranks]
