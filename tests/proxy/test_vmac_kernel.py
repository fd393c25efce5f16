"""The compiled VMAC against its specification, which the published tags check."""

from __future__ import annotations

import ctypes
import random

import pytest

from miraccl import native
from miraccl.errors import MissingDependency
from miraccl.native.crypto import AesGcm, libcrypto
from miraccl.proxy.datagram_engine import vmac_memory
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.wire.datagram.seal import vmac_of

try:
    libcrypto()
except MissingDependency as error:
    pytest.skip(str(error), allow_module_level=True)


def test_compiled_tags_equal_the_specification() -> None:
    draw = random.Random(2)
    cipher = AesGcm(draw.randbytes(16))
    mac, state = vmac_of(cipher), vmac_memory(cipher)
    buffer = PrivateMemory(40_000)
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
    library = native.library("miraccl.proxy.kernels.vmac")
    compiled = kind(library.address(native.PREFIX + "vmac"))
    for size in [*range(1, 40), 127, 128, 129, 255, 256, 383, 384, 385, 1428, 1472, 32_000]:
        data, nonce = draw.choice((draw.randbytes(size), b"\xff" * size)), draw.randbytes(12)
        memory_at(buffer.address, 32)[:] = nonce + bytes(20)
        memory_at(buffer.address + 33, size)[:] = data
        compiled(state.address, buffer.address + 33, size, buffer.address)
        got = bytes(memory_at(buffer.address + 16, 16))
        assert got == mac.tag(nonce, data), size
