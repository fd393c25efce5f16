"""A hub and its members without sockets: bytes move when the test says so, time is a number, every
state is validated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from miraccl.wire.auth import make_nonce
from miraccl.wire.bootstrap import (
    CloseHub,
    Connected,
    Disconnected,
    Drop,
    Finished,
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
)
from miraccl.wire.bootstrap_hub import HubMachine
from miraccl.wire.bootstrap_member import MemberMachine
from miraccl.wire.bootstrap_messages import Join

SECRET = bytes(range(32))


def nonce(word: object) -> bytes:
    return hashlib.sha256(repr(word).encode()).digest()


def a_join(rank: int, timeout: float = 10.0, pid: int | None = None) -> Join:
    pid = 100 + rank if pid is None else pid
    return Join(
        host="h",
        network="n",
        token=bytes([pid]) * 8,
        pid=pid,
        addresses=("10.0.0.1",),
        loopback=True,
        timeout_total=timeout,
        timeout_left=timeout,
        standby_port=7000 + rank,
    )


class Member:
    """One member: its machine, bytes in flight to it, and the messages that it passed up."""

    def __init__(
        self,
        net: Net,
        conn: int,
        rank: int,
        nranks: int,
        secret: bytes,
        timeout: float,
        pid: int | None,
        last: bytes = b"",
    ) -> None:
        self.net, self.conn, self.rank, self.timeout, self.pid = net, conn, rank, timeout, pid
        self.machine = MemberMachine(
            secret=secret,
            rank=rank,
            nranks=nranks,
            nonce=make_nonce(secret, nonce(("member", conn)), last),
        )
        self.news: list[Any] = []
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.open = True

    def input(self, event: Any) -> None:
        for output in self.machine.handle(event):
            if isinstance(output, Send):
                self.outbox += output.data
            elif isinstance(output, HubProved):
                self.input(
                    SendMessage(now=self.net.now, message=a_join(self.rank, self.timeout, self.pid))
                )
            elif isinstance(output, MessageArrived):
                self.news.append(output.message)
            elif isinstance(output, HubLost | HubRejected):
                self.news.append(output)
            else:
                assert isinstance(output, Drop)
        self.machine.validate_state()

    def send(self, message: Any) -> None:
        self.input(SendMessage(now=self.net.now, message=message))

    def got(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.news if isinstance(message, kind)]


class Net:
    """``chunk`` cuts bytes in flight: it gets how many wait and returns how many move now (at least
    1).
    """

    def __init__(
        self, nranks: int | None = None, chunk: Callable[[int], int] = lambda n: n, **options: Any
    ) -> None:
        self.now = 0.0
        self.log: list[Any] = []
        self.options = {"secret": SECRET, "token": b"hub-proc", "nranks": nranks, **options}
        self.hub = HubMachine(**self.options, log=self.log)
        self.chunk = chunk
        self.outputs: list[list[Any]] = []
        self.members: dict[int, Member] = {}
        self.raw: dict[int, bytearray] = {}  # what the hub sent to connections that are no member's
        self.dropped: dict[int, str] = {}
        self.finished = False
        self._next = 1

    def hub_input(self, event: Any) -> None:
        outputs = self.hub.handle(event)
        self.outputs.append(outputs)
        for output in outputs:
            if isinstance(output, Finished):
                self.finished = True
                continue
            assert output.conn not in self.dropped, "the hub speaks to a connection that it dropped"
            if isinstance(output, Drop):
                self.dropped[output.conn] = output.reason
            elif output.conn in self.members:
                self.members[output.conn].inbox += output.data
            else:
                self.raw[output.conn] += output.data
        self.hub.validate_state()

    def connect(self) -> int:
        conn, self._next = self._next, self._next + 1
        self.raw[conn] = bytearray()
        self.hub_input(
            Connected(now=self.now, conn=conn, nonce=nonce(("hub", conn)), peer=f"10.0.0.9:{conn}")
        )
        return conn

    def member(
        self,
        rank: int,
        nranks: int,
        *,
        secret: bytes = SECRET,
        timeout: float = 10.0,
        pid: int | None = None,
        after: Member | None = None,
    ) -> Member:
        """``after``: the one that calls again."""
        conn = self.connect()
        last = after.machine.nonce if after is not None else b""
        member = self.members[conn] = Member(self, conn, rank, nranks, secret, timeout, pid, last)
        member.input(Start(now=self.now))
        return member

    def bytes_to_hub(self, conn: int, data: bytes) -> None:
        self.hub_input(Received(now=self.now, conn=conn, data=data))

    def disconnect(self, member: Member) -> None:
        member.open = False
        self.hub_input(Disconnected(now=self.now, conn=member.conn, reason="connection closed"))

    def run(self) -> None:
        """Move bytes until none wait."""
        moved = True
        while moved:
            moved = False
            for member in list(self.members.values()):
                moved |= self._move_up(member) | self._move_down(member)

    def _move_up(self, member: Member) -> bool:
        if not member.outbox or not member.open:
            return False
        count = max(1, min(len(member.outbox), self.chunk(len(member.outbox))))
        data, member.outbox = bytes(member.outbox[:count]), member.outbox[count:]
        self.hub_input(Received(now=self.now, conn=member.conn, data=data))
        return True

    def _move_down(self, member: Member) -> bool:
        if member.inbox and member.open:
            count = max(1, min(len(member.inbox), self.chunk(len(member.inbox))))
            data, member.inbox = bytes(member.inbox[:count]), member.inbox[count:]
            member.input(Received(now=self.now, data=data))
            return True
        if (
            member.conn in self.dropped
            and member.open
            and member.machine.state is not MemberState.CLOSED
        ):
            member.open = False
            member.input(Disconnected(now=self.now, reason="connection closed"))
            return True
        return False

    def tick(self, now: float) -> None:
        """Advance the clock, with a Tick for each deadline on the way."""
        for _ in range(1000):
            deadline = self.hub.deadline()
            if deadline is None or deadline > now:
                break
            self.now = max(self.now, deadline)
            self.hub_input(Tick(now=self.now))
        else:
            raise AssertionError("the hub asks for ticks without end")
        self.now = now

    def close_hub(self, reason: str = "closed") -> None:
        self.hub_input(CloseHub(now=self.now, reason=reason))


def meet(
    nranks: int, order: Iterable[int] | None = None, **options: Any
) -> tuple[Net, list[Member]]:
    """A job that has met; members in rank order."""
    net = Net(**options)
    members = [net.member(rank, nranks) for rank in (order if order is not None else range(nranks))]
    net.run()
    return net, sorted(members, key=lambda member: member.rank)
