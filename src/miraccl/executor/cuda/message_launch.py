"""Launches of the kernel ``p2p``: lowered once per pattern of messages, run with new addresses.

Patterns that exceed the arguments of a launch use a table in pinned memory. A table is reused when
its launch has completed; a captured launch keeps its table, since the graph may be replayed at any
time.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.launch import OVERLAP_MIN_ARCH, KernelLaunch, Kernels
from miraccl.executor.cuda.lower import CommArgs
from miraccl.executor.cuda.message_lowering import (
    LoweredMessages,
    P2pMessage,
    WarpQueueRules,
    lower_messages,
)
from miraccl.executor.cuda.plan import DevicePlan
from miraccl.executor.cuda.source import Framing
from miraccl.executor.cuda.warp_queues import OVERLAP_THREADS

MAX_PATTERNS = 1024  # cached launches

_address = struct.Struct("<Q")


@dataclass
class _MessageTable:
    """Message table in pinned memory.

    ``event`` follows the last launch that reads the table; None after a capture.
    """

    host: int
    on_gpu: int
    nbytes: int
    event: Any = None
    free: bool = True


class _PatternLaunch(KernelLaunch):
    """Prepared launch of messages, complete but for the addresses; the two pointers of collectives
    are
    unused.
    """

    def __init__(
        self,
        gpu: Gpu,
        function: Any,
        plan: DevicePlan,
        lowered: LoweredMessages,
        overlaps: bool = False,
    ) -> None:
        super().__init__(gpu, function, plan, lowered.blocks, lowered.args, overlaps)
        self.lowered = lowered

    @property
    def argument_address(self) -> int:
        """Address of the kernel's argument."""
        return ctypes.addressof(self._args)

    def address_positions(self) -> list[int]:
        """Return the locations of the messages' buffer addresses in the arguments."""
        return [self.argument_address + position for position in self.lowered.positions]


class _TemplateLaunch(_PatternLaunch):
    """Pattern for compiled code, which writes sizes into it as well."""

    @property
    def last_plan(self) -> DevicePlan:
        blocks, threads = self._config.grid[0], self._config.block[0]
        return replace(
            self.plan,
            blocks=blocks,
            threads=threads,
            reason=_reason(len(self.lowered.positions), blocks, threads),
        )


def _reason(count: int, blocks: int, threads: int) -> str:
    return f"{count} messages, up to {blocks * threads // 32} warps"


class FastMessageTable(Protocol):
    """Table of prepared launches from which compiled code runs messages (``fastpath.cuda``)."""

    def add_messages(
        self,
        messages: Sequence[P2pMessage],
        positions: Sequence[int],
        launch: KernelLaunch,
        saturates_gpu: bool,
        signature: int = 0,
    ) -> None: ...

    def add_template(
        self,
        messages: Sequence[P2pMessage],
        lowered: LoweredMessages,
        rank: int,
        rules: WarpQueueRules,
        argument: int,
        launch: KernelLaunch,
        signature: int = 0,
    ) -> None: ...

    def has_template(self, messages: Sequence[P2pMessage], signature: int = 0) -> bool: ...

    def remove_messages(self) -> None: ...


