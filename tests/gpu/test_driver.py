"""What the driver is asked directly, on every GPU there is."""

from __future__ import annotations

import pytest

from miraccl.executor.cuda.driver import Gpu, ordinal_at
from tests.gpu.gpus import GPUS, NEEDS_GPU


@pytest.mark.gpu
@NEEDS_GPU
def test_the_gpu_of_an_address() -> None:
    for ordinal in range(GPUS):
        gpu = Gpu(ordinal)
        address = gpu.allocate(4096)
        assert ordinal_at(address) == ordinal
        assert gpu.owner(address) == ordinal
        gpu.free(address)
        gpu.close()


def test_memory_that_no_gpu_has() -> None:
    assert ordinal_at(4096) is None
