"""Simulated verbs devices: queue pairs, completion queues, keys, and a wire with faults.

Plain Python over memory of this process. ``sim.verbs`` gives it the ABI of libibverbs, so the
verbs transport runs on it unchanged. The wire carries one work request at a time; ``order`` chooses
the queue pair, among those that have requests. Within a queue pair requests complete in order.

Requests of reliable connections arrive in that order or fail. Packets of UD and UC have a ``fate``:
lost, late, or several copies; one for which no receive is posted is lost as well.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from miraccl import clock
from miraccl.native import verbs_abi as abi

STATUS_LOCAL_PROTECTION, STATUS_REMOTE_INVALID, STATUS_REMOTE_ACCESS = 4, 9, 10
VENDOR_TIMEOUT: int = 129
_IMM_FLAG: int = 2
#: Bytes in front of a received UD packet, and the largest one.
GRH_BYTES, UD_BYTES = 40, 4096
_GRH_FLAG, _LENGTH_ERROR = 1, 1
Segments = tuple[tuple[int, int, int], ...]


@dataclass(eq=False)
class Channel:
    """Completion channel: queues of which an event was asked for."""

    fd: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE))
    events: deque[int] = field(default_factory=deque)

    def notify(self, event: int) -> None:
        self.events.append(event)
        os.eventfd_write(self.fd, 1)

    def take(self) -> int | None:
        """Return the oldest event, None if there is none."""
        if not self.events:
            return None
        os.eventfd_read(self.fd)
        return self.events.popleft()

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Work completion as ``ibv_wc`` has it; ``solicited``: its sender asked for an event."""

    qp: int
    wr_id: int
    status: int = 0
    opcode: int = 0
    vendor: int = 0
    nbytes: int = 0
    immediate: int = 0
    flags: int = 0
    solicited: bool = False


@dataclass(eq=False)
class Queue:
    """Completion queue. ``overflowed`` counts completions for which it had no entry.

    Attributes:
        armed: The next completion is an event.
        solicited_only: Only a solicited one, or one with an error.
    """

    address: int
    entries: int
    channel: Channel | None
    armed: bool = False
    solicited_only: bool = False
    overflowed: int = 0
    completions: deque[Completion] = field(default_factory=deque)

    def push(self, completion: Completion) -> None:
        if len(self.completions) >= self.entries:
            self.overflowed += 1
            return
        self.completions.append(completion)
        asked = completion.solicited or completion.status or not self.solicited_only
        if self.armed and asked and self.channel:
            self.armed = False
            self.channel.notify(self.address)

    def forget(self, qp: int) -> None:
        """Drop the completions of a queue pair, as drivers do when it is reset or destroyed."""
        self.completions = deque(c for c in self.completions if c.qp != qp)


@dataclass(frozen=True, kw_only=True)
class Region:
    """Registered memory.

    Attributes:
        null: What is written to it is dropped.
        mapping: Address at which the device accesses it; ``address`` need not be accessible.
        posted: Writes become visible when the device reads the memory next, as those to GPU memory
            may without a flush.
    """

    device: str
    address: int
    nbytes: int
    access: int
    null: bool = False
    mapping: int = 0
    posted: bool = False

    def load(self, address: int, nbytes: int) -> bytes:
        """Return what the device reads where work requests say ``address``."""
        return ctypes.string_at(self._place(address), nbytes)

    def store(self, address: int, data: bytes) -> None:
        ctypes.memmove(self._place(address), data, len(data))

    def _place(self, address: int) -> int:
        return address - self.address + self.mapping if self.mapping else address

    def allows(self, device: str, address: int, nbytes: int, access: int) -> bool:
        inside = self.address <= address and address + nbytes <= self.address + self.nbytes
        return self.device == device and inside and self.access & access == access


@dataclass(frozen=True, kw_only=True)
class Request:
    """Send work request; ``data`` is the payload of an inline one."""

    wr_id: int
    opcode: int
    signaled: bool
    segments: Segments
    remote: int
    rkey: int
    immediate: int
    data: bytes | None = None
    qkey: int = 0
    addend: int = 0
    atomic_rkey: int = 0
    solicited: bool = False

    @property
    def nbytes(self) -> int:
        if self.data is not None:
            return len(self.data)
        return sum(length for _, length, _ in self.segments)


