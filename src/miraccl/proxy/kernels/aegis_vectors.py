"""AEGIS-128X2 as instructions of kernel sources: its state is kept in vector registers.

The cipher is that of ``wire.datagram.aegis``. Where the processor has no instructions for rounds
of AES, ``aegis_compiled`` is 0 and the others do nothing.

The state at an address is eight vectors of 32 bytes, each of two blocks.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from miraccl.native.loader import cpu_features
from miraccl.wire.datagram.aegis import (
    AES_BLOCK_BYTES,
    C0,
    C1,
    FINAL_UPDATES,
    FIRST_UPDATES,
    RATE_BYTES,
)

I64 = types.int64
_W, _B = ir.IntType(64), ir.IntType(8)
_BLOCK, _BYTES = ir.VectorType(_W, 2), ir.VectorType(_B, 16)

Vector = list[Any]
"""Two blocks: one register of 256 bits, or two of 128."""


@functools.cache
def _registers() -> int:
    """Return the number of registers that hold a vector, 0 without instructions for AES."""
    features = cpu_features().split(",")
    if platform.machine() == "x86_64" and "+aes" in features:
        return 1 if "+vaes" in features else 2
    return 2 if platform.machine() == "aarch64" and "+aes" in features else 0


def _kind() -> ir.VectorType:
    return ir.VectorType(_W, 4 // _registers())


def _declared(builder: Any, name: str, kind: Any, count: int) -> Any:
    """Return an intrinsic of LLVM."""
    found = builder.module.globals.get(name)
    return (
        found
        if found is not None
        else ir.Function(builder.module, ir.FunctionType(kind, [kind] * count), name)
    )


def _round(builder: Any, value: Any, key: Any) -> Any:
    """Emit one round of AES on every block of a register."""
    if value.type != _BLOCK:
        return builder.call(
            _declared(builder, "llvm.x86.aesni.aesenc.256", value.type, 2), [value, key]
        )
    if platform.machine() == "x86_64":
        return builder.call(_declared(builder, "llvm.x86.aesni.aesenc", _BLOCK, 2), [value, key])
    # Arm adds the key first, x86 last.
    mixed = builder.call(
        _declared(builder, "llvm.aarch64.crypto.aese", _BYTES, 2),
        [builder.bitcast(value, _BYTES), ir.Constant(_BYTES, None)],
    )
    mixed = builder.call(_declared(builder, "llvm.aarch64.crypto.aesmc", _BYTES, 1), [mixed])
    return builder.xor(builder.bitcast(mixed, _BLOCK), key)


def _map(function: Any, *vectors: Vector) -> Vector:
    return [function(*parts) for parts in zip(*vectors, strict=True)]


def _place(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    at = builder.add(address, ir.Constant(_W, offset))
    return builder.inttoptr(at, kind.as_pointer())


def _load(builder: Any, address: Any, offset: int) -> Vector:
    kind, step = _kind(), 2 * AES_BLOCK_BYTES // _registers()
    return [
        builder.load(_place(builder, address, offset + i * step, kind), align=1)
        for i in range(_registers())
    ]


def _store(builder: Any, vector: Vector, address: Any, offset: int) -> None:
    step = 2 * AES_BLOCK_BYTES // _registers()
    for i, part in enumerate(vector):
        builder.store(part, _place(builder, address, offset + i * step, part.type), align=1)


def _load_state(builder: Any, state: Any) -> list[Vector]:
    return [_load(builder, state, 2 * AES_BLOCK_BYTES * j) for j in range(8)]


def _store_state(builder: Any, values: Sequence[Vector], state: Any) -> None:
    for j, vector in enumerate(values):
        _store(builder, vector, state, 2 * AES_BLOCK_BYTES * j)


def _of_words(words: Sequence[Any]) -> Vector:
    """Return a vector of four constant words."""
    size = 4 // _registers()
    return [
        ir.Constant(_kind(), [ir.Constant(_W, word) for word in words[i : i + size]])
        for i in range(0, 4, size)
    ]


def _both(builder: Any, low: Any, high: Any) -> Vector:
    """Return a vector whose blocks are both made of two words."""
    kind = _kind()
    made = ir.Constant(kind, ir.Undefined)
    for i in range(kind.count):
        place = ir.Constant(ir.IntType(32), i)
        made = builder.insert_element(made, high if i % 2 else low, place)
    return [made] * _registers()


def _block_at(builder: Any, address: Any) -> Vector:
    """Return a vector whose blocks are both the one at an address."""
    low, high = (builder.load(_place(builder, address, offset, _W), align=1) for offset in (0, 8))
    return _both(builder, low, high)


def _update(builder: Any, v: list[Vector], first: Vector, second: Vector) -> list[Vector]:
    """Emit the update of the state with two vectors."""
    keys = list(v)
    keys[0], keys[4] = _map(builder.xor, v[0], first), _map(builder.xor, v[4], second)
    return [_map(functools.partial(_round, builder), v[(j - 1) % 8], keys[j]) for j in range(8)]


def _key_stream(builder: Any, v: list[Vector]) -> tuple[Vector, Vector]:
    xor = functools.partial(_map, builder.xor)
    both = functools.partial(_map, builder.and_)
    return xor(xor(v[6], v[1]), both(v[2], v[3])), xor(xor(v[2], v[5]), both(v[6], v[7]))


@intrinsic
def aegis_compiled(typingctx: Any) -> Any:
    """Return 1 if the processor has the instructions."""
    return I64(), lambda context, builder, sig, args: ir.Constant(_W, int(_registers() > 0))


@intrinsic
def aegis_start(typingctx: Any, state: Any, key: Any, nonce: Any) -> Any:
    """Set the state for a key and a nonce of 16 bytes each."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not _registers():
            return context.get_dummy_value()
        xor = functools.partial(_map, builder.xor)
        key, nonce = _block_at(builder, args[1]), _block_at(builder, args[2])
        c0, c1 = (
            _of_words([int.from_bytes(c[i : i + 8], "little") for i in (0, 8)] * 2)
            for c in (C0, C1)
        )
        numbers = _of_words([1 << 8, 0, 1 | 1 << 8, 0])  # of each state, beside the degree - 1
        mixed = xor(key, nonce)
        v = [mixed, c1, c0, c1, mixed, xor(key, c0), xor(key, c1), xor(key, c0)]
        for _ in range(FIRST_UPDATES):
            v[3], v[7] = xor(v[3], numbers), xor(v[7], numbers)
            v = _update(builder, v, nonce, key)
        _store_state(builder, v, args[0])
        return context.get_dummy_value()

    return types.void(I64, I64, I64), emit


