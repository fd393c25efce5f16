"""Linker for ELF objects of x86-64 in the code model ``large``.

LLVM's own linker (MCJIT) takes 10 MiB of a process, of which compiled kernels need nothing. In the
code model ``large`` every reference is a 64-bit address (R_X86_64_64), and unwind tables hold
64-bit distances (R_X86_64_PC64; System V ABI for x86-64, 4.4). The tables are not registered:
kernels raise nothing. Common symbols (gABI, chapter 4: SHN_COMMON) are zeros: folds have those of
Numba's environments and do not use them. Objects with other relocations are left to LLVM.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass

_EM_X86_64, _ET_REL = 62, 1
_SHT_SYMTAB, _SHT_RELA, _SHT_NOBITS, _SHT_REL = 2, 4, 8, 9
_SHF_ALLOC = 2
_SHN_UNDEF, _SHN_COMMON = 0, 0xFFF2
_R_X86_64_64, _R_X86_64_PC64 = 1, 24
_STB_LOCAL = 0
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")


class _NotSupported(Exception):
    """Something that only LLVM links."""


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int


class _Object:
    """Sections and symbols of one ELF object."""

    def __init__(self, data: bytes) -> None:
        try:
            head = _HEADER.unpack_from(data)
            if head[0][:6] != b"\x7fELF\x02\x01" or head[1:3] != (_ET_REL, _EM_X86_64):
                raise _NotSupported
            fields = [
                _SECTION.unpack_from(data, head[6] + i * _SECTION.size) for i in range(head[12])
            ]
        except struct.error:
            raise _NotSupported from None
        self.data = data
        self.sections = [_Section(f[1], f[2], f[4], f[5], f[6], f[7], max(f[8], 1)) for f in fields]
        tables = [s for s in self.sections if s.kind == _SHT_SYMTAB]
        if len(tables) != 1:
            raise _NotSupported
        strings = self.sections[tables[0].link].offset
        self.symbols = []
        self.commons: dict[str, tuple[int, int]] = {}  # name -> alignment and bytes
        for at in range(tables[0].offset, tables[0].offset + tables[0].size, _SYMBOL.size):
            name, info, _, index, value, size = _SYMBOL.unpack_from(data, at)
            end = data.index(b"\0", strings + name)
            text = data[strings + name : end].decode()
            self.symbols.append((text, info >> 4, index, value))
            if index == _SHN_COMMON:
                self.commons[text] = (value, size)
        self.places: dict[int, int] = {}  # section -> offset in the image

    def place(self, at: int) -> int:
        """Choose places for the sections from ``at`` on; return the end."""
        for number, section in enumerate(self.sections):
            if section.flags & _SHF_ALLOC:
                at = -(-at // section.align) * section.align
                self.places[number] = at
                at += section.size
        return at


def link(objects: list[bytes], resolve: Callable[[str], int]) -> dict[str, int] | None:
    """Load objects into executable memory, which is never freed.

    Args:
        resolve: Returns the address of a symbol that no object defines.

    Returns:
        The addresses of all global symbols; None if LLVM has to link these objects.
    """
    try:
        parsed = [_Object(data) for data in objects]
        size = 0
        for item in parsed:
            size = item.place(-(-size // 64) * 64)
        commons: dict[str, int] = {}  # offset in the image
        for item in parsed:
            for name, (align, nbytes) in item.commons.items():
                if name in commons:
                    raise _NotSupported
                commons[name] = -(-size // align) * align
                size = commons[name] + nbytes
        image = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(image))
        defined = {name: base + at for name, at in commons.items()}
        for item in parsed:
            for name, binding, index, value in item.symbols:
                if binding == _STB_LOCAL or index in (_SHN_UNDEF, _SHN_COMMON) or not name:
                    continue
                if index not in item.places or name in defined:
                    raise _NotSupported
                defined[name] = base + item.places[index] + value
        for item in parsed:
            _fill(item, image, base, defined, resolve)
    except (_NotSupported, OSError):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(base, len(image), mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        return None
    _images.append(image)
    return defined


_images: list[mmap.mmap] = []


def _fill(
    item: _Object,
    image: mmap.mmap,
    base: int,
    defined: dict[str, int],
    resolve: Callable[[str], int],
) -> None:
    """Copy the sections of an object and relocate them."""
    for number, at in item.places.items():
        section = item.sections[number]
        if section.kind != _SHT_NOBITS:
            image[at : at + section.size] = item.data[
                section.offset : section.offset + section.size
            ]
    for section in item.sections:
        if section.info not in item.places or section.kind not in (_SHT_RELA, _SHT_REL):
            continue
        if section.kind == _SHT_REL:
            raise _NotSupported
        for at in range(section.offset, section.offset + section.size, _RELOCATION.size):
            offset, info, addend = _RELOCATION.unpack_from(item.data, at)
            name, _, index, value = item.symbols[info >> 32]
            kind = info & 0xFFFFFFFF
            if kind not in (_R_X86_64_64, _R_X86_64_PC64):
                raise _NotSupported
            if index in item.places:
                target = base + item.places[index] + value
            elif index in (_SHN_UNDEF, _SHN_COMMON) and name:
                target = defined.get(name) or resolve(name)
            else:
                raise _NotSupported
            where = item.places[section.info] + offset
            value = target + addend - (base + where if kind == _R_X86_64_PC64 else 0)
            struct.pack_into("<Q", image, where, value % (1 << 64))
