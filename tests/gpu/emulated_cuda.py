"""A CUDA driver without a GPU that runs kernels: ``fake_cuda`` with launches by the emulator.

Ranks are processes that map each other's memory.
"""

# ruff: noqa: N802

from __future__ import annotations

import ctypes
import types
from typing import Any

from miraccl.executor.cuda import launch
from tests.gpu.emulator import compile_kernel
from tests.gpu.fake_cuda import FakeCuda, Result


class EmulatedCuda(FakeCuda):
    """Streams run kernels one after another; what a graph replays is launched with the arguments that were captured."""

    CUstream = int
    CUresult = types.SimpleNamespace(CUDA_ERROR_NOT_READY=600, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT=906)

    def install(self) -> EmulatedCuda:
        super().install()
        vars(launch)["Kernels"].function = lambda _, spec: compile_kernel(spec)
        self.launches = 0
        return self

    def cuLaunchKernel(
        self, function: Any, blocks: int, y: int, z: int, threads: int, ty: int, tz: int, shared: int, stream: int, params: int, extra: int
    ) -> tuple[Any, ...]:
        if self.current is None:
            return (Result.CUDA_ERROR_INVALID_CONTEXT,)
        address = ctypes.c_void_p.from_address(params).value
        assert address is not None
        size = int(function.argument_bytes)
        # arguments are copied by the call, as the driver does, to a place that is aligned for every type
        room = (ctypes.c_char * (size + 16))()
        start = -ctypes.addressof(room) % 16
        ctypes.memmove(ctypes.addressof(room) + start, address, size)
        self.launches += 1

        def run() -> None:
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(room) + start)
            function(pointers, (ctypes.c_uint32 * 1)(blocks), 1, threads)

        return self._put(stream, run)

    def cuEventQuery(self, event: Any) -> tuple[Any, ...]:
        return (Result.CUDA_SUCCESS if event.recorded.is_set() else self.CUresult.CUDA_ERROR_NOT_READY,)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, 1, stream, None
