"""Lowering: Schedule -> Program -> Run, from symbolic chunks to the words that the engine walks.

``lower`` turns one rank's steps into a flat array; it depends on the schedule alone and is cached.
A ``Run`` adds the properties of a plan (element size, round size, kernels) and is cached per plan.
The counts of its blocks come last (``kernels.counts``): once for a plan of one count, with every
call for uneven counts. Nothing here reads data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.limits import check_limits, check_width
from miraccl.executor.cpu.rounds import rounds_of
from miraccl.executor.cpu.sizes import ALIGN, chunk_bytes, count_hash
from miraccl.schedule.ir import Op, Ref, Schedule, Step
from miraccl.schedule.rows import operand_tables
from miraccl.types import Collective, DType, RedOp

Words = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Program:
    """Steps of one rank, ``STEP_SIZE`` bytes each.

    Attributes:
        peers: Memory that the steps' lists of peers point into.
        tables: Memory of the lists of tables, one per peer of a step.
        sends: Ranks that the program sends to.
    """

    schedule: Schedule
    rank: int
    steps: Words
    peers: Words
    sends: Words
    tables: Words

    @property
    def nsteps(self) -> int:
        return len(self.steps)


def lower(schedule: Schedule, rank: int, *, signalled: bool = False) -> Program:
    """Return the program of ``rank``; channels follow each other, as a CPU rank has one thread.

    Args:
        signalled: True if the signals at the start of the schedule have been exchanged already,
            when
            the engine negotiated the window path.

    Raises:
        InvalidUsage: CPU ranks cannot run the schedule (``limits``).
    """
    check_limits(schedule)
    steps = [step for channel in schedule.channels for step in channel[rank]]
    when = rounds_of(schedule, signalled=signalled)[rank]
    lists = [
        step.peers or (tuple(range(schedule.participants)) if step.op is Op.BARRIER else ())
        for step in steps
    ]
    peers = np.array([p for peers in lists for p in peers] or [0], np.int64)
    given = operand_tables(schedule) if schedule.tables else {}
    numbers = [
        given.get((channel, rank, number), ())
        for channel, ranks in enumerate(schedule.channels)
        for number in range(len(ranks[rank]))
    ]
    tables = np.array([t for found in numbers for t in found] or [0], np.int64)
    table = np.zeros((max(len(steps), 1), layout.STEP_SIZE // 8), np.int64)
    offset = tables_offset = 0
    for number, (step, listed) in enumerate(zip(steps, lists, strict=True)):
        row = _encode(step, when[number], peers.ctypes.data + 8 * offset, len(listed))
        row[layout.STEP_FANOUT // 8] = _fanout(steps, number)
        row[layout.STEP_TABLES // 8] = tables.ctypes.data + 8 * tables_offset
        table[number] = row
        offset += len(listed)
        tables_offset += len(numbers[number])
    sends = sorted(
        {step.send_peer for step in steps if step.op.sends and step.send_peer is not None}
    )
    return Program(
        schedule=schedule,
        rank=rank,
        steps=table[: len(steps)],
        peers=peers,
        tables=tables,
        sends=np.array(sends or [0], np.int64)[: len(sends)],
    )


def _encode(step: Step, when: int, peers: int, npeers: int) -> Words:
    words = np.zeros(layout.STEP_SIZE // 8, np.int64)
    src = (step.src.buffer, step.src.index) if step.src else (0, 0)
    dst = (step.dst.buffer, step.dst.index) if step.dst else (0, 0)
    fields = (
        (layout.STEP_OP, step.op),
        (layout.STEP_SRC_BUF, src[0]),
        (layout.STEP_SRC, src[1]),
        (layout.STEP_DST_BUF, dst[0]),
        (layout.STEP_DST, dst[1]),
        (layout.STEP_CHUNKS, step.chunks),
        (layout.STEP_RECV, -1 if step.recv_peer is None else step.recv_peer),
        (layout.STEP_SEND, -1 if step.send_peer is None else step.send_peer),
        (layout.STEP_PEERS, peers),
        (layout.STEP_NPEERS, npeers),
        (layout.STEP_ROUNDS, when),
        (layout.STEP_SRC_TABLE, _table(step.src)),
        (layout.STEP_DST_TABLE, _table(step.dst)),
    )
    for place, value in fields:
        words[place // 8] = int(value)
    return words


def _fanout(steps: Sequence[Step], number: int) -> int:
    """Return the ``STEP_FANOUT`` of a step: whether its neighbours send the same chunk as well."""
    step = steps[number]
    if step.op is not Op.SEND or step.chunks != 1:
        return layout.NO_FANOUT
    before, after = (
        0 <= i < len(steps) and steps[i].op is Op.SEND and steps[i].src == step.src
        for i in (number - 1, number + 1)
    )
    if before:
        return layout.REST_OF_FANOUT
    return layout.FIRST_OF_FANOUT if after else layout.NO_FANOUT


def _table(ref: Ref | None) -> int:
    return -1 if ref is None or ref.table is None else ref.table


def signature(collective: Collective, dtype: DType, op: RedOp, root: int, count: int) -> int:
    """Return what ranks must agree on, without the sequence number (bits 0-15).

    Fields: collective, dtype, operator, root and a hash of the count.
    """
    return (
        collective << 16
        | dtype << 21
        | op << 25
        | (root & 0xFFF) << 28
        | count_hash(count) << layout.SIG_COUNT_SHIFT
    )


def describe_signature(sig: int) -> dict[str, str]:
    """Return the fields of a signature by name; the count is only a hash."""

    def name(kind: type[Collective] | type[DType] | type[RedOp], value: int) -> str:
        try:
            return kind(value).name.lower()
        except ValueError:
            return f"unknown ({value})"

    return {
        "sequence number": str(sig & 0xFFFF),
        "collective": name(Collective, sig >> 16 & 31),
        "dtype": name(DType, sig >> 21 & 15),
        "operator": name(RedOp, sig >> 25 & 7),
        "root": str(sig >> 28 & 0xFFF),
        "count": f"hash {sig >> 40 & 0x7FFFFF:06x}",
    }


class BlockCounts:
    """Elements of a call's blocks on this rank, in the words of ``kernels.counts``.

    Args:
        inputs, outputs: Elements of each block.
        agreed: Value that ranks compare: a count or the hash of a list, 0 if ranks do not know each
            other's counts.
        reported: Count shown if they differ.
    """

    def __init__(
        self, inputs: Sequence[int], outputs: Sequence[int], *, agreed: int, reported: int
    ) -> None:
        self.words = np.array([agreed, reported, *inputs, *outputs], np.int64)
        self.address = int(self.words.ctypes.data)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one run with tables, in the words of ``kernels.rows``.

    Attributes:
        words: A ``ROWS_*`` record.
        nrounds: Rounds of the run, at least 1.
        count: Elements of the block.
        agreed: Value that ranks compare: a hash of what they must agree on.
        moved_bytes: Bytes of the rows of the union.
        owned: Memory that the record points to.
    """

    words: Words
    nrounds: int
    count: int
    agreed: int
    moved_bytes: int
    owned: tuple[Words, ...]

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)


