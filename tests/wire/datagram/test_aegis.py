"""Compiled AEGIS-128X2 against its specification, whatever registers the processor has."""

from __future__ import annotations

import ctypes
import random

import pytest

from miraccl.native.compiler import compile_module
from miraccl.native.loader import CodeLibrary
from miraccl.proxy.kernels import aegis_vectors, flow_layout
from miraccl.wire.datagram.aegis import Aegis
from miraccl.wire.datagram.packets import Data, Packet, encode
from miraccl.wire.datagram.seal import Protection, protect

ALL = aegis_vectors._registers()

pytestmark = pytest.mark.skipif(not ALL, reason="the processor has no instructions for AES")


@pytest.mark.parametrize("registers", sorted({ALL, 2}))
def test_compiled_code_makes_the_packets_of_the_specification(
    registers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aegis_vectors, "_registers", lambda: registers)
    library = CodeLibrary(compile_module("tests.wire.datagram.aegis_kernel", "test_"))
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
    mac, aead = (kind(library.address(f"test_{name}")) for name in ("mac", "aead"))
    port = ctypes.create_string_buffer(flow_layout.PORT_BYTES)
    draw = random.Random(registers)
    for size in (0, 1, 15, 16, 19, 35, 36, 47, 48, 1428, 9000):
        key = draw.randbytes(16)
        packet = encode(Packet(3, 7, 1 << 40, (Data(1, 2, 3, draw.randbytes(size), bytes(48)),)))
        secret, made = ctypes.create_string_buffer(key, 16), _padded(packet)
        at = [ctypes.addressof(each) for each in (port, secret, made)]
        mac(*at, len(packet))
        assert made.raw == protect(Protection.MAC, Aegis(key), packet)
        made = _padded(packet)
        at[2] = ctypes.addressof(made)
        aead(*at, 2 * len(packet))
        sealed = protect(Protection.AEAD, Aegis(key), packet)
        assert made.raw == sealed
        aead(*at, 2 * len(packet) + 1)
        assert made.raw == packet + sealed[-16:]


def _padded(packet: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(packet, len(packet) + 16)
