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
from miraccl.native.crypto import GHASH_NAMES, AesGcm, Gmac, ghash_addresses, libcrypto
from miraccl.proxy.kernels import flow_layout
from miraccl.wire.datagram.packets import Data, Packet, encode
from miraccl.wire.datagram.seal import Protection, nonce_of, protect
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


@pytest.mark.skipif(not ghash_addresses(), reason="libcrypto exports no GHASH")
@pytest.mark.parametrize("size", [0, 1, 15, 16, 1428, 9000])
def test_gmac_of_compiled_code_is_that_of_aes_gcm(size: int) -> None:
    draw = random.Random(size)
    key = draw.randbytes(16)
    packet = encode(Packet(3, 7, 1 << 40, (Data(1, 2, 3, draw.randbytes(size), bytes(48)),)))
    library, mac = libcrypto(), Gmac(key, native.library(KERNEL).address("miraccl_aes_block"))
    context, tag = ctypes.c_void_p(mac.address), ctypes.create_string_buffer(16)
    set_nonce, add, write, check = (getattr(library, name) for name in GHASH_NAMES)
    set_nonce(context, nonce_of(packet), ctypes.c_size_t(12))
    for part in (packet[:20], packet[20:]):
        add(context, part, ctypes.c_size_t(len(part)))
    write(context, tag, ctypes.c_size_t(16))
    sealed = protect(Protection.MAC, AesGcm(key), packet)
    assert packet + tag.raw == sealed
    set_nonce(context, nonce_of(packet), ctypes.c_size_t(12))
    add(context, packet, ctypes.c_size_t(len(packet)))
    assert check(context, tag, ctypes.c_size_t(16)) == 0
