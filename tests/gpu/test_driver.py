"""What the driver is asked directly, on every GPU there is."""

from __future__ import annotations

from typing import Any

import pytest

from miraccl.errors import SystemFailure
from miraccl.executor.cuda import driver, toolkit
from miraccl.executor.cuda.driver import Gpu, ordinal_at
from tests.gpu.fake_cuda import FakeCuda, Result
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


@pytest.mark.parametrize(("compiler", "hint"), [(13, "CUDA 12: a newer one, or .*cuda12"), (12, "")])
def test_machine_code_that_the_driver_refuses(compiler: int, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver that is imitated is of CUDA 12."""
    cuda = FakeCuda(refuse=["cuModuleLoadData"])
    monkeypatch.setattr(driver, "bindings", lambda name: cuda)
    monkeypatch.setattr(toolkit, "version", lambda: (compiler, 2))
    with pytest.raises(SystemFailure, match=f"cuModuleLoadData.*{hint}") as raised:
        Gpu(0).load(b"code", "kernel")
    assert bool(raised.value.hint) == bool(hint)


def test_a_driver_that_does_not_start_is_told_with_who_knows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(refuse=["cuInit"])
    monkeypatch.setattr(driver, "bindings", lambda name: cuda)
    with pytest.raises(SystemFailure, match=r"cuInit: CUDA_ERROR_NOT_SUPPORTED.*miraccl doctor"):
        Gpu(0)


class LoadingCuda(FakeCuda):
    """Counts modules."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded, self.unloaded = 0, 0

    def cuModuleLoadData(self, cubin: bytes) -> tuple[Any, ...]:  # noqa: N802
        self.loaded += 1
        return Result.CUDA_SUCCESS, self.loaded

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        return Result.CUDA_SUCCESS, (module, name)

    def cuModuleUnload(self, module: int) -> tuple[Any, ...]:  # noqa: N802
        self.unloaded += 1
        return (Result.CUDA_SUCCESS,)


def test_communicators_of_a_gpu_load_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = LoadingCuda()
    monkeypatch.setattr(driver, "bindings", lambda name: cuda)
    first, second, other = Gpu(6), Gpu(6), Gpu(7)
    assert first.load(b"code", "kernel") == second.load(b"code", "kernel")
    assert cuda.loaded == 1
    assert second.load(b"other code", "kernel") != other.load(b"code", "kernel") != first.load(b"code", "kernel")
    assert cuda.loaded == 3
    first.close()
    other.close()
    assert cuda.unloaded == 1  # the second uses the others still
    assert second.load(b"code", "kernel") == (1, b"kernel")
    second.close()
    assert cuda.unloaded == 3
    again = Gpu(6)
    again.load(b"code", "kernel")
    assert cuda.loaded == 4
    again.close()
