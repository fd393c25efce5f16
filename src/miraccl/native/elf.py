"""Writer of shared objects that hold data only: named tables that a process fills after loading.

A plugin interface asks a shared object for symbols that are structures of function pointers. Such
an object needs no compiler: it is one writable segment with a dynamic symbol table. The process
that writes it loads it and stores the addresses of its own functions. Code that loads the same file
later in this process sees them, since a file is mapped once.

Format: System V ABI, generic part (chapters 4 and 5), for 64-bit little-endian machines.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping

from miraccl.errors import SystemFailure

_MACHINES = {"x86_64": 62, "AMD64": 62, "aarch64": 183, "arm64": 183}
_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR = struct.Struct("<IIQQQQQQ")
_SYM = struct.Struct("<IBBHQQ")
_DYN = struct.Struct("<qQ")
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_READ, _WRITE = 4, 2
_ET_DYN = 3
_GLOBAL_OBJECT = 1 << 4 | 1
#: Any defined section: the dynamic loader only compares with 0 (undefined).
_DEFINED = 0xFFF1 - 1
_DT = {"HASH": 4, "STRTAB": 5, "SYMTAB": 6, "STRSZ": 10, "SYMENT": 11, "SONAME": 14, "NULL": 0}
_PAGE = 1 << 16
_ALIGN = 64


def machine_code(machine: str = "") -> int:
    """Return the ELF number of a processor, by default of this one's. Raises ``SystemFailure``."""
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise SystemFailure(
            f"cannot write a shared object for {name}: allowed are {', '.join(sorted(_MACHINES))}"
        )
    return _MACHINES[name]


def data_object(symbols: Mapping[str, int], soname: str, machine: str = "") -> bytes:
    """Return the bytes of a shared object with zeroed, writable objects.

    Args:
        symbols: Name and size in bytes of each object; each starts at a multiple of 64 bytes.
        soname: Name by which the loader knows it.
        machine: Processor as ``uname -m`` names it; by default this one.
    """
    names = [soname, *symbols]
    strings, offsets = b"\0", []
    for name in names:
        offsets.append(len(strings))
        strings += name.encode() + b"\0"
    nsyms = 1 + len(symbols)
    phdrs = _EHDR.size
    hash_at = _aligned(phdrs + 3 * _PHDR.size)
    symtab_at = _aligned(hash_at + 4 * (2 + 1 + nsyms))
    strtab_at = symtab_at + nsyms * _SYM.size
    dynamic_at = _aligned(strtab_at + len(strings))
    ndyn = len(_DT)
    data_at = _aligned(dynamic_at + ndyn * _DYN.size)
    places, end = [], data_at
    for size in symbols.values():
        places.append(end)
        end = _aligned(end + size)
    symtab = _SYM.pack(0, 0, 0, 0, 0, 0) + b"".join(
        _SYM.pack(offset, _GLOBAL_OBJECT, 0, _DEFINED, place, size)
        for offset, place, size in zip(offsets[1:], places, symbols.values(), strict=True)
    )
    # one bucket whose chain has every symbol
    chain = [0, *range(2, nsyms), 0] if nsyms > 1 else [0]
    hashes = struct.pack(f"<{3 + nsyms}I", 1, nsyms, 1 if nsyms > 1 else 0, *chain)
    dynamic = b"".join(
        _DYN.pack(_DT[tag], value)
        for tag, value in (
            ("SONAME", offsets[0]),
            ("HASH", hash_at),
            ("STRTAB", strtab_at),
            ("SYMTAB", symtab_at),
            ("STRSZ", len(strings)),
            ("SYMENT", _SYM.size),
            ("NULL", 0),
        )
    )
    header = _EHDR.pack(
        b"\x7fELF\2\1\1".ljust(16, b"\0"),
        _ET_DYN,
        machine_code(machine),
        1,
        0,
        phdrs,
        0,
        0,
        _EHDR.size,
        _PHDR.size,
        3,
        0,
        0,
        0,
    )
    rw = _READ | _WRITE
    programs = (
        _PHDR.pack(_PT_LOAD, rw, 0, 0, 0, end, end, _PAGE)
        + _PHDR.pack(
            _PT_DYNAMIC, rw, dynamic_at, dynamic_at, dynamic_at, len(dynamic), len(dynamic), 8
        )
        # without this header the loader assumes that the object needs an executable stack
        + _PHDR.pack(_PT_GNU_STACK, rw, 0, 0, 0, 0, 0, 16)
    )
    image = bytearray(end)
    for place, part in (
        (0, header),
        (phdrs, programs),
        (hash_at, hashes),
        (symtab_at, symtab),
        (strtab_at, strings),
        (dynamic_at, dynamic),
    ):
        image[place : place + len(part)] = part
    return bytes(image)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
