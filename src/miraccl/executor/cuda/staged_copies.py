"""Copy engines between plain arrays, through staging memory at the receiver, in chunks.

Runs any schedule of sends, receives, copies and ``recv_copy_send``. Every communicating pair of
ranks has a few slots in the receiver's packet buffer, which is unused between two device barriers
(source/device_barrier.cuh). Each direction of a pair has a stream:

    sender    wait until the slot is free | copy the chunk into it | mark it ready
    receiver  wait until the slot is ready | copy the chunk to its address | mark it free

The waiting side resets the words, so a captured graph can be replayed. Multiprocessors run only the
two barriers and the reset of the buffer at the end. On H200 this is slower than kernels
(docs/design/experiments-gpu.md), so it is used only if the user reserves all multiprocessors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout, lower, schedules
from miraccl.executor.cuda.copies import SideStream, barrier_launch
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.launch import Kernels
from miraccl.executor.cuda.plan import DevicePlan, Request
from miraccl.schedule import catalog
from miraccl.schedule.ir import Buffer, Op, Ref, Schedule
from miraccl.types import Collective

#: Collective -> algorithm; all of them use every link at once, in both directions.
ALGORITHMS = {
    Collective.ALL_GATHER: "one_shot",
    Collective.ALL_TO_ALL: "one_shot",
    Collective.BROADCAST: "chain",
}
STAGING_BYTES = 2 * layout.HALF_BYTES
ALIGN = 512


class ByteRange(NamedTuple):
    """Bytes of the input or output."""

    buffer: Buffer
    offset: int
    nbytes: int


class ChunkCopy(NamedTuple):
    """Path of some bytes at a rank: from ``source_rank`` or ``source`` to ``target`` and to
    ``target_rank``.
    """

    source_rank: int | None
    source: ByteRange | None
    target: ByteRange | None
    target_rank: int | None


def byte_ranges(ref: Ref, parts: int, block: int) -> Iterator[ByteRange]:
    """Yield the non-empty bytes of chunks; all parts but the last are multiples of 16 bytes."""
    part = schedules.part_elements(block, parts, 1)
    for index in range(ref.index, ref.index + ref.chunks):
        at, begin = index // parts * block, min(block, index % parts * part)
        nbytes = min(part, block - begin)
        if nbytes:
            yield ByteRange(ref.buffer, at + begin, nbytes)


def rank_copies(schedule: Schedule, rank: int, block: int) -> list[ChunkCopy]:
    """Return the steps of a rank for blocks of ``block`` bytes; raise ``InvalidUsage`` for
    reductions.
    """
    found: list[ChunkCopy] = []
    for channel in schedule.channels:
        for step in channel[rank]:
            if step.op not in (Op.SEND, Op.RECV, Op.COPY, Op.RECV_COPY_SEND):
                raise InvalidUsage(
                    f"cannot run schedule {schedule.name!r} by copy engines: "
                    f"it has the step {step.op.name}"
                )
            sources = list(byte_ranges(step.src, schedule.parts, block)) if step.src else []
            targets = list(byte_ranges(step.dst, schedule.parts, block)) if step.dst else []
            for i in range(max(len(sources), len(targets))):
                source, target = (
                    (sources[i] if sources else None),
                    (targets[i] if targets else None),
                )
                found.append(ChunkCopy(step.recv_peer, source, target, step.send_peer))
    return found


def split_chunks(move: ChunkCopy, slot: int) -> Iterator[ChunkCopy]:
    """Split a copy into chunks that fit a slot."""
    span = move.source or move.target
    assert span is not None
    for begin in range(0, span.nbytes, slot):
        nbytes = min(slot, span.nbytes - begin)
        source, target = (
            s and ByteRange(s.buffer, s.offset + begin, nbytes) for s in (move.source, move.target)
        )
        yield ChunkCopy(move.source_rank, source, target, move.target_rank)


@dataclass(frozen=True, kw_only=True)
class StagingLayout:
    """Division of every rank's staging memory; ``senders[r]`` are the ranks that send to rank r."""

    senders: tuple[tuple[int, ...], ...]
    nslots: int
    slot_bytes: int

    @classmethod
    def of(cls, schedule: Schedule, nbytes: int) -> StagingLayout:
        senders = tuple(
            tuple(
                sorted(
                    {
                        step.recv_peer
                        for channel in schedule.channels
                        for step in channel[rank]
                        if step.recv_peer is not None
                    }
                )
            )
            for rank in range(schedule.nranks)
        )
        most = max(1, max(map(len, senders)))
        nslots = 2 if most > 2 else layout.COPY_SLOTS
        return cls(
            senders=senders, nslots=nslots, slot_bytes=nbytes // most // nslots // ALIGN * ALIGN
        )

    def slot(self, src: int, dst: int, number: int) -> int:
        """Return the offset of slot ``number`` for ``src`` in the region of ``dst``."""
        index = self.senders[dst].index(src) * self.nslots + number
        return layout.PACKETS_OFFSET + index * self.slot_bytes

    @staticmethod
    def ready(src: int, number: int) -> int:
        return layout.COPY_FLAGS_OFFSET + 4 * (src * layout.COPY_SLOTS + number)

    @staticmethod
    def free(dst: int, number: int) -> int:
        return layout.COPY_FLAGS_OFFSET + 4 * (
            (layout.MAX_RANKS + dst) * layout.COPY_SLOTS + number
        )


