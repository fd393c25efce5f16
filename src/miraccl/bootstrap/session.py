"""Session: the control plane of one group of ranks, as communicators use it.

The session of the whole job and those split from it with ``subgroup`` share one connection
(``Link``); a job of one rank has none. All methods may be called from any thread. Ranks are those
of the session.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Collection, Sequence
from typing import Any

from miraccl import trace
from miraccl.bootstrap.contract import EventCallback, StatusProvider
from miraccl.bootstrap.control_link import ControlLink, Membership, WaitFailure
from miraccl.bootstrap.events import HUB, Event, Notice, PeerLeft, PeerLost, StatusRequest
from miraccl.bootstrap.hub import HubServer
from miraccl.bootstrap.stacks import locate
from miraccl.deadline import Deadline
from miraccl.errors import (
    BootstrapError,
    CollectiveTimeout,
    CommunicatorAborted,
    CommunicatorClosed,
    InvalidUsage,
    MiracclError,
    PeerDied,
    ProtocolError,
)
from miraccl.host import host_fingerprint, network_fingerprint, process_token
from miraccl.wire import framing
from miraccl.wire.bootstrap import format_ranks
from miraccl.wire.bootstrap_messages import Join

_log = trace.logger("bootstrap")
#: Events stored for a session without a callback.
MAX_BACKLOG = 4096


class LinkSession:
    """Session over a link; ``link`` None is a job of one rank.

    Made by ``connect``, ``join_launch``, ``single_rank_session`` or ``InMemoryJob``. The session of
    the whole job and those split from it with ``subgroup`` share one link.
    """

    def __init__(
        self,
        *,
        link: ControlLink | None,
        membership: Membership,
        ranks: tuple[int, ...],
        rank: int,
        group: int = 0,
        name: str = "world",
        timeout: float,
        thread_ids: Sequence[int] = (),
        hub: HubServer | None = None,
    ) -> None:
        self.rank = ranks.index(rank)
        self.nranks = len(ranks)
        self.name = name
        self.timeout = timeout
        self.world_ranks = ranks
        self.status_provider: StatusProvider | None = None
        #: Key from which data transports derive theirs; set by ``connect``, distinct for each
        #: session split from this one.
        self.data_key = b""
        self.thread_ids: tuple[int, ...] = tuple(thread_ids) or (threading.get_ident(),)
        self._link, self._membership, self._ranks, self._group, self._hub = (
            link,
            membership,
            ranks,
            group,
            hub,
        )
        self._local_rank_of = {world: local for local, world in enumerate(ranks)}
        self.hosts = [membership.members[r].host for r in ranks]
        self.pids = [membership.members[r].pid for r in ranks]
        #: By rank what names its process, in all sessions.
        self.tokens = tuple(membership.members[r].token.hex() for r in ranks)
        self.all_addresses = [membership.members[r].addresses for r in ranks]
        self.addresses = _addresses([membership.members[r] for r in ranks])
        self._lock = threading.Lock()
        self._callbacks: list[EventCallback] = []
        self._backlog: list[Event] = []
        self._subgroup_counts: dict[tuple[tuple[int, ...], str], int] = {}
        self._closed = False
        if link is not None:
            link.attach(group, ranks, self)

    def __repr__(self) -> str:
        closed = " closed" if self._closed else ""
        return f"<Session {self.name} rank {self.rank} of {self.nranks}{closed}>"

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def key(self) -> str:
        return hashlib.sha256(b"key of a session" + self.data_key).hexdigest()[:16]

    @property
    def hub(self) -> HubServer | None:
        """The hub that ``join_launch`` started for this session, if it did."""
        return self._hub

    # --- collective calls ---

    def all_gather(
        self, data: bytes, tag: str, timeout: float | Deadline | None = None
    ) -> list[bytes]:
        data = bytes(data)
        op = f"all_gather {tag!r} of {self.name}"
        self._check_open(op)
        if self._link is None:
            return [data]
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        result = self._link.gather(self._group, tag, data, deadline.left)
        if isinstance(result, WaitFailure):
            raise self._error(result, op, deadline.seconds)
        return list(result)

    def end_gather(self, tag: str, reason: str) -> None:
        if self._link is not None:
            self._link.end_gather(self._group, tag, reason)

    def barrier(self, tag: str, timeout: float | None = None) -> None:
        self.all_gather(b"", f"barrier {tag}", timeout)

    def notify(self, payload: dict[str, Any]) -> None:
        data = framing.encode_json(payload)
        self._check_open("notify")
        if self._link is not None:
            failure = self._link.notify(self._group, data)
            if failure is not None:
                raise self._error(failure, "notify", 0.0)

    def drain(self, timeout: float) -> None:
        if self._link is not None:
            self._link.drain(timeout)

    def gone(self) -> frozenset[int]:
        return (
            frozenset(self._local_rank_of[rank] for rank in self._link.gone(self._group))
            if self._link is not None
            else frozenset()
        )

    def wait_until_delivered(self, timeout: float, without: Collection[int] = ()) -> None:
        self._check_open("wait_until_heard")
        if self._link is not None:  # a rank replies after it has handled earlier messages
            self._link.query_status(self._group, timeout, [self._ranks[r] for r in without])

    def request_status(
        self,
        timeout: float = 1.0,
        without: Collection[int] = (),
        quiet: float | None = None,
    ) -> dict[int, dict[str, Any]]:
        self._check_open("request_status")
        answers = {self.rank: framing.decode_json(self._own_status())}
        if self._link is not None:
            replies, absent = self._link.query_status(
                self._group, timeout, [self._ranks[r] for r in without], quiet
            )
            for world, payload in replies.items():
                if world in self._local_rank_of:
                    with contextlib.suppress(ProtocolError):
                        answers[self._local_rank_of[world]] = framing.decode_json(payload)
            for world, failure in absent.items():
                reason = f"{_verb(failure)}: {failure.reason}"
                answers.setdefault(
                    self._local_rank_of[world], {"answered": False, "reason": reason}
                )
        for rank in range(self.nranks):
            answers.setdefault(
                rank, {"answered": False, "reason": f"no answer within {timeout:.3g} s"}
            )
        return dict(sorted(answers.items()))

    def subgroup(self, ranks: Sequence[int], name: str) -> LinkSession:
        self._check_open("sub")
        chosen = tuple(ranks)
        if (
            not chosen
            or len(set(chosen)) != len(chosen)
            or not all(0 <= r < self.nranks for r in chosen)
        ):
            raise InvalidUsage(
                f"cannot make a session {name!r} of ranks {list(ranks)}: "
                f"they are distinct numbers of 0..{self.nranks - 1}",
                rank=self.rank,
            )
        if self.rank not in chosen:
            raise InvalidUsage(
                (
                    f"cannot make a session {name!r} of ranks {list(ranks)} on rank {self.rank}: "
                    "it is not one"
                ),
                rank=self.rank,
            )
        with self._lock:
            number = self._subgroup_counts.get((chosen, name), 0)
            self._subgroup_counts[chosen, name] = number + 1
        label = f"{self._group}/{','.join(map(str, chosen))}/{number}/{name}"
        group = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big") or 1
        session = LinkSession(
            link=self._link,
            membership=self._membership,
            ranks=tuple(self._ranks[r] for r in chosen),
            rank=self._ranks[self.rank],
            group=group,
            name=name,
            timeout=self.timeout,
            thread_ids=self.thread_ids,
        )
        session.status_provider = self.status_provider
        session.data_key = hashlib.sha256(self.data_key + group.to_bytes(8, "big")).digest()
        return session

    # --- events ---

    def on_event(self, callback: EventCallback) -> None:
        with self._lock:
            self._callbacks.append(callback)
            backlog, self._backlog = self._backlog, []
        if backlog and self._link is not None:
            self._link.run_on_watcher(lambda: self._replay(callback, backlog))

    def off_event(self, callback: EventCallback) -> None:
        with self._lock:
            self._callbacks.remove(callback)

    @staticmethod
    def _replay(callback: EventCallback, events: list[Event]) -> None:
        for event in events:
            callback(event)

    def _emit(self, event: Event) -> None:
        with self._lock:
            callbacks = list(self._callbacks)
            if not callbacks and len(self._backlog) < MAX_BACKLOG:
                self._backlog.append(event)
        for callback in callbacks:
            try:
                callback(event)
            except Exception:
                _log.exception("a callback of rank %d failed on %s", self.rank, event)

    def peer_gone(self, rank: int, left: bool, reason: str) -> None:
        """Handle a rank that is gone from the job or left this group; called by the link."""
        kind = PeerLeft if left else PeerLost
        self._emit(kind(rank=self._local_rank_of[rank], reason=reason))

    def control_plane_lost(self, left: bool, reason: str) -> None:
        """Handle the loss of a hub that has no successor; called by the link."""
        kind = PeerLeft if left else PeerLost
        self._emit(kind(rank=HUB, reason=reason))

    def notice(self, rank: int, payload: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            self._emit(
                Notice(from_rank=self._local_rank_of[rank], payload=framing.decode_json(payload))
            )

    def status_requested(self, rank: int, ident: int) -> bytes:
        self._emit(StatusRequest(from_rank=self._local_rank_of[rank], id=ident))
        return self._own_status()

    def _own_status(self) -> bytes:
        answer: dict[str, Any] = {
            "answered": True,
            "rank": self.rank,
            "pid": os.getpid(),
            "host": self.hosts[self.rank],
            "threads": locate(self.thread_ids) or locate([threading.main_thread().ident or 0]),
        }
        try:
            answer["status"] = self.status_provider() if self.status_provider is not None else {}
            return framing.encode_json(answer)
        except Exception as error:  # the provider's failure is part of the reply
            answer["status"] = {"error": f"{type(error).__name__}: {error}"}
            return framing.encode_json(answer)

    # --- end ---

    def close(self, reason: str = "finalized") -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._link is not None:
            self._link.detach(self._group, reason)

    def __enter__(self) -> LinkSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise CommunicatorClosed("the session is closed", rank=self.rank, op=op)

    def _error(self, failure: WaitFailure, op: str, timeout: float) -> MiracclError:
        ranks = [self._local_rank_of[r] for r in failure.ranks if r in self._local_rank_of]
        peer = ranks[0] if len(ranks) == 1 else None
        who = (
            f"{format_ranks(ranks)} of {self.nranks}"
            if ranks
            else self._link.hub_name
            if self._link is not None
            else "the control plane"
        )
        if failure.kind == "late":
            return CollectiveTimeout(
                f"{who} did not arrive within {timeout:.3g} s: timed out",
                rank=self.rank,
                peer=peer,
                op=op,
            )
        if failure.kind == "closed":
            return CommunicatorClosed(failure.reason, rank=self.rank, op=op)
        if failure.kind == "ended":
            return CommunicatorAborted(failure.reason, rank=self.rank, op=op)
        if failure.kind == "silent":
            return CollectiveTimeout(
                f"no answer within {timeout:.3g} s (timed out): {failure.reason}",
                rank=self.rank,
                peer=0,
                op=op,
            )
        text = f"{who} {_verb(failure)}: {failure.reason}"
        if failure.kind in ("lost", "hub"):
            return PeerDied(text, rank=self.rank, peer=peer, op=op)
        return BootstrapError(text, rank=self.rank, peer=peer, op=op)


def _verb(failure: WaitFailure) -> str:
    return {
        "lost": "died",
        "hub": "was lost",
        "hub left": "was closed",
    }.get(failure.kind, "left")


def _addresses(members: list[Join]) -> list[str]:
    """Return one address per rank that the others can reach.

    Loopback if all ranks share one and may use it.
    """
    if all(member.loopback and member.network == members[0].network for member in members):
        six = all(":" in member.addresses[0] for member in members if member.addresses)
        return [
            "::1" if six and any(member.addresses for member in members) else "127.0.0.1"
        ] * len(members)
    return [member.addresses[0] if member.addresses else "127.0.0.1" for member in members]


def single_rank_session(timeout: float = 60.0) -> LinkSession:
    """Return the session of a job of one rank: without socket and thread."""
    member = Join(
        host=host_fingerprint(),
        network=network_fingerprint(),
        token=process_token(),
        pid=os.getpid(),
        addresses=("127.0.0.1",),
        loopback=True,
        timeout_total=timeout,
        timeout_left=timeout,
        standby_port=0,
    )
    return LinkSession(
        link=None,
        membership=Membership(members=(member,), hub_rank=0),
        ranks=(0,),
        rank=0,
        timeout=timeout,
    )
