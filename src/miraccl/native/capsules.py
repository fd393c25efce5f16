"""Capsules, by which C libraries pass pointers to each other through Python objects."""

from __future__ import annotations

import ctypes

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, [ctypes.py_object]


def pointer_of(capsule: object, name: bytes) -> int:
    """Return the pointer in a capsule of this name. Raises ``ValueError`` for any other object."""
    return int(_pointer(capsule, name))


def name_of(capsule: object) -> bytes:
    """Return the name of a capsule. Raises ``ValueError`` for any other object."""
    return bytes(_name(capsule) or b"")
