"""Kernel source: single words of shared memory, for Python code that shares them with compiled
code.

Arguments are Python ints.
"""

from __future__ import annotations

from typing import Any

from miraccl.native.intrinsics import (
    FUTEX_WAKE,
    SYS_FUTEX,
    PyLong_AsLong,
    PyLong_FromLong,
    add,
    add32,
    exchange,
    load,
    load_acquire,
    store_release,
    syscall,
)


def load_word(self: int, args: int, nargs: int) -> int:
    return PyLong_FromLong(load_acquire(PyLong_AsLong(load(args))))


def store_word(self: int, args: int, nargs: int) -> int:
    store_release(PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8)))
    return PyLong_FromLong(0)


def exchange_word(self: int, args: int, nargs: int) -> int:
    return PyLong_FromLong(exchange(PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8))))


def add_word(self: int, args: int, nargs: int) -> int:
    """Add to a word and return the old value."""
    return PyLong_FromLong(add(PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8))))


def ring_futex(self: int, args: int, nargs: int) -> int:
    """Add one to a 32-bit word and wake all its sleepers."""
    address = PyLong_AsLong(load(args))
    add32(address, 1)
    return PyLong_FromLong(syscall(SYS_FUTEX, address, FUTEX_WAKE, 1 << 30, 0, 0, 0))


def system_call(self: int, args: int, nargs: int) -> int:
    """Make the system call ``system_call(number, a, b, c)``; return its result or -1."""
    number = PyLong_AsLong(load(args))
    a, b, c = (
        PyLong_AsLong(load(args + 8)),
        PyLong_AsLong(load(args + 16)),
        PyLong_AsLong(load(args + 24)),
    )
    return PyLong_FromLong(syscall(number, a, b, c, 0, 0, 0))


EXPORTS: dict[str, Any] = {
    "load_word": load_word,
    "store_word": store_word,
    "exchange_word": exchange_word,
    "add_word": add_word,
    "ring_futex": ring_futex,
    "system_call": system_call,
}
