"""The verbs engine: one thread per rank that moves messages between FIFOs and queue pairs.

The thread runs compiled code without the interpreter's lock (``proxy.verbs.kernels``). It returns
to Python for commands of other threads, queue pairs that fail, and links that have ended.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from miraccl import clock, native, trace
from miraccl.errors import CommunicatorClosed, MiracclError, as_system_failure
from miraccl.native import verbs_abi as abi
from miraccl.native.verbs_abi import VerbsLibrary
from miraccl.proxy.commands import COMMAND_TIMEOUT_S, CommandQueue
from miraccl.proxy.kernels import link_layout
from miraccl.proxy.stream_engine import FAULT_TEXTS, register_descriptor
from miraccl.proxy.verbs.connection_memory import EngineConnection
from miraccl.proxy.verbs.kernels import verbs_layout as layout
from miraccl.proxy.verbs.recovery import Kernel, Recovery
from miraccl.transport.base import OnLost, Wake
from miraccl.transport.fifo import PAGE_BYTES, PrivateMemory, memory_at, native_atomics
from miraccl.transport.verbs import VerbsConnection
from miraccl.transport.verbs_device import ACCESS_REMOTE, VerbsDevice
from miraccl.transport.verbs_registrations import Registration, RegistrationCache
from miraccl.wire.proxy_records import CLOSED_WITHOUT_CLOSE_FRAME, Loss, LossKind
from miraccl.wire.stream import MAX_TEXT_BYTES, Frame, FrameType, encode_frame
from miraccl.wire.verbs.failover import NEVER
from miraccl.wire.verbs.rows import KIND_GONE

log = trace.logger("verbs")

KERNEL = "miraccl.proxy.verbs.kernels.verbs_engine"
#: Nanoseconds that an idle engine polls before it sleeps.
SPIN_NS = 50_000
_DOORBELL_DATA, _ASYNC_DATA = 0xFFFFFFFF, 0xFFFFFFFE
_TABLE_ENTRIES = 1024
#: Time in which the last rows of an ending link may leave.
FAREWELL_S = 0.1

_TEXTS = FAULT_TEXTS | {
    layout.REGISTER_FAILED: "cannot register {0} bytes at {1:#x} for a transfer (is the limit of "
    "locked memory, ulimit -l, too low?)",
    layout.BAD_ROW: "it sent a row of kind {0} on stream {1} that cannot be true ({2})",
    layout.BAD_PLACEMENT: "it placed message {0} of {1} bytes where it may not (place {2})",
}


@dataclass(eq=False)
class _Closer:
    """Links that are closing, and who waits for their end."""

    links: list[EngineConnection]
    done: clock.Event


class VerbsEngine:
    """Moves messages for one rank over verbs.

    Until ``close``, ``abort`` or ``detach`` has returned, memory given to FIFOs may still be
    touched.

    Args:
        rank: This rank, for errors and the thread's name.
        library: Functions of libibverbs.
        wake: Called with the rank after flags or tails were published, if ``control`` is 0.
        on_lost: Called once per lost peer, from the engine's thread.
        control: Address of the executor's control page, by which compiled code wakes it.

    Raises:
        SystemFailure: A descriptor or the thread cannot be created.
    """

    def __init__(
        self,
        *,
        rank: int,
        library: VerbsLibrary,
        wake: Wake,
        on_lost: OnLost,
        control: int = 0,
        spin_ns: int = SPIN_NS,
    ) -> None:
        self.rank = rank
        self._wake, self._on_lost = wake, on_lost
        self._library, self._atomics = library, native_atomics()
        compiled = native.library(KERNEL)
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        names = (
            *("run", "close_link", "fail_link", "post_receives", "post_special", "post_abort"),
            *("deregister_everything", "drain", "resolve", "end_streams"),
        )
        self._kernels: dict[str, Kernel] = {
            name: kind(compiled.address(native.PREFIX + name)) for name in names
        }
        self._recovery = Recovery(self._kernels)
        self._connections: dict[int, EngineConnection] = {}
        self._devices: list[VerbsDevice] = []
        self._failures: dict[int, str] = {}
        self._regions = RegistrationCache(
            self._register_region, self._deregister_region, max_entries=layout.MAX_REGIONS
        )
        self._owned: dict[int, list[Registration]] = {}
        self._closers: list[_Closer] = []
        self._commands = CommandQueue("the verbs engine", rank)
        self._memory = PrivateMemory(layout.VERBS_ENGINE_BYTES + PAGE_BYTES)
        self._table = PrivateMemory(8 * _TABLE_ENTRIES)
        self._stopping = self._closed = False
        self._thread = clock.thread(target=self._main, name=f"miraccl-verbs-{rank}", daemon=True)
        with as_system_failure("cannot start the verbs engine", rank=rank), ExitStack() as undo:
            self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._doorbell)
            self._epoll = undo.enter_context(select.epoll())
            register_descriptor(
                self._epoll.fileno(), self._doorbell, select.EPOLLIN, _DOORBELL_DATA
            )
            for offset, value in (
                (link_layout.ENGINE_LINKS, self._table.address),
                (link_layout.ENGINE_EPOLL, self._epoll.fileno()),
                (link_layout.ENGINE_DOORBELL, self._doorbell),
                (link_layout.ENGINE_ASLEEP, self.asleep),
                (link_layout.ENGINE_CTRL, control),
                (link_layout.ENGINE_SPIN_NS, spin_ns),
                (layout.FUNCTION_REG_MR, library.address("ibv_reg_mr")),
                (layout.FUNCTION_DEREG_MR, library.address("ibv_dereg_mr")),
                (layout.FUNCTION_GET_EVENT, library.address("ibv_get_cq_event")),
                (layout.FUNCTION_ACK_EVENTS, library.address("ibv_ack_cq_events")),
            ):
                self._set(offset, value)
            self._thread.start()
            undo.pop_all()

    # --- other threads

    @property
    def doorbell(self) -> int:
        return self._doorbell

    @property
    def asleep(self) -> int:
        return self._memory.address + layout.VERBS_ENGINE_BYTES

    def counters(self) -> dict[str, int]:
        """Return rounds, sleeps and registrations of single messages so far."""
        return {
            "rounds": self._get(link_layout.ENGINE_ROUNDS),
            "sleeps": self._get(layout.ENGINE_SLEEPS),
            "registrations": self._get(layout.ENGINE_REGISTERED),
        }

    def routes(self, peer: int) -> list[int]:
        """Return the queue pair that carries each stream to a peer."""
        return list(self._connections[peer].failover.route)

    def add_devices(self, devices: Sequence[VerbsDevice]) -> None:
        self._call(lambda: self._add_devices(devices))

    def add_region(self, address: int, nbytes: int) -> None:
        self._call(lambda: self._add_region(address, nbytes))

    def remove_region(self, address: int) -> None:
        """End the registration of a region; its memory may be unmapped afterwards."""
        self._call(lambda: self._remove_region(address))

    def attach(self, connections: Sequence[VerbsConnection]) -> None:
        self._call(lambda: self._attach(connections))

    def failure(self, peer: int) -> str:
        return self._failures.get(peer, "")

    def fail_queue_pair(self, peer: int, qp: int, text: str) -> None:
        """Treat a queue pair as failed."""
        self._call(lambda: self._recovery.fail_pair(self._connections[peer], qp, text))

    def detach(self, peers: Sequence[int], *, linger: float) -> None:
        deadline = clock.monotonic() + linger
        done = clock.event()
        with suppress(CommunicatorClosed):
            self._call(lambda: self._start_closing(peers, done))
            done.wait(max(0.0, deadline - clock.monotonic()))
            self._call(lambda: self._remove(peers))

    def abort(self, text: str) -> None:
        with suppress(CommunicatorClosed):
            self._call(lambda: self._abort(text))

    def close(self) -> None:
        """Close all connections and stop the thread; idempotent."""
        if self._closed:
            return
        with suppress(CommunicatorClosed):
            self._call(self._stop)
        self._closed = True
        self._thread.join(COMMAND_TIMEOUT_S)
        self._epoll.close()
        os.close(self._doorbell)

    def _call(self, action: Callable[[], None]) -> None:
        if threading.current_thread() is self._thread:
            return action()
        self._commands.call(action, self._request_attention)

    def _request_attention(self) -> None:
        self._atomics.store_release(self._memory.address + link_layout.ENGINE_ATTENTION, 1)
        os.eventfd_write(self._doorbell, 1)

    # --- the thread

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._set_timer()
                self._kernels["run"](self._memory.address, 0)
                self._set(link_layout.ENGINE_ATTENTION, 0)
                self._commands.run_pending()
                self._take_events()
                for each in list(self._connections.values()):
                    self._service(each)
                self._report_ended()
                if self._get(link_layout.ENGINE_DIRTY):
                    self._set(link_layout.ENGINE_DIRTY, 0)
                    self._wake(self.rank)
        except Exception as error:  # a bug of ours: no rank may wait for an engine that is gone
            log.exception("the verbs engine failed")
            loss = Loss(LossKind.INTERNAL, f"has no verbs engine: {error!r}")
            peers = list(self._connections)
            self._remove(peers)
            for peer in peers:
                self._report(peer, loss)
            self._wake(self.rank)
        finally:
            self._remove(list(self._connections))
            self._commands.close()
            for closer in self._closers:
                closer.done.set()

    def _set_timer(self) -> None:
        timers = (self._recovery.next_timer(each) for each in self._connections.values())
        at = min(timers, default=NEVER)
        self._set(layout.ENGINE_TIMER_NS, 0 if at == NEVER else max(1, int(at * 1e9)))

    def _service(self, each: EngineConnection) -> None:
        if not each.alive:
            return
        self._recovery.service(each)
        self._recovery.timer(each)
        if not each.conn.ready.is_set():
            heard = each.word(layout.CONN_HELLOS)
            up = [i for i in range(each.count) if i not in each.texts]
            if up and all(heard >> i & 1 for i in up):
                each.conn.ready.set()

    def _take_events(self) -> None:
        """Process asynchronous events of devices: a port or a device that is lost."""
        if not self._get(layout.ENGINE_ASYNC):
            return
        self._set(layout.ENGINE_ASYNC, 0)
        for number, device in enumerate(self._devices):
            while (kind := device.next_event()) >= 0:
                if kind in (abi.EVENT_PORT_ERR, abi.EVENT_DEVICE_FATAL):
                    what = "device" if kind == abi.EVENT_DEVICE_FATAL else "port"
                    self._fail_device(number, f"the {what} {device.name} is down")

    def _fail_device(self, number: int, text: str) -> None:
        for each in self._connections.values():
            for qp in range(number, each.count, len(self._devices)):
                if each.alive:
                    self._recovery.fail_pair(each, qp, text)

    # --- ends

    def _report_ended(self) -> None:
        """Close the queue pairs of links that have ended, and report losses."""
        for each in list(self._connections.values()):
            if each.alive or each.link_word(link_layout.LINK_REPORTED):
                continue
            each.store_link(link_layout.LINK_REPORTED, 1)
            lost = each.link_word(link_layout.LINK_STATE) == link_layout.STATE_LOST
            loss = self._loss(each) if lost else None
            self._take_leave(each, loss)
            self._disconnect(each)
            if loss:
                self._set(link_layout.ENGINE_DIRTY, 1)
                self._report(each.conn.peer, loss)
            each.conn.ready.set() if not loss else None
        for closer in [c for c in self._closers if not any(each.alive for each in c.links)]:
            self._closers.remove(closer)
            closer.done.set()

    def _take_leave(self, each: EngineConnection, loss: Loss | None) -> None:
        """Send the last row: an ABORT for a fault of the peer or of this side, else GONE."""
        if loss and loss.kind in (LossKind.PROTOCOL, LossKind.INTERNAL):
            self._send_abort(each, loss.detail)
        elif loss and loss.kind is LossKind.CLOSED:
            self._post_last(each, KIND_GONE)

    def _loss(self, each: EngineConnection) -> Loss:
        """Return why a link ended, in the words of ``wire.proxy``."""
        kind = each.link_word(link_layout.LINK_FAULT)
        words = (link_layout.LINK_FAULT_A, link_layout.LINK_FAULT_B, link_layout.LINK_FAULT_C)
        a, b, c = (each.link_word(word) for word in words)
        code = each.link_word(link_layout.LINK_FAULT_CODE)
        if kind == link_layout.FAULT_CLOSED:
            return Loss(LossKind.CLOSED, "closed its communicator")
        if kind == link_layout.FAULT_RESET and code == layout.ALL_PATHS_FAILED:
            return Loss(LossKind.RESET, self._describe_failures(each))
        if kind == link_layout.FAULT_RESET:
            return Loss(LossKind.RESET, CLOSED_WITHOUT_CLOSE_FRAME)
        if kind == link_layout.FAULT_ABORTED:
            text = bytes(memory_at(each.link.address + link_layout.LINK_TEXT, a))
            return Loss(LossKind.ABORTED, f"gave up: {text.decode('utf-8', 'replace')}")
        detail = _TEXTS.get(code, "fault {0}").format(a, b, c)
        if kind == link_layout.FAULT_PROTOCOL:
            return Loss(LossKind.PROTOCOL, f"violated the protocol: {detail}")
        return Loss(LossKind.INTERNAL, detail)

    def _describe_failures(self, each: EngineConnection) -> str:
        failed = [f"{each.conn.edges[qp]}: {text}" for qp, text in sorted(each.texts.items())]
        return "no queue pair works: " + "; ".join(dict.fromkeys(failed))

    def _report(self, peer: int, loss: Loss) -> None:
        log.info("rank %d is lost (%s): %s", peer, loss.kind.value, loss)
        self._failures[peer] = str(loss)
        try:
            self._on_lost(peer, loss)
        except Exception:
            log.exception("on_lost failed")

    def _post_last(self, each: EngineConnection, kind: int) -> None:
        """Post a row and give it a moment to leave."""
        if self._recovery.post(each, kind):
            self._flush(each)

    def _send_abort(self, each: EngineConnection, text: str) -> None:
        """Send an ABORT on the first stream that has room."""
        data = text.encode()[:MAX_TEXT_BYTES]
        memory_at(each.conn.memory.text_out, len(data))[:] = data
        for stream in range(each.count):
            frame = encode_frame(Frame(FrameType.ABORT, stream, length=len(data)))
            words = each.write_arguments(stream, len(data), data=frame)
            if self._kernels["post_abort"](each.state.address, words):
                self._flush(each)
                return

    def _flush(self, each: EngineConnection) -> None:
        """Wait until the work requests of the pairs that work have completed."""
        deadline = clock.monotonic() + FAREWELL_S
        while clock.monotonic() < deadline:
            self._kernels["drain"](each.state.address, 0)
            if all(
                each.qp_word(i, layout.QP_STATE) != layout.QP_ACTIVE
                or each.qp_word(i, layout.QP_DONE) >= each.qp_word(i, layout.QP_POSTED)
                for i in range(each.count)
            ):
                return
            clock.sleep(0.0005)

    def _disconnect(self, each: EngineConnection) -> None:
        """Destroy the queue pairs of a connection and end its registrations. Idempotent."""
        if each.closed:
            return
        each.closed = True
        for i, qp in enumerate(each.conn.qps):
            each.store_qp(i, layout.QP_STATE, layout.QP_CLOSED)
            qp.close()
        self._kernels["deregister_everything"](each.state.address, 0)

    # --- commands

    def _add_devices(self, devices: Sequence[VerbsDevice]) -> None:
        self._devices = list(devices)
        for number, device in enumerate(devices):
            start = layout.ENGINE_DEVICES + number * layout.DEVICE_BYTES
            for offset, value in (
                (layout.DEVICE_PD, device.pd),
                (layout.DEVICE_POLL_CQ, device.operations[abi.OP_POLL_CQ]),
                (layout.DEVICE_REQ_NOTIFY, device.operations[abi.OP_REQ_NOTIFY_CQ]),
                (layout.DEVICE_POST_SEND, device.operations[abi.OP_POST_SEND]),
                (layout.DEVICE_POST_RECV, device.operations[abi.OP_POST_RECV]),
                (layout.DEVICE_CHANNEL, device.channel),
                (layout.DEVICE_ACCESS, device.extra_access),
            ):
                self._set(start + offset, value)
            for fd, data in ((device.channel_fd, number), (device.async_fd, _ASYNC_DATA)):
                register_descriptor(self._epoll.fileno(), fd, select.EPOLLIN, data)
        self._set(layout.ENGINE_NDEVICES, len(devices))

    def _add_region(self, address: int, nbytes: int) -> None:
        # Without room for one more, the messages of the range are registered one by one.
        region = self._regions.acquire(address, nbytes)
        if region is not None:
            self._owned.setdefault(address, []).append(region)
        self._write_regions()

    def _remove_region(self, address: int) -> None:
        for region in self._owned.pop(address, []):
            self._regions.release(region)
            self._regions.invalidate(region.address, region.nbytes)
        self._write_regions()

    def _register_region(self, address: int, nbytes: int) -> list[tuple[VerbsDevice, int, int]]:
        """Register a range on all devices, or on none; return (device, mr, keys) of each."""
        made: list[tuple[VerbsDevice, int, int]] = []
        try:
            for device in self._devices:
                mr = device.make_registration(address, nbytes, ACCESS_REMOTE)
                lkey, rkey = abi.word32(mr + abi.MR_LKEY), abi.word32(mr + abi.MR_RKEY)
                keys = (lkey | rkey << 32) - (1 << 64 if rkey >> 31 else 0)
                made.append((device, mr, keys))
        except BaseException:
            self._deregister_region(made)
            raise
        return made

    @staticmethod
    def _deregister_region(made: list[tuple[VerbsDevice, int, int]]) -> None:
        for device, mr, _ in made:
            device.library.call("ibv_dereg_mr", mr)

    def _write_regions(self) -> None:
        """Write the table in which compiled code finds the keys of a payload."""
        valid = [region for region in self._regions if region.valid]
        for number, region in enumerate(valid):
            start = layout.ENGINE_REGIONS + number * layout.REGION_BYTES
            self._set(start + layout.REGION_START, region.address)
            self._set(start + layout.REGION_END, region.end)
            for index, (_, _, keys) in enumerate(region.handle):
                self._set(start + layout.REGION_KEYS + 8 * index, keys)
        self._set(layout.ENGINE_NREGIONS, len(valid))

    def _attach(self, connections: Sequence[VerbsConnection]) -> None:
        for conn in connections:
            if conn.peer in self._connections:
                raise MiracclError(
                    f"cannot attach rank {conn.peer}: it is attached already", rank=self.rank
                )
            index = self._free_entry()
            each = EngineConnection.build(
                conn, index=index, engine=self._memory.address, initiator=self.rank < conn.peer
            )
            self._connections[conn.peer] = each
            self._set_entry(index, each.state.address)
            for qp in range(len(conn.qps)):
                self._recovery.start(each, qp)

    def _free_entry(self) -> int:
        used = {each.index for each in self._connections.values()}
        index = next(i for i in range(len(used) + 1) if i not in used)
        if index >= _TABLE_ENTRIES:
            raise MiracclError(f"cannot connect more than {_TABLE_ENTRIES} peers over verbs")
        return index

    def _set_entry(self, index: int, address: int) -> None:
        self._atomics.store_release(self._table.address + 8 * index, address)
        count = max(index + 1, self._get(link_layout.ENGINE_NLINKS))
        self._set(link_layout.ENGINE_NLINKS, count)

    def _start_closing(self, peers: Sequence[int], done: clock.Event) -> None:
        closing = [self._connections[peer] for peer in peers if peer in self._connections]
        for each in closing:
            self._kernels["close_link"](each.state.address, 0)
        self._closers.append(_Closer(closing, done))

    def _remove(self, peers: Sequence[int]) -> None:
        for peer in peers:
            each = self._connections.pop(peer, None)
            if each:
                self._set_entry(each.index, 0)
                if each.alive:
                    self._post_last(each, KIND_GONE)
                self._disconnect(each)

    def _abort(self, text: str) -> None:
        for each in self._connections.values():
            if each.alive:
                self._send_abort(each, text)
                each.store_link(link_layout.LINK_STATE, link_layout.STATE_FINISHED)
        self._remove(list(self._connections))

    def _stop(self) -> None:
        self._remove(list(self._connections))
        self._regions.clear()
        self._write_regions()
        self._stopping = True

    def _get(self, offset: int) -> int:
        return self._atomics.load_acquire(self._memory.address + offset)

    def _set(self, offset: int, value: int) -> None:
        self._atomics.store_release(self._memory.address + offset, value)


def open_engine(
    rank: int, library: VerbsLibrary, wake: Wake, on_lost: OnLost, control: int
) -> VerbsEngine:
    """Return an engine with default settings."""
    return VerbsEngine(rank=rank, library=library, wake=wake, on_lost=on_lost, control=control)
