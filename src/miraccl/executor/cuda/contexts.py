"""Contexts of GPUs: which is current in a thread, and whose memory, streams and events its calls mean.

The primary context of a GPU is used, so that memory and streams of PyTorch, CuPy and others are ours too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from miraccl.errors import MissingDependency, SystemFailure
from miraccl.executor.cuda.driver import check, driver


def current_ordinal() -> int | None:
    """The number of the GPU whose context is current in the calling thread; None without one, and without a driver."""
    try:
        code, device = driver().cuCtxGetDevice()
    except (MissingDependency, SystemFailure):  # who needs the GPU is told
        return None
    return None if int(code) else int(device)


class WrongDevice(SystemFailure):
    """In this thread the context of another GPU is current; nothing has happened."""


@contextlib.contextmanager
def preserve_context() -> Iterator[None]:
    """After the block the context is current in the calling thread that was before, if there was one."""
    cuda, before = None, 0
    with contextlib.suppress(MissingDependency, SystemFailure):  # who needs the GPU is told
        cuda = driver()
        before = check(cuda.cuCtxGetCurrent(), "cuCtxGetCurrent")
    try:
        yield
    finally:
        if cuda is not None and int(before):
            check(cuda.cuCtxSetCurrent(before), "cuCtxSetCurrent")


class PrimaryContext:
    """That of the GPU with number ``ordinal`` in this process, retained until ``release``."""

    def __init__(self, ordinal: int) -> None:
        self.cuda = driver()
        self.ordinal = ordinal
        self._device = check(self.cuda.cuDeviceGet(ordinal), f"cuDeviceGet({ordinal})")
        self._context = check(
            self.cuda.cuDevicePrimaryCtxRetain(self._device), "cuDevicePrimaryCtxRetain"
        )
        self.context = int(self._context)

    def make_current(self) -> None:
        """Make the context current in the calling thread; after ``release`` there is none."""
        if self._context is not None:
            check(self.cuda.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def ensure_current(self) -> None:
        """Make the context current in a thread that has none, in which nothing could be launched; ``WrongDevice`` where the program has
        chosen another one."""
        current = int(check(self.cuda.cuCtxGetCurrent(), "cuCtxGetCurrent"))
        if not current:
            self.make_current()
        elif current != self.context:
            raise WrongDevice(f"GPU {self.ordinal} is not the one that is current in this thread")

    def is_wrong_device(self) -> bool:
        """Whether the calling thread has another context."""
        return int(check(self.cuda.cuCtxGetCurrent(), "cuCtxGetCurrent")) not in (0, self.context)

    @contextlib.contextmanager
    def device_guard(self) -> Iterator[None]:
        """Inside the block the context is current in the calling thread; afterwards the one that was, if any."""
        if int(check(self.cuda.cuCtxGetCurrent(), "cuCtxGetCurrent")) == self.context:
            yield
            return
        with preserve_context():
            self.make_current()
            yield

    def release(self) -> None:
        """There is none any more."""
        self.cuda.cuDevicePrimaryCtxRelease(self._device)
        self._context = None
