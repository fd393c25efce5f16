"""Model of protocol Simple: a block that executes a schedule (source/steps.cuh), and the op log.

One block per rank: blocks of equal number have FIFOs, heads, tails and signals of their own. A
message is two cells, whose stores land in any order. Memory that steps address without a FIFO is
checked by ``schedule.verify`` instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from miraccl.executor.cuda import layout
from miraccl.schedule.ir import Op, Schedule, Step
from miraccl.schedule.steps import inp, one_channel, out, recv, recv_copy_send, send
from miraccl.types import Collective

from .program import Kind, MemoryCell, ModelSystem, Thread

HALVES = range(2)


@dataclass(frozen=True)
class StepRules:
    """Options of the model; all but ``reads`` weaken it.

    ``reads``: FIFOs are in the sender's memory and receivers read over the link. ``left``: a slot
    is written when all but ``nslots - left`` messages have been received. ``fences``: fence before
    a tail. ``last_heads``: a sender waits for its heads before it clears them. ``hears``: a rank
    waits for all op records before it ends. ``entries``: entries of the op log.
    """

    nslots: int
    reads: bool = False
    left: int = 1
    fences: bool = True
    last_heads: bool = True
    awaits_peers: bool = True
    entries: int = layout.OP_LOG_ENTRIES


def steps(
    schedule: Schedule, rules: StepRules, *, rounds: int = 1, launches: int = 1, halves: int = 2
) -> ModelSystem:
    """Return the model of channel 0; ``rounds``: tiles that a block moves of each chunk."""
    system = ModelSystem(schedule.nranks)
    for rank, program in enumerate(schedule.channels[0]):
        thread = system.thread(rank)
        for launch in range(launches):
            thread.begin(launch, launch % halves)
            block = _Block(thread, rules, schedule.nranks, launch, launch % halves)
            block.announce()
            for step in [*program] * rounds:
                block.walk(step)
            block.clear_fifos()
            if rules.awaits_peers:
                block.hear_peers()
            thread.end()
    return system


def line(nranks: int, messages: int) -> Schedule:
    """Return a broadcast along a chain with few enough messages for a search."""
    first, last = [send(inp(0), 1)] * messages, [recv(out(0), nranks - 2)] * messages
    between = (
        [recv_copy_send(out(0), rank - 1, rank + 1)] * messages for rank in range(1, nranks - 1)
    )
    return one_channel("line", Collective.BROADCAST, [first, *between, last], parts=1)


@dataclass
class _Block:
    """Block of a rank in one launch."""

    thread: Thread
    rules: StepRules
    nranks: int
    launch: int
    parity: int
    sent: list[int] = field(init=False)  # messages and signals to and from every peer
    taken: list[int] = field(init=False)
    told: list[int] = field(init=False)
    heard: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.rank = self.thread.rank
        self.peers = [peer for peer in range(self.nranks) if peer != self.rank]
        self.sent, self.taken, self.told, self.heard = ([0] * self.nranks for _ in range(4))

    def signal_or_wait(self, step: Step) -> None:
        for peer in step.peers:
            if step.op is Op.SIGNAL:
                self.thread.fence()
                self.told[peer] += 1
                self.thread.store(self.signals_of(peer, self.rank), self.told[peer])
            else:
                self.heard[peer] += 1
                self.thread.reach(self.signals_of(self.rank, peer), self.heard[peer])

    def walk(self, step: Step) -> None:
        if step.op in (Op.SIGNAL, Op.WAIT):
            self.signal_or_wait(step)
        if step.op > Op.RECV_REDUCE_ALL:
            return
        sources = (
            [peer for peer in step.peers if peer != self.rank]
            if step.op is Op.RECV_REDUCE_ALL
            else [step.recv_peer]
        )
        froms, to = [peer for peer in sources if peer is not None], step.send_peer
        for peer in froms:  # wait_message
            self.thread.reach(self.tail_word(self.rank, peer), self.taken[peer] + 1)
        if to is not None and self.sent[to] >= self.rules.nslots:  # wait_taken
            self.thread.reach(
                self.head_word(self.rank, to), self.sent[to] - self.rules.nslots + self.rules.left
            )
        for peer in froms:  # move
            for cell in self.slot_of(peer, self.rank, self.taken[peer]):
                self.thread.read(cell, self.taken[peer])
        if to is not None:
            for cell in self.slot_of(self.rank, to, self.sent[to]):
                self.thread.store(cell, self.sent[to])
        for peer in froms:  # tell_taken
            self.taken[peer] += 1
            self.thread.store(self.head_word(peer, self.rank), self.taken[peer])
        if to is not None:
            if self.rules.fences:
                self.thread.fence()
            self.sent[to] += 1
            self.thread.store(self.tail_word(to, self.rank), self.sent[to])

    def clear_fifos(self) -> None:
        for peer in self.peers:
            if self.taken[peer]:
                if not self.rules.reads:
                    self.clear_slots(peer, self.rank, self.taken[peer])
                self.thread.clear(self.tail_word(self.rank, peer))
            if self.heard[peer]:
                self.thread.clear(self.signals_of(self.rank, peer))
        for peer in self.peers:
            if self.sent[peer]:
                if self.rules.last_heads:
                    self.thread.reach(self.head_word(self.rank, peer), self.sent[peer])
                self.thread.clear(self.head_word(self.rank, peer))
                if self.rules.reads:
                    self.clear_slots(self.rank, peer, self.sent[peer])

    def clear_slots(self, sender: int, receiver: int, messages: int) -> None:
        for last in range(max(0, messages - self.rules.nslots), messages):  # that lay in each slot
            for cell in self.slot_of(sender, receiver, last):
                self.thread.clear(cell, last)

    def announce(self) -> None:
        for peer in self.peers:
            self.thread.store(self.op_record(peer, self.rank), self.launch)

    def hear_peers(self) -> None:
        for peer in self.peers:
            self.thread.wait_for(self.op_record(self.rank, peer), self.launch)

    def slot_of(self, sender: int, receiver: int, message: int) -> list[MemoryCell]:
        name = (
            f"slot {message % self.rules.nslots} of the FIFO from rank {sender} "
            f"to rank {receiver}, half {self.parity}"
        )
        owner = sender if self.rules.reads else receiver
        return [
            MemoryCell(f"{name}, half {half}", owner, Kind.BUFFER, self.parity) for half in HALVES
        ]

    def tail_word(self, dst: int, src: int) -> MemoryCell:
        return MemoryCell(
            f"tail from rank {src}, half {self.parity}", dst, Kind.COUNTER, self.parity
        )

    def head_word(self, dst: int, src: int) -> MemoryCell:
        return MemoryCell(
            f"head from rank {src}, half {self.parity}", dst, Kind.COUNTER, self.parity
        )

    def signals_of(self, dst: int, src: int) -> MemoryCell:
        return MemoryCell(
            f"signals of rank {src}, half {self.parity}", dst, Kind.COUNTER, self.parity
        )

    def op_record(self, dst: int, src: int) -> MemoryCell:
        return MemoryCell(
            f"entry {self.launch % self.rules.entries} of the op log for rank {src}",
            dst,
            Kind.WORD,
            None,
        )
