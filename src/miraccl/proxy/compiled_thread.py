"""Base of the compiled engines: a progress thread whose rounds are compiled code without the GIL.

The compiled loop returns to Python for commands of other threads and for links that have ended.
Its first page is the one of ``kernels.link_layout``; the links of its table have that layout, too.
"""

from __future__ import annotations

import abc
import ctypes
import os
import select
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, TypeVar

from miraccl import native
from miraccl.proxy.kernels import link_layout as layout
from miraccl.proxy.progress_thread import ProgressThread, ThreadPeer
from miraccl.transport.base import OnLost, Wake
from miraccl.transport.fifo import PAGE_BYTES, Atomics, PrivateMemory, memory_at
from miraccl.wire.proxy_records import Loss, LossKind

#: Nanoseconds that an idle engine polls before it sleeps: most answers arrive within this time, and
#: waking a sleeping thread costs about as much.
SPIN_NS = 50_000


def has_one_core() -> bool:
    """Return True if this process may use a single core.

    A thread that polls then keeps its peers, and the kernel's thread that delivers packets, from
    running (Soft-RoCE in a guest with one processor: 340 us per message of 64 KiB with sleeps,
    1000 us with polls and yields).
    """
    return len(os.sched_getaffinity(0)) == 1


_DOORBELL_DATA = 0xFFFFFFFF
_EPOLL_CTL_ADD = 1
_TABLE_ENTRIES = 64

Kernel = Callable[[int, int], int]
"""Compiled function of (address, argument)."""


class _EpollEvent(ctypes.Structure):
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))
    _pack_ = 1 if os.uname().machine == "x86_64" else 0


_libc = ctypes.CDLL(None, use_errno=True)


class CompiledPeer(ThreadPeer, Protocol):
    """Connection of a compiled engine to one peer.

    Attributes:
        index: Entry in the engine's table.
        address: Compiled state.
    """

    index: int

    @property
    def address(self) -> int: ...
    @property
    def peer(self) -> int: ...
    def take_end(self) -> tuple[bool, Loss | None]:
        """Return (True, loss) once, when the connection has ended; the loss is None after CLOSE on
        both sides.
        """


LinkT = TypeVar("LinkT", bound=CompiledPeer)


