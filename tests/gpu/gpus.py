"""Requirements of tests on real GPUs, and their skip reasons."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from miraccl.executor.cuda.driver import check, driver


def _count() -> int:
    """Return the GPUs of this process; 0 without a driver."""
    try:
        return int(check(driver().cuDeviceGetCount(), "cuDeviceGetCount"))
    except Exception:  # no package, no library, no driver, no device: all the same to who asks
        return 0


GPUS = _count()
NO_GPU = "no NVIDIA GPU, no driver, or cuda-bindings is not installed"
NEEDS_GPU = pytest.mark.skipif(GPUS == 0, reason=NO_GPU)
#: For tests whose ranks are processes of ``tests.gpu.ranks``.
ON_GPUS = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    NEEDS_GPU,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None,
        reason="the ranks of these tests make their tensors with PyTorch",
    ),
]


def need_gpus() -> None:
    """Exit a command with the missing requirement."""
    if GPUS == 0:
        sys.exit(NO_GPU)
