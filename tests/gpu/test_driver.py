"""Direct driver calls, on every GPU."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest

from miraccl.errors import SystemFailure
from miraccl.executor.cuda import driver, toolkit
from miraccl.executor.cuda.driver import ordinal_at
from miraccl.executor.cuda.gpu import Gpu
from miraccl.runtime.gpu.keep_alive import KeepAlive
from tests.gpu.emulated_cuda import EmulatedCuda
from tests.gpu.fake_cuda import FakeCuda, Result, context_of
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


@pytest.mark.gpu
@NEEDS_GPU
def test_the_context_of_an_application_is_known_and_preserved() -> None:
    """PyTorch uses the same context on each GPU. An event goes to the default stream of the current
    context.
    """
    torch = pytest.importorskip("torch")
    gpus = [Gpu(ordinal) for ordinal in range(GPUS)]
    for here in gpus:
        torch.cuda.set_device(here.ordinal)
        torch.ones(1, device="cuda")
        for gpu in gpus:
            assert gpu.is_wrong_device() == (gpu is not here)
            with gpu.device_guard():
                assert not gpu.is_wrong_device()
                event = gpu.make_event()
                gpu.record(event, 0)
            assert not here.is_wrong_device()
            assert torch.cuda.current_device() == here.ordinal
            if gpu is not here:
                with pytest.raises(SystemFailure):
                    gpu.record(event, 0)
            gpu.destroy_event(event)
    for gpu in gpus:
        gpu.close()


def test_retained_objects_wait_for_the_gpu_of_their_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, gate = EmulatedCuda(), threading.Event()
    monkeypatch.setattr(driver, "bindings", lambda name: cuda)
    kept, thing = KeepAlive(Gpu(1)), Thing()
    there = weakref.ref(thing)
    cuda.streams.legacy[context_of(1)].put(
        lambda: None if gate.wait(30) else pytest.fail("nobody opens the gate")
    )
    cuda.set_current(0)
    kept.retain([thing], 0)
    del thing
    cuda.streams[0].synchronize()  # of the other GPU
    kept.retain([], 0)
    assert there() is not None
    gate.set()
    cuda.streams.legacy[context_of(1)].synchronize()
    kept.retain([], 0)
    assert there() is None
    assert cuda.current == context_of(0)


class Thing:
    """Weakly referenceable object."""


def test_memory_without_a_gpu() -> None:
    assert ordinal_at(4096) is None


@pytest.mark.parametrize(
    ("compiler", "hint"), [(13, "CUDA 12: install a newer driver, or .*cuda12"), (12, "")]
)
def test_machine_code_that_the_driver_rejects(
    compiler: int, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake driver supports CUDA 12."""
    cuda = FakeCuda(refuse=["cuModuleLoadData"])
    monkeypatch.setattr(driver, "bindings", lambda name: cuda)
    monkeypatch.setattr(toolkit, "version", lambda: (compiler, 2))
    with pytest.raises(SystemFailure, match=f"cuModuleLoadData.*{hint}") as raised:
        Gpu(0).load(b"code", "kernel")
    assert bool(raised.value.hint) == bool(hint)


def test_a_driver_that_does_not_start_is_reported_with_a_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(refuse=["cuInit"])
    monkeypatch.setattr(driver, "bindings", lambda name: cuda)
    with pytest.raises(SystemFailure, match=r"cuInit: CUDA_ERROR_NOT_SUPPORTED.*miraccl doctor"):
        Gpu(0)


class LoadingCuda(FakeCuda):
    """Fake driver that counts modules."""

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
    assert (
        second.load(b"other code", "kernel")
        != other.load(b"code", "kernel")
        != first.load(b"code", "kernel")
    )
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
