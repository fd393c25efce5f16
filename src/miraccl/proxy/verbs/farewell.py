"""End of a verbs connection: the last rows to the peer, then the queue pairs and registrations.

Everything here runs on the engine's thread.
"""

from __future__ import annotations

from miraccl import clock
from miraccl.proxy.compiled_thread import Kernel
from miraccl.proxy.verbs.connection_memory import EngineConnection
from miraccl.proxy.verbs.kernels import verbs_layout as layout
from miraccl.proxy.verbs.recovery import Recovery
from miraccl.transport.fifo import memory_at
from miraccl.wire.proxy_records import Loss, LossKind
from miraccl.wire.stream import MAX_TEXT_BYTES, Frame, FrameType, encode_frame
from miraccl.wire.verbs.rows import KIND_GONE

#: Time in which the last rows of an ending link may leave.
FAREWELL_S = 0.1


class Farewell:
    """Last rows of the connections of an engine.

    Args:
        kernels: Compiled functions by name.
    """

    def __init__(self, kernels: dict[str, Kernel], recovery: Recovery) -> None:
        self._kernels, self._recovery = kernels, recovery

    def end(self, each: EngineConnection, loss: Loss | None) -> None:
        """Send the last row, an ABORT for a fault of the peer or of this side, else GONE, and
        disconnect.
        """
        if loss and loss.kind in (LossKind.PROTOCOL, LossKind.INTERNAL):
            self.send_abort(each, loss.detail)
        elif loss and loss.kind is LossKind.CLOSED:
            self._send_gone(each)
        self.disconnect(each)

    def leave(self, each: EngineConnection) -> None:
        """Notify a peer that is still connected that this side is gone, and disconnect."""
        if each.alive:
            self._send_gone(each)
        self.disconnect(each)

    def send_abort(self, each: EngineConnection, text: str) -> None:
        """Send an ABORT on the first stream that has room."""
        data = text.encode()[:MAX_TEXT_BYTES]
        memory_at(each.conn.memory.text_out, len(data))[:] = data
        for stream in range(each.count):
            frame = encode_frame(Frame(FrameType.ABORT, stream, length=len(data)))
            words = each.write_arguments(stream, len(data), data=frame)
            if self._kernels["post_abort"](each.state.address, words):
                self._flush(each)
                return

    def _send_gone(self, each: EngineConnection) -> None:
        if self._recovery.post(each, KIND_GONE):
            self._flush(each)

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

    def disconnect(self, each: EngineConnection) -> None:
        """Destroy the queue pairs of a connection and end its registrations. Idempotent."""
        if each.closed:
            return
        each.closed = True
        for i, qp in enumerate(each.conn.qps):
            each.store_qp(i, layout.QP_STATE, layout.QP_CLOSED)
            qp.close()
        self._kernels["deregister_everything"](each.state.address, 0)
