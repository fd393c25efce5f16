"""End of a communicator: abort, finalize, and the waits for its GPU work."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Self

from miraccl.api.one_sided import OneSided
from miraccl.diagnosis import blocked_ops
from miraccl.errors import MiracclError
from miraccl.runtime.control import FINALIZE
from miraccl.runtime.dispatch import Dispatcher

if TYPE_CHECKING:
    from miraccl.runtime.gpu.communicator import DeviceCommunicator
    from miraccl.runtime.multinode.communicator import MultiNodeCommunicator


class Lifecycle(OneSided, Dispatcher):
    """Part of ``Communicator`` that ends it."""

    rank: int
    nranks: int
    _gpu_waits: int

    def abort(self, reason: str = "abort() was called") -> None:
        """End the communicator on all ranks; waiting ranks raise ``CommunicatorAborted``.

        Callable from any thread, any number of times.

        Args:
            reason: Text for the errors of the other ranks.

        Raises:
            MiracclError: Never; a communicator that has ended stays as it is.
        """
        if self._device is not None and not self._core.in_forked_child:
            self._device.abort(reason)
        self._core.abort(reason)
        if self._aggregation is not None:
            self._aggregation.abort(reason)

    def finalize(self) -> None:
        """Complete pending operations and leave the communicator. Local; may be called twice.

        Raises:
            CollectiveTimeout, CollectiveMismatch: A fault of the GPU side that no call has reported
                yet, or a message on GPU memory that no rank received.
        """
        if self._core.in_forked_child:
            return
        self._core.cancel_pending_setup()
        self._close_agent()
        if self._background is not None:
            self._background.close()
        pending = None
        if self._device is not None:
            # Closing the GPU side waits for the other ranks.
            with (
                self._register_gpu_wait(self._device),
                self._core.faults.control.enter(FINALIZE),
                self._device.device_guard(),
            ):
                pending = self._device.close(self._core.faults.raised)
        self._core.finalize()
        if self._aggregation is not None:
            self._aggregation.close()
        if pending is not None:
            raise pending

    def synchronize(self) -> None:
        """Wait for this rank's GPU.

        Raises:
            CollectiveTimeout, CollectiveMismatch, PeerDied: The fault that kernels have found.
        """
        if self._device is not None:
            with self._register_gpu_wait(self._device), self._device.device_guard():
                self._device.synchronize()

    def _register_gpu_wait(
        self, device: DeviceCommunicator | MultiNodeCommunicator
    ) -> blocked_ops.BlockedScope:
        """Register the wait of the application for its GPU work, for deadlock detection."""
        self._gpu_waits += 1
        return blocked_ops.BlockedScope(
            functools.partial(
                self._core.wait_state.wait_for_stream, device.stream_name, self._gpu_waits
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, value: BaseException | None, trace: Any) -> None:
        if value is not None and not self._core.closed:
            self.abort(f"{kind.__name__} left the communicator's with block: {value}")
        try:
            self.finalize()
        except MiracclError:
            if value is None:
                raise