class MessageLaunches:
    """Enqueues messages of one communicator on ``gpu``. For calls of one thread.

    ``rules`` is the same on all ranks. ``fast_path`` receives the launches that compiled code may
    run.
    """

    def __init__(
        self,
        gpu: Gpu,
        kernels: Kernels,
        comm_args: CommArgs,
        rules: WarpQueueRules,
        fast_path: FastMessageTable,
    ) -> None:
        self.gpu, self.rules = gpu, rules
        self._kernels, self._comm_args, self._fast_path = kernels, comm_args, fast_path
        self._patterns: dict[tuple[Any, ...], _PatternLaunch] = {}
        self._tables: list[_MessageTable] = []
        self.last_plan: DevicePlan | None = None

    def run(
        self, messages: Sequence[P2pMessage], stream: int, saturates_gpu: bool, signature: int = 0
    ) -> None:
        """Enqueue one launch for all messages in ``stream``. It does not wait; it allocates only
        tables.

        ``saturates_gpu``: it may use the whole GPU. ``signature``: the collective that the messages
        belong to, or 0 (``message_collectives``); a collective without messages on this rank is
        still launched.
        """
        if not messages and not signature:
            return
        if self.rules.nranks == 1:
            self._copy(messages, stream)
            return
        key = (
            signature,
            *[(receives, peer, nbytes, code) for receives, peer, _, nbytes, code in messages],
        )
        launch = self._patterns.get(key) or self._prepare(key, messages, saturates_gpu)
        lowered, table = launch.lowered, None
        target = lowered.args if lowered.table is None else lowered.table
        for message, position in zip(messages, lowered.positions):
            _address.pack_into(target, position, message[2])
        if lowered.table is not None:
            table = self._table(len(lowered.table))
            ctypes.memmove(table.host, bytes(lowered.table), len(lowered.table))
            lowered.set_table(table.on_gpu)
        launch.run(0, 0, stream)
        if table is not None:
            self._borrow(table, stream)
        self.last_plan = launch.plan

    def _prepare(
        self, key: tuple[Any, ...], messages: Sequence[P2pMessage], saturates_gpu: bool
    ) -> _PatternLaunch:
        self.gpu.make_current()
        signature = key[0]
        lowered = lower_messages(messages, self._comm_args, self.rules, signature)
        bulk = lowered.bulk_blocks > 0
        function = self._kernels.function(self.rules.kernel_spec(bulk, lowered.capacity))
        proto = "simple" if bulk else "ll128" if self.rules.frame is Framing.LINE else "ll"
        reason = _reason(len(messages), lowered.blocks, lowered.threads)
        if bulk:
            reason = f"{len(messages)} messages, {lowered.bulk_blocks} blocks"
        plan = DevicePlan(
            algo="p2p",
            proto=proto,
            blocks=lowered.blocks,
            threads=lowered.threads,
            unroll=4 if bulk else 8,
            reason=reason,
        )
        if len(self._patterns) >= MAX_PATTERNS:
            self._patterns.clear()
            self._fast_path.remove_messages()
        overlaps = (
            self.gpu.arch >= OVERLAP_MIN_ARCH
            and not bulk
            and lowered.blocks * lowered.threads <= OVERLAP_THREADS
        )
        launch = self._patterns[key] = _PatternLaunch(self.gpu, function, plan, lowered, overlaps)
        if lowered.table is None:
            self._fast_path.add_messages(
                messages, launch.address_positions(), launch, saturates_gpu, signature
            )
            if launch.record and not bulk and not self._fast_path.has_template(messages, signature):
                own = replace(lowered, args=lowered.args.copy())
                shaped = _TemplateLaunch(self.gpu, function, plan, own)
                self._fast_path.add_template(
                    messages,
                    own,
                    self._comm_args.rank,
                    self.rules,
                    shaped.argument_address,
                    shaped,
                    signature,
                )
        return launch

    def _copy(self, messages: Sequence[P2pMessage], stream: int) -> None:
        """Copy messages of a communicator with a single rank."""
        lowered = lower_messages(messages, self._comm_args, self.rules)
        assert len(lowered.positions) == len(messages)
        sends = [m for m in messages if not m.receives]
        receives = [m for m in messages if m.receives]
        for send, receive in zip(sends, receives):
            if send.nbytes and send.address != receive.address:
                self.gpu.copy(receive.address, send.address, send.nbytes, stream)

    # ---- tables

    def _table(self, nbytes: int) -> _MessageTable:
        for table in self._tables:
            if table.nbytes >= nbytes and (
                table.free or (table.event is not None and self.gpu.has_completed(table.event))
            ):
                return table
        with self.gpu.relaxed_capture():
            _, host, on_gpu = self.gpu.host_words(-(-nbytes // 4096) * 4096)
        table = _MessageTable(host=host, on_gpu=on_gpu, nbytes=-(-nbytes // 4096) * 4096)
        self._tables.append(table)
        return table

    def _borrow(self, table: _MessageTable, stream: int) -> None:
        table.free = False
        if self.gpu.is_capturing(stream):
            if table.event is not None:
                self.gpu.destroy_event(table.event)
            table.event = None
            return
        if table.event is None:
            table.event = self.gpu.make_event()
        self.gpu.record(table.event, stream)

    def close(self) -> None:
        """Free the tables; the GPU must have completed its work. May be called twice."""
        tables, self._tables = self._tables, []
        for table in tables:
            if table.event is not None:
                self.gpu.destroy_event(table.event)
            self.gpu.free_host(table.host)
