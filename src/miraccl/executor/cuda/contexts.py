"""CUDA contexts: the current context of a thread decides which memory, streams and events it uses.

The primary context of a GPU is used, so memory and streams are shared with PyTorch, CuPy and
others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from miraccl.errors import MissingDependency, SystemFailure
from miraccl.executor.cuda.driver import check, driver


def current_ordinal() -> int | None:
    """Return the ordinal of the GPU whose context is current in this thread.

    None without a current context, and without a driver.
    """
    try:
        code, device = driver().cuCtxGetDevice()
    except (MissingDependency, SystemFailure):  # callers that need the GPU get the error
        return None
    return None if int(code) else int(device)


class WrongDevice(SystemFailure):
    """Another GPU's context is current in this thread; nothing has been done."""


@contextlib.contextmanager
def preserve_context() -> Iterator[None]:
    """Restore the context of the calling thread after the block, if it had one."""
    cuda, before = None, 0
    with contextlib.suppress(
        MissingDependency, SystemFailure
    ):  # callers that need the GPU get the error
        cuda = driver()
        before = check(cuda.cuCtxGetCurrent(), "cuCtxGetCurrent")
    try:
        yield
    finally:
        if cuda is not None and int(before):
            check(cuda.cuCtxSetCurrent(before), "cuCtxSetCurrent")


class PrimaryContext:
    """Primary context of the GPU ``ordinal`` in this process, retained until ``release``."""

    def __init__(self, ordinal: int) -> None:
        self.cuda = driver()
        self.ordinal = ordinal
        self._device = check(self.cuda.cuDeviceGet(ordinal), f"cuDeviceGet({ordinal})")
        self._context = check(
            self.cuda.cuDevicePrimaryCtxRetain(self._device), "cuDevicePrimaryCtxRetain"
        )
        self.context = int(self._context)

    def make_current(self) -> None:
        """Make the context current in the calling thread; do nothing after ``release``."""
        if self._context is not None:
            check(self.cuda.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def ensure_current(self) -> None:
        """Make the context current in a thread that has none; raise ``WrongDevice`` if another one
        is.
        """
        # without a current context nothing can be launched in this thread
        current = int(check(self.cuda.cuCtxGetCurrent(), "cuCtxGetCurrent"))
        if not current:
            self.make_current()
        elif current != self.context:
            raise WrongDevice(
                f"cannot use GPU {self.ordinal}: another GPU is current in this thread"
            )

    def is_wrong_device(self) -> bool:
        """Return True if the calling thread's current context is another GPU's."""
        return int(check(self.cuda.cuCtxGetCurrent(), "cuCtxGetCurrent")) not in (0, self.context)

    @contextlib.contextmanager
    def device_guard(self) -> Iterator[None]:
        """Make the context current in the calling thread inside the block; restore the previous one
        after it.
        """
        if int(check(self.cuda.cuCtxGetCurrent(), "cuCtxGetCurrent")) == self.context:
            yield
            return
        with preserve_context():
            self.make_current()
            yield

    def release(self) -> None:
        """Release the primary context; there must be no call after this."""
        self.cuda.cuDevicePrimaryCtxRelease(self._device)
        self._context = None
