"""Versions of an array that peers write and this process reads: no reader sees half an update.

There are two buffers. Peers write the one that is not current; ``publish`` makes it current after
the last write. A reader pins the current version, and a buffer is offered for writing only when no
reader has it pinned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from miraccl import clock
from miraccl.deadline import Deadline
from miraccl.errors import InvalidUsage, TransferTimeout

if TYPE_CHECKING:
    from miraccl.p2p.agent import Agent
    from miraccl.p2p.registration import Registration


class Versions:
    """Two registered buffers of one array.

    Args:
        agent: Owner of the memory.
        shape, dtype: Of the array.

    Attributes:
        version: The current version, 0 before the first ``publish``.
    """

    def __init__(self, agent: Agent, shape: Any, dtype: Any) -> None:
        self._agent = agent
        self._buffers = [agent.empty(shape, dtype) for _ in range(2)]
        self._registered: Registration | None = None
        self._changed = clock.condition()
        self._pins = [0, 0]
        self._writing = 0
        self.version = 0

    def begin(self, version: int, *, timeout: float | None = None) -> bytes:
        """Offer the other buffer for a new version; return its descriptor.

        Args:
            version: Greater than the current one.
            timeout: Seconds to wait for readers of that buffer, default the agent's.

        Raises:
            InvalidUsage: The version is not newer, or another one is being written.
            TransferTimeout: A reader still has the buffer pinned.
        """
        if not self.version < version < 1 << 62 or self._writing:
            raise InvalidUsage(
                f"cannot begin version {version}: the current one is {self.version}"
                + (f", and {self._writing} is being written" if self._writing else "")
            )
        index = 1 - self._current()
        deadline = Deadline.after(self._agent.timeout if timeout is None else timeout)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._pins[index], deadline.left):
                raise TransferTimeout(
                    f"cannot begin version {version}: {self._pins[index]} readers have had version "
                    f"{self.version - 1} or an older one pinned for {deadline.seconds:g} s",
                    reason="pinned",
                )
            self._writing = version
        self._registered = self._agent.register(self._buffers[index], "w")
        return self._registered.advertise()

    def publish(self, version: int) -> None:
        """Make the written buffer current, once no further write can come.

        Raises:
            InvalidUsage: ``begin`` was not called with this version.
            TransferTimeout: A peer still writes to the buffer.
        """
        if version != self._writing or self._registered is None:
            raise InvalidUsage(
                f"cannot publish version {version}: version {self._writing} is being written"
            )
        self._registered.deregister()
        with self._changed:
            self.version, self._writing, self._registered = version, 0, None
            self._parity = 1 - self._current()

    def abandon(self) -> None:
        """Give up the version that is being written; the current one stays."""
        if self._registered is not None:
            self._registered.deregister()
        self._writing, self._registered = 0, None

    @contextmanager
    def pin(self) -> Iterator[tuple[int, Any]]:
        """Yield (version, array) of the current version, which does not change until the end."""
        with self._changed:
            index, version = self._current(), self.version
            self._pins[index] += 1
        try:
            yield version, self._buffers[index]
        finally:
            with self._changed:
                self._pins[index] -= 1
                self._changed.notify_all()

    _parity = 0

    def _current(self) -> int:
        return self._parity

    @property
    def nbytes(self) -> int:
        """Bytes of one version."""
        return int(math.prod(self._buffers[0].shape) * self._buffers[0].itemsize)
