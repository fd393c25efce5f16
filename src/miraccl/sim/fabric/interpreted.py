"""Transfers on the fabric of Python objects: the specification of ``compiled``."""

from __future__ import annotations

from collections import deque
from typing import Any

from miraccl.sim.fabric.events import SECOND
from miraccl.sim.fabric.network import PacketFabric
from miraccl.sim.fabric.ports import FabricPacket
from miraccl.sim.fabric.senders import Kind, Message, Receiver, Sender
from miraccl.sim.fabric.transfers import (
    Balance,
    Control,
    TransferConfig,
    TransferRequest,
    TransferResult,
)


class TransferHost:
    """Host that sends and receives transfers through its first link.

    Senders with something to send take turns; a pacer issues credits to the senders of this host's
    receivers, those that resend first, the others in turn.
    """

    def __init__(self, fabric: PacketFabric, number: int, config: TransferConfig) -> None:
        self.number, self.config = number, config
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, tuple[Receiver, int]] = {}
        self._events = fabric.events
        self._port = fabric.attach(number, self)[0]
        self._port.source = self
        self._ready: deque[Sender] = deque()
        self._resending: deque[int] = deque()
        self._active: deque[int] = deque()
        self._pacing = False
        self._next_pull = self._pulls = 0
        time = self._port.profile.transmission_time(config.packet)
        self._pull_interval = time * config.pull_percent // 100

    # ---- sending

    def start(self, sender: Sender) -> None:
        """Begin a transfer."""
        self._events.schedule(self._events.now + self.config.timeout, self._on_timer, sender)
        self._offer(sender)

    def _offer(self, sender: Sender) -> None:
        if not sender.queued and sender.may_send:
            sender.queued = True
            self._ready.append(sender)
            self._port.kick()

    @property
    def has_data(self) -> bool:
        """True if a sender waits for the link."""
        return bool(self._ready)

    def next_data(self) -> FabricPacket | None:
        """Return the next data packet of the sender whose turn it is."""
        while self._ready:
            sender = self._ready.popleft()
            sender.queued = False
            if not sender.may_send:
                continue
            sender.sharing = len(self._ready) + 1
            message = sender.next_message(self._events.now)
            if sender.may_send:
                sender.queued = True
                self._ready.append(sender)
            target, size = sender.transfer.target, sender.size(message.sequence)
            return FabricPacket(
                self.number, target, sender.number, message.entropy, size, content=message
            )
        return None

    def _on_timer(self, sender: Sender) -> None:
        if sender.finished >= 0:
            return
        again, stalled = sender.on_timer(self._events.now)
        if stalled:
            self._request(sender, stalled=True)
        self._offer(sender)
        self._events.schedule(again, self._on_timer, sender)

    def _request(self, sender: Sender, *, stalled: bool) -> None:
        if (message := sender.request(stalled=stalled)) is not None:
            self._reply(sender.transfer.target, message)

    def _reply(self, target: int, message: Message) -> None:
        self._port.enqueue(
            FabricPacket(
                self.number,
                target,
                message.transfer,
                message.entropy,
                self.config.header,
                control=True,
                content=message,
            )
        )

    # ---- receiving

    def receive(self, packet: FabricPacket) -> None:
        """Process a packet of any kind."""
        message: Message = packet.content
        if message.kind is Kind.DATA:
            self._on_data(packet, message)
        elif message.kind is Kind.REQUEST:
            self._on_request(message)
        else:
            self._on_feedback(self.senders[message.transfer], message)

    def _on_data(self, packet: FabricPacket, message: Message) -> None:
        receiver, source = self.receivers[message.transfer]
        kind = receiver.on_data(message, packet.trimmed)
        answer = Message(
            kind, message.transfer, message.sequence, message.entropy, marked=packet.marked
        )
        self._reply(source, answer)
        self._want(message.transfer)

    def _on_request(self, message: Message) -> None:
        receiver, source = self.receivers[message.transfer]
        receiver.on_request(message)
        if not receiver.missing:
            self._reply(source, Message(Kind.COMPLETE, message.transfer, 0, message.entropy))
        self._want(message.transfer)

    def _on_feedback(self, sender: Sender, message: Message) -> None:
        if message.kind is Kind.ACK:
            sender.on_ack(self._events.now, message)
        elif message.kind is Kind.NACK:
            unsolicited = sender.unsolicited
            sender.on_nack(message)
            if unsolicited:
                self._request(sender, stalled=False)
        elif message.kind is Kind.PULL:
            sender.on_pull(message.sequence)
        else:
            sender.on_complete(self._events.now)
        self._offer(sender)

    # ---- credits

    def _want(self, transfer: int) -> None:
        receiver = self.receivers[transfer][0]
        if self.config.control is Control.SENDER or receiver.backlog <= 0:
            return
        if receiver.resend_backlog > 0 and not receiver.resend_listed:
            receiver.resend_listed = True
            self._resending.append(transfer)
        if not receiver.listed:
            receiver.listed = True
            self._active.append(transfer)
        if not self._pacing:
            self._pacing = True
            self._events.schedule(self._next_pull, self._pull)

    def _pull(self, _: Any) -> None:
        """Issue one credit, to a transfer that resends if there is one."""
        issued = self._pull_from(self._resending, resend=True)
        if not issued:
            issued = self._pull_from(self._active, resend=False)
        if not issued:
            self._pacing = False
            return
        self._next_pull = self._events.now + self._pull_interval
        self._events.schedule(self._next_pull, self._pull)

    def _pull_from(self, waiting: deque[int], *, resend: bool) -> bool:
        while waiting:
            transfer = waiting.popleft()
            receiver, source = self.receivers[transfer]
            if receiver.backlog <= 0 or (resend and receiver.resend_backlog <= 0):
                self._unlist(receiver, resend)
                continue
            receiver.issued += 1
            receiver.resend_backlog = max(0, receiver.resend_backlog - 1)
            if receiver.backlog > 0 and not (resend and receiver.resend_backlog <= 0):
                waiting.append(transfer)
            else:
                self._unlist(receiver, resend)
            self._pulls += 1
            entropy = self._pulls % self.config.entropies
            if self.config.balance is Balance.RECYCLE:
                entropy = receiver.entropy
            self._reply(source, Message(Kind.PULL, transfer, receiver.issued, entropy))
            return True
        return False

    @staticmethod
    def _unlist(receiver: Receiver, resend: bool) -> None:
        if resend:
            receiver.resend_listed = False
        else:
            receiver.listed = False


