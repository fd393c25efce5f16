"""Random histories of compiled flows, and that their checks find what they look for.

``TEST_SLOW=1`` runs a million of them, as ``python -m tests.wire.datagram.compiled_histories`` does
with progress.
"""

from __future__ import annotations

import ctypes
import os
import random

import pytest

from miraccl import native
from miraccl.proxy.kernels import flow_layout
from miraccl.wire.datagram.aegis import Aegis
from miraccl.wire.datagram.packets import Data, Packet, encode
from miraccl.wire.datagram.seal import Protection, protect
from tests.wire.datagram import history_layout as layout
from tests.wire.datagram.compiled_histories import KERNEL, CompiledWorld

COUNT = 1_000_000 if os.environ.get("TEST_SLOW") else 3000


def test_random_histories_deliver_every_frame_once() -> None:
    counts, findings = CompiledWorld().run(0, COUNT)
    assert not findings
    assert counts["histories"] == COUNT
    # the adversary was there
    assert counts["lost"] > counts["packets"] // 10
    assert counts["rejected"] > counts["packets"] // 50


def test_without_tags_corrupted_packets_are_found() -> None:
    _, findings = CompiledWorld().run(0, 100, protection=flow_layout.PROTECT_NONE)
    assert "a corrupted packet was accepted" in findings[0][1]


@pytest.mark.parametrize("size", [0, 1, 15, 16, 47, 48, 1428, 9000])
def test_compiled_aegis_makes_the_packets_of_the_specification(size: int) -> None:
    draw, library, world = random.Random(size), native.library(KERNEL), CompiledWorld()
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
    mac, aead = (kind(library.address(native.PREFIX + f"aegis_{n}")) for n in ("mac", "aead"))
    port = world.side_word(0, layout.PORT)
    for _ in range(3):
        key = draw.randbytes(16)
        packet = encode(Packet(3, 7, 1 << 40, (Data(1, 2, 3, draw.randbytes(size), bytes(48)),)))
        secret, buffer = ctypes.create_string_buffer(key, 16), _padded(packet)
        at = ctypes.addressof(buffer)
        if not mac(port, ctypes.addressof(secret), at, len(packet)):
            pytest.skip("the processor has no instructions for AES")
        assert buffer.raw == protect(Protection.MAC, Aegis(key), packet)
        buffer = _padded(packet)
        at = ctypes.addressof(buffer)
        aead(port, ctypes.addressof(secret), at, 2 * len(packet))
        sealed = protect(Protection.AEAD, Aegis(key), packet)
        assert buffer.raw == sealed
        aead(port, ctypes.addressof(secret), at, 2 * len(packet) + 1)
        assert buffer.raw == packet + sealed[-16:]


def _padded(packet: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(packet, len(packet) + 16)
