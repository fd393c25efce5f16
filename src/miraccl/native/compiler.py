"""Compiler of kernel sources to object code.

A kernel source is a module with functions over int64 and a table ``EXPORTS``: name -> function of
two, three or four int64s. Each export becomes a C function ``int64 name(int64, ...)``. Numba
compiles them and only the object code is stored, so that a process that finds it in the cache needs
neither Numba nor a linker.
"""

from __future__ import annotations

import importlib
from typing import Any


def compile_module(module: str, prefix: str, only: tuple[str, ...] | None = None) -> list[bytes]:
    """Return object files of the exports of a kernel source, with symbols ``prefix + name``.

    ``only``: names to compile, by default all.
    """
    source = importlib.import_module(module)
    exports: dict[str, Any] = source.EXPORTS
    return [
        _compile(function, prefix + name)
        for name, function in exports.items()
        if only is None or name in only
    ]


def _compile(function: Any, symbol: str) -> bytes:
    from numba import cfunc, types

    arity = function.__code__.co_argcount
    signature = types.int64(*([types.int64] * arity))
    compiled = cfunc(signature, nopython=True, error_model="numpy", no_cpython_wrapper=True)(
        function
    )
    library = compiled._library
    # Numba's optimised module has the C wrapper under a mangled name: rename it and emit it again.
    text = library.get_llvm_str().replace(compiled.native_name, symbol)
    return _emit(text)


def _emit(text: str) -> bytes:
    import llvmlite.binding as llvm

    from miraccl.native.loader import target_machine

    module = llvm.parse_assembly(text)
    module.verify()
    return bytes(target_machine().emit_object(module))
