"""``with miraccl.group():`` collects calls and starts them together at the end, so that no order of sends and receives can deadlock.

Once there is a GPU side, groups begin and end in compiled code (``executor.cuda.doors.groups``).  What that knows of a group of one thread
is in ``_record``; the first call that is not a door's makes a ``Group`` of it, and the rest is done here.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

from miraccl.fastpath.cuda import layout as at
from miraccl.native import atomics

_record = (ctypes.c_int64 * at.GROUPS_WORDS)()
_ADDRESS = ctypes.addressof(_record)
_OPEN = _ADDRESS + at.GROUPS_OPEN
_add = atomics.add


def address() -> int:
    """The address of the words that compiled code works on (``at.GROUPS_*``). The first one counts the groups that threads of this process
    have open. Doors of the CPU do not know about threads, so while any group is open they leave all calls to Python."""
    global _add
    _add = atomics.bound("add_word")
    return _ADDRESS


class GroupBatch(Protocol):
    """What a group has collected for one communicator."""

    def run(self) -> None: ...
    def drop(self) -> None: ...


AnyBatch = TypeVar("AnyBatch", bound=GroupBatch)


class Waitable(Protocol):
    def wait(self) -> Any: ...


class TransferCore(Protocol):
    """A communicator, as groups see it."""

    def exchange(self, transfers: list[Any], result: Any, name: str, async_op: bool) -> Any: ...
    def start_exchange(self, transfers: list[Any], name: str) -> Waitable: ...


class _CpuBatch:
    """Calls on CPU memory: sends and receives of each communicator, and what runs the others, in the order in which these were called.

    Ranks that send nothing over a communicator meet it only in a collective, so the order of these is that of the calls, whatever
    communicator they are of.
    """

    def __init__(self, owner: Any) -> None:
        self.transfers: dict[TransferCore, list[Any]] = {}
        self.operations: list[Callable[[], Any]] = []

    def run(self) -> None:
        """Messages of several communicators go on at the same time: other ranks may have begun with other ones."""
        members = list(self.transfers)
        begun = [member.start_exchange(self.transfers[member], "group") for member in members[1:]]
        for member in members[:1]:
            member.exchange(self.transfers[member], None, "group", False)
        for work in begun:
            work.wait()
        for run in self.operations:
            run()

    def drop(self) -> None:
        """Nothing has begun."""


class Group:
    """What a thread collects between the beginning of its outermost ``with`` block and the end. ``parts`` run in their order."""

    __slots__ = ("depth", "batches")

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth  # blocks that are open
        self.batches: dict[Any, Any] = {}

    def batch(self, owner: Any, make: Callable[[Any], AnyBatch]) -> AnyBatch:
        """What is collected for ``owner``, at first ``make(owner)``."""
        found: AnyBatch | None = self.batches.get(owner)
        if found is None:
            found = self.batches[owner] = make(owner)
        return found

    def transfer(self, core: TransferCore, transfer: Any) -> None:
        """A send or receive on CPU memory."""
        self.batch(_CpuBatch, _CpuBatch).transfers.setdefault(core, []).append(transfer)

    def run(self, run: Callable[[], Any]) -> None:
        """Another operation on CPU memory."""
        self.batch(_CpuBatch, _CpuBatch).operations.append(run)


class _Local(threading.local):
    group: Group | None = (
        None  # of the class: asking for what a thread has not set would cost half a microsecond
    )


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
    """The ``with`` block; inside another one it is a part of that. It has nothing of its own: a thread has one group."""

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
    """Batch the calls of this thread inside the ``with`` block: they start when it ends, sends and receives of a communicator together.

    Results of calls inside are filled in when the block has ended.  Groups may be nested: the outermost counts.  An exception inside
    the block drops the batch; nothing of it was sent.
    """
    return _block


# ---- groups that compiled code has begun

ReplayCalls = Callable[[Group], None]
_compiled_batches: list[
    ReplayCalls
] = []  # by whom calls of the group are noted in which ``_record`` has a thread


def _is_compiled() -> int:
    """Whether this thread's group is that one."""
    return 0


def install_fast_path(
    begin: Callable[..., None], end: Callable[..., None], is_compiled: Callable[[], int]
) -> None:
    """Begin and end blocks by these builtins from now on; they hand to Python what they do not take."""
    global _is_compiled
    for where, value in (
        (at.GROUPS_NOTED, _compiled_batches),
        (at.GROUPS_BEGIN, _begin),
        (at.GROUPS_END, _end),
        (at.GROUPS_NONE, None),
    ):
        _record[where // 8] = id(value)
    _is_compiled = is_compiled
    Block.__enter__, Block.__exit__ = begin, end  # type: ignore[method-assign]


def _adopt_compiled_group() -> None:
    """Make a ``Group`` of the group that this thread has in ``_record``."""
    whole = _local.group = Group(_record[at.GROUPS_DEPTH // 8])
    noted = _compiled_batches.copy()
    _compiled_batches.clear()
    _record[at.GROUPS_STATE // 8] = _record[at.GROUPS_THREAD // 8] = 0
    for hand_over in noted:
        hand_over(whole)


def is_single_compiled_block() -> bool:
    """Whether this thread's group is one block, and only compiled code knows of it."""
    return bool(_is_compiled()) and _record[at.GROUPS_DEPTH // 8] == 1


def current() -> Group | None:
    """The group that this thread has open."""
    if _is_compiled():
        _adopt_compiled_group()
    return _local.group
