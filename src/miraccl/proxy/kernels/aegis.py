"""Kernel source: tags and encryption of packets by AEGIS-128X2 (``wire.datagram.aegis``).

A context has the cipher's state and what does not fill a block of 64 bytes yet.
"""

from __future__ import annotations

from miraccl.native.intrinsics import inline, load, memcpy, store
from miraccl.proxy.kernels import flow_layout as layout
from miraccl.proxy.kernels.aegis_vectors import (
    aegis_absorb,
    aegis_decrypt,
    aegis_encrypt,
    aegis_finish,
    aegis_start,
)
from miraccl.wire.datagram.aegis import RATE_BYTES


@inline
def start(context: int, key: int, nonce: int) -> None:
    """Start a packet; key and nonce have 16 bytes."""
    aegis_start(context, key, nonce)
    store(context + layout.AEGIS_FILLED, 0)
    store(context + layout.AEGIS_SIZE, 0)


@inline
def fill_block(context: int, source: int, size: int) -> None:
    """Put less than a block into the buffer, padded with zeros."""
    block = context + layout.AEGIS_BLOCK
    for offset in range(0, RATE_BYTES, 8):
        store(block + offset, 0)
    memcpy(block, source, size)


@inline
def absorb(context: int, source: int, size: int) -> None:
    """Add bytes to the associated data."""
    store(context + layout.AEGIS_SIZE, load(context + layout.AEGIS_SIZE) + size)
    block, filled = context + layout.AEGIS_BLOCK, load(context + layout.AEGIS_FILLED)
    if filled != 0:
        part = min(RATE_BYTES - filled, size)
        memcpy(block + filled, source, part)
        if filled + part < RATE_BYTES:
            store(context + layout.AEGIS_FILLED, filled + part)
            return
        aegis_absorb(context, block, 0, 1)
        source += part
        size -= part
    count = size // RATE_BYTES
    aegis_absorb(context, source, 0, count)
    rest = size - count * RATE_BYTES
    fill_block(context, source + size - rest, rest)
    store(context + layout.AEGIS_FILLED, rest)


@inline
def end_absorbing(context: int) -> None:
    """Absorb the last block of the associated data."""
    if load(context + layout.AEGIS_FILLED) != 0:
        aegis_absorb(context, context + layout.AEGIS_BLOCK, 0, 1)


@inline
def encrypt(context: int, text: int, size: int) -> None:
    """Encrypt in place all that is to be encrypted."""
    count, block = size // RATE_BYTES, context + layout.AEGIS_BLOCK
    aegis_encrypt(context, text, text, count)
    rest = size - count * RATE_BYTES
    if rest != 0:
        fill_block(context, text + size - rest, rest)
        aegis_encrypt(context, block, block, 1)
        memcpy(text + size - rest, block, rest)


@inline
def decrypt(context: int, text: int, size: int) -> None:
    """Decrypt in place all that was encrypted."""
    count, block = size // RATE_BYTES, context + layout.AEGIS_BLOCK
    aegis_decrypt(context, text, text, count)
    rest = size - count * RATE_BYTES
    if rest != 0:
        last, saved = text + size - rest, context + layout.AEGIS_SAVED
        memcpy(saved, context, layout.AEGIS_STATE_BYTES)
        fill_block(context, last, rest)
        aegis_decrypt(context, block, block, 1)
        memcpy(last, block, rest)
        # The state is that after the plaintext, padded with zeros.
        memcpy(context, saved, layout.AEGIS_STATE_BYTES)
        fill_block(context, last, rest)
        aegis_absorb(context, block, 0, 1)


@inline
def finish(context: int, text: int, tag: int) -> None:
    """Write the tag of a packet with ``text`` encrypted bytes."""
    aegis_finish(context, load(context + layout.AEGIS_SIZE), text, tag)
