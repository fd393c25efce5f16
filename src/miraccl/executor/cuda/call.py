"""Kernel source: cuLaunchKernelEx as a fast builtin. Through cuda.bindings a launch costs about a microsecond and a half more.

``launch(block, source, target, stream)``: ``block`` is the address of ``BLOCK_WORDS`` words; the result is CUDA's code.  Python's lock is
let go, since a launch waits where the queue of the GPU is full.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from miraccl.native.intrinsics import I64, PyEval_RestoreThread, PyEval_SaveThread, PyLong_AsLong, PyLong_FromLong, load, store

#: words: address of cuLaunchKernelEx, address of the kernel's argument, then what cuLaunchKernelEx takes: configuration (CUlaunchConfig),
#: function, parameters, extra
BLOCK_WORDS = 6
FUNCTION, ARGUMENT, CONFIG, KERNEL, PARAMETERS, EXTRA = range(BLOCK_WORDS)
CONFIG_STREAM = 32  # bytes from the beginning of the configuration to the stream


@intrinsic
def call4(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call the C function at an address with four words; it returns an int."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.IntType(32), [word] * 4)
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:]), word)

    return I64(I64, I64, I64, I64, I64), emit


def launch(self: int, args: int, nargs: int) -> int:
    block = PyLong_AsLong(load(args))
    argument, config = load(block + 8 * ARGUMENT), load(block + 8 * CONFIG)
    store(argument, PyLong_AsLong(load(args + 8)))
    store(argument + 8, PyLong_AsLong(load(args + 16)))
    store(config + CONFIG_STREAM, PyLong_AsLong(load(args + 24)))
    state = PyEval_SaveThread()
    code = call4(load(block + 8 * FUNCTION), config, load(block + 8 * KERNEL), load(block + 8 * PARAMETERS), load(block + 8 * EXTRA))
    PyEval_RestoreThread(state)
    return PyLong_FromLong(code)


EXPORTS: dict[str, Any] = {"launch": launch}