class Run:
    """Program with its arguments, complete but for counts and addresses; owns the memory it points
    to.

    Args:
        block_bytes: Size of the blocks of which scratch memory has chunks.
        direct: Bytes from which payloads are posted by address; -1: never.
        epilogue, epilogue_arg: Kernel applied to the output at the end, and its argument.
        stream_from: Bytes of both buffers that exceed the caches.

    Attributes:
        owned: Objects that live as long as the run.
        window_run: Run used instead on the window path.
    """

    def __init__(
        self,
        program: Program,
        *,
        dtype: DType,
        block_bytes: int,
        slot_bytes: int,
        round_bytes: int,
        direct: int,
        template: int,
        fold: int = 0,
        epilogue: int = 0,
        epilogue_arg: int = 0,
        ll: bool = False,
        stream_from: int = 1 << 62,
    ) -> None:
        schedule, itemsize = program.schedule, dtype.itemsize
        self.program = program
        self.owned: list[Any] = []
        self.in_blocks = np.zeros(
            (max(1, schedule.input_chunks // schedule.parts), layout.BLOCK_SIZE // 8), np.int64
        )
        self.out_blocks = np.zeros(
            (max(1, schedule.output_chunks // schedule.parts), layout.BLOCK_SIZE // 8), np.int64
        )
        check_width(schedule, slot_bytes)
        piece = (
            min(round_bytes, slot_bytes // schedule.widest // ALIGN * ALIGN)
            if direct < 0 or schedule.widest > 1
            else round_bytes
        )
        self.scratch = np.zeros(
            schedule.scratch_chunks * chunk_bytes(block_bytes, schedule.parts, itemsize) + 1,
            np.int8,
        )
        self.words = np.zeros(layout.RUN_SIZE // 8, np.int64)
        for place, value in (
            (layout.RUN_SCRATCH, self.scratch.ctypes.data),
            (layout.RUN_ITEMSIZE, itemsize),
            (layout.RUN_FOLD, fold),
            (layout.RUN_PROGRAM, program.steps.ctypes.data),
            (layout.RUN_NSTEPS, program.nsteps),
            (layout.RUN_ROUND_BYTES, piece),
            (layout.RUN_STRIDE, piece),  # for tables of rows; others: ``kernels.counts``
            (layout.RUN_DIRECT, direct),
            (layout.RUN_IN_BLOCKS, self.in_blocks.ctypes.data),
            (layout.RUN_OUT_BLOCKS, self.out_blocks.ctypes.data),
            (layout.RUN_NIN, schedule.input_chunks // schedule.parts),
            (layout.RUN_NOUT, schedule.output_chunks // schedule.parts),
            (layout.RUN_PARTS, schedule.parts),
            (layout.RUN_LL, int(ll)),
            (layout.RUN_SENDS, program.sends.ctypes.data),
            (layout.RUN_NSENDS, len(program.sends)),
            (layout.RUN_EPILOGUE, epilogue),
            (layout.RUN_EPILOGUE_ARG, epilogue_arg),
            (layout.RUN_TEMPLATE, template),
            (layout.RUN_STREAM_FROM, stream_from),
        ):
            self.words[place // 8] = value
        self.address = int(self.words.ctypes.data)
        self.window_run: Run | None = None
        self.rows: Rows | None = None
        self._negotiate_peers = np.zeros(0, np.int64)

    def set_rows(self, rows: Rows) -> None:
        """Move these rows in the next run; its count is that of their block."""
        self.rows = rows
        words, agreed = self.words, count_hash(rows.agreed)
        words[layout.RUN_ROWS // 8] = rows.address
        words[layout.RUN_NROUNDS // 8] = rows.nrounds
        words[layout.RUN_COUNT // 8] = rows.count
        low = (1 << layout.SIG_COUNT_SHIFT) - 1
        template = int(words[layout.RUN_TEMPLATE // 8]) & low
        words[layout.RUN_TEMPLATE // 8] = template | agreed << layout.SIG_COUNT_SHIFT
        # decides whether the GIL is released
        words[layout.RUN_IN_BYTES // 8] = words[layout.RUN_OUT_BYTES // 8] = rows.moved_bytes

    def set_window_path(self, other: Run, ranks: Sequence[int]) -> None:
        """Use ``other`` instead if the buffers of this rank and of ``ranks`` are window memory."""
        self.window_run, self._negotiate_peers = other, np.array(ranks, np.int64)
        self.words[layout.RUN_WINDOW_PATH // 8] = other.address
        self.words[layout.RUN_NEGOTIATE_PEERS // 8] = self._negotiate_peers.ctypes.data
        self.words[layout.RUN_NEGOTIATE_NPEERS // 8] = len(ranks)
