"""Kernel source: VMAC-128 over the pieces of a packet (``wire.datagram.vmac``).

Words are unsigned here; sums of 128 bits are pairs (high, low).
"""

from __future__ import annotations

from typing import Any

from miraccl.native.intrinsics import (
    below,
    call6,
    inline,
    load,
    load_unaligned,
    memcpy,
    multiply_high,
    shift_right,
    store,
    store_unaligned,
    swap_bytes,
)
from miraccl.wire.datagram.vmac import BLOCK_BYTES, NH_WORDS

# ---- layout: keys, then the hash under way

VMAC_AES = 0  # EVP_CIPHER_CTX of AES-128-ECB
VMAC_ENCRYPT = 8  # EVP_EncryptUpdate
VMAC_NH = 16
VMAC_POLY = VMAC_NH + 8 * NH_WORDS
VMAC_LAST = VMAC_POLY + 32
VMAC_SUMS = VMAC_LAST + 32  # high and low of both halves
VMAC_BUFFERED, VMAC_BUFFER = VMAC_SUMS + 32, VMAC_SUMS + 40
VMAC_NONCE = VMAC_BUFFER + BLOCK_BYTES + 16  # room for padding
VMAC_PAD, VMAC_LENGTH = VMAC_NONCE + 16, VMAC_NONCE + 48
VMAC_BYTES = VMAC_NONCE + 64
LOW_63, LOW_62, LOW_32 = (1 << 63) - 1, (1 << 62) - 1, (1 << 32) - 1
#: 2^64 - 257 as a signed word.
LAST_PRIME = -257


@inline
def step(key: int, sums: int, high: int, low: int) -> None:
    """Multiply a sum by its key and add (high, low), modulo 2^127 - 1 but not fully reduced."""
    ah, al, kh, kl = load(sums), load(sums + 8), load(key), load(key + 8)
    # the outer products, 2^128 being 2
    square = ah * kh
    th, tl = (multiply_high(ah, kh) << 1) + shift_right(square, 63), square << 1
    product = al * kl
    low += product
    high += multiply_high(al, kl) + below(low, product)
    low += tl
    high += th + below(low, tl)
    # the middle ones, times 2^64
    first, second = al * kh, ah * kl
    middle = first + second
    upper = multiply_high(al, kh) + multiply_high(ah, kl) + below(middle, first)
    low += upper << 1
    high += below(low, upper << 1)
    high += middle
    carry = (below(high, middle) << 1) + shift_right(high, 63)
    low += carry
    store(sums, (high & LOW_63) + below(low, carry))
    store(sums + 8, low)


@inline
def add_block(state: int, block: int, pairs: int) -> None:
    """Add a block of pairs of words to both halves.

    The hash of a half sums the products of pairs of words, each plus a word of the key; the second
    half's key begins two words later.
    """
    high, low, high2, low2 = 0, 0, 0, 0
    key, next_key = load(state + VMAC_NH), load(state + VMAC_NH + 8)
    for i in range(pairs):
        word, next_word = load_unaligned(block + 16 * i), load_unaligned(block + 16 * i + 8)
        a, b = word + key, next_word + next_key
        key, next_key = load(state + VMAC_NH + 16 * i + 16), load(state + VMAC_NH + 16 * i + 24)
        product = a * b
        low += product
        high += multiply_high(a, b) + below(low, product)
        a, b = word + key, next_word + next_key
        product = a * b
        low2 += product
        high2 += multiply_high(a, b) + below(low2, product)
    step(state + VMAC_POLY, state + VMAC_SUMS, high & LOW_62, low)
    step(state + VMAC_POLY + 16, state + VMAC_SUMS + 16, high2 & LOW_62, low2)


@inline
def vmac_start(state: int) -> None:
    """Begin a message, which must not be empty."""
    store(state + VMAC_BUFFERED, 0)
    for half in range(2):
        store(state + VMAC_SUMS + 16 * half, 0)
        store(state + VMAC_SUMS + 16 * half + 8, 1)


@inline
def vmac_add(state: int, address: int, size: int) -> None:
    """Add bytes of the message."""
    buffered, at, left = load(state + VMAC_BUFFERED), address, size
    if buffered != 0:
        part = min(BLOCK_BYTES - buffered, left)
        memcpy(state + VMAC_BUFFER + buffered, at, part)
        buffered, at, left = buffered + part, at + part, left - part
        if buffered == BLOCK_BYTES:
            add_block(state, state + VMAC_BUFFER, BLOCK_BYTES // 16)
            buffered = 0
    while left >= BLOCK_BYTES:
        add_block(state, at, BLOCK_BYTES // 16)
        at, left = at + BLOCK_BYTES, left - BLOCK_BYTES
    if left != 0:
        memcpy(state + VMAC_BUFFER, at, left)
        buffered = left
    store(state + VMAC_BUFFERED, buffered)


@inline
def last_hash(keys: int, high: int, low: int) -> int:
    """Reduce a polynomial's value to a word below 2^64 - 257."""
    ones = high + shift_right(low, 32)
    upper = shift_right(ones, 32)
    quotient = high + upper + (upper + (ones & LOW_32)) // LOW_32
    rest = low + (quotient << 32)
    first, second = load(keys), load(keys + 8)
    a, b = quotient + first, rest + second
    if below(a, first) != 0:
        a += 257
    if below(b, second) != 0:
        b += 257
    # 2^64 is 257
    product_high = multiply_high(a, b)
    folded = product_high * 257
    result = a * b + folded
    carry = (below(result, folded) + multiply_high(product_high, 257)) * 257
    result += carry
    if below(result, carry) != 0:
        result += 257
    if below(result, LAST_PRIME) == 0:
        result -= LAST_PRIME
    return result


@inline
def vmac_finish(state: int, nonce: int, tag: int) -> None:
    """Write the tag of the message for a nonce of 12 bytes."""
    buffered = load(state + VMAC_BUFFERED)
    if buffered != 0:
        store_unaligned(state + VMAC_BUFFER + buffered, 0)  # up to 15 bytes of padding
        store_unaligned(state + VMAC_BUFFER + buffered + 8, 0)
        add_block(state, state + VMAC_BUFFER, (buffered + 15) // 16)
    block, pad = state + VMAC_NONCE, state + VMAC_PAD
    store(block, load_unaligned(nonce) << 32)
    store_unaligned(block + 8, load_unaligned(nonce + 4))
    call6(
        load(state + VMAC_ENCRYPT), load(state + VMAC_AES), pad, state + VMAC_LENGTH, block, 16, 0
    )
    for half in range(2):
        high, low = load(state + VMAC_SUMS + 16 * half), load(state + VMAC_SUMS + 16 * half + 8)
        carry = shift_right(high, 63)
        low += carry
        high = (high & LOW_63) + below(low, carry) + 8 * buffered
        if shift_right(high, 63) != 0 or (high == LOW_63 and low == -1):
            low += 1
            if low == 0:
                high += 1
            high &= LOW_63
        word = last_hash(state + VMAC_LAST + 16 * half, high, low)
        store_unaligned(tag + 8 * half, swap_bytes(word + swap_bytes(load(pad + 8 * half))))


def vmac(state: int, data: int, size: int, nonce_and_tag: int) -> int:
    """Compute one tag: the nonce is at the address, its tag 16 bytes after it."""
    vmac_start(state)
    vmac_add(state, data, size // 3)  # in two pieces
    vmac_add(state, data + size // 3, size - size // 3)
    vmac_finish(state, nonce_and_tag, nonce_and_tag + 16)
    return 0


EXPORTS: dict[str, Any] = {"vmac": vmac}
