"""Kernel source: cuLaunchKernel as a fast builtin. Through cuda.bindings a launch costs about a microsecond and a half more.

``launch(block, source, target, stream)``: ``block`` is the address of ``BLOCK_WORDS`` words; the result is CUDA's code.  Python's lock is
let go, since a launch waits where the queue of the GPU is full.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from miraccl.native.intrinsics import I64, PyEval_RestoreThread, PyEval_SaveThread, PyLong_AsLong, PyLong_FromLong, load, store

#: words: address of cuLaunchKernel, address of the kernel's argument, then what cuLaunchKernel takes: function, grid x y z, block x y z,
#: shared memory, stream, parameters, extra
BLOCK_WORDS = 13
FUNCTION, ARGUMENT, FIRST, STREAM = 0, 1, 2, 10


@intrinsic
def call11(typingctx: Any, function: Any, block: Any) -> Any:
    """Call the C function at an address with the eleven words at ``block``."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(64)
        words = builder.inttoptr(args[1], word.as_pointer())
        values = [builder.load(builder.gep(words, [ir.Constant(word, i)])) for i in range(11)]
        kind = ir.FunctionType(ir.IntType(32), [word] * 11)
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), values), word)

    return I64(I64, I64), emit


def launch(self: int, args: int, nargs: int) -> int:
    block = PyLong_AsLong(load(args))
    argument = load(block + 8 * ARGUMENT)
    store(argument, PyLong_AsLong(load(args + 8)))
    store(argument + 8, PyLong_AsLong(load(args + 16)))
    store(block + 8 * STREAM, PyLong_AsLong(load(args + 24)))
    state = PyEval_SaveThread()
    code = call11(load(block + 8 * FUNCTION), block + 8 * FIRST)
    PyEval_RestoreThread(state)
    return PyLong_FromLong(code)


EXPORTS: dict[str, Any] = {"launch": launch}
