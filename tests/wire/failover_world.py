"""A job whose hubs die, without sockets: processes of one rank each, machines, and moved bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from miraccl.wire.auth import make_nonce
from miraccl.wire.bootstrap import (
    Connected,
    Disconnected,
    Drop,
    Finished,
    HubLost,
    HubProved,
    JobState,
    MemberState,
    MessageArrived,
    RankDead,
    Received,
    Send,
    SendMessage,
    Start,
    Tick,
)
from miraccl.wire.bootstrap_failover import (
    Action,
    Dial,
    GiveUp,
    Outcome,
    SearchState,
    SuccessorSearch,
    TakeOver,
    candidates,
)
from miraccl.wire.bootstrap_hub import HubMachine
from miraccl.wire.bootstrap_member import MemberMachine
from miraccl.wire.bootstrap_messages import (
    Accepted,
    Gather,
    Gathered,
    GatherMissing,
    Gone,
    JoinRejected,
    Rejoin,
    Replayed,
    Resumed,
    Welcome,
    pack_gone,
    unpack_gone,
)
from tests.wire.bootstrap_kit import SECRET, a_join, nonce


def token(rank: int) -> bytes:
    return a_join(rank).token


@dataclass(eq=False)
class Hub:
    """A hub in the process of ``owner``, -1 for a launcher."""

    owner: int
    machine: HubMachine
    conns: dict[int, Process] = field(default_factory=dict)


@dataclass(eq=False)
class Process:
    """The process of one rank: its member machine, its search, and the hub it may host."""

    rank: int
    alive: bool = True
    stopped: bool = False  # SIGSTOP: its connections stay open
    machine: MemberMachine | None = None
    search: SuccessorSearch | None = None
    action: Action | None = None
    hub: Hub | None = None  # in this process
    at: Hub | None = None  # the one it is connected to
    conn: int = 0
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    gone: dict[int, Gone] = field(default_factory=dict)
    sent: list[Gather] = field(default_factory=list)
    results: list[Gathered] = field(default_factory=list)
    failure: str = ""
    delivery: int = 1 << 30  # bytes that still arrive from the hub

    @property
    def up(self) -> bool:
        return self.machine is not None and self.machine.state is MemberState.UP


class FailoverWorld:
    """``hosts``: by rank; ``unreachable``: (from, to) ranks between whom no packet passes."""

    def __init__(self, nranks: int, *, launcher: bool = False, hosts: list[str] | None = None):
        self.nranks, self.now, self._conn = nranks, 0.0, 0
        self.hosts = hosts or ["h"] * nranks
        self.down: set[str] = set()
        self.unreachable: set[tuple[int, int]] = set()
        self.ranks = [Process(rank) for rank in range(nranks)]
        first = Hub(
            -1 if launcher else 0,
            HubMachine(secret=SECRET, token=b"launcher" if launcher else token(0)),
        )
        if not launcher:
            self.ranks[0].hub = first
        self.first: Hub | None = first
        for process in self.ranks:
            self._connect(process, first)
        self.run()
        assert all(process.up for process in self.ranks)

    # --- bytes ---

    def _connect(self, process: Process, hub: Hub) -> None:
        self._conn += 1
        process.conn, process.at = self._conn, hub
        hub.conns[self._conn] = process
        process.inbox, process.outbox = bytearray(), bytearray()
        process.machine = MemberMachine(
            secret=SECRET,
            rank=process.rank,
            nranks=self.nranks,
            nonce=make_nonce(SECRET, nonce(("member", self._conn)), b""),
        )
        self._hub_input(
            hub,
            Connected(now=self.now, conn=self._conn, nonce=nonce(("hub", self._conn)), peer="h:1"),
        )
        self._member_input(process, Start(now=self.now))

    def _hub_input(self, hub: Hub, event: Any) -> None:
        for output in hub.machine.handle(event):
            if isinstance(output, Send):
                hub.conns[output.conn].inbox += output.data
            elif isinstance(output, Drop):
                process = hub.conns.pop(output.conn)
                self._deliver(process)
                self._member_input(process, Disconnected(now=self.now, reason=output.reason))
            else:
                assert isinstance(output, Finished)
        hub.machine.validate_state()

    def _member_input(self, process: Process, event: Any) -> None:
        assert process.machine is not None
        for output in process.machine.handle(event):
            if isinstance(output, Send):
                process.outbox += output.data
            elif isinstance(output, HubProved):
                self._proved(process)
            elif isinstance(output, MessageArrived):
                self._message(process, output.message)
            elif isinstance(output, HubLost):
                self._hub_lost(process, output.state)
        process.machine.validate_state()

    def send(self, process: Process, message: Any) -> None:
        if isinstance(message, Gather):
            process.sent.append(message)
        if process.up:
            self._member_input(process, SendMessage(now=self.now, message=message))

    # --- what a link does ---

    def _proved(self, process: Process) -> None:
        message: Any = a_join(process.rank)
        if process.search is not None:
            message = Rejoin(token=token(process.rank), **pack_gone(process.gone.values()))
            self._outcome(process, Outcome.PROVED)
        self._member_input(process, SendMessage(now=self.now, message=message))

    def _message(self, process: Process, message: Any) -> None:
        if isinstance(message, Gone):
            process.gone.setdefault(message.rank, message)
        elif isinstance(message, Resumed):
            for gone in unpack_gone(message):
                process.gone.setdefault(gone.rank, gone)
            self._outcome(process, Outcome.RESUMED)
            process.search = None
            done = {(g.group, g.tag, g.round) for g in process.results}
            for gather in process.sent:
                if (gather.group, gather.tag, gather.round) not in done:
                    self._member_input(process, SendMessage(now=self.now, message=gather))
            self._member_input(process, SendMessage(now=self.now, message=Replayed()))
        elif isinstance(message, GatherMissing):
            for gather in process.sent:
                if (gather.group, gather.tag, gather.round) == (
                    message.group,
                    message.tag,
                    message.round,
                ):
                    self._member_input(process, SendMessage(now=self.now, message=gather))
        elif isinstance(message, Gathered):
            key = (message.group, message.tag, message.round)
            if key not in {(g.group, g.tag, g.round) for g in process.results}:
                process.results.append(message)
        elif isinstance(message, JoinRejected):
            self._outcome(process, Outcome.REJECTED, message.text)
        else:
            assert isinstance(message, Accepted | Welcome)

    def _hub_lost(self, process: Process, state: MemberState) -> None:
        hub, process.at = process.at, None
        assert hub is not None
        if process.failure or not process.alive or state is MemberState.CLOSED:
            return
        if hub.owner >= 0 and hub.owner != process.rank:
            lost = Gone(rank=hub.owner, left=False, reason="connection closed")
            process.gone.setdefault(hub.owner, lost)
        if process.search is None:
            alive = candidates([1] * self.nranks, self.hosts, list(process.gone))
            process.search = SuccessorSearch(rank=process.rank, candidates=alive)
            process.action = process.search.start()
        else:
            self._outcome(process, Outcome.LOST)

    def _outcome(self, process: Process, outcome: Outcome, detail: str = "") -> None:
        assert process.search is not None
        if process.search.state in (SearchState.FAILED, SearchState.RESUMED):
            return
        process.action = process.search.handle(outcome, detail) or process.action
        if outcome in (Outcome.RESUMED, Outcome.PROVED):
            process.action = None
        process.search.validate_state()

    def _act(self, process: Process) -> bool:
        action = process.action
        if isinstance(action, GiveUp):
            process.failure, process.action = action.reason, None
            return True
        if isinstance(action, TakeOver):
            machine = HubMachine.successor(
                secret=SECRET,
                token=token(process.rank),
                tokens=[token(rank) for rank in range(self.nranks)],
                gone=process.gone.values(),
                now=self.now,
            )
            process.hub = Hub(process.rank, machine)
            process.action = None
            self._connect(process, process.hub)
            return True
        if isinstance(action, Dial):
            target = self.ranks[action.rank]
            if (process.rank, target.rank) in self.unreachable or self.hosts[
                target.rank
            ] in self.down:
                self._outcome(process, Outcome.UNREACHABLE)
                return True
            if not target.alive:
                self._outcome(process, Outcome.REFUSED)
                return True
            if target.hub is not None and target.hub.machine.state is not JobState.FINISHED:
                process.action = None
                self._connect(process, target.hub)
                return True
        return False

    def _deliver(self, process: Process) -> bool:
        if not process.inbox or process.at is None or not process.alive:
            return False
        data, process.inbox = bytes(process.inbox), bytearray()
        data, process.delivery = data[: process.delivery], process.delivery - len(data)
        if data:
            self._member_input(process, Received(now=self.now, data=data))
        return True

    # --- the test's hand ---

    def run(self, *, probes: bool = True) -> None:
        """Move bytes and act until nothing is left to do."""
        moved = True
        while moved:
            moved = False
            for process in self.running:
                if process.outbox and process.at is not None:
                    data, process.outbox = bytes(process.outbox), bytearray()
                    event = Received(now=self.now, conn=process.conn, data=data)
                    self._hub_input(process.at, event)
                    moved = True
                moved |= self._deliver(process)
                moved |= self._act(process)
            if not moved and probes:
                for process in self.running:
                    moved |= self._probe(process)

    def _probe(self, process: Process) -> bool:
        hub = process.hub
        dead = [
            rank
            for rank in (hub.machine.missing if hub is not None else ())
            if not self.ranks[rank].alive and self.hosts[rank] not in self.down
        ]
        for rank in dead:
            assert hub is not None
            self._hub_input(hub, RankDead(now=self.now, rank=rank, reason="refused"))
        return bool(dead)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for hub in [p.hub for p in self.running if p.hub is not None]:
            self._hub_input(hub, Tick(now=self.now))
        self.run()

    def silent(self, rank: int) -> None:
        """The others' connections to a candidate that does not run end without an answer."""
        for process in self.running:
            if process.action == Dial(rank=rank):
                self._outcome(process, Outcome.SILENT)
        self.run()

    def kill(self, *ranks: int) -> None:
        """End processes; the others notice in ``run``."""
        for rank in ranks:
            self.ranks[rank].alive = False
        for rank in ranks:
            process = self.ranks[rank]
            if process.at is not None and process.conn in process.at.conns:
                hub, process.at = process.at, None
                del hub.conns[process.conn]
                if hub.owner < 0 or self.ranks[hub.owner].alive:
                    self._hub_input(
                        hub, Disconnected(now=self.now, conn=process.conn, reason="killed")
                    )
            if process.hub is not None:
                self._end_hub(process.hub)

    def kill_launcher(self) -> None:
        assert self.first is not None
        self._end_hub(self.first)

    def _end_hub(self, hub: Hub) -> None:
        for process in list(hub.conns.values()):
            if process.alive:
                self._deliver(process)  # what the hub had sent still arrives
                self._member_input(process, Disconnected(now=self.now, reason="killed"))
        hub.conns.clear()

    @property
    def running(self) -> list[Process]:
        return [process for process in self.living if not process.stopped]

    @property
    def living(self) -> list[Process]:
        return [process for process in self.ranks if process.alive]
