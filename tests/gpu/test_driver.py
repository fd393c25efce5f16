"""What the driver is asked directly, on every GPU there is."""

from __future__ import annotations

import pytest

from miraccl.executor.cuda.driver import Gpu, device_count, ordinal_at

GPUS = device_count()


@pytest.mark.gpu
@pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU, no driver, or cuda-bindings is not installed")
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
