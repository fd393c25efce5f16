"""Prepared launches, complete but for the pointers, and the kernels loaded on a GPU."""

from __future__ import annotations

import ctypes
import functools
import struct
import types
from collections.abc import Callable
from typing import Any

from miraccl import native
from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout, lower, schedules, toolkit
from miraccl.executor.cuda.driver import check, function_address
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.plan import DevicePlan, Request
from miraccl.executor.cuda.source import KernelSpec, write_source

_pointers = struct.Struct("<QQ")
OVERLAP_MIN_ARCH = 90  # sm_90 has programmatic dependent launch
OVERLAP_MIN_DRIVER = 12030  # the driver of CUDA 12.3 can capture it
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, whose value has 64 bytes."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint32 * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("nattributes", ctypes.c_uint32),
    )


class KernelLaunch:
    """Prepared launch of one collective of one size. ``run`` enqueues it; it neither waits nor
    allocates.

    ``overlaps``: the kernel itself waits for the previous one in the stream (``wait_previous_grid``
    of source/machine.cuh), so it is set up while that one runs.
    """

    def __init__(
        self,
        gpu: Gpu,
        function: Any,
        plan: DevicePlan,
        blocks: int,
        args: bytearray,
        overlaps: bool = False,
    ) -> None:
        self.plan, self.blocks, self.threads = plan, blocks, blocks * plan.threads
        self._args = (ctypes.c_char * len(args)).from_buffer(args)
        self._params = (ctypes.c_void_p * 1)(ctypes.addressof(self._args))
        self._address = ctypes.addressof(self._params)
        self._function = function
        self._launch = gpu.cuda.cuLaunchKernel
        self._stream_type = gpu.cuda.CUstream
        self._stream, self._stream_object = -1, None
        self._arg_bytes = args
        self._results = gpu.cuda.CUresult
        # address of the record for compiled code (fastpath.cuda.layout); 0 with a fake driver
        self.record = 0
        if (direct := direct_launch(gpu)) is not None:
            address, self._direct = direct
            attribute = ctypes.pointer(_LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (1,)))
            overlaps = overlaps and gpu.driver_version >= OVERLAP_MIN_DRIVER
            self._config = _LaunchConfig(
                (blocks, 1, 1), (plan.threads, 1, 1), 0, None, attribute, int(overlaps)
            )
            words = (
                address,
                ctypes.addressof(self._args),
                ctypes.addressof(self._config),
                int(function),
                self._address,
            )
            self._record = (ctypes.c_uint64 * len(words))(*words)
            self.record = ctypes.addressof(self._record)
            self.run = self._run_direct  # type: ignore[method-assign]

    @property
    def last_plan(self) -> DevicePlan:
        """Plan of the last ``run``."""
        return self.plan

    @property
    def signatures(self) -> tuple[int, ...]:
        """Signatures of this launch in op records."""
        field = layout.ARGS["signature"]
        return (
            int(struct.unpack_from(f"<{field.code}", self._arg_bytes, field.offset)[0])
            & 0xFFFFFFFF,
        )

    def run(self, source: int, target: int, stream: int) -> None:
        """Enqueue in ``stream`` (a CUstream as an int), reading at ``source`` and writing at
        ``target``.
        """
        _pointers.pack_into(self._args, 0, source, target)
        if stream != self._stream:
            self._stream, self._stream_object = stream, self._stream_type(stream)
        code = self._launch(
            self._function,
            self.blocks,
            1,
            1,
            self.plan.threads,
            1,
            1,
            0,
            self._stream_object,
            self._address,
            0,
        )
        if code[0]:
            check(code, "cuLaunchKernel")

    def _run_direct(self, source: int, target: int, stream: int) -> None:
        """``run`` without the conversions of cuda.bindings (``fastpath.cuda.call``)."""
        code = self._direct(self.record, source, target, stream)
        if code:
            self.check(code)

    def check(self, code: int) -> None:
        """Raise ``SystemFailure`` for an error code of the driver."""
        check((self._results(code),), "cuLaunchKernelEx")


@functools.cache
def _cuda_launch() -> tuple[int, Callable[[int, int, int, int], int]] | None:
    """Return (address of cuLaunchKernelEx, builtin that calls it); None without the driver's
    library.
    """
    address = function_address("cuLaunchKernelEx")
    entry = native.library("miraccl.fastpath.cuda.call").address(native.PREFIX + "launch")
    return (address, native.builtin("launch", entry)) if address else None


def direct_launch(gpu: Gpu) -> tuple[int, Callable[[int, int, int, int], int]] | None:
    """Return the direct launch function, which bypasses cuda.bindings; None if the driver is a
    fake.
    """
    return _cuda_launch() if isinstance(gpu.cuda, types.ModuleType) else None


def driver_addresses(gpu: Gpu, *names: str) -> tuple[int, ...]:
    """Return addresses of driver functions for compiled code; 0 each if the driver is a fake."""
    real = isinstance(gpu.cuda, types.ModuleType)
    return tuple(function_address(name) if real else 0 for name in names)


class Kernels:
    """Compiled and loaded kernels of one GPU, by specification."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._functions: dict[KernelSpec, Any] = {}

    def function(self, spec: KernelSpec) -> Any:
        """Return the loaded kernel; it is compiled if it is not in the cache of this machine."""
        if spec not in self._functions:
            cubin = toolkit.compile_cubin(
                write_source(spec, self.gpu.arch), self.gpu.arch, spec.name
            )
            self._functions[spec] = self.gpu.load(cubin, spec.entry)
        return self._functions[spec]

    def prepare_scale(self, request: Request, comm_args: lower.CommArgs) -> KernelLaunch:
        """Prepare a pre-multiplied sum of a single rank."""
        threads = 512
        blocks = max(1, min(request.multiprocessors, -(-request.count // threads)))
        plan = DevicePlan(
            algo="alone",
            proto="",
            blocks=blocks,
            threads=threads,
            unroll=1,
            reason="one rank: the input times its scalar",
        )
        spec = KernelSpec(
            family="scale",
            nranks=lower.SCALE_RANKS,
            dtype=request.dtype,
            op=request.op,
            threads=threads,
        )
        return KernelLaunch(
            self.gpu, self.function(spec), plan, blocks, lower.lower_scale(request, comm_args)
        )

    def prepare(
        self,
        plan: DevicePlan,
        request: Request,
        comm_args: lower.CommArgs,
        windows: schedules.WindowOffsets = schedules.NO_WINDOWS,
    ) -> KernelLaunch:
        """Compile, load and lower. May be called while a stream is captured.

        Raises:
            InvalidUsage: The arguments of the launch need a newer driver.
        """
        schedule = schedules.schedule_of(plan, request, comm_args.order)
        spec = schedules.kernel_for(plan, request, schedule)
        args = schedules.lower_plan(schedule, plan, request, comm_args, windows)
        if (
            len(args) > layout.SMALL_ARGUMENT_BYTES
            and self.gpu.driver_version < layout.LARGE_ARGUMENTS_DRIVER
        ):
            raise InvalidUsage(
                f"cannot run schedule {plan.algo!r}: more than "
                f"{layout.STEP_CAPACITIES[0]} steps of a rank need a driver of CUDA 12.1"
            )
        function = self.function(spec)
        overlaps = (spec.single_tile or spec.double_buffered) and self.gpu.arch >= OVERLAP_MIN_ARCH
        return KernelLaunch(
            self.gpu, function, plan, schedules.grid_blocks(plan, schedule), args, overlaps
        )