@dataclass(frozen=True, kw_only=True)
class Datagram:
    """Packet of an unreliable queue pair on its way; ``after`` packets pass it first."""

    target: int
    source: int
    qkey: int
    data: bytes
    after: int = 0
    solicited: bool = False


@dataclass(eq=False)
class Pair:
    """Queue pair of a device.

    Attributes:
        queue, recv_queue: Completion queues of its sends and of its receives.
        qkey: Key that UD packets to it must carry.
        traffic_class: Class of its RoCE packets, once it is connected.
        receives: (work request number, buffers) of posted receives.
    """

    number: int
    device: str
    queue: Queue
    recv_queue: Queue
    send_depth: int
    recv_depth: int
    kind: int = abi.QPT_RC
    qkey: int = 0
    traffic_class: int = 0
    state: int = abi.QPS_RESET
    peer: int = 0
    sends: deque[Request] = field(default_factory=deque)
    receives: deque[tuple[int, Segments]] = field(default_factory=deque)
    waiting_since: float | None = None
    in_doubt: deque[int] = field(default_factory=deque)
    """Requests that were executed and whose acknowledgement was lost."""

    @property
    def reliable(self) -> bool:
        return self.kind == abi.QPT_RC

    @property
    def receiving(self) -> bool:
        return self.state in (abi.QPS_RTR, abi.QPS_RTS)


