"""Messages on emulated GPUs: one launch per rank, received bytes compared with the sent ones."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from miraccl.executor.cuda.message_lowering import (
    LoweredMessages,
    P2pMessage,
    WarpQueueRules,
    lower_messages,
)
from miraccl.types import DType
from tests.gpu.emulator import EmulatedMachine

THREADS = 64


@dataclass(frozen=True)
class EmulatedSend:
    """One message; arrays start ``offset`` bytes after an aligned address.

    ``expected``: bytes that the receiver expects. ``half``: the only rank that calls it.
    """

    src: int
    dst: int
    nbytes: int
    offset: int = 0
    out_offset: int = 0
    expected: int | None = None
    half: int | None = None


def _placed(nbytes: int, offset: int, fill: Any) -> Any:
    """Return (bytes of an array, the memory around it)."""
    room = np.full(nbytes + offset + 192, 0xA5, np.uint8)
    start = -room.ctypes.data % 64 + 64 + offset
    room[start : start + nbytes] = fill
    return room[start : start + nbytes], room


def hold_table(lowered: LoweredMessages) -> Any:
    """Make a launch read its table in place, while the result is alive; None without a table."""
    if lowered.table is None:
        return None
    table = (ctypes.c_char * len(lowered.table)).from_buffer(lowered.table)
    lowered.set_table(ctypes.addressof(table))
    return table


def blocks_of(lowered: LoweredMessages) -> int:
    """Return the blocks of ``THREADS`` threads of a launch."""
    return lowered.bulk_blocks + -(
        -(lowered.blocks - lowered.bulk_blocks) * lowered.threads // THREADS
    )


def run(
    machine: EmulatedMachine,
    rules: WarpQueueRules,
    sends: Sequence[EmulatedSend],
    seed: int = 0,
    only: Sequence[int] | None = None,
    signatures: Sequence[int] = (),
) -> list[str]:
    """Run messages, each rank in the order of ``sends``, and return the differences by message.

    ``only``: ranks that launch; ``signatures``: by rank, of the message collective.
    """
    rng = np.random.default_rng(seed)
    sources = [_placed(s.nbytes, s.offset, rng.integers(0, 256, s.nbytes, np.uint8)) for s in sends]
    targets = [
        _placed(s.nbytes if s.expected is None else s.expected, s.out_offset, 0x5A) for s in sends
    ]
    args, blocks, keep, bulk, room = [], [], [], False, 0
    for rank in range(machine.nranks):
        messages = []
        for s, (source, _), (target, _) in zip(sends, sources, targets):
            if s.half not in (None, rank):
                continue
            if s.src == rank:
                messages.append(
                    P2pMessage(False, s.dst, source.ctypes.data, source.size, int(DType.UINT8))
                )
            if s.dst == rank:
                messages.append(
                    P2pMessage(True, s.src, target.ctypes.data, target.size, int(DType.UINT8))
                )
        signature = signatures[rank] if signatures else 0
        lowered = lower_messages(messages, machine.comm_args(rank), rules, signature)
        for message, position in zip(messages, lowered.positions, strict=True):
            block = lowered.args if lowered.table is None else lowered.table
            assert struct.unpack_from("<Q", block, position) == (message.address,)
        keep.append(hold_table(lowered))
        args.append(lowered.args)
        comes = (messages or signature) and (only is None or rank in only)
        blocks.append(blocks_of(lowered) if comes else 0)
        bulk, room = bulk or lowered.bulk_blocks > 0, max(room, lowered.capacity)
    for argument in args:  # bytes behind the messages are ignored
        argument.extend(bytes(room))
    machine.launch(replace(rules.kernel_spec(bulk, room), threads=THREADS), args, blocks)
    answers = []
    for s, (source, _), (target, room) in zip(sends, sources, targets):
        outside = room.size - target.size - int((room == 0xA5).sum()) + int((target == 0xA5).sum())
        wrong = int((source != target).sum()) if source.size == target.size else 0
        answers.append(
            f"{s}: {wrong} bytes wrong, {outside} written outside" if wrong or outside else ""
        )
    return answers
