"""Monitor for broken streams during setup, before an operation uses them.

The acceptor of a stream may have sent its welcome and consider it connected while the initiator has
not read it and gives up. After setup, the operation that uses a stream finds it broken.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping

from miraccl import clock
from miraccl.bootstrap.eventfd import EventFd
from miraccl.errors import as_system_failure
from miraccl.runtime.loss_notice import run_after_notice
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.wire.proxy_records import CLOSED_WITHOUT_CLOSE_FRAME, Loss, LossKind


class StreamMonitor:
    """Thread that cancels ``stages`` when a stream breaks; ``close`` it once the ranks are ready.

    It first leaves the control plane time to report a better reason.
    """

    def __init__(self, stages: SetupPhases) -> None:
        self._stages = stages
        self._peers: dict[int, int] = {}  # by descriptor
        self._poll = select.poll()
        self._closed = False
        with as_system_failure("streams cannot be watched", rank=stages.session.rank):
            self._bell = EventFd()
            self._poll.register(self._bell, select.POLLIN)
            self._thread = clock.thread(target=self._run, name="miraccl stream watch", daemon=True)
            try:
                self._thread.start()
            except BaseException:
                self._bell.close()
                raise

    def add(self, streams: Mapping[int, socket.socket]) -> None:
        """Monitor streams, by rank of the stages' session."""
        for peer, stream in streams.items():
            self._peers[stream.fileno()] = peer
            self._poll.register(stream, select.POLLRDHUP)
        self._bell.notify()

    def _run(self) -> None:
        while not self._closed:
            for descriptor, _ in clock.wait_io(
                lambda s: self._poll.poll(None if s is None else 1e3 * s), None
            ):
                if descriptor == self._bell.fileno():
                    self._bell.clear()
                else:
                    self._poll.unregister(descriptor)
                    self._report_broken(self._peers[descriptor])

    def _report_broken(self, peer: int) -> None:
        loss, session = Loss(LossKind.RESET, CLOSED_WITHOUT_CLOSE_FRAME), self._stages.session

        def end() -> None:
            if not self._closed:
                self._stages.cancel(loss.error(rank=session.rank, peer=peer))

        run_after_notice(session, loss, end)

    def close(self) -> None:
        """Stop the thread. May be called twice."""
        if not self._closed:
            self._closed = True
            self._bell.notify()
            self._thread.join()
            self._bell.close()