class Wire:
    """Everything that is simulated, for all devices of a process.

    Args:
        order: ``order(n)`` chooses one of n queue pairs that have requests; the first by default.
        timeout_s: Time after which an unanswered request fails with status 12.
        fate: Copies of an unreliable packet that arrive: for each, the number of packets that
            pass it first. The default is one copy in order; an empty sequence loses the packet.

    Attributes:
        not_ready: Number of times that a receiver had posted no receive.
        dropped: Unreliable packets that arrived and had no receive, key or path.
    """

    def __init__(
        self,
        *,
        order: Callable[[int], int] = lambda n: 0,
        timeout_s: float = 0.05,
        fate: Callable[[Pair, Request], Sequence[int]] = lambda pair, request: (0,),
    ) -> None:
        self.lock = threading.RLock()
        self.pairs: dict[int, Pair] = {}
        self.regions: dict[int, Region] = {}
        self.async_events: dict[str, list[Channel]] = {}
        self.not_ready = self.delivered = self.dropped = 0
        self._fate = fate
        self._late: list[Datagram] = []
        self._posted: dict[str, list[tuple[Region, int, bytes]]] = {}  # writes by device
        self.on_deliver: Callable[[Pair, Request], None] = lambda pair, request: None
        self._order, self._timeout_s = order, timeout_s
        self._down: set[str] = set()
        self._dead: set[str] = set()
        self._cut: set[int] = set()
        self._failures: dict[int, tuple[int, int]] = {}
        self._lost_acks: set[int] = set()
        self._frozen = False
        self._work = clock.condition(self.lock)
        self._closed = False
        self._thread = clock.thread(self._run, name="verbs-wire", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self.lock:
            self._closed = True
            self._work.notify_all()
        self._thread.join(5.0)

    # --- faults

    def fail_request(self, qp: int, status: int, vendor: int = 0) -> None:
        """Let the next request of a queue pair fail with a status."""
        with self.lock:
            self._failures[qp] = (status, vendor)
            self._work.notify_all()

    def lose_acknowledgements(self, qp: int) -> None:
        """Execute the requests of a queue pair, but never report them: they fail at the end."""
        with self.lock:
            self._lost_acks.add(qp)

    def cut(self, qp: int) -> None:
        """Lose all packets of a queue pair, in its own direction, from now on."""
        with self.lock:
            self._cut.add(qp)

    def mend(self) -> None:
        """End all faults of queue pairs, and bring ports up."""
        with self.lock:
            self._cut.clear()
            self._lost_acks.clear()
            self._down.clear()
            self._work.notify_all()

    def freeze(self, frozen: bool) -> None:
        """Stop or continue all deliveries."""
        with self.lock:
            self._frozen = frozen
            self._work.notify_all()

    def port_down(self, device: str, *, quietly: bool = False) -> None:
        """Lose everything from and to a device; report it unless ``quietly``."""
        with self.lock:
            self._down.add(device)
            self._write_posted(device)
        if not quietly:
            self._report(device, abi.EVENT_PORT_ERR)

    def kill_device(self, device: str) -> None:
        """Let a device vanish: its queue pairs are in error and complete nothing more."""
        with self.lock:
            self._dead.add(device)
            self._down.add(device)
            self._write_posted(device)
        self._report(device, abi.EVENT_DEVICE_FATAL)

    def _report(self, device: str, event: int) -> None:
        with self.lock:
            for channel in self.async_events.get(device, []):
                channel.notify(event)

    # --- verbs

    def post_send(self, pair: Pair, request: Request) -> int:
        """Queue a request; return an errno."""
        with self.lock:
            if pair.device in self._dead:
                return 5  # EIO
            if pair.state == abi.QPS_ERR:
                self._complete(pair, request, abi.WC_WR_FLUSH_ERR)
                return 0
            if pair.state != abi.QPS_RTS:
                return 22
            if len(pair.sends) + len(pair.in_doubt) >= pair.send_depth:
                return 12
            pair.sends.append(request)
            self._work.notify_all()
            return 0

    def post_receive(self, pair: Pair, wr_id: int, segments: Segments = ()) -> int:
        with self.lock:
            if len(pair.receives) >= pair.recv_depth:
                return 12
            if pair.state == abi.QPS_ERR:
                self._flush_receive(pair, wr_id)
            else:
                pair.receives.append((wr_id, segments))
                self._work.notify_all()
            return 0

    def set_state(self, pair: Pair, state: int) -> int:
        with self.lock:
            if pair.device in self._dead:
                return 5
            pair.state = state
            if state == abi.QPS_ERR:
                self._flush(pair)
            elif state == abi.QPS_RESET:
                pair.sends.clear()
                pair.receives.clear()
                pair.in_doubt.clear()
                pair.waiting_since = None
                self._forget(pair)
            self._work.notify_all()
            return 0

    @staticmethod
    def _forget(pair: Pair) -> None:
        pair.queue.forget(pair.number)
        pair.recv_queue.forget(pair.number)

    def destroy(self, pair: Pair) -> None:
        with self.lock:
            self.pairs.pop(pair.number, None)
            self._forget(pair)
            self._work.notify_all()

    # --- delivery

    def _run(self) -> None:
        with self.lock:
            while not self._closed:
                if not self._step():
                    self._work.wait(self._timeout_s / 4 if self._waiting() else None)

    def _waiting(self) -> bool:
        return any(pair.sends or pair.in_doubt for pair in self.pairs.values())

    def _step(self) -> bool:
        """Deliver one request; return False if none can be delivered now."""
        if self._frozen:
            return False
        ready = [pair for pair in self.pairs.values() if self._can_move(pair)]
        if not ready:
            self._arrive_late(everything=True)
            return False
        pair = ready[self._order(len(ready))]
        if pair.reliable:
            self._deliver(pair)
        else:
            self._send_datagram(pair)
        return True

    def _send_datagram(self, pair: Pair) -> None:
        """Complete the oldest send of an unreliable queue pair, and let its packet go."""
        request = pair.sends.popleft()
        status, vendor = self._failures.pop(pair.number, (0, 0))
        if pair.kind == abi.QPT_UD and request.nbytes > UD_BYTES:
            status = _LENGTH_ERROR
        data = b"" if status else self._read(pair, request)
        if data is None:
            status = STATUS_LOCAL_PROTECTION
        if status or data is None:
            self._complete(pair, request, status, vendor)
            pair.state = abi.QPS_ERR
            self._flush(pair)
            return
        self._complete(pair, request, 0)
        target = request.rkey if pair.kind == abi.QPT_UD else pair.peer
        if self._path_works(pair, target):
            for after in self._fate(pair, request):
                packet = Datagram(
                    target=target,
                    source=pair.number,
                    qkey=request.qkey,
                    data=data,
                    after=after,
                    solicited=request.solicited,
                )
                if after:
                    self._late.append(packet)
                else:
                    self._arrive(packet)
        self.on_deliver(pair, request)
        self._arrive_late(everything=False)

    def _arrive_late(self, *, everything: bool) -> None:
        """Let one packet pass all late ones; deliver those whose time has come, or all."""
        late, self._late = self._late, []
        for packet in late:
            if packet.after <= 1 or everything:
                self._arrive(packet)
            else:
                self._late.append(replace(packet, after=packet.after - 1))

    def _read(self, pair: Pair, request: Request) -> bytes | None:
        """Return the payload of a request, None if its memory is not registered."""
        if request.data is not None:
            return request.data
        parts = []
        for address, length, lkey in request.segments:
            source = self.regions.get(lkey)
            if source is None or not source.allows(pair.device, address, length, 0):
                return None
            parts.append(source.load(address, length))
        return b"".join(parts)

    def _arrive(self, packet: Datagram) -> None:
        """Write a packet into the oldest receive of its target, or drop it."""
        pair = self.pairs.get(packet.target)
        if pair is None or not pair.receiving or not pair.receives:
            self.dropped += 1
            return
        ud = pair.kind == abi.QPT_UD
        if (ud and packet.qkey != pair.qkey) or (not ud and pair.peer != packet.source):
            self.dropped += 1
            return
        header = GRH_BYTES if ud else 0
        wr_id, ((address, room, lkey),) = pair.receives.popleft()
        region, nbytes = self.regions.get(lkey), header + len(packet.data)
        if (
            region is None
            or nbytes > room
            or not region.allows(pair.device, address, nbytes, abi.ACCESS_LOCAL_WRITE)
        ):
            self._flush_receive(pair, wr_id)
            return
        ctypes.memmove(address + header, packet.data, len(packet.data))
        self.delivered += 1
        pair.recv_queue.push(
            Completion(
                qp=pair.number,
                wr_id=wr_id,
                opcode=abi.WC_RECV,
                nbytes=nbytes,
                flags=_GRH_FLAG if ud else 0,
                solicited=packet.solicited,
            )
        )

    def _can_move(self, pair: Pair) -> bool:
        """Return True if the head of a queue pair's requests can be executed, or fails now."""
        if pair.state != abi.QPS_RTS or not (pair.sends or pair.in_doubt):
            return False
        if not pair.reliable:
            return True
        if pair.number in self._failures and pair.sends:
            return True
        now = clock.monotonic()
        if pair.sends and self._reachable(pair):
            return True
        if pair.waiting_since is None:
            pair.waiting_since = now
        expired = now - pair.waiting_since > self._timeout_s
        if expired and self._answers_later(pair):
            return False
        return expired

    def _answers_later(self, pair: Pair) -> bool:
        """Return True if the peer has posted no receive: that is not a timeout."""
        peer = self.pairs.get(pair.peer)
        if not self._path_works(pair, pair.peer) or peer is None or pair.in_doubt:
            return False
        return peer.receiving

    def _path_works(self, pair: Pair, target: int) -> bool:
        peer = self.pairs.get(target)
        devices = {pair.device, peer.device if peer else pair.device}
        return pair.number not in self._cut and not devices & self._down

    def _reachable(self, pair: Pair) -> bool:
        peer = self.pairs.get(pair.peer)
        if not self._path_works(pair, pair.peer) or peer is None or not peer.receiving:
            return False
        if peer.peer != pair.number:
            return False
        if pair.sends[0].opcode == abi.WR_RDMA_WRITE_WITH_IMM and not peer.receives:
            self.not_ready += 1
            return False
        return True

    def _deliver(self, pair: Pair) -> None:
        """Execute the oldest request of a queue pair, or let it fail."""
        status, vendor = self._failures.pop(pair.number, (0, 0))
        peer = self.pairs.get(pair.peer)
        if not status and not (pair.sends and self._reachable(pair)):
            status, vendor = abi.WC_RETRY_EXC_ERR, VENDOR_TIMEOUT
        if status:
            wr_id = pair.in_doubt[0] if pair.in_doubt else pair.sends.popleft().wr_id
            pair.queue.push(Completion(qp=pair.number, wr_id=wr_id, status=status, vendor=vendor))
            pair.state = abi.QPS_ERR
            self._flush(pair)
            return
        assert peer is not None
        request = pair.sends.popleft()
        pair.waiting_since = None
        status = self._execute(pair, peer, request)
        if status:
            self._complete(pair, request, status)
            pair.state = peer.state = abi.QPS_ERR
            self._flush(pair)
            self._flush(peer)
        elif pair.number in self._lost_acks:
            pair.in_doubt.append(request.wr_id)
            pair.waiting_since = clock.monotonic()
        else:
            self._complete(pair, request, 0)

    def _execute(self, pair: Pair, peer: Pair, request: Request) -> int:
        """Write the payload and consume a receive, or read; return a status."""
        if request.opcode in (abi.WR_RDMA_READ, abi.WR_ATOMIC_FETCH_AND_ADD):
            return self._fetch(pair, peer, request)
        target, nbytes = request.remote, request.nbytes
        region = self.regions.get(request.rkey)
        if nbytes and (
            region is None
            or not region.allows(peer.device, target, nbytes, abi.ACCESS_REMOTE_WRITE)
        ):
            return STATUS_REMOTE_ACCESS
        data = self._read(pair, request)
        if data is None:
            return STATUS_LOCAL_PROTECTION
        if region is not None and region.posted:
            self._posted.setdefault(peer.device, []).append((region, target, data))
        elif region is not None:
            region.store(target, data)
        self.delivered += 1
        self.on_deliver(pair, request)
        if request.opcode == abi.WR_RDMA_WRITE_WITH_IMM:
            peer.recv_queue.push(
                Completion(
                    qp=peer.number,
                    wr_id=peer.receives.popleft()[0],
                    opcode=abi.WC_RECV_RDMA_WITH_IMM,
                    nbytes=nbytes,
                    immediate=request.immediate,
                    flags=_IMM_FLAG,
                    solicited=request.solicited,
                )
            )
        return 0

    def _write_posted(self, device: str) -> None:
        """Make all writes of a device visible, in their order."""
        for region, address, data in self._posted.pop(device, []):
            region.store(address, data)

    def _fetch(self, pair: Pair, peer: Pair, request: Request) -> int:
        """Read remote memory, or add to 8 bytes of it and return the old ones; return a status."""
        atomic = request.opcode == abi.WR_ATOMIC_FETCH_AND_ADD
        access = abi.ACCESS_REMOTE_ATOMIC if atomic else abi.ACCESS_REMOTE_READ
        rkey = request.atomic_rkey if atomic else request.rkey
        region, ((local, length, lkey),) = self.regions.get(rkey), request.segments
        if region is None or not region.allows(peer.device, request.remote, length, access):
            return STATUS_REMOTE_ACCESS
        if atomic and (length != 8 or request.remote % 8):
            return STATUS_REMOTE_INVALID
        target = self.regions.get(lkey)
        if target is None or not target.allows(pair.device, local, length, abi.ACCESS_LOCAL_WRITE):
            return STATUS_LOCAL_PROTECTION
        self._write_posted(peer.device)
        data = region.load(request.remote, length)
        if not target.null:
            target.store(local, data)
        if atomic:
            total = int.from_bytes(data, "little") + request.addend & (1 << 64) - 1
            region.store(request.remote, total.to_bytes(8, "little"))
        self.delivered += 1
        self.on_deliver(pair, request)
        return 0

    def _complete(self, pair: Pair, request: Request, status: int, vendor: int = 0) -> None:
        if request.signaled or status:
            pair.queue.push(
                Completion(
                    qp=pair.number,
                    wr_id=request.wr_id,
                    status=status,
                    opcode=1,
                    vendor=vendor,
                )
            )

    def _flush(self, pair: Pair) -> None:
        """Complete everything that is posted on a queue pair in error."""
        while pair.sends:
            self._complete(pair, pair.sends.popleft(), abi.WC_WR_FLUSH_ERR)
        while pair.receives:
            self._flush_receive(pair, pair.receives.popleft()[0])

    def _flush_receive(self, pair: Pair, wr_id: int) -> None:
        pair.recv_queue.push(
            Completion(
                qp=pair.number,
                wr_id=wr_id,
                status=abi.WC_WR_FLUSH_ERR,
                opcode=abi.WC_RECV,
            )
        )
