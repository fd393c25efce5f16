"""Compiler of kernel sources to object code.

A kernel source is a module with functions over int64 and a table ``EXPORTS``: name -> function of
two, three or four int64s. Each export becomes a C function ``int64 name(int64, ...)``. The object
code is all that is kept, so that a process that finds it in the cache needs neither a compiler nor
a linker.

``native.frontend`` translates a kernel source whose every value is an int64. A source that computes
with other types sets ``COMPILER = "numba"``, which takes about ten times as long.
"""

from __future__ import annotations

import importlib
from typing import Any


def compile_module(module: str, prefix: str, only: tuple[str, ...] | None = None) -> list[bytes]:
    """Return object files of the exports of a kernel source, with symbols ``prefix + name``.

    ``only`` selects exports by name.
    """
    source = importlib.import_module(module)
    exports: dict[str, Any] = {
        name: function for name, function in source.EXPORTS.items() if only is None or name in only
    }
    if getattr(source, "COMPILER", "frontend") == "numba":
        return [_compile_with_numba(function, prefix + name) for name, function in exports.items()]
    return [_compile_exports(exports, prefix)]


def _compile_exports(exports: dict[str, Any], prefix: str) -> bytes:
    """Compile all exports as one module: helpers that are not inlined are shared."""
    import llvmlite.binding as llvm

    from miraccl.native import frontend
    from miraccl.native.loader import target_machine

    machine = target_machine()
    text = frontend.translate(exports, prefix, llvm.get_process_triple(), str(machine.target_data))
    module = llvm.parse_assembly(text)
    module.verify()
    _optimize(module, machine)
    return bytes(machine.emit_object(module))


def _optimize(module: Any, machine: Any) -> None:
    """Run LLVM's -O3 pipeline on a module."""
    import llvmlite.binding as llvm

    if hasattr(llvm, "create_pass_builder"):
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = True
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        return
    # llvmlite before 0.44
    builder = llvm.create_pass_manager_builder()
    builder.opt_level, builder.loop_vectorize, builder.inlining_threshold = 3, True, 275
    passes = llvm.create_module_pass_manager()
    machine.add_analysis_passes(passes)
    builder.populate(passes)
    passes.run(module)


def _compile_with_numba(function: Any, symbol: str) -> bytes:
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
