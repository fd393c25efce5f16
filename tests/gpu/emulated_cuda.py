"""CUDA driver without a GPU that runs kernels: ``fake_cuda`` with launches by the emulator.

Ranks are processes that map each other's memory.
"""

# ruff: noqa: N802

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from miraccl.executor.cuda import launch
from miraccl.executor.cuda.source import KernelSpec
from tests.gpu.emulator import compile_kernel
from tests.gpu.fake_cuda import FakeCuda, Result


@dataclass
class Module:
    """Machine code in a context, and its only function."""

    context: int
    function: Any
    loaded: bool = True

    def __int__(self) -> int:
        return id(self)


class EmulatedCuda(FakeCuda):
    """Emulated driver whose GPUs are linked by NVLink.

    Streams run kernels in order; a graph replays launches with the arguments that were captured.
    """

    CUstream = int

    def install(self) -> EmulatedCuda:
        super().install()
        vars(launch)["Kernels"].function = lambda kernels, spec: self._function(kernels, spec)
        self.launches = 0
        self._specs: dict[bytes, KernelSpec] = {}
        self.modules: dict[int, Module] = {}
        return self

    def _function(self, kernels: launch.Kernels, spec: KernelSpec) -> Any:
        code = repr(spec).encode()
        self._specs[code] = spec
        return kernels.gpu.load(code, spec.entry)

    def cuDeviceGetP2PAttribute(self, kind: int, device: int, peer: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, 1  # over NVLink

    def cuModuleLoadData(self, code: bytes) -> tuple[Any, ...]:
        if self.current is None:
            return Result.CUDA_ERROR_INVALID_CONTEXT, None
        module = Module(self.current, compile_kernel(self._specs[code]))
        self.modules[int(module)] = module
        return Result.CUDA_SUCCESS, module

    def cuModuleGetFunction(self, module: Module, entry: bytes) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, module

    def cuModuleUnload(self, module: Module) -> tuple[Any, ...]:
        if self.current != module.context:
            return (Result.CUDA_ERROR_INVALID_HANDLE,)
        module.loaded = False
        return (Result.CUDA_SUCCESS,)

    def cuLaunchKernel(
        self,
        code: Module,
        blocks: int,
        y: int,
        z: int,
        threads: int,
        ty: int,
        tz: int,
        shared: int,
        stream: int,
        params: int,
        extra: int,
    ) -> tuple[Any, ...]:
        if self.current is None:
            return (Result.CUDA_ERROR_INVALID_CONTEXT,)
        address = ctypes.c_void_p.from_address(params).value
        assert address is not None
        size = int(code.function.argument_bytes)
        if not code.loaded or {code.context, self.streams[stream].context} != {self.current}:
            return (Result.CUDA_ERROR_INVALID_HANDLE,)
        if not self._touches(stream, *(ctypes.c_uint64 * (size // 8)).from_address(address)):
            return (Result.CUDA_ERROR_ILLEGAL_ADDRESS,)
        # like the driver, the call copies the arguments, to memory aligned for every type
        room = (ctypes.c_char * (size + 16))()
        start = -ctypes.addressof(room) % 16
        ctypes.memmove(ctypes.addressof(room) + start, address, size)
        self.launches += 1

        def run() -> None:
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(room) + start)
            code.function(pointers, (ctypes.c_uint32 * 1)(blocks), 1, threads)

        return self._put(stream, run)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, 1, stream, None
