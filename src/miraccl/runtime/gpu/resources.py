"""Set-up of the GPU side on one host, collectively: memory of all ranks, faults and agreements."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from miraccl import trace
from miraccl.errors import BootstrapError, MiracclError, PeerDied, SystemFailure
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.lower import CommArgs
from miraccl.planning.cta_limits import CtaLimits
from miraccl.planning.device_planner import DevicePlanner
from miraccl.planning.ring_order import RingOrder, find_ring
from miraccl.runtime import summary
from miraccl.runtime.gpu.kernel_faults import DeviceFaults
from miraccl.runtime.gpu.probe import DeviceProbe
from miraccl.runtime.gpu.windows import DeviceWindows
from miraccl.runtime.options import Options
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.transport.cuda_p2p import SymmetricMemory

if TYPE_CHECKING:
    from miraccl.bootstrap.contract import Session

_log = trace.logger("init")


class DeviceResources:
    """Memory that the GPUs of a host share, and what their ranks have agreed on.

    On return all ranks have mapped and initialised their memory, so packets may be sent.

    Args:
        ordinal: GPU of this rank.
        stages: Set-up phases.
        global_ranks: Rank numbers for errors, by rank of the session.
        launches: Returns the prepared launches, for reports.

    Attributes:
        host: Words in pinned memory that kernels write.
        comm_args: Arguments of every kernel.
    """

    def __init__(
        self,
        session: Session,
        ordinal: int,
        options: Options,
        stages: SetupPhases,
        *,
        global_ranks: Sequence[int],
        launches: Callable[[], Iterable[Any]],
    ) -> None:
        self.rank, self.nranks = session.rank, session.nranks
        self.planner = DevicePlanner(self.rank, self.nranks, options)
        self.gpu = Gpu(ordinal)
        self._windows: DeviceWindows | None = None
        self.symmetric = SymmetricMemory(
            self.gpu,
            session.rank,
            session.nranks,
            layout.TOTAL_BYTES,
            layout.INITIAL_FILL,
            stages=stages,
        )
        self.probe = DeviceProbe(self.gpu, self.symmetric, launches)
        try:
            self.host, self._host_address, host_on_gpu = self.gpu.host_words(layout.HOST_BYTES)
            # Created before the ranks agree: a rank that is ready may already send notices.
            self.faults = DeviceFaults(
                session,
                self.host,
                options.timeout,
                read_snapshot=self.probe.snapshot,
                describe_launch=self.probe.describe_launch,
                rejected_size=self.probe.rejected_size,
                stopped=self.probe.stopped,
                global_ranks=global_ranks,
            )
            self.ring, self.ctas = self._agree(options.cta_policy, stages)
        except (
            BootstrapError,
            PeerDied,
            SystemFailure,
        ):
            # Only for these errors: after others, such as a deadline, a peer may be ready and
            # write to this rank's memory, which therefore stays mapped.
            with contextlib.suppress(MiracclError):
                self.symmetric.close()
            raise
        self.comm_args = CommArgs(
            rank=self.rank,
            own=self.symmetric.own,
            inboxes=tuple(self.symmetric.inboxes),
            outboxes=tuple(self.symmetric.outboxes),
            host=host_on_gpu,
            timeout_ns=int(options.timeout * 1e9),
            order=self.ring.kernel_order,
            direct=self.symmetric.all_direct,
        )

    def _agree(self, cta_policy: str, stages: SetupPhases) -> tuple[RingOrder, CtaLimits]:
        """Agree on the ring order, found by rank 0, and on the SM limits."""
        ready: dict[str, Any] = {"ctas": CtaLimits.proposal(self.gpu.multiprocessors, cta_policy)}
        if self.rank == 0:
            ready["ring"] = find_ring(self.symmetric.facts, self.symmetric.paths_read).to_json()
        answers = stages.exchange("gpu ready", ready)
        return RingOrder.from_json(answers[0]["ring"]), CtaLimits.agree(
            [answer["ctas"] for answer in answers]
        )

    def log_summary(self, name: str) -> None:
        """Log the data paths to the other ranks under ``MIRACCL_DEBUG=INFO``."""
        if not _log.isEnabledFor(logging.INFO):
            return
        kinds = {
            a + b - self.rank: kind
            for (a, b), kind, _ in self.symmetric.explain()
            if self.rank in (a, b)
        }
        ring = self.ring
        text = summary.describe_gpu(
            self.rank, self.gpu.ordinal, kinds, ring.order, ring.reason, self.ctas.max_sms
        )
        _log.info("%s: %s", name, text)

    def memory(self) -> dict[str, int]:
        """Return the bytes that this rank holds: on its GPU, of these in windows, and pinned."""
        windows = self._windows.nbytes if self._windows is not None else 0
        own = self.symmetric.nbytes if self.nranks > 1 else 0
        return {
            "device": own + windows,
            "windows": windows,
            "pinned": layout.HOST_BYTES + self.symmetric.host_bytes(),
        }

    def open_windows(self) -> DeviceWindows:
        """Return the window memory of this communicator, opened by the first call."""
        if self._windows is None:
            self._windows = DeviceWindows(self.symmetric)
        return self._windows

    def close_windows(self) -> None:
        if self._windows is not None:
            self._windows.close()

    def close(self) -> None:
        """Free all memory; peers no longer write to it."""
        self.symmetric.close()
        with contextlib.suppress(MiracclError):
            self.gpu.free_host(self._host_address)
            self.gpu.close()
