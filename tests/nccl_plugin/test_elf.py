"""Shared objects of data only: loaded by the dynamic loader, found by name, writable."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from miraccl.errors import SystemFailure
from miraccl.native import elf


def test_objects_are_found_zeroed_and_writable(tmp_path: Path) -> None:
    path = tmp_path / "libdata.so"
    sizes = {"first": 8, "second": 200, "third": 1}
    path.write_bytes(elf.data_object(sizes, "libdata.so"))
    library = ctypes.CDLL(str(path))
    addresses = {}
    for name, size in sizes.items():
        data = (ctypes.c_char * size).in_dll(library, name)
        assert data.raw == bytes(size)
        data[size - 1] = b"\1"
        addresses[name] = ctypes.addressof(data)
    assert len({a // 64 for a in addresses.values()}) == 3
    again = ctypes.CDLL(str(path))
    assert (ctypes.c_char * 8).in_dll(again, "first").raw == bytes(7) + b"\1"
    assert not hasattr(library, "fourth")


def test_unknown_processor() -> None:
    with pytest.raises(SystemFailure, match="cannot write a shared object for s390x"):
        elf.data_object({"x": 8}, "x.so", "s390x")