def run(request: TransferRequest, until: int = 10 * SECOND) -> TransferResult:
    """Run transfers until all have ended or ``until`` ns have passed."""
    fabric = PacketFabric(request.topology, seed=request.seed)
    fabric.schedule_changes(request.changes)
    hosts: dict[int, TransferHost] = {}
    senders: list[Sender] = []
    for number, transfer in enumerate(request.transfers):
        for host in (transfer.source, transfer.target):
            if host not in hosts:
                hosts[host] = TransferHost(fabric, host, request.config)
        sender = Sender(number, transfer, request.config, request.seed)
        senders.append(sender)
        hosts[transfer.source].senders[number] = sender
        hosts[transfer.target].receivers[number] = Receiver(sender.count), transfer.source
        fabric.events.schedule(transfer.start, hosts[transfer.source].start, sender)
    fabric.run(until, lambda: all(s.finished >= 0 for s in senders))
    return TransferResult(
        completion=tuple(s.finished - s.transfer.start if s.finished >= 0 else -1 for s in senders),
        events=fabric.events.executed,
        sent=sum(s.sent for s in senders),
        resent=sum(s.resent for s in senders),
        trimmed=fabric.total("trimmed"),
        marked=fabric.total("marked"),
        dropped=fabric.total("dropped"),
        lost=fabric.total("lost"),
        last_loss=max(port.counters.last_loss for port in fabric.ports),
    )
