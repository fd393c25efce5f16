"""The verbs engine: one thread per rank that moves messages between FIFOs and queue pairs.

The thread runs compiled code without the interpreter's lock (``proxy.verbs.kernels``). It returns
to Python for commands of other threads, queue pairs that fail, and links that have ended.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import suppress

from miraccl import native, trace
from miraccl.native.verbs_abi import VerbsLibrary
from miraccl.proxy.compiled_thread import CompiledThread, Kernel, has_one_core
from miraccl.proxy.kernels import link_layout
from miraccl.proxy.verbs.connection_memory import EngineConnection
from miraccl.proxy.verbs.engine_devices import EngineDevices
from miraccl.proxy.verbs.farewell import Farewell
from miraccl.proxy.verbs.kernels import verbs_layout as layout
from miraccl.proxy.verbs.recovery import Recovery
from miraccl.transport.base import Driving, OnLost, Wake, WindowPort
from miraccl.transport.verbs import VerbsConnection
from miraccl.transport.verbs_device import VerbsDevice
from miraccl.transport.verbs_gpu_memory import GpuRange
from miraccl.wire.proxy_records import Loss
from miraccl.wire.verbs.failover import NEVER

_ASYNC_DATA = 0xFFFFFFFE
_FUNCTIONS = (
    *("fail_link", "post_receives", "post_special", "post_abort"),
    *("deregister_everything", "drain", "resolve", "end_streams"),
)


class VerbsEngine(CompiledThread[EngineConnection]):
    """Moves messages for one rank over verbs; see ``ProgressThread`` and ``CompiledThread``.

    Args:
        library: Functions of libibverbs.
    """

    noun = "verbs engine"
    thread_name = "verbs"
    log = trace.logger("verbs")
    kernel = "miraccl.proxy.verbs.kernels.verbs_engine"
    state_bytes = layout.VERBS_ENGINE_BYTES

    def __init__(
        self,
        *,
        rank: int,
        library: VerbsLibrary,
        wake: Wake,
        on_lost: OnLost,
        control: int = 0,
        spin_ns: int | None = None,
    ) -> None:
        self._verbs = library
        self._failures: dict[int, str] = {}
        super().__init__(rank=rank, wake=wake, on_lost=on_lost, control=control, spin_ns=spin_ns)

    def _prepare(self) -> None:
        super()._prepare()
        self._kernels: dict[str, Kernel] = {name: self._function(name) for name in _FUNCTIONS}
        self._recovery = Recovery(self._kernels)
        self._farewell = Farewell(self._kernels, self._recovery)
        self._devices = EngineDevices(self._set)
        self._devices.write_functions(self._verbs)
        self._set(link_layout.ENGINE_LOCK, 1)  # of the thread, whenever it is outside ``run``

    # --- other threads

    def driver(self, *, overlap: bool) -> Driving:
        """Return how a waiting executor advances the connections; ``overlap`` changes nothing, as
        the adapter moves payloads. With a single core it sleeps there as well.
        """
        sleeps = has_one_core()
        if sleeps:
            self._share_core([device.channel_fd for device in self._devices.devices])
        function = self._library.address(native.PREFIX + "drive")
        return Driving(function, self._memory.address, sleeps)

    def counters(self) -> dict[str, int]:
        """Return counts so far: rounds of the thread and of executors, sleeps, calls that posted
        work requests, work requests, registrations of single messages.
        """
        return {
            "rounds": self.rounds,
            "driven": self._get(link_layout.ENGINE_DRIVEN),
            "sleeps": self._get(layout.ENGINE_SLEEPS),
            "posts": self._get(layout.ENGINE_POSTS),
            "requests": self._get(layout.ENGINE_REQUESTS),
            "registrations": self._get(layout.ENGINE_REGISTERED),
        }

    def routes(self, peer: int) -> list[int]:
        """Return the queue pair that carries each stream to a peer."""
        return list(self._peers[peer].failover.route)

    def working_devices(self) -> set[int]:
        """Return the devices with a queue pair that has not failed; any thread may call it."""
        count = max(1, len(self._devices.devices))
        return {
            qp % count
            for each in list(self._peers.values())
            if each.alive
            for qp in range(each.count)
            if each.qp_word(qp, layout.QP_STATE) <= layout.QP_ACTIVE
        }

    def add_devices(self, devices: Sequence[VerbsDevice]) -> None:
        self._call(lambda: self._add_devices(devices))

    def add_region(self, address: int, nbytes: int) -> None:
        self._call(lambda: self._devices.add_region(address, nbytes))

    def add_gpu_region(self, memory: GpuRange) -> list[int]:
        """Keep GPU memory registered; return its remote key on each device. Raises
        ``SystemFailure``.
        """
        keys: list[int] = []
        self._call(lambda: keys.extend(self._devices.add_gpu_region(memory)))
        return keys

    def remove_region(self, address: int) -> None:
        """End the registration of a region; its memory may be unmapped afterwards."""
        self._call(lambda: self._devices.remove_region(address))

    def watch_window(self, window: WindowPort) -> None:
        """Keep payloads in window memory registered, each until its block is freed."""
        self._call(lambda: self._devices.watch_window(window))
        window.on_release = self._hold_block

    def _hold_block(self, offset: int, nbytes: int) -> bool:
        """Take over a block that is freed; called at any point of the program."""
        if self._stopping or not self._devices.hold_block(offset, nbytes):
            return False
        with suppress(OSError):  # the engine is closing, which gives the block back
            self._request_attention()
        return True

    def attach(self, connections: Sequence[VerbsConnection]) -> None:
        self._call(lambda: self._attach(connections))

    def failure(self, peer: int) -> str:
        return self._failures.get(peer, "")

    def fail_queue_pair(self, peer: int, qp: int, text: str) -> None:
        """Treat a queue pair as failed."""
        self._call(lambda: self._recovery.fail_pair(self._peers[peer], qp, text))

    # --- the thread

    def _advance(self) -> None:
        timers = (self._recovery.next_timer(each) for each in self._peers.values())
        at = min(timers, default=NEVER)
        self._set(layout.ENGINE_TIMER_NS, 0 if at == NEVER else max(1, int(at * 1e9)))
        super()._advance()

    def _service(self) -> None:
        if self._get(layout.ENGINE_ASYNC):
            self._set(layout.ENGINE_ASYNC, 0)
            for number, text in self._devices.lost():
                self._fail_device(number, text)
        self._devices.end_released()
        if address := self._get(layout.ENGINE_WANTED):
            self._devices.keep_payload(address, self._get(layout.ENGINE_WANTED_BYTES))
            self._set(layout.ENGINE_WANTED, 0)
        for each in list(self._peers.values()):
            if each.alive:
                self._recovery.service(each)
                self._recovery.timer(each)
                each.note_ready()

    def _fail_device(self, number: int, text: str) -> None:
        for each in self._peers.values():
            for qp in range(number, each.count, len(self._devices.devices)):
                if each.alive:
                    self._recovery.fail_pair(each, qp, text)

    def _end_link(self, link: EngineConnection, loss: Loss | None) -> None:
        self._farewell.end(link, loss)
        if not loss:
            link.conn.ready.set()

    def _free(self, link: EngineConnection) -> None:
        self._farewell.leave(link)

    def _send_aborts(self, text: str) -> None:
        for each in self._peers.values():
            if each.alive:
                self._farewell.send_abort(each, text)
                each.store_link(link_layout.LINK_STATE, link_layout.STATE_FINISHED)

    def _report(self, peer: int, loss: Loss) -> None:
        self._failures[peer] = str(loss)
        super()._report(peer, loss)

    # --- commands

    def _add_devices(self, devices: Sequence[VerbsDevice]) -> None:
        self._devices.add(devices)
        for number, device in enumerate(devices):
            self._watch(device.channel_fd, select.EPOLLIN, number)
            self._watch(device.async_fd, select.EPOLLIN, _ASYNC_DATA)

    def _attach(self, connections: Sequence[VerbsConnection]) -> None:
        for conn in connections:
            self._check_new(conn.peer)
            index = self._free_entry()
            each = EngineConnection.build(
                conn, index=index, engine=self._memory.address, initiator=self.rank < conn.peer
            )
            self._peers[conn.peer] = each
            self._set_entry(index, each.state.address)
            for qp in range(len(conn.qps)):
                self._recovery.start(each, qp)

    def _stop(self) -> None:
        self._remove(list(self._peers))
        self._stopping = True
        self._devices.clear_regions()
        super()._stop()