Directions = dict[tuple[int, bool], SideStream]
"""Side streams by (peer, data come from it)."""


def staged_plan(request: Request) -> DevicePlan:
    """Return the plan of an operation between plain arrays by copy engines."""
    name = ALGORITHMS[request.collective]
    return DevicePlan(
        algo=name,
        proto="copy",
        blocks=1,
        threads=32,
        unroll=1,
        reason="copy engines through staging memory",
    )


class StagedLaunch:
    """Launch of one collective of one size; like ``launch.KernelLaunch`` it does not wait."""

    threads = 1 << 20  # its end resets the buffer: ordered like launches that use the whole GPU

    def __init__(
        self,
        gpu: Gpu,
        kernels: Kernels,
        request: Request,
        comm_args: lower.CommArgs,
        sides: Directions,
    ) -> None:
        self.plan = staged_plan(request)
        schedule = catalog.build(self.plan.algo, request.collective, request.nranks, request.root)
        self._gpu, self._comm_args, self._rank = gpu, comm_args, comm_args.rank
        self._staging = StagingLayout.of(schedule, STAGING_BYTES)
        moves = rank_copies(schedule, comm_args.rank, request.block_bytes)
        self._chunks = [
            chunk for move in moves for chunk in split_chunks(move, self._staging.slot_bytes)
        ]
        self._before, self._after = (
            barrier_launch(gpu, kernels, self.plan, request, comm_args, stream_waits=waits)
            for waits in (True, False)
        )
        self._totals = Counter(
            chunk.source_rank for chunk in self._chunks
        )  # received chunks by peer
        ends = {(c.source_rank, True) for c in self._chunks} | {
            (c.target_rank, False) for c in self._chunks
        }
        used = [(peer, comes) for peer, comes in ends if peer is not None]
        self._directions: Directions = {key: sides.get(key) or SideStream(gpu) for key in used}
        sides.update(self._directions)
        self._done: Counter[tuple[int, bool]] = Counter()  # chunks enqueued in each direction

    @property
    def signatures(self) -> tuple[int, ...]:
        """Signatures of this launch in op records."""
        return self._before.signatures

    def run(self, source: int, target: int, stream: int) -> None:
        """Enqueue in ``stream``, reading at ``source`` and writing at ``target``."""
        gpu = self._gpu
        self._before.run(source, target, stream)
        directions = list(self._directions.values())
        gpu.record(directions[0].event, stream)
        for direction in directions:
            gpu.wait_event(direction.stream, directions[0].event)
        self._done.clear()
        base = {Buffer.INPUT: source, Buffer.OUTPUT: target}
        for chunk in interleave(self._chunks):
            self._enqueue(chunk, base, stream)
        for direction in directions:
            gpu.record(direction.event, direction.stream)
            gpu.wait_event(stream, direction.event)
        gpu.set_words(
            self._comm_args.own + layout.PACKETS_OFFSET, STAGING_BYTES // 4, 0xFFFFFFFF, stream
        )
        self._after.run(source, target, stream)

    def _enqueue(self, chunk: ChunkCopy, base: dict[Buffer, int], stream: int) -> None:
        gpu, target = self._gpu, chunk.target
        address = base[target.buffer] + target.offset if target else 0
        if chunk.source_rank is None and chunk.target_rank is None:
            assert chunk.source is not None
            origin = base[chunk.source.buffer] + chunk.source.offset
            if origin != address:
                gpu.copy(address, origin, chunk.source.nbytes, stream)
            return
        if chunk.source_rank is not None:
            assert target is not None
            self._recv_chunk(chunk.source_rank, address, target.nbytes)
            if chunk.target_rank is not None:
                direction = self._directions[chunk.source_rank, True]
                gpu.record(direction.event, direction.stream)
                gpu.wait_event(self._directions[chunk.target_rank, False].stream, direction.event)
                self._send_chunk(chunk.target_rank, address, target.nbytes)
        elif chunk.target_rank is not None and chunk.source is not None:
            origin = base[chunk.source.buffer] + chunk.source.offset
            self._send_chunk(chunk.target_rank, origin, chunk.source.nbytes)

    def _send_chunk(self, peer: int, address: int, nbytes: int) -> None:
        gpu, comm_args, stage = self._gpu, self._comm_args, self._staging
        done, stream = self._done[peer, False], self._directions[peer, False].stream
        number = done % stage.nslots
        if done >= stage.nslots:
            word = comm_args.inboxes[peer] + stage.free(peer, number)
            gpu.wait_word(word, 1, stream)
            gpu.write_word(word, 0, stream)
        gpu.copy(
            comm_args.outboxes[peer] + stage.slot(self._rank, peer, number), address, nbytes, stream
        )
        gpu.write_word(comm_args.outboxes[peer] + stage.ready(self._rank, number), 1, stream)
        self._done[peer, False] += 1

    def _recv_chunk(self, peer: int, address: int, nbytes: int) -> None:
        gpu, comm_args, stage = self._gpu, self._comm_args, self._staging
        done, stream = self._done[peer, True], self._directions[peer, True].stream
        number = done % stage.nslots
        word = comm_args.inboxes[peer] + stage.ready(peer, number)
        gpu.wait_word(word, 1, stream)
        gpu.write_word(word, 0, stream)
        gpu.copy(
            address, comm_args.inboxes[peer] + stage.slot(peer, self._rank, number), nbytes, stream
        )
        if done + stage.nslots < self._totals[peer]:
            gpu.write_word(comm_args.outboxes[peer] + stage.free(self._rank, number), 1, stream)
        self._done[peer, True] += 1


def interleave(chunks: Sequence[ChunkCopy]) -> Iterator[ChunkCopy]:
    """Yield the chunks so that all directions progress together, each in its own order."""
    queues: dict[tuple[int | None, int | None], deque[ChunkCopy]] = {}
    for chunk in chunks:
        queues.setdefault((chunk.source_rank, chunk.target_rank), deque()).append(chunk)
    together = {ends for ends in queues if None not in ends}
    if any((up, None) in queues or (None, down) in queues for up, down in together):
        yield from chunks  # a direction has chunks of two kinds: keep the order of the schedule
        return
    # Sends before receives: even if streams share a hardware queue, nothing then waits for work
    # behind it.
    order = sorted(queues, key=lambda ends: ends[0] is not None)
    while queues:
        for ends in [ends for ends in order if ends in queues]:
            yield queues[ends].popleft()
            if not queues[ends]:
                del queues[ends]
