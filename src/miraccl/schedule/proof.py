"""Symbolic run of a schedule: all rules of ``verify`` that need a run.

A cell holds a symbol (``provenance``) instead of elements. Messages and signals carry the vector
clocks of their senders, so at every access to memory it is known which steps of other ranks
happened before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from miraccl.errors import ScheduleError
from miraccl.schedule.ir import Op, Schedule, Step
from miraccl.schedule.provenance import (
    ALL_ROWS,
    Access,
    ProofMemory,
    StepViolation,
    Symbol,
    VectorClock,
    add,
    add_in_rank_order,
    rank_list,
)
from miraccl.schedule.steps import sent_table
from miraccl.schedule.text import format_location
from miraccl.types import Collective


class _SymbolicMessage:
    """A message in a FIFO: copied symbols or, with ``cells``, the location to read them from."""

    __slots__ = ("cells", "clock", "number", "sender", "symbols", "table")

    def __init__(
        self,
        sender: int,
        number: int,
        clock: VectorClock | None,
        symbols: list[Symbol] | None,
        cells: range | None,
        table: int | None,
    ) -> None:
        self.table = table
        self.sender, self.number, self.clock, self.symbols, self.cells = (
            sender,
            number,
            clock,
            symbols,
            cells,
        )


class ScheduleProof:
    """Symbolic run of all channels. Channels are unordered, so they run one after the other."""

    def __init__(
        self, schedule: Schedule, in_place: bool, depth: int, direct: bool, rank_ordered: bool
    ) -> None:
        self.schedule, self.depth, self.direct = schedule, depth, direct
        self.add = add_in_rank_order if rank_ordered else add
        self.reduces = schedule.collective.reduces
        self.memory = ProofMemory(schedule, in_place)
        self.is_barrier = schedule.collective is Collective.BARRIER
        self.with_clocks = direct or schedule.needs_addressable_memory or self.is_barrier
        self.tracks = self.with_clocks or schedule.nchannels > 1

    def run(self) -> None:
        clocks: list[VectorClock] = []
        for number in range(self.schedule.nchannels):
            channel = _ChannelProof(self, number)
            channel.run()
            clocks.append(np.array(channel.clock))
        self._check_outputs()
        if self.is_barrier:
            self._check_barrier(np.maximum.reduce(clocks))

    def _check_barrier(self, final_clocks: VectorClock) -> None:
        """Check that each rank depends on all others when it leaves the barrier."""
        for rank, other in np.argwhere(final_clocks == 0):
            raise ScheduleError(
                f"{self.schedule.name}: rank {rank} may leave the barrier before rank {other} has"
                " arrived"
            )

    def _check_outputs(self) -> None:
        memory = self.memory
        for cell, wanted in enumerate(memory.expected):
            if wanted is None or memory.symbols[cell] == wanted:
                if wanted is not None and memory.rows[cell] != ALL_ROWS:
                    self._check_output_rows(cell, wanted)
                continue
            held, writer = memory.symbols[cell], memory.writer[cell]
            who = (
                format_location(self.schedule, writer.channel, writer.rank, writer.number)
                if writer
                else f"{self.schedule.name}: no channel"
            )
            if held is None or (writer is None and held.chunk != wanted.chunk):
                raise ScheduleError(
                    f"{self.schedule.name}: rank {memory.owner(cell)}: {memory.name(cell)} is not"
                    " written"
                )
            raise ScheduleError(
                f"{who}: at the end {memory.name(cell)} holds {held}, expected {wanted}"
            )

    def _check_output_rows(self, cell: int, wanted: Symbol) -> None:
        if missing := wanted.ranks & ~self.memory.rows[cell]:
            raise ScheduleError(
                f"{self.schedule.name}: at the end {self.memory.name(cell)} lacks rows of ranks"
                f" {rank_list(missing)}"
            )


class _ChannelProof:
    """Symbolic run of one channel: program counters, FIFOs, signals, clocks."""

    def __init__(self, proof: ScheduleProof, channel: int) -> None:
        self.proof, self.channel, self.memory = proof, channel, proof.memory
        self.schedule, self.depth, self.direct = proof.schedule, proof.depth, proof.direct
        self.steps = proof.schedule.channels[channel]
        nranks = proof.schedule.participants
        self.position = [0] * nranks
        self.fifos: dict[tuple[int, int], deque[_SymbolicMessage]] = {}
        self.signals: dict[tuple[int, int], deque[VectorClock | None]] = {}
        self.at_barrier: set[int] = set()
        self.received: list[_SymbolicMessage] = []  # messages consumed by the step in progress
        self.clock: list[VectorClock] = []
        if proof.with_clocks:
            self.clock = [np.zeros(nranks, dtype=np.int32) for _ in range(nranks)]
            for rank, clock in enumerate(self.clock):
                clock[rank] = 1
        #: accesses to other ranks' memory: (cell, rank, time of rank, step)
        self.remote: list[tuple[int, int, int, int]] = []

    # control

    def run(self) -> None:
        ready = deque(range(self.schedule.participants))
        waiting: set[int] = set()
        while ready:
            rank = ready.popleft()
            steps = self.steps[rank]
            number = self.position[rank]
            while number < len(steps):
                step = steps[number]
                if not self._can_run(step, rank):
                    waiting.add(rank)
                    break
                try:
                    woken = self._execute(step, rank)
                except StepViolation as problem:
                    raise ScheduleError(
                        f"{format_location(self.schedule, self.channel, rank, number)}:"
                        f" {problem}{self._describe_senders()}"
                    ) from None
                number += 1
                self.position[rank] = number
                for other in woken:
                    if other in waiting:
                        waiting.discard(other)
                        ready.append(other)
        if waiting:
            raise ScheduleError(self._describe_deadlock(waiting))
        self._check_unreceived()
        self._check_remote_accesses()

    def _can_run(self, step: Step, rank: int) -> bool:
        op = step.op
        if op is Op.RECV_REDUCE_ALL:
            return all(self.fifos.get((peer, rank)) for peer in step.peers if peer != rank)
        if op is Op.WAIT:
            return all(self.signals.get((peer, rank)) for peer in step.peers)
        if op is Op.BARRIER:
            self.at_barrier.add(rank)
            return len(self.at_barrier) == self.schedule.participants
        if op >= Op.PUT:
            return True
        if step.recv_peer is not None and not self.fifos.get((step.recv_peer, rank)):
            return False
        if step.send_peer is not None:
            return len(self.fifos.get((rank, step.send_peer), ())) < self.depth
        return True

    def _execute(self, step: Step, rank: int) -> Sequence[int]:
        """Execute ``step``; return the ranks that it may have unblocked."""
        op, src, dst = step.op, step.src, step.dst
        self.received.clear()
        if self.schedule.tables:
            self._check_rows_read(step, rank)
        if op is Op.SIGNAL:
            return self._signal(step, rank)
        if op is Op.WAIT:
            for peer in step.peers:
                self._merge(rank, self.signals[peer, rank].popleft())
            return ()
        if op is Op.BARRIER:
            return self._barrier()
        if op is Op.SEND:
            assert src is not None
            assert step.send_peer is not None
            cells = self.memory.cells(rank, src)
            if self.direct:
                self._send(rank, step.send_peer, None, cells)
            else:
                self._send(rank, step.send_peer, self._read(rank, cells), None)
            return (step.send_peer,)
        symbols, woken = self._operands(step, rank)
        stored = None
        if dst is not None:
            owner = step.send_peer if op is Op.PUT and step.send_peer is not None else rank
            stored = self.memory.cells(owner, dst)
            if not self._is_self_copy(step, rank, stored):
                self._write(rank, stored, symbols, owner)
            if dst.table is not None:
                self._check_rows_stored(step, dst.table, stored)
        if op.sends and step.send_peer is not None:
            if self.direct and stored is not None:
                self._send(rank, step.send_peer, None, stored)
            else:
                self._send(rank, step.send_peer, symbols, None)
            woken.append(step.send_peer)
        return woken

    def _operands(self, step: Step, rank: int) -> tuple[list[Symbol], list[int]]:
        """Return the symbols that ``step`` stores or sends, and the ranks whose message it
        received.
        """
        op, src, dst, peer = step.op, step.src, step.dst, step.recv_peer
        cells = self.memory.cells
        if op is Op.COPY or op is Op.PUT:
            assert src is not None
            return self._read(rank, cells(rank, src)), []
        if op is Op.GET:
            assert src is not None
            assert peer is not None
            return self._read_remote(rank, peer, cells(peer, src)), []
        if op is Op.REDUCE_FROM_PEERS:
            assert src is not None
            return (
                self._fold(
                    [self._read_remote(rank, other, cells(other, src)) for other in step.peers]
                ),
                [],
            )
        if op is Op.RECV_REDUCE_ALL:
            if src is None and rank in step.peers:
                raise StepViolation(f"rank {rank} is a peer of itself, but has no src to add")
            parts = [
                self._read(rank, cells(rank, src))
                if src is not None and other == rank
                else self._receive(rank, other, step.chunks)
                for other in step.peers
            ]
            return self._fold(parts), [other for other in step.peers if other != rank]
        assert peer is not None
        message = self._receive(rank, peer, step.chunks)
        if not op.reduces:
            return message, [peer]
        operand = src if src is not None else dst
        assert operand is not None
        return self._fold([self._read(rank, cells(rank, operand)), message]), [peer]

    def _signal(self, step: Step, rank: int) -> Sequence[int]:
        clock = self._release(rank)
        for peer in step.peers:
            self.signals.setdefault((rank, peer), deque()).append(clock)
        return step.peers

    def _barrier(self) -> Sequence[int]:
        """Release all ranks by advancing each past its barrier step."""
        ranks = range(self.schedule.participants)
        if self.clock:
            together = np.maximum.reduce(self.clock)
            for rank in ranks:
                np.copyto(self.clock[rank], together)
                self.clock[rank][rank] += 1
        for rank in ranks:
            self.position[rank] += 1
        self.at_barrier.clear()
        return ranks

    def _describe_senders(self) -> str:
        """Name the senders of the messages received by the step in progress, for its error."""
        if not self.received:
            return ""
        senders = ", ".join(
            f"rank {message.sender} in its step {message.number}" for message in self.received
        )
        return f"; the message was sent by {senders}"

    # clocks

    def _release(self, rank: int) -> VectorClock | None:
        """Return the clock of the steps ``rank`` has completed; later steps get a later time."""
        if not self.clock:
            return None
        clock = self.clock[rank].copy()
        self.clock[rank][rank] += 1
        return clock

    def _merge(self, rank: int, clock: VectorClock | None) -> None:
        if clock is not None:
            np.maximum(self.clock[rank], clock, out=self.clock[rank])

    # messages

    def _send(
        self, rank: int, peer: int, symbols: list[Symbol] | None, cells: range | None
    ) -> None:
        table = sent_table(self.steps[rank][self.position[rank]])
        message = _SymbolicMessage(
            rank, self.position[rank], self._release(rank), symbols, cells, table
        )
        self.fifos.setdefault((rank, peer), deque()).append(message)

    def _receive(self, rank: int, peer: int, chunks: int) -> list[Symbol]:
        message = self.fifos[peer, rank].popleft()
        self.received.append(message)
        self._merge(rank, message.clock)
        size = len(message.symbols if message.symbols is not None else message.cells or ())
        if size != chunks:
            raise StepViolation(f"expects {chunks} chunks, the message has {size}")
        if message.symbols is not None:
            return message.symbols
        assert message.cells is not None
        return self._read(rank, message.cells)

    # memory

    def _access(self, rank: int) -> tuple[Access, VectorClock | None]:
        clock = self.clock[rank] if self.clock else None
        return (
            Access(
                self.channel, rank, 0 if clock is None else int(clock[rank]), self.position[rank]
            ),
            clock,
        )

    def _read(self, rank: int, cells: range) -> list[Symbol]:
        memory, symbols = self.memory, []
        if self.proof.tracks:
            access, clock = self._access(rank)
            for cell in cells:
                memory.track_read(cell, access, clock)
        for cell in cells:
            symbol = memory.symbols[cell]
            if symbol is None:
                raise StepViolation(f"reads {memory.name(cell)} before it is written")
            symbols.append(symbol)
        return symbols

    def _read_remote(self, rank: int, owner: int, cells: range) -> list[Symbol]:
        if owner != rank:
            self._record_remote_access(rank, owner, cells)
        return self._read(rank, cells)

    def _record_remote_access(self, rank: int, owner: int, cells: range) -> None:
        """Record that ``rank`` accesses memory of ``owner``, which must have started and not
        finished.
        """
        if self.clock[rank][owner] == 0:
            raise StepViolation(
                f"accesses {self.memory.name(cells[0])} before a signal shows that rank {owner} has"
                " started"
            )
        time = int(self.clock[rank][rank])
        self.remote.extend((cell, rank, time, self.position[rank]) for cell in cells)

    def _write(self, rank: int, cells: range, symbols: list[Symbol], owner: int) -> None:
        if owner != rank:
            self._record_remote_access(rank, owner, cells)
        memory = self.memory
        access, clock = self._access(rank)
        for cell, symbol in zip(cells, symbols, strict=True):
            if self.proof.tracks:
                memory.track_write(cell, access, clock)
            self._check_stored_symbol(cell, symbol)
            memory.symbols[cell] = symbol
            memory.writer[cell] = access

    def _check_stored_symbol(self, cell: int, symbol: Symbol) -> None:
        """Check that a cell may hold ``symbol``.

        An output cell accepts its expected chunk or a partial sum of it, a scratch cell chunks of
        its part.
        """
        memory = self.memory
        wanted = memory.expected[cell]
        if wanted is None and memory.scratch_part[cell] < 0:
            raise StepViolation(f"stores {symbol} in {memory.name(cell)}, which does not need it")
        if wanted is None:
            if symbol.chunk % self.schedule.parts != memory.scratch_part[cell]:
                raise StepViolation(
                    f"{memory.name(cell)} holds part {memory.scratch_part[cell]},"
                    f" input[{symbol.chunk}] is another part"
                )
        elif symbol.chunk != wanted.chunk or not (
            self.proof.reduces or symbol.ranks == wanted.ranks
        ):
            raise StepViolation(
                f"stores {symbol} in {memory.name(cell)}, where {wanted} belongs (store other"
                " chunks in scratch)"
            )

    def _fold(self, operands: list[list[Symbol]]) -> list[Symbol]:
        if not self.proof.reduces:
            raise StepViolation(f"{self.schedule.collective.label} does not reduce")
        total = operands[0]
        for operand in operands[1:]:
            total = [
                self.proof.add(first, second) for first, second in zip(total, operand, strict=True)
            ]
        return total

    def _is_self_copy(self, step: Step, rank: int, stored: range) -> bool:
        """Return True for a COPY whose source and destination are the same cells (in place)."""
        if step.src is None or step.op is Op.PUT or step.op is Op.GET:
            return False
        source = self.memory.cells(rank, step.src)
        if source != stored and source.start < stored.stop and stored.start < source.stop:
            raise StepViolation(f"{step.src} and {step.dst} overlap partially")
        return source == stored and step.op is Op.COPY

    # rows

    def _check_rows_read(self, step: Step, rank: int) -> None:
        """Check that the step reads all rows that the chunks may have, and no row that is stale.

        A chunk with the contributions of some ranks is zero outside of their rows, whatever the
        tables of a run are.
        """
        if step.op is Op.RECV_REDUCE_SEND:
            raise StepViolation("sends a sum that it does not store: no table names its rows")
        refs = [step.src, step.dst if step.op is Op.RECV_REDUCE else None]
        for ref in refs:
            if ref is None or ref.table is None:
                continue
            listed = self.schedule.tables[ref.table]
            owners = (step.recv_peer,) if step.op is Op.GET else (rank,)
            for owner in step.peers if step.op is Op.REDUCE_FROM_PEERS else owners:
                assert owner is not None
                for cell in self.memory.cells(owner, ref):
                    symbol, held = self.memory.symbols[cell], self.memory.rows[cell]
                    if symbol is not None and symbol.ranks & ~listed:
                        raise StepViolation(
                            f"table {ref.table} has no rows of ranks"
                            f" {rank_list(symbol.ranks & ~listed)}, which {self.memory.name(cell)}"
                            " holds"
                        )
                    if held != ALL_ROWS and listed & ~held:
                        raise StepViolation(
                            f"reads rows of ranks {rank_list(listed & ~held)} in"
                            f" {self.memory.name(cell)}, which was written without them"
                        )

    def _check_rows_stored(self, step: Step, table: int, stored: range) -> None:
        """Check that the step stores exactly the rows of ``table``, and that these are enough."""
        tables, listed = self.schedule.tables, self.schedule.tables[table]
        if step.op is Op.RECV or step.op is Op.RECV_COPY_SEND:
            given = self.received[0].table
        else:
            given = step.src.table if not step.op.reduces and step.src is not None else table
        if given is not None and tables[given] != listed:
            raise StepViolation(f"stores the rows of table {table}, but has those of table {given}")
        for cell in stored:
            symbol = self.memory.symbols[cell]
            if symbol is not None and symbol.ranks & ~listed:
                raise StepViolation(
                    f"table {table} has no rows of ranks {rank_list(symbol.ranks & ~listed)}, whose"
                    f" contributions {self.memory.name(cell)} gets"
                )
            self.memory.rows[cell] = listed

    # the end

    def _check_unreceived(self) -> None:
        for (sender, receiver), queue in self.fifos.items():
            if queue:
                where = format_location(self.schedule, self.channel, sender, queue[0].number)
                raise ScheduleError(
                    f"{where}: rank {receiver} does not receive this message ({len(queue)} remain)"
                )
        for (sender, receiver), clocks in self.signals.items():
            if clocks:
                name = f"{self.schedule.name}: channel {self.channel}, rank {sender}"
                raise ScheduleError(
                    f"{name}: rank {receiver} does not consume {len(clocks)} signals"
                )

    def _check_remote_accesses(self) -> None:
        """Check that a rank finishes after all accesses of peers to its memory."""
        for cell, rank, time, number in self.remote:
            owner = self.memory.owner(cell)
            if self.clock[owner][rank] < time:
                where = format_location(self.schedule, self.channel, rank, number)
                raise ScheduleError(
                    f"{where}: rank {owner} may finish before {self.memory.name(cell)} has been"
                    " accessed"
                )

    def _describe_deadlock(self, waiting: set[int]) -> str:
        """Describe a rank that waits for a finished one, or a cycle of waiting ranks."""
        waits = {rank: self._blocking_peer(rank) for rank in sorted(waiting)}
        for rank, (peer, what) in waits.items():
            if peer not in waiting:
                return (
                    f"{format_location(self.schedule, self.channel, rank, self.position[rank])}:"
                    f" waits for {what}, but rank {peer} has finished"
                )
        rank = min(waiting)
        seen: list[int] = []
        while rank not in seen:
            seen.append(rank)
            rank = waits[rank][0]
        cycle = seen[seen.index(rank) :]
        lines = [
            f"{format_location(self.schedule, self.channel, rank, self.position[rank])}: waits for"
            f" {waits[rank][1]}"
            for rank in cycle
        ]
        return "deadlock: " + "; ".join(lines)

    def _blocking_peer(self, rank: int) -> tuple[int, str]:
        step = self.steps[rank][self.position[rank]]
        if step.op is Op.BARRIER:
            peer = next(
                other for other in range(self.schedule.participants) if other not in self.at_barrier
            )
            return peer, f"rank {peer} to reach the barrier"
        if step.op is Op.WAIT:
            peer = next(other for other in step.peers if not self.signals.get((other, rank)))
            return peer, f"a signal from rank {peer}"
        for peer in step.senders(rank):
            if not self.fifos.get((peer, rank)):
                return peer, f"a message from rank {peer}"
        assert step.send_peer is not None
        return (
            step.send_peer,
            f"a free slot in the FIFO to rank {step.send_peer} ({self.depth} messages)",
        )
