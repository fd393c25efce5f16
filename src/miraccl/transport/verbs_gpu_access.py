"""Access of a rank's adapters to GPU memory: registration, and the flush of what they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

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
            if method is not FlushMethod.NONE:
                stack.pop_all()
                return
        self._queues.clear()

    def flush(self, address: int, nbytes: int, keys: Sequence[int]) -> None:
        """Make what the adapters have written visible to the GPU. Raises ``SystemFailure``."""
        for queue, key in zip(self._queues, keys, strict=False):
            queue.post(address, nbytes, key)
        for queue in self._queues:
            queue.wait()

    def close(self) -> None:
        """Destroy the queue pairs of the flush; idempotent."""
        for queue in self._queues:
            queue.close()
        self._queues.clear()