class CompiledThread(ProgressThread[LinkT]):
    """Progress thread that runs the loop ``run`` of a kernel.

    Args:
        control: Address of the executor's control page, by which compiled code wakes it; 0 to
            call ``wake`` instead.
        spin_ns: Nanoseconds that an idle thread polls; None: ``SPIN_NS``, 0 with a single core.
    """

    #: Module of the kernel, which has ``run`` and ``close_link``.
    kernel: ClassVar[str]
    #: Bytes of the engine's state; its first page is that of ``link_layout``.
    state_bytes: ClassVar[int] = layout.ENGINE_BYTES

    def __init__(
        self,
        *,
        rank: int,
        wake: Wake,
        on_lost: OnLost,
        control: int = 0,
        atomics: Atomics | None = None,
        spin_ns: int | None = None,
    ) -> None:
        self._library = native.library(self.kernel)
        self._run, self._close_link = self._function("run"), self._function("close_link")
        self._memory = PrivateMemory(self.state_bytes + PAGE_BYTES)
        self._table = PrivateMemory(8 * _TABLE_ENTRIES)
        self._entries = _TABLE_ENTRIES
        if spin_ns is None:
            spin_ns = 0 if has_one_core() else SPIN_NS
        self._control, self._spin_ns, self._wake_fd = control, spin_ns, -1
        super().__init__(rank=rank, wake=wake, on_lost=on_lost, atomics=atomics)

    def _function(self, name: str) -> Kernel:
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        return kind(self._library.address(native.PREFIX + name))

    # --- what a subclass defines

    @abc.abstractmethod
    def _end_link(self, link: LinkT, loss: Loss | None) -> None:
        """Send the last words to a peer whose connection has ended, and free it."""

    def _service(self) -> None:
        """Do what compiled code leaves to Python; called after every return of the loop."""

    def close(self, *, linger: float = 0.0) -> None:
        super().close(linger=linger)
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    # --- the thread

    @property
    def asleep(self) -> int:
        return self._memory.address + self.state_bytes

    @property
    def rounds(self) -> int:
        """Number of rounds of the thread."""
        return self._get(layout.ENGINE_ROUNDS)

    def _prepare(self) -> None:
        self._watch(self._doorbell, select.EPOLLIN, _DOORBELL_DATA)
        for offset, value in (
            (layout.ENGINE_LINKS, self._table.address),
            (layout.ENGINE_EPOLL, self._epoll.fileno()),
            (layout.ENGINE_DOORBELL, self._doorbell),
            (layout.ENGINE_ASLEEP, self.asleep),
            (layout.ENGINE_CTRL, self._control),
            (layout.ENGINE_SPIN_NS, self._spin_ns),
            (layout.ENGINE_DOZE_NS, layout.DOZE_NS),
        ):
            self._set(offset, value)

    def _share_core(self, channels: Sequence[int]) -> None:
        """Let executors sleep in ``drive``, as they share a single core with the thread.

        Args:
            channels: Descriptor of the completion channel of each device.
        """
        if self._wake_fd < 0:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        fds = (self._wake_fd, *channels)
        for index, fd in enumerate(fds):
            self._set(layout.ENGINE_SLEEP_FDS + 8 * index, fd | select.POLLIN << 32)
        self._set(layout.ENGINE_NSLEEP_FDS, len(fds))
        self._set(layout.ENGINE_DOZE_NS, layout.ONE_CORE_DOZE_NS)
        self._set(layout.ENGINE_ONE_CORE, 1)

    def _request_attention(self) -> None:
        self._set(layout.ENGINE_ATTENTION, 1)
        super()._request_attention()

    def _watch(self, fd: int, events: int, data: int) -> None:
        """Have epoll report a descriptor to the compiled loop as ``data``."""
        event = _EpollEvent(events, data)
        if _libc.epoll_ctl(self._epoll.fileno(), _EPOLL_CTL_ADD, fd, ctypes.byref(event)) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def _advance(self) -> None:
        self._run(self._memory.address, 0)
        self._set(layout.ENGINE_ATTENTION, 0)
        self._commands.run_pending()
        self._service()
        self._report_ended()
        if self._get(layout.ENGINE_DIRTY):
            self._set(layout.ENGINE_DIRTY, 0)
            self._wake(self.rank)

    def _report_ended(self) -> None:
        """Free links that have ended, and report losses."""
        for link in list(self._peers.values()):
            ended, loss = link.take_end()
            if not ended:
                continue
            self._end_link(link, loss)
            if loss:
                self._set(layout.ENGINE_DIRTY, 1)
                self._report(link.peer, loss)
        self._notify_closers()

    def _fail(self, error: Exception) -> None:
        loss = Loss(LossKind.INTERNAL, f"has no {self.noun}: {error!r}")
        peers = list(self._peers)
        try:
            self._remove(peers)
        finally:
            for peer in peers:
                self._report(peer, loss)

    def _begin_close(self, peer: LinkT) -> None:
        self._close_link(peer.address, 0)

    def _remove(self, peers: Sequence[int]) -> None:
        for peer in peers:
            link = self._peers.pop(peer, None)
            if link:
                self._set_entry(link.index, 0)
                self._free(link)

    @abc.abstractmethod
    def _free(self, link: LinkT) -> None:
        """Close a link that leaves the table; idempotent."""

    # --- memory

    def _free_entry(self) -> int:
        """Return a free entry of the table of links, growing it if there is none."""
        used = {link.index for link in self._peers.values()}
        index = next(i for i in range(len(used) + 1) if i not in used)
        if index >= self._entries:
            grown = PrivateMemory(16 * self._entries)
            memory_at(grown.address, 8 * self._entries)[:] = memory_at(
                self._table.address, 8 * self._entries
            )
            self._table, self._entries = grown, 2 * self._entries
            self._set(layout.ENGINE_LINKS, grown.address)
        return index

    def _set_entry(self, index: int, address: int) -> None:
        self._atomics.store_release(self._table.address + 8 * index, address)
        self._set(layout.ENGINE_NLINKS, max(index + 1, self._get(layout.ENGINE_NLINKS)))

    def _get(self, offset: int) -> int:
        return self._atomics.load_acquire(self._memory.address + offset)

    def _set(self, offset: int, value: int) -> None:
        self._atomics.store_release(self._memory.address + offset, value)
