"""Messages between nodes from and to GPU memory by RDMA: no payload passes the host's memory.

The segments of a job lie in slots of GPU memory that the adapters have registered. The streams copy
from and to these as they do with pinned memory (``staging``); in between a staging thread posts the
addresses, and the adapters write from slot to slot. A connection of its own per peer has no slots
that a CPU would copy from (``VerbsOptions.in_place_only``): every message waits for the receiver's
CTS. A received round is flushed, where ``wire.verbs.flush`` says so, before its stream goes on.

The CPU never touches a payload, so only operations that move data run here, as sends and receives;
reductions are staged in host memory.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from miraccl import clock
from miraccl.errors import CollectiveTimeout, MiracclError
from miraccl.executor.cpu.lower import signature
from miraccl.executor.cuda.gpu import Gpu
from miraccl.runtime.core_access import CoreAccess
from miraccl.runtime.multinode.network import PythonStaging
from miraccl.runtime.multinode.staging import NSLOTS, PAGE_BYTES
from miraccl.transport.ends import ReceivedMessage, RecvEnd, SendEnd
from miraccl.transport.fifo import NSLOTS as IN_FLIGHT
from miraccl.transport.fifo import Mode, native_atomics
from miraccl.transport.verbs_gpu_access import GpuAccess
from miraccl.transport.verbs_gpu_memory import GpuRange, GpuRegistration
from miraccl.types import Collective, RedOp

if TYPE_CHECKING:
    from miraccl.runtime.multinode.message_rounds import MessageRound, StagedMessage
    from miraccl.runtime.multinode.messages import CollectiveKind
    from miraccl.runtime.multinode.segments import StagedSegment
    from miraccl.transport.verbs import VerbsTransport
    from miraccl.wire.proxy_records import Loss

GRANULARITY = 2 << 20
"""Allocations of this size begin at a page, which a dma-buf needs."""
LEAST_BYTES = 64
"""Smaller messages are sent with the bytes behind them, up to the alignment of a slot: those of 32
bytes and less would be copied into a row by the CPU."""
SEQUENCE_MASK = 0xFFFF
LEFT_S = 0.1
"""Time without progress after which a wait for a rank that has left is in vain."""
CHECK_S = 1e-3
"""Time between two looks at faults while nothing moves."""
POLL_S = 20e-6


class GpuSlots:
    """GPU memory for ``NSLOTS`` segments of ``nbytes`` each (``staging.Slots``).

    Attributes:
        keys: Remote key on each adapter, for the flush.
    """

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self.total = -(-NSLOTS * self.nbytes // GRANULARITY) * GRANULARITY
        self._gpu = gpu
        self.address = gpu.allocate(self.total)
        self.keys: Sequence[int] = ()

    def copy_down(self, slot: int, device: int, nbytes: int, stream: int) -> None:
        self._gpu.copy(slot, device, nbytes, stream)

    def copy_up(self, device: int, slot: int, nbytes: int, stream: int) -> None:
        self._gpu.copy(device, slot, nbytes, stream)

    def close(self) -> None:
        """Free the memory after its registrations have ended. May be called twice."""
        address, self.address = self.address, 0
        if address:
            self._gpu.free(address)


@dataclass(frozen=True, slots=True)
class _Part:
    """Message of a round at its address; ``elements`` of its whole transfer."""

    address: int
    nbytes: int
    signature: int
    elements: int


class GpuDirect:
    """Connections of a rank to those of other nodes, and the slots that its adapters access.

    Used by one thread at a time.

    Args:
        transport: Set up with ``in_place_only``, not yet connected; closed by this object.
        access: Registration and flush.
        losses: Lost connections of the transport by peer.
    """

    def __init__(
        self,
        core: CoreAccess,
        gpu: Gpu,
        transport: VerbsTransport,
        access: GpuAccess,
        losses: Mapping[int, Loss],
    ) -> None:
        self.core, self._gpu, self._transport, self._access = core, gpu, transport, access
        self._losses = losses
        self._slots: list[GpuSlots] = []
        self._sends: dict[int, SendEnd] = {}
        self._receives: dict[int, RecvEnd] = {}
        self._begun: Counter[int] = Counter()  # collectives with each peer, as it counts them

    def connect(self, infos: dict[int, bytes]) -> None:
        """Connect to the ranks in ``infos`` (rank -> description)."""
        atomics = native_atomics()
        for peer, pair in self._transport.connect(infos).items():
            self._sends[peer] = SendEnd(pair.send, atomics)
            self._receives[peer] = RecvEnd(pair.recv, atomics)

    @property
    def description(self) -> str:
        """Data path in a few words, for explanations."""
        return f"RDMA from and to GPU memory ({self._access.description})"

    # ---- memory

    def slots_for(self, nbytes: int) -> GpuSlots:
        """Return registered slots of at least ``nbytes``; larger ones are made once and kept.

        Raises:
            SystemFailure: An adapter refuses the memory.
        """
        for slots in self._slots:
            if slots.nbytes >= nbytes:
                return slots
        with self._gpu.relaxed_capture():
            slots = GpuSlots(self._gpu, 1 << (max(nbytes, PAGE_BYTES) - 1).bit_length())
            try:
                slots.keys = self._register(slots)
            except BaseException:
                slots.close()
                raise
        self._slots.append(slots)
        return slots

    def _register(self, slots: GpuSlots) -> Sequence[int]:
        memory = GpuRange(
            way=self._access.registration.way, address=slots.address, nbytes=slots.total
        )
        if memory.way is not GpuRegistration.DMABUF:
            return self._transport.register_gpu(memory)
        descriptor = self._gpu.export_dma_buf(slots.address, slots.total)
        try:
            return self._transport.register_gpu(replace(memory, descriptor=descriptor))
        finally:
            os.close(descriptor)

    def prepare(self, nbytes: int) -> None:
        """Make slots of ``nbytes`` and check that every adapter writes and reads them.

        Raises:
            SystemFailure: One does not.
        """
        slots = self.slots_for(nbytes)
        self._access.open(self._transport.devices, slots.address, slots.keys, self._gpu.read)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory."""
        return sum(slots.total for slots in self._slots)

    # ---- messages

    def run(
        self,
        messages: Sequence[StagedMessage],
        slots: GpuSlots,
        slot: int,
        kind: CollectiveKind | None,
        group: Sequence[int] = (),
    ) -> None:
        """Move the messages of a round, all at the same time; returns when they have moved.

        Args:
            kind: Collective that they form, if any.
            group: The collective's ranks if this round is its first.
        """
        self._begun.update(rank for rank in group if rank in self._sends)
        name = f"{kind[0].label} between nodes" if kind else "send/recv"
        sends: dict[int, deque[_Part]] = {}
        receives: dict[int, deque[_Part]] = {}
        base = slots.address + slot * slots.nbytes
        for message in messages:
            direction = receives if message.receives else sends
            direction.setdefault(message.peer, deque()).append(self._part(message, base, kind))
        landed = [part for queue in receives.values() for part in queue]
        granted = dict.fromkeys(receives, 0)
        started = checked = last = clock.monotonic()
        while pending := [*receives, *sends]:
            moved = [self._receive(peer, receives[peer], granted) for peer in receives]
            moved += [self._send(peer, sends[peer]) for peer in sends]
            receives = {peer: queue for peer, queue in receives.items() if queue}
            sends = {peer: queue for peer, queue in sends.items() if self._is_sending(peer, queue)}
            now = clock.monotonic()
            if any(moved):
                last = now
            if now - checked > CHECK_S:
                checked = now
                self._check(name, pending[0], now - started, now - last)
            if not any(moved):
                clock.sleep(POLL_S)
        if landed:
            # One request per adapter flushes all that it has written before.
            last_part, working = landed[-1], self._transport.working_devices
            self._access.flush(last_part.address, last_part.nbytes, slots.keys, working)

    def _part(self, message: StagedMessage, base: int, kind: CollectiveKind | None) -> _Part:
        collective, root = kind or (Collective.SEND_RECV, 0)
        sig = signature(collective, message.dtype, RedOp.SUM, root, message.transfer_count)
        number = self._begun[message.peer] & SEQUENCE_MASK if kind else 0
        nbytes = max(message.count * message.dtype.itemsize, LEAST_BYTES)
        return _Part(base + message.host, nbytes, sig | number, message.transfer_count)

    def _receive(self, peer: int, queue: deque[_Part], granted: dict[int, int]) -> bool:
        """Grant and consume what can be; return True if a message has arrived."""
        end, moved = self._receives[peer], False
        while granted[peer] < min(len(queue), IN_FLIGHT):
            part = queue[granted[peer]]
            end.clear_to_send(part.address, part.nbytes, ahead=granted[peer])
            granted[peer] += 1
        while queue and (found := end.peek()) is not None:
            self._match(peer, queue.popleft(), found)
            end.consume()
            granted[peer] -= 1
            moved = True
        return moved

    def _send(self, peer: int, queue: deque[_Part]) -> bool:
        """Post what can be; return True if there was something."""
        end, moved = self._sends[peer], False
        while queue and end.post_address(
            queue[0].address, queue[0].nbytes, signature=queue[0].signature
        ):
            queue.popleft()
            moved = True
        return moved

    def _is_sending(self, peer: int, queue: deque[_Part]) -> bool:
        """Return True until the peer has everything: then the slot may be written again."""
        return bool(queue) or self._sends[peer].released < self._sends[peer].posted

    def _match(self, peer: int, part: _Part, found: ReceivedMessage) -> None:
        """Raise ``CollectiveMismatch`` if a message is not the one that was to arrive."""
        mine, theirs = part.signature, found.signature
        if mine == theirs and found.nbytes == part.nbytes and found.mode is not Mode.OVERSIZE:
            return
        text = ""
        if mine & ~SEQUENCE_MASK == theirs & ~SEQUENCE_MASK:
            text = (
                f"rank {self.core.rank} waits in collective {mine & SEQUENCE_MASK} with rank "
                f"{peer}, which has sent a message of collective {theirs & SEQUENCE_MASK}"
            )
        # The peer's count is not known: a message may be one of several of its transfer.
        raise self.core.message_mismatch(peer, (mine, part.elements), (theirs, -1), text)

    def _check(self, name: str, peer: int, waited: float, idle: float) -> None:
        """Raise if the communicator has a fault, the peer is lost or has left, or the deadline has
        passed.
        """
        self.core.check(name)
        loss = self._losses.get(peer)
        # What a peer has sent before it left, and its acknowledgements, still arrive.
        left = self.core.departure_of(peer) if idle > LEFT_S else None
        error: MiracclError
        if loss is not None:
            error = loss.error(rank=self.core.rank, peer=peer)
        elif left is not None:
            error = left
        elif waited > self.core.timeout:
            error = CollectiveTimeout(
                f"rank {self.core.rank} timed out: no progress within its timeout of "
                f"{self.core.timeout:g} s while waiting for rank {peer}",
                graph=self.core.wait_for_graph(),
                rank=self.core.rank,
                peer=peer,
            )
        else:
            return
        error.op = name
        raise self.core.break_with(error)

    def network(
        self,
        rounds: Sequence[MessageRound],
        slots: GpuSlots,
        kind: CollectiveKind | None,
        ranks: Sequence[int],
    ) -> PythonStaging:
        """Return the network that runs rounds whose segments lie in ``slots``.

        Args:
            ranks: Those of the collective that the messages form.
        """

        def run(segment: StagedSegment, number: int, slot: int) -> None:
            group = ranks if kind and number == 0 else ()
            self.run(rounds[number].messages, slots, slot, kind, group)

        return PythonStaging(run)

    # ---- end

    def disconnect(self) -> None:
        """End the connections, when no peer may still send or await acknowledgements."""
        self._access.close()
        if self.core.fault is None:
            self._transport.close()
        else:
            self._transport.abort(str(self.core.fault))

    def close(self) -> None:
        """Disconnect and free the memory. May be called twice."""
        self.disconnect()
        for slots in self._slots:
            slots.close()
