"""Closed sets of the library: data types, reduction operators, collectives and protocols.

Codes are part of an operation's signature on the wire, so numbers are never reused.
"""

from __future__ import annotations

import contextlib
import enum
import math
import operator
from dataclasses import dataclass, field
from typing import Any

from miraccl.errors import InvalidUsage


class DType(enum.IntEnum):
    """Element types, named as in NCCL where it has them. ``itemsize`` is in bytes."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8_E4M3 = 10
    FLOAT8_E5M2 = 11

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self]

    @property
    def is_float(self) -> bool:
        return self >= DType.FLOAT16

    @property
    def accumulates_in_float32(self) -> bool:
        """True for 16-bit and 8-bit floats, which are added up in float32 and rounded once."""
        return self in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)

    @property
    def label(self) -> str:
        return self.name.lower()


_ITEMSIZE = {
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.INT32: 4,
    DType.UINT32: 4,
    DType.INT64: 8,
    DType.UINT64: 8,
    DType.FLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.BFLOAT16: 2,
    DType.FLOAT8_E4M3: 1,
    DType.FLOAT8_E5M2: 1,
}
#: (code, bits) of a DLDataType (dlpack.h) -> element type
DL_TYPES = {
    (0, 8): DType.INT8,
    (0, 32): DType.INT32,
    (0, 64): DType.INT64,
    (1, 8): DType.UINT8,
    (1, 32): DType.UINT32,
    (1, 64): DType.UINT64,
    (2, 16): DType.FLOAT16,
    (2, 32): DType.FLOAT32,
    (2, 64): DType.FLOAT64,
    (4, 16): DType.BFLOAT16,
    (10, 8): DType.FLOAT8_E4M3,
    (12, 8): DType.FLOAT8_E5M2,
}


class RedOp(enum.IntEnum):
    """Reduction operators.

    ``AVG`` is the sum divided by the number of ranks; for integers the quotient is truncated
    towards zero. An operator equals only itself, never a number.
    """

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4
    PREMUL_SUM = 5

    # The caches of prepared calls are keyed by operator: 0 and False, which are rejected, must not
    # find the entry of SUM.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = int.__hash__  # implemented in C; a Python method would cost time in every call


@dataclass(frozen=True)
class PreMulSum:
    """Sum of ``scalar * x``, where each rank passes its own scalar (``ncclRedOpCreatePreMulSum``).

    A whole number of Python, NumPy or PyTorch is stored as an int, which is exact for 64-bit
    integers; any other number is stored as a float64. Equality distinguishes 0.0 from -0.0.

    Args:
        scalar: The factor of this rank. For integer arrays it must be a value of their type.

    Raises:
        InvalidUsage: ``scalar`` is not a number or is outside the range of float64.
    """

    scalar: float
    _sign: float = field(init=False, repr=False)  # 1.0 or -1.0; distinguishes 0.0 from -0.0

    def __post_init__(self) -> None:
        given: Any = self.scalar
        try:
            if isinstance(given, str | bytes | bytearray):  # float() would parse these
                raise TypeError
            number = float(given)
        except (TypeError, ValueError):
            raise InvalidUsage(
                f"PreMulSum: scalar is {self.scalar!r}; it must be a number"
            ) from None
        except OverflowError:
            raise InvalidUsage("PreMulSum: scalar is outside the range of float64") from None
        with contextlib.suppress(TypeError):
            number = operator.index(given)
        object.__setattr__(self, "scalar", number)
        object.__setattr__(self, "_sign", math.copysign(1.0, number))


Operator = RedOp | PreMulSum
"""Reduction operator of a collective."""


class Collective(enum.IntEnum):
    """Collective operations. Buffers are counted in *blocks* of ``count`` elements
    (``schedule.ir``).
    """

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    BROADCAST = 3
    REDUCE = 4
    ALL_TO_ALL = 5
    GATHER = 6
    SCATTER = 7
    BARRIER = 8
    SEND_RECV = 9  # a group of sends and receives

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def reduces(self) -> bool:
        return self in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)

    @property
    def rooted(self) -> bool:
        return self in (
            Collective.BROADCAST,
            Collective.REDUCE,
            Collective.GATHER,
            Collective.SCATTER,
        )


class Protocol(enum.IntEnum):
    """Data transfer protocols of a connection (NCCL's LL, LL128 and Simple)."""

    LL = 0
    LL128 = 1
    SIMPLE = 2
