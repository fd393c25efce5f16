"""Loader of object code: C addresses, and Python builtins that call them without a wrapper.

A kernel that Python calls often is bound as a builtin of the calling convention ``METH_FASTCALL``:
the interpreter passes the objects themselves (``PyObject *self, PyObject *const *args, Py_ssize_t
nargs``), at about 12 ns per call, against 190 of a Numba dispatcher and 600 of ctypes (Python 3.11,
x86-64).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from miraccl.errors import SystemFailure
from miraccl.native.object_code import link

METH_FASTCALL = 0x0080  # CPython Include/methodobject.h


class _PyMethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("method", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_new_builtin = ctypes.pythonapi.PyCFunction_NewEx
_new_builtin.restype = ctypes.py_object
_new_builtin.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
_function_of = ctypes.pythonapi.PyCFunction_GetFunction
_function_of.restype = ctypes.c_void_p
_function_of.argtypes = [ctypes.py_object]


@functools.cache
def target_machine() -> Any:
    """Return LLVM's target for this processor with all of its features.

    The code model ``large`` reaches libc at any distance.
    """
    import llvmlite.binding as llvm  # 40 ms, only to compile

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=cpu_features(),
        opt=3,
        reloc="static",
        codemodel="large",
        jit=True,
    )


@functools.cache
def cpu_features() -> str:
    """Return the features of this processor as LLVM names them."""
    import llvmlite.binding as llvm

    return str(llvm.get_host_cpu_features().flatten())


class CodeLibrary:
    """Loaded object code. It lives as long as the process, because builtins may point into it."""

    def __init__(self, objects: list[bytes]) -> None:
        self._symbols = link(objects, _address_of)
        self._engine: Any = None
        if self._symbols is None:
            import llvmlite.binding as llvm

            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
            for data in objects:
                image = llvm.object_file.ObjectFileRef.from_data(data)
                self._engine.add_object_file(image)
            for symbol in _undefined_symbols(objects):
                llvm.add_symbol(symbol, _address_of(symbol))
            self._engine.finalize_object()
        _libraries.append(self)

    def address(self, symbol: str) -> int:
        """Return the address of a symbol. Raises ``SystemFailure``."""
        if self._symbols is not None:
            value = self._symbols.get(symbol, 0)
        else:
            value = int(self._engine.get_function_address(symbol))
        if not value:
            raise SystemFailure(f"cannot use compiled code: it has no function {symbol!r}")
        return value


_libraries: list[CodeLibrary] = []


@functools.cache
def _address_of(symbol: str) -> int:
    """Return the address of a function of Python or libc."""
    libc = ctypes.CDLL(None)
    library = ctypes.pythonapi if symbol.startswith("Py") else libc
    try:
        value = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
    except AttributeError:
        # Numba's wrapper refers to its own helpers to report exceptions, which kernels never raise.
        value = ctypes.cast(libc.abort, ctypes.c_void_p).value
    return value or 0


def _undefined_symbols(objects: list[bytes]) -> set[str]:
    """Return the names of undefined symbols of ELF objects.

    System V ABI, chapter 4: entries of SHT_SYMTAB with section index 0.
    """
    import struct

    names: set[str] = set()
    for data in objects:
        shoff = struct.unpack_from("<Q", data, 40)[0]
        shentsize, shnum = struct.unpack_from("<HH", data, 58)
        sections = [
            struct.unpack_from("<IIQQQQIIQQ", data, shoff + i * shentsize) for i in range(shnum)
        ]
        for section in sections:
            if section[1] != 2:  # SHT_SYMTAB
                continue
            strings = sections[section[6]][4]
            for at in range(section[4], section[4] + section[5], 24):
                name, _, _, index = struct.unpack_from("<IBBH", data, at)
                if index == 0 and name:
                    end = data.index(b"\0", strings + name)
                    names.add(data[strings + name : end].decode())
    return names


def builtin(name: str, address: int, owner: object = None) -> Callable[..., Any]:
    """Return a Python builtin for a compiled C function.

    Its type is ``PyObject *f(PyObject *owner, PyObject *const *args, Py_ssize_t nargs)``.
    """
    function: Callable[..., Any] = _new_builtin(
        ctypes.addressof(_method_definition(name, address)), owner, None
    )
    return function


@functools.cache
def _method_definition(name: str, address: int) -> _PyMethodDef:
    """Return the method definition shared by builtins of all owners."""
    definition = _PyMethodDef(name.encode(), address, METH_FASTCALL, b"")
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(definition))
    return definition


def entry_of(function: Callable[..., Any]) -> tuple[int, int]:
    """Return the C function of a builtin and the address of its owner, for compiled code that calls
    it.

    The builtin keeps the owner alive.
    """
    return int(_function_of(function)), id(function.__self__)  # type: ignore[attr-defined]