def _blocks(mode: str) -> Any:
    """Return the instruction that processes ``count`` times ``RATE_BYTES`` bytes."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not _registers():
            return context.get_dummy_value()
        state, source, target, count = args
        values = _load_state(builder, state)
        before = builder.block
        test, body, after = (builder.append_basic_block(n) for n in ("aegis", "block", "end"))
        builder.branch(test)
        builder.position_at_end(test)
        index = builder.phi(_W)
        index.add_incoming(ir.Constant(_W, 0), before)
        phis = [[builder.phi(part.type) for part in vector] for vector in values]
        for vector, found in zip(values, phis, strict=True):
            for part, phi in zip(vector, found, strict=True):
                phi.add_incoming(part, before)
        builder.cbranch(builder.icmp_signed("<", index, count), body, after)
        builder.position_at_end(body)
        offset = builder.mul(index, ir.Constant(_W, RATE_BYTES))
        parts = [
            _load(builder, builder.add(source, offset), i * 2 * AES_BLOCK_BYTES) for i in (0, 1)
        ]
        message = parts
        if mode != "absorb":
            made = [
                _map(builder.xor, part, stream)
                for part, stream in zip(parts, _key_stream(builder, phis), strict=True)
            ]
            for i, vector in enumerate(made):
                _store(builder, vector, builder.add(target, offset), i * 2 * AES_BLOCK_BYTES)
            if mode == "decrypt":
                message = made
        updated = _update(builder, phis, *message)
        for vector, found in zip(updated, phis, strict=True):
            for part, phi in zip(vector, found, strict=True):
                phi.add_incoming(part, builder.block)
        index.add_incoming(builder.add(index, ir.Constant(_W, 1)), builder.block)
        builder.branch(test)
        builder.position_at_end(after)
        _store_state(builder, phis, state)
        return context.get_dummy_value()

    return emit


@intrinsic
def aegis_absorb(typingctx: Any, state: Any, source: Any, target: Any, count: Any) -> Any:
    """Absorb ``count`` blocks of 64 bytes; ``target`` is not used."""
    return types.void(I64, I64, I64, I64), _blocks("absorb")


@intrinsic
def aegis_encrypt(typingctx: Any, state: Any, source: Any, target: Any, count: Any) -> Any:
    """Encrypt ``count`` blocks of 64 bytes, perhaps in place."""
    return types.void(I64, I64, I64, I64), _blocks("encrypt")


@intrinsic
def aegis_decrypt(typingctx: Any, state: Any, source: Any, target: Any, count: Any) -> Any:
    """Decrypt ``count`` blocks of 64 bytes, perhaps in place."""
    return types.void(I64, I64, I64, I64), _blocks("decrypt")


@intrinsic
def aegis_finish(typingctx: Any, state: Any, aad: Any, text: Any, tag: Any) -> Any:
    """Write the tag of 16 bytes for the sizes of associated data and text, in bytes."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not _registers():
            return context.get_dummy_value()
        v = _load_state(builder, args[0])
        three = ir.Constant(_W, 3)
        sizes = _both(builder, builder.shl(args[1], three), builder.shl(args[2], three))
        mixed = _map(builder.xor, v[2], sizes)
        for _ in range(FINAL_UPDATES):
            v = _update(builder, v, mixed, mixed)
        total = v[0]
        for vector in v[1:7]:
            total = _map(builder.xor, total, vector)
        number = ir.IntType(32)
        words = [
            builder.extract_element(part, ir.Constant(number, i))
            for part in total
            for i in range(part.type.count)
        ]
        for i in (0, 1):
            place = _place(builder, args[3], 8 * i, _W)
            builder.store(builder.xor(words[i], words[i + 2]), place, align=1)
        return context.get_dummy_value()

    return types.void(I64, I64, I64, I64), emit
