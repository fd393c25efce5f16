"""``with miraccl.group():`` collects the calls of a thread and starts them together at the end.

Sends and receives of a group therefore cannot deadlock through their order. Once there is a GPU
side, blocks begin and end in compiled code (``fastpath.cuda.groups``), whose state for a group of
one thread is ``_record``. The first call that the fast path does not handle turns it into a
``Group``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

from miraccl.executor.cuda import fast_call_layout
from miraccl.native import atomics

_record = (ctypes.c_int64 * fast_call_layout.GROUPS_WORDS)()
_ADDRESS = ctypes.addressof(_record)
_OPEN = _ADDRESS + fast_call_layout.GROUPS_OPEN
_add = atomics.add


def address() -> int:
    """Return the address of the group state that compiled code reads (``layout.GROUPS_*``).

    Its first word counts the open groups of this process. The CPU fast path does not know threads,
    so it leaves all calls to Python while a group is open.
    """
    global _add
    _add = atomics.bound("add_word")
    return _ADDRESS


class GroupBatch(Protocol):
    """Calls that a group has collected for one communicator."""

    def run(self) -> None: ...
    def drop(self) -> None: ...


AnyBatch = TypeVar("AnyBatch", bound=GroupBatch)


class Waitable(Protocol):
    def wait(self) -> Any: ...


class TransferCore(Protocol):
    """``CommunicatorCore``, as groups use it."""

    def exchange(self, transfers: list[Any], result: Any, name: str, async_op: bool) -> Any: ...
    def start_exchange(self, transfers: list[Any], name: str) -> Waitable: ...


class _CpuBatch:
    """Collected calls on CPU memory: transfers by communicator, operations in call order."""

    def __init__(self, owner: Any) -> None:
        self.transfers: dict[TransferCore, list[Any]] = {}
        self.operations: list[Callable[[], Any]] = []

    def run(self) -> None:
        """Run the transfers of all communicators concurrently, then the operations."""
        # Concurrently, because other ranks may have started with another communicator. Operations
        # of all communicators keep the order of the calls, since ranks may share several of them.
        members = list(self.transfers)
        begun = [member.start_exchange(self.transfers[member], "group") for member in members[1:]]
        for member in members[:1]:
            member.exchange(self.transfers[member], None, "group", False)
        for work in begun:
            work.wait()
        for run in self.operations:
            run()

    def drop(self) -> None:
        """Discard the batch; nothing has started."""


class Group:
    """Calls collected in the outermost ``with`` block of a thread; batches run in order."""

    __slots__ = ("batches", "depth")

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth  # open blocks
        self.batches: dict[Any, Any] = {}

    def batch(self, owner: Any, make: Callable[[Any], AnyBatch]) -> AnyBatch:
        """Return the batch of ``owner``, created by ``make(owner)`` on first use."""
        found: AnyBatch | None = self.batches.get(owner)
        if found is None:
            found = self.batches[owner] = make(owner)
        return found

    def transfer(self, core: TransferCore, transfer: Any) -> None:
        """Collect a send or receive on CPU memory."""
        self.batch(_CpuBatch, _CpuBatch).transfers.setdefault(core, []).append(transfer)

    def run(self, run: Callable[[], Any]) -> None:
        """Collect another operation on CPU memory."""
        self.batch(_CpuBatch, _CpuBatch).operations.append(run)


class _Local(threading.local):
    # A class attribute: reading an attribute that the thread has not set costs 0.5 us.
    group: Group | None = None


_local = _Local()


def _begin() -> None:
    whole = current()
    if whole is None:
        whole = _local.group = Group()
        _add(_OPEN, 1)
    whole.depth += 1


def _end(
    kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
) -> None:
    whole = current()
    assert whole is not None
    whole.depth -= 1
    if whole.depth:
        return
    _local.group = None
    _add(_OPEN, -1)
    waiting = iter(whole.batches.values())
    try:
        if kind is None:
            for part in waiting:
                part.run()
    finally:
        for part in waiting:
            part.drop()


class Block:
    """The ``with`` block of a group. It has no state: a thread has one group; nested blocks join
    it.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        _begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _end(kind, value, trace)


_block = Block()


def group() -> Block:
    """Return a context manager that collects the calls of this thread and starts them at its end.

    Sends and receives of a communicator start together. Results of calls inside the block are valid
    after it. Blocks may be nested; the outermost one counts. If the block raises, the collected
    calls are dropped and nothing was sent.

    Raises:
        InvalidUsage: A call inside the block has ``async_op=True``.
    """
    return _block


# ---- groups that compiled code has opened

ReplayCalls = Callable[[Group], None]
#: Recorders of the calls of the group in ``_record``; each replays them into a ``Group``.
_compiled_batches: list[ReplayCalls] = []


def _is_compiled() -> int:
    """Return 1 if this thread's group is only known to compiled code; replaced by a builtin."""
    return 0


def install_fast_path(
    begin: Callable[..., None], end: Callable[..., None], is_compiled: Callable[[], int]
) -> None:
    """Begin and end blocks with these compiled functions, which fall back to ``_begin`` and
    ``_end``.
    """
    global _is_compiled
    for where, value in (
        (fast_call_layout.GROUPS_BATCHES, _compiled_batches),
        (fast_call_layout.GROUPS_BEGIN, _begin),
        (fast_call_layout.GROUPS_END, _end),
        (fast_call_layout.GROUPS_NONE, None),
    ):
        _record[where // 8] = id(value)
    _is_compiled = is_compiled
    Block.__enter__, Block.__exit__ = begin, end  # type: ignore[method-assign]


def _adopt_compiled_group() -> None:
    """Convert the group of this thread in ``_record`` to a ``Group``."""
    whole = _local.group = Group(_record[fast_call_layout.GROUPS_DEPTH // 8])
    noted = _compiled_batches.copy()
    _compiled_batches.clear()
    _record[fast_call_layout.GROUPS_STATE // 8] = _record[fast_call_layout.GROUPS_THREAD // 8] = 0
    for hand_over in noted:
        hand_over(whole)


def is_single_compiled_block() -> bool:
    """Return True if this thread's group is one block that only compiled code knows."""
    return bool(_is_compiled()) and _record[fast_call_layout.GROUPS_DEPTH // 8] == 1


def current() -> Group | None:
    """Return the open group of this thread, or None."""
    if _is_compiled():
        _adopt_compiled_group()
    return _local.group
