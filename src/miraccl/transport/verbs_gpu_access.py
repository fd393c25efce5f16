"""Access of a rank's adapters to GPU memory: registration, and the flush of what they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from miraccl import clock, trace
from miraccl.errors import SystemFailure
from miraccl.native.verbs_abi import VerbsLibrary, has_data_direct
from miraccl.topo.hca import Hca
from miraccl.transport.verbs_device import VerbsDevice
from miraccl.transport.verbs_flush import FlushQueue, flush_facts
from miraccl.transport.verbs_gpu_memory import (
    GpuRegistration,
    RegistrationDecision,
    decide,
    distance_problem,
    probe,
)
from miraccl.wire.verbs.flush import FlushDecision, FlushMethod, decide_flush

log = trace.logger("verbs")
DRAIN_S = 1e-3
"""Time in which writes that an adapter posted before it failed reach the GPU, far more than they
need: no read through the adapter can say that they have."""
RETRY_S = 60.0
"""Longest time in which an adapter's queue pairs count as working while its flush fails: they
notice the same failure by their own timeout (``MIRACCL_IB_TIMEOUT``)."""


@dataclass(frozen=True, kw_only=True)
class GpuTraits:
    """Properties of a GPU that adapters depend on.

    Attributes:
        bus_id: PCI address.
        sm: Compute capability, 90 for 9.0.
        dma_buf: Its driver exports memory as a dma-buf.
        writes_ordering: As ``wire.verbs.flush.FlushFacts`` has it.
    """

    bus_id: str
    sm: int
    dma_buf: bool
    writes_ordering: int = -1


def decide_registration(
    gpu: GpuTraits, library: VerbsLibrary, hcas: Sequence[Hca], root: str | Path = "/"
) -> RegistrationDecision:
    """Return how these adapters register memory of a GPU: not at all if it is too far away."""
    if problem := distance_problem(gpu.bus_id, hcas, root):
        return RegistrationDecision(way=GpuRegistration.NONE, reason=problem)
    # The driver's own answer; files of a host may be hidden in a container.
    return decide(replace(probe(library, root), open_driver=gpu.dma_buf))


@dataclass(eq=False)
class GpuAccess:
    """Registration and flush of one GPU on the adapters of a rank."""

    gpu: GpuTraits
    registration: RegistrationDecision
    flush_decision: FlushDecision | None = None
    _queues: list[FlushQueue] = field(default_factory=list)
    _working: set[int] = field(default_factory=set)  # adapters at the last flush
    _errors: dict[int, SystemFailure] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """Registration and flush in a few words."""
        flush = self.flush_decision.method.value if self.flush_decision else "unknown"
        return f"{self.registration.way.value}, flush: {flush}"

    def open(
        self,
        devices: Sequence[VerbsDevice],
        address: int,
        keys: Sequence[int],
        read: Callable[[int, int], bytes],
    ) -> None:
        """Check that the adapters write and read GPU memory, and prepare its flush.

        Args:
            address, keys: 8 bytes of registered memory, which change, and its key on each device.
            read: ``read(address, nbytes)`` returns the memory as the GPU sees it.

        Raises:
            SystemFailure: They do not.
        """
        null_mr = [device.make_null_registration() for device in devices]
        for device, made in zip(devices, null_mr, strict=True):
            if made:
                device.library.call("ibv_dereg_mr", made)
        self.flush_decision = decide_flush(
            flush_facts(
                self.gpu.sm,
                writes_ordering=self.gpu.writes_ordering,
                null_mr=all(null_mr),
                data_direct=all(has_data_direct(d.context, d.hca.name) for d in devices),
            )
        )
        # The others are decided and not built; a read through the NIC is right in their place.
        method = self.flush_decision.method
        atomic = method is FlushMethod.ATOMIC
        with ExitStack() as stack:
            for device, key in zip(devices, keys, strict=True):
                queue = FlushQueue(device, FlushMethod.ATOMIC if atomic else FlushMethod.READ)
                stack.callback(queue.close)
                queue.open()
                queue.verify(address, key, read)
                self._queues.append(queue)
            self._working = set(range(len(devices)))
            if method is not FlushMethod.NONE:
                stack.pop_all()
                return
        self._queues.clear()

    def flush(
        self,
        address: int,
        nbytes: int,
        keys: Sequence[int],
        working: Callable[[], set[int]],
    ) -> None:
        """Make what the adapters have written visible to the GPU.

        Args:
            working: Returns the numbers of the adapters that may have written. One whose queue
                pairs have failed is left out until they work again.

        Raises:
            SystemFailure: An adapter that works cannot flush.
        """
        if not self._queues:
            return
        now = working()
        lost, self._working = self._working - now, now
        failed = {i for i in now if not self._try(i, FlushQueue.post, address, nbytes, keys[i])}
        failed |= {i for i in now - failed if not self._try(i, FlushQueue.wait)}
        until = clock.monotonic() + RETRY_S
        for index in failed:
            while not self._try(index, FlushQueue.flush, address, nbytes, keys[index]):
                if index not in working():
                    lost.add(index)
                    self._working.discard(index)
                    break
                if clock.monotonic() > until:
                    raise self._errors[index]
                clock.sleep(DRAIN_S)
        if lost:
            clock.sleep(DRAIN_S)

    def _try(self, index: int, action: Callable[..., None], *args: int) -> bool:
        """Run an action on an adapter's queue pair, made again if it has failed; False if that
        fails.
        """
        queue = self._queues[index]
        try:
            if not queue.queue:
                queue.open()
            action(queue, *args)
        except SystemFailure as error:
            log.warning("%s", error)
            self._errors[index] = error
            queue.close()
            return False
        return True

    def close(self) -> None:
        """Destroy the queue pairs of the flush; idempotent."""
        for queue in self._queues:
            queue.close()
        self._queues.clear()
