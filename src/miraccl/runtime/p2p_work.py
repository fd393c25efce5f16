"""Handle of a send or receive in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from miraccl import clock
from miraccl.errors import CollectiveTimeout, InvalidUsage, MiracclError
from miraccl.runtime.work import Work, check_timeout

if TYPE_CHECKING:
    from miraccl.runtime.core_transfers import CoreTransfers
    from miraccl.runtime.exchange import TransferEntry


class P2pWork(Work):
    """A send or receive in the background.

    It advances inside calls of its communicator, ``wait`` and ``done`` included, and on the
    progress thread.
    """

    def __init__(
        self, name: str, core: CoreTransfers, entries: Sequence[TransferEntry], result: Any
    ) -> None:
        super().__init__(name)
        self._core, self._entries = core, entries
        self._result = result

    def wait(self, timeout: float | None = None, *, stream: Any = None) -> Any:
        if (seconds := check_timeout(timeout)) is not None:
            self._poll_until(seconds)
        if not self.done():
            self._update(self._core.complete)
        return super().wait(0)

    def _poll_until(self, timeout: float) -> None:
        deadline = clock.monotonic() + timeout
        while not self.done():
            if clock.monotonic() >= deadline:
                raise CollectiveTimeout(
                    f"timed out after {timeout:g} s; the operation continues", op=self.name
                )
            clock.sleep(0.0005)

    def done(self) -> bool:
        if not super().done():
            self._update(self._core.progress)
        return super().done()

    is_completed = done

    def _update(self, advance: Callable[[Sequence[TransferEntry], str], bool]) -> None:
        try:
            if advance(self._entries, self.name):
                self._finish(self._result, None)
        except InvalidUsage:  # another thread is inside; the operation is unaffected
            raise
        except MiracclError as error:
            self._finish(None, error)
