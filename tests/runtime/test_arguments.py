"""Argument validation: errors precede any data, name the argument, and leave the communicator
usable.
"""

from __future__ import annotations

import array
import ctypes
import pickle
import types
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import miraccl
from miraccl import Communicator, DType, PreMulSum, RedOp
from miraccl.errors import InvalidUsage, SystemFailure
from miraccl.ops import host_arrays, prepare
from miraccl.ops.arguments import resolve_operator
from miraccl.ops.host_arrays import view
from tests.runtime import reference as ref
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def comm() -> Iterator[Communicator]:
    with miraccl.init() as made:
        yield made


class Exporter:
    """A DLPack tensor over NumPy memory, as exported by a library without NumPy."""

    def __init__(
        self,
        base: np.ndarray,
        code: int,
        bits: int,
        *,
        device: int = 1,
        lanes: int = 1,
        strides: Any = None,
    ) -> None:
        self.base, self.device, self.deleted = base, device, 0
        shape = (ctypes.c_int64 * base.ndim)(*base.shape)
        steps = None if strides is None else (ctypes.c_int64 * base.ndim)(*strides)

        class Tensor(ctypes.Structure):
            _fields_ = (
                ("data", ctypes.c_void_p),
                ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16),
                ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p),
                ("byte_offset", ctypes.c_uint64),
                ("manager", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p),
            )

        self.tensor = Tensor(
            base.ctypes.data - 8,
            device,
            0,
            base.ndim,
            code,
            bits,
            lanes,
            ctypes.addressof(shape),
            ctypes.addressof(steps) if steps is not None else None,
            8,
            None,
            None,
        )
        self._keep = (shape, steps)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, stream: Any = None) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


class VersionedExporter(Exporter):
    """A DLPack 1.0 tensor: version, context, deleter and flags precede the tensor."""

    def __init__(self, base: np.ndarray, code: int, bits: int, *, flags: int) -> None:
        super().__init__(base, code, bits)

        class Versioned(ctypes.Structure):
            _fields_ = (
                ("version", ctypes.c_uint32 * 2),
                ("manager", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64),
                ("tensor", ctypes.c_char * 48),  # up to byte_offset
            )

        tensor = ctypes.string_at(ctypes.addressof(self.tensor), 48)
        self.versioned = Versioned((ctypes.c_uint32 * 2)(1, 0), None, None, flags)
        ctypes.memmove(ctypes.addressof(self.versioned) + Versioned.tensor.offset, tensor, 48)

    def __dlpack__(self, stream: Any = None, max_version: tuple[int, int] | None = None) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        assert max_version == (1, 0)
        return new(ctypes.addressof(self.versioned), b"dltensor_versioned", None)


class Interface:
    def __init__(self, base: np.ndarray) -> None:
        self.base = base
        self.__array_interface__ = base.__array_interface__


def test_arrays_of_all_kinds(comm: Communicator) -> None:
    """Arrays are viewed, never copied: a write to the view reaches the original."""
    plain = np.arange(6, dtype=np.float32)
    makes: list[tuple[Any, np.ndarray]] = [
        (plain, plain),
        (Interface(plain), plain),
        (plain.data, plain),
        (Exporter(plain, 2, 32), plain),
        (Exporter(plain.reshape(2, 3), 2, 32, strides=(3, 1)), plain),
    ]
    raw = bytearray(range(6))
    makes.append((raw, np.frombuffer(raw, np.uint8)))
    old = array.array("d", [1.0, 2.0])
    makes.append((old, np.frombuffer(old, np.float64)))
    chars = (ctypes.c_int * 5)(1, 2, 3, 4, 5)
    makes.append((chars, np.ctypeslib.as_array(chars)))
    for given, behind in makes:
        memory = view(given, "x", writes=True, where="test")
        assert memory.address == behind.ctypes.data
        assert memory.count == behind.size
        assert comm.all_reduce(given) is given
        before = behind.copy()
        memory.array.reshape(-1)[0] += 1
        assert behind.reshape(-1)[0] == before.reshape(-1)[0] + 1


DLPACK = {
    (0, 8): np.int8,
    (0, 32): np.int32,
    (0, 64): np.int64,
    (1, 8): np.uint8,
    (1, 32): np.uint32,
    (1, 64): np.uint64,
    (2, 16): np.float16,
    (2, 32): np.float32,
    (2, 64): np.float64,
    (4, 16): ml_dtypes.bfloat16,
    (10, 8): ml_dtypes.float8_e4m3fn,
    (12, 8): ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize(("code", "dtype"), DLPACK.items(), ids=str)
def test_dlpack_types(code: tuple[int, int], dtype: Any) -> None:
    base = np.ones(7, dtype)
    memory = view(Exporter(base, *code), "x", writes=True, where="test")
    assert memory.array.dtype == base.dtype
    assert ref.DTYPES[memory.dtype] == base.dtype
    memory.array[2] = 3
    assert base[2] == 3
    empty = view(Exporter(np.ones((0, 4), dtype), *code), "x", writes=True, where="test")
    assert empty.count == 0


def test_read_only_dlpack(comm: Communicator) -> None:
    base = np.arange(6, dtype=np.float32)
    assert (
        view(VersionedExporter(base, 2, 32, flags=2), "x", writes=True, where="test").address
        == base.ctypes.data
    )
    constant = VersionedExporter(base, 2, 32, flags=1)
    with pytest.raises(
        InvalidUsage,
        match=r"all_reduce: x is read-only, but the result is written to it .*writable copy",
    ):
        comm.all_reduce(constant)
    with pytest.raises(InvalidUsage, match=r"out is read-only, but the result is written to it$"):
        comm.all_reduce(base.copy(), out=constant)
    result: Any = comm.all_reduce(constant, out=np.empty_like(base))
    assert result.tolist() == base.tolist()
    result = comm.all_gather(constant)
    assert result.tolist() == base.tolist()


def test_class_with_gpu_attribute_in_cpu_memory(comm: Communicator) -> None:
    """JAX arrays in CPU memory raise for the GPU attribute that their class has."""

    class Somewhere(Exporter):
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise AttributeError("only GPU buffers have it")

    x = np.ones(3, np.float32)
    result: Any = comm.all_reduce(Somewhere(x, 2, 32), out=np.empty_like(x))
    assert result.tolist() == [1.0, 1.0, 1.0]


def test_rejected_dlpack() -> None:
    base = np.ones((4, 4), np.float32)
    for exporter, why in (
        (Exporter(base, 2, 32, device=2), "is in device memory"),
        (Exporter(base, 5, 64), "has DLPack type"),
        (Exporter(base, 2, 32, lanes=4), "has DLPack type"),
        (Exporter(base, 2, 32, strides=(1, 4)), "not contiguous"),
    ):
        with pytest.raises(InvalidUsage, match=why):
            view(exporter, "x", writes=True, where="test")

    class Broken:
        def __dlpack__(self) -> None:
            raise BufferError("no")

    with pytest.raises(InvalidUsage, match="cannot read x by DLPack: no"):
        view(Broken(), "x", writes=False, where="test")


def test_freed_arrays_are_rejected() -> None:
    """Freed storage is detected although shape and address look valid."""
    lost, odd, endless = (Exporter(np.ones(4, np.float32), 2, 32) for _ in range(3))
    lost.tensor.data = None
    ctypes.c_int64.from_address(odd.tensor.shape).value = -4
    ctypes.c_int64.from_address(endless.tensor.shape).value = 1 << 60
    said = Interface(np.ones(4, np.float32))
    said.__array_interface__ |= {"shape": (1 << 60,)}
    for thing, why in (
        (lost, "x has 4 elements, but no memory"),
        (odd, r"cannot read x by DLPack: 1 axes, shape \[-4\]"),
        (
            endless,
            f"x claims {1 << 60} elements of float32; a process can address "
            f"at most {1 << 57} bytes",
        ),
        (
            said,
            f"x claims {1 << 60} elements of float32; a process can address "
            f"at most {1 << 57} bytes",
        ),
    ):
        with pytest.raises(InvalidUsage, match=f"a test: {why}"):
            view(thing, "x", writes=False, where="a test")
    torch = pytest.importorskip("torch")
    whole = torch.ones(1 << 10)
    parts = [whole, whole[3:]]  # whose address is 12 then
    whole.untyped_storage().resize_(0)
    for part in parts:
        with pytest.raises(
            InvalidUsage,
            match=f"x has {part.numel()} elements, but no memory .its storage may have been freed",
        ):
            view(part, "x", writes=False, where="a test")
    assert view(whole[:0], "x", writes=False, where="a test").count == 0


def test_masked_arrays_are_rejected(comm: Communicator) -> None:
    """Operations would add masked elements."""
    said = Interface(np.ones(4, np.float32))
    said.__array_interface__ |= {"mask": np.zeros(4, bool)}
    for thing in (np.ma.masked_array(np.ones(4), mask=[False, True, False, False]), said):
        with pytest.raises(
            InvalidUsage, match="all_reduce: x is a masked array; masks are not supported"
        ):
            comm.all_reduce(thing)
    said.__array_interface__ |= {"mask": None}
    assert comm.all_reduce(said) is said


def test_a_tensor_of_another_library() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(5, dtype=torch.bfloat16)
    memory = view(tensor, "x", writes=True, where="test")
    memory.array[1] = 2
    assert tensor[1].item() == 2.0


FROZEN = np.zeros(4, np.float32)
FROZEN.setflags(write=False)
GRID = np.zeros((4, 4), np.float32)
LINE = np.zeros(12, np.float32)
NOTHING: dict[str, Any] = {"text": "a", "digit": "2", "none": None}

WRONG: list[tuple[str, Any]] = [
    ("x is a list", lambda c: c.all_reduce([1.0])),
    ("x is a NoneType", lambda c: c.all_reduce(None)),
    ("x has dtype complex64", lambda c: c.all_reduce(np.zeros(3, np.complex64))),
    ("x has dtype bool", lambda c: c.all_reduce(np.zeros(3, bool))),
    ("x has dtype object", lambda c: c.all_reduce(np.zeros(3, object))),
    (
        "float8_e4m3, float8_e5m2 (float8_e4m3 is float8_e4m3fn here)",
        lambda c: c.all_reduce(np.zeros(3, ml_dtypes.float8_e4m3)),
    ),
    ("x has non-native byte order", lambda c: c.all_reduce(np.zeros(3, ">f4"))),
    ("x is not contiguous", lambda c: c.all_reduce(GRID[:, 1])),
    ("x is not contiguous", lambda c: c.all_reduce(GRID.T)),
    ("x is not aligned", lambda c: c.all_reduce(np.zeros(9, np.uint8)[1:].view(np.float32))),
    ("x is read-only", lambda c: c.all_reduce(FROZEN)),
    ("x is read-only", lambda c: c.recv(FROZEN, 0)),
    ("out is read-only", lambda c: c.all_gather(LINE, FROZEN)),
    ("x is read-only", lambda c: c.all_reduce(b"abcd")),
    ("x is read-only", lambda c: c.all_reduce(np.float32(3))),
    ("out is read-only", lambda c: c.sendrecv(LINE[:4], 0, FROZEN, 0)),
    ("different dtypes, float32 and float64", lambda c: c.all_reduce(LINE, np.zeros(12))),
    ("out has 11 elements, but needs 12", lambda c: c.all_reduce(LINE, np.zeros(11, np.float32))),
    ("out has 11 elements, but needs 12", lambda c: c.all_gather(LINE, np.zeros(11, np.float32))),
    (
        "out has 13 elements, but needs 12",
        lambda c: c.reduce_scatter(LINE, np.zeros(13, np.float32)),
    ),
    ("out has 2 elements, but needs 12", lambda c: c.all_to_all(LINE, np.zeros(2, np.float32))),
    ("out has 2 elements, but needs 12", lambda c: c.gather(LINE, 0, np.zeros(2, np.float32))),
    ("out has 2 elements, but needs 12", lambda c: c.scatter(LINE, 0, np.zeros(2, np.float32))),
    ("x and out overlap", lambda c: c.all_reduce(LINE[:4], LINE[2:6])),
    ("x and out must not overlap", lambda c: c.all_to_all(LINE, LINE)),
    ("x and out overlap", lambda c: c.all_gather(LINE[1:4], LINE[2:5])),
    ("x and out must not overlap", lambda c: c.sendrecv(LINE, 0, LINE, 0)),
    ("x and out must not overlap", lambda c: c.sendrecv(LINE[:4], 0, LINE[3:5], 0)),
    ("x and out must not overlap", lambda c: grouped(c.sendrecv, LINE[3:5], 0, LINE[:4], 0)),
    ("root is 1; allowed are the ranks 0 to 0", lambda c: c.broadcast(LINE, 1)),
    ("root is True", lambda c: c.reduce(LINE, True)),
    ("root is 0.0", lambda c: c.gather(LINE, 0.0)),
    ("src is -1", lambda c: c.recv(LINE, -1)),
    ("dst is '0'", lambda c: c.sendrecv(LINE, "0", LINE, 0)),
    ("op is <built-in function sum>", lambda c: c.all_reduce(LINE, op=sum)),
    (
        "scalar 0.5 of PreMulSum is not a value of int32",
        lambda c: c.all_reduce(np.zeros(3, np.int32), op=PreMulSum(0.5)),
    ),
    (
        "scalar nan of PreMulSum is not a value of int32",
        lambda c: c.all_reduce(np.zeros(3, np.int32), op=PreMulSum(float("nan"))),
    ),
    (
        "scalar inf of PreMulSum is not a value of int64",
        lambda c: c.all_reduce(np.zeros(3, np.int64), op=PreMulSum(float("inf"))),
    ),
    (
        "scalar -2 of PreMulSum is not a value of uint8",
        lambda c: c.all_reduce(np.zeros(3, np.uint8), op=PreMulSum(-2)),
    ),
    (
        "scalar 9223372036854775808 of PreMulSum",
        lambda c: c.all_reduce(np.zeros(3, np.int64), op=PreMulSum(1 << 63)),
    ),
    (
        "scalar -9223372036854775809 of PreMulSum",
        lambda c: c.all_reduce(np.zeros(3, np.int64), op=PreMulSum(-(1 << 63) - 1)),
    ),
    (
        "scalar 9.223372036854776e+18 of PreMulSum",
        lambda c: c.all_reduce(np.zeros(3, np.int64), op=PreMulSum(2.0**63)),
    ),
    (
        "scalar 18446744073709551616 of PreMulSum",
        lambda c: c.all_reduce(np.zeros(3, np.uint64), op=PreMulSum(1 << 64)),
    ),
    (
        "scalar 256 of PreMulSum is not a value of uint8",
        lambda c: c.all_reduce(np.zeros(3, np.uint8), op=PreMulSum(256)),
    ),
    (
        "scalar 1e+300 of PreMulSum exceeds 3.4028235e+38",
        lambda c: c.all_reduce(LINE, op=PreMulSum(1e300)),
    ),
    ("scalar -1e+39 of PreMulSum", lambda c: c.reduce(LINE, op=PreMulSum(-1e39))),
    (
        "the largest float32, in which float16 is accumulated",
        lambda c: c.all_reduce(np.zeros(3, np.float16), op=PreMulSum(1e39)),
    ),
    (
        "in which bfloat16 is",
        lambda c: c.reduce_scatter(np.zeros(3, ml_dtypes.bfloat16), op=PreMulSum(1e300)),
    ),
    ("outside the range of float64", lambda c: c.all_reduce(LINE, op=PreMulSum(10**400))),
    (
        "scalar is 'a'; it must be a number",
        lambda c: c.all_reduce(LINE, op=PreMulSum(NOTHING["text"])),
    ),
    (
        "scalar is '2'; it must be a number",
        lambda c: c.all_reduce(LINE, op=PreMulSum(NOTHING["digit"])),
    ),
    ("scalar is None", lambda c: c.all_reduce(LINE, op=PreMulSum(NOTHING["none"]))),
    ("counts must have 1 counts", lambda c: c.all_gather_v(LINE, [6, 6])),
    ("counts must have 1 counts of 0 or more", lambda c: c.all_gather_v(LINE, [-1])),
    ("counts must be a list", lambda c: c.reduce_scatter_v(LINE, None)),
    ("counts must be a list", lambda c: c.reduce_scatter_v(LINE, ["a"])),
    ("counts must be a list", lambda c: c.all_gather_v(LINE, {12: 0})),
    ("counts must be a list", lambda c: c.reduce_scatter_v(LINE, {12})),
    ("counts must be a list", lambda c: c.all_gather_v(LINE, [12.5])),
    ("counts must be a list", lambda c: c.all_gather_v(LINE, ["12"])),
    ("counts must be a list", lambda c: c.all_gather_v(LINE, [float("inf")])),
    ("x has 12 elements, but needs 5", lambda c: c.all_gather_v(LINE, [5])),
    ("x has 12 elements, but needs 5", lambda c: c.reduce_scatter_v(LINE, [5])),
    ("counts of a rank to itself differ", lambda c: c.all_to_all_v(LINE, [12], [3])),
    ("x has 12 elements, but needs 3", lambda c: c.scatter_v(LINE, [3])),
    ("empty: shape is -3", lambda c: c.empty(-3)),
    ("is not supported", lambda c: c.empty(3, object)),
    ("is not supported", lambda c: c.empty(3, "nonsense")),
    ("empty: shape is '3'", lambda c: c.empty("3")),
    ("unknown collective 'all'", lambda c: c.explain("all", 4)),
    ("unknown collective None; known are all_reduce", lambda c: c.explain(None, 4)),
    ("nbytes is -4", lambda c: c.explain("all_reduce", -4)),
    ("nbytes is '4K'", lambda c: c.explain("all_reduce", "4K")),
    (
        "nbytes is 4611686018427387904; allowed are 0 to",
        lambda c: c.explain("all_reduce", 1 << 62),
    ),
    ("dtype is None", lambda c: c.explain("all_reduce", 4, None)),
    ("device is None; allowed are cpu, cuda", lambda c: c.empty(4, device=None)),
    ("device is 'cuda:'; allowed are cpu, cuda", lambda c: c.empty(4, device="cuda:")),
    (
        "device is 'cuda:99999'; allowed are cpu, cuda",
        lambda c: c.explain("all_reduce", 4, device="cuda:99999"),
    ),
    ("dtype is 'half'", lambda c: c.explain("all_reduce", 4, "half")),
    ("color is 'red'", lambda c: c.split("red")),
    ("key is 'a'", lambda c: c.split(0, "a")),
    (
        "all_reduce: async_op is not allowed inside a group",
        lambda c: grouped(c.all_reduce, LINE, async_op=True),
    ),
    (
        "send: async_op is not allowed inside a group",
        lambda c: grouped(c.send, LINE, 0, async_op=True),
    ),
    (
        "sendrecv: async_op is not allowed inside a group",
        lambda c: grouped(c.sendrecv, LINE[:6], 0, LINE[6:], 0, async_op=True),
    ),
]


def test_nonfinite_and_largest_scalars_are_accepted(comm: Communicator) -> None:
    """inf and nan are the caller's choice; a scalar may round to the largest finite value."""
    largest = np.finfo(np.float32).max
    for scalar, want in (
        (float("inf"), np.inf),
        (float("-inf"), -np.inf),
        (float("nan"), np.nan),
        (3.4028235e38, largest),
    ):
        for dtype in (np.float32, ml_dtypes.bfloat16):
            x = np.ones(3, dtype)
            comm.all_reduce(x, op=PreMulSum(scalar))
            np.testing.assert_array_equal(
                x.astype(np.float32), np.full(3, want).astype(dtype).astype(np.float32)
            )
    x = np.ones(3)
    assert (comm.all_reduce(x, op=PreMulSum(1e300)) == 1e300).all()


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_scalars_of_integers_are_exact(comm: Communicator, dtype: Any) -> None:
    """float64 has no odd integers above 2^53; integers of any library keep their value."""
    limits, odd = np.iinfo(dtype), (1 << 53) + 1
    large = (odd, -odd, int(limits.max), int(limits.min), int(limits.max) - 1)
    cases: list[tuple[Any, int]] = [(s, s) for s in large if limits.min <= s <= limits.max]
    cases += [
        (dtype(odd), odd),
        (np.array(odd), odd),
        (2.0**53, 1 << 53),
        (2.0, 2),
        (np.float32(3), 3),
        (True, 1),
        (np.True_, 1),
    ]
    given = np.array([1, 3, 5, limits.max], dtype)
    for scalar, whole in cases:
        want = np.array([int(v) * whole % (1 << 64) for v in given], np.uint64).view(dtype)
        x, out, op = given.copy(), np.zeros(4, dtype), PreMulSum(scalar)
        np.testing.assert_array_equal(comm.all_reduce(x, out, op), want)
        np.testing.assert_array_equal(comm.reduce_scatter(x, op=op), want)
        prepared = comm.reduce_init(x, op=op)
        np.testing.assert_array_equal(x, given)
        np.testing.assert_array_equal(prepared(), want)
        np.testing.assert_array_equal(x, want)


def test_whole_float_is_rounded_as_float() -> None:
    """NumPy scalars become Python numbers: launches are cached by their exact equality."""
    odd = (1 << 53) + 1
    wholes: list[Any] = [odd, np.uint64(odd), True]
    others: list[Any] = [2.0, np.float64(2), np.float16(2)]
    assert {type(PreMulSum(scalar).scalar) for scalar in wholes} == {int}
    assert {type(PreMulSum(scalar).scalar) for scalar in others} == {float}
    same: list[Any] = [np.int64(odd), np.int8(2)]
    assert PreMulSum(same[0]) == PreMulSum(odd) != PreMulSum(float(odd))
    assert PreMulSum(same[1]) == PreMulSum(2) == PreMulSum(2.0)
    for kind in (np.float16, np.float32, np.float64):
        code = DType[np.dtype(kind).name.upper()]
        (_, whole), (_, rounded) = (
            resolve_operator(PreMulSum(s), code, "test") for s in (odd, float(odd))
        )
        assert whole == rounded
        assert type(whole) is float


@pytest.mark.parametrize("number", [0, False, 0.0, np.int64(0), np.False_])
def test_operators_equal_no_numbers(number: Any) -> None:
    """Launches are cached by operator: 0 and False must not find the entry of ``SUM``."""
    assert {(RedOp.SUM, 1): "launch"}.get((number, 1)) is None
    assert number not in {RedOp.SUM}


def test_equal_factors_have_equal_products() -> None:
    zeros: list[Any] = [0.0, 0, np.float16(0), False]
    negative: list[Any] = [-0.0, np.float32(-0.0), np.array(-0.0)]
    for group in (zeros, negative):
        assert len({PreMulSum(scalar) for scalar in group}) == 1
    assert PreMulSum(0.0) != PreMulSum(-0.0)
    assert pickle.loads(pickle.dumps(PreMulSum(-0.0))) == PreMulSum(-0.0)
    assert repr(PreMulSum(-0.0)) == "PreMulSum(scalar=-0.0)"


def grouped(call: Any, *args: Any, **options: Any) -> None:
    with miraccl.group():
        call(*args, **options)


@pytest.mark.parametrize(
    ("why", "call"), WRONG, ids=[f"{i}-{why[:30]}" for i, (why, _) in enumerate(WRONG)]
)
def test_rejected_arguments(comm: Communicator, why: str, call: Any) -> None:
    for _ in range(2):
        with pytest.raises(InvalidUsage) as caught:
            call(comm)
        assert why in str(caught.value)
    assert (comm.all_reduce(np.ones(3)) == 1).all()


def test_out_of_memory_for_result(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: Any) -> Any:
        raise MemoryError

    without_memory = types.SimpleNamespace(**vars(np) | {"empty": empty})
    monkeypatch.setattr(prepare, "np", without_memory)
    monkeypatch.setattr(host_arrays, "np", without_memory)
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        with pytest.raises(
            SystemFailure, match=rf"{name}: cannot allocate a result of shape \(12,\)"
        ):
            getattr(comm, name)(LINE)
    monkeypatch.undo()
    assert comm.all_gather(LINE).size == LINE.size


def test_stream_with_cpu_memory_is_rejected_on_every_call(
    comm: Communicator,
) -> None:
    x, out = np.ones(4), np.ones(4)
    for call in (
        comm.all_reduce,
        comm.all_gather,
        comm.reduce_scatter,
        comm.broadcast,
        comm.all_to_all,
    ):
        call(*((x, out) if call == comm.all_to_all else (x,)))  # now its plan is known
        with pytest.raises(InvalidUsage, match="streams are for GPU memory"):
            call(*((x, out) if call == comm.all_to_all else (x,)), stream=0)


def test_persistent_operation_on_cpu_memory_rejects_stream(comm: Communicator) -> None:
    x, scaled = np.ones(4), np.full(4, 3.0)
    for prepared in (comm.all_reduce_init(x), comm.reduce_init(scaled, op=PreMulSum(2))):
        for _ in range(2):
            with pytest.raises(
                InvalidUsage,
                match=r"rank 0, (all_)?reduce: stream is given",
            ):
                prepared(stream=0)
            assert prepared(stream=None) is prepared.result
    assert scaled.tolist() == [12.0] * 4, "only what was started has changed it"


def test_timeout_of_wait(comm: Communicator) -> None:
    for timeout in (1e300, 10**400, float("inf"), 0.5, 30):
        assert comm.all_reduce(np.ones(2), async_op=True).wait(timeout=timeout).sum() == 2
        assert (
            comm.all_reduce(np.ones(2), async_op=True).synchronize(timeout).sum() == 2
        )  # as on GPU memory
    assert comm.all_reduce(np.ones(2), async_op=True).wait(stream=0).sum() == 2
    work = comm.all_reduce(np.ones(2), async_op=True)
    wrong: Any
    for wrong in (float("nan"), "5", True, [1]):
        with pytest.raises(InvalidUsage, match="it must be a number of seconds, or None"):
            work.wait(timeout=wrong)
    work.wait()


def test_options_are_checked() -> None:
    for options, why in (
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": -1.0}, "timeout is -1"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"timeout": [5]}, "timeout is .5."),
        (
            {"timout": 5},
            "unknown option 'timout'; known are timeout, algo, proto, deterministic, buffsize",
        ),
        ({"algo": 3}, "algo is 3"),
        ({"algo": "fast"}, "unknown algorithm 'fast'"),
        ({"proto": "ll64"}, "unknown protocol 'll64'"),
        ({"buffsize": -5}, "buffsize is -5"),
        ({"deterministic": "no"}, "deterministic is 'no'; it must be True or False"),
    ):
        with pytest.raises(InvalidUsage, match=why):
            miraccl.init(**options)
    for fine in (
        {"timeout": 10**400},
        {"proto": "LL128"},
    ):  # that protocol is one of GPUs: CPU memory goes as without it
        with miraccl.init(**fine) as alone:
            assert alone.all_reduce(np.ones(2)).sum() == 2
    with pytest.raises(InvalidUsage, match="nranks is 0"):
        Communicator(0, miraccl.get_unique_id(), 0)
    with pytest.raises(InvalidUsage, match="rank is 3"):
        Communicator(2, miraccl.get_unique_id(), 3)
    with pytest.raises(InvalidUsage, match="rank is True"):
        Communicator(2, miraccl.get_unique_id(), True)
    for unique_id, kind in (
        (3, "int"),
        (None, "NoneType"),
        (["id"], "list"),
        (np.zeros(4, np.uint8), "ndarray"),
    ):
        with pytest.raises(
            InvalidUsage,
            match=rf"unique_id is a {kind}; allowed are the result of get_unique_id",
        ):
            Communicator(2, unique_id, 0)  # type: ignore[arg-type]


def rejected_on_all_ranks() -> None:
    """Make mistakes that need several ranks; each rank rejects its own call before data is sent."""
    with miraccl.init(timeout=10) as comm:
        n = comm.nranks
        odd = np.zeros(n * 4 + 1, np.float32)
        even = np.zeros(n * 4, np.float32)
        for call, why in (
            (lambda: comm.reduce_scatter(odd), "not divisible by"),
            (lambda: comm.all_to_all(odd), "not divisible by"),
            (lambda: comm.scatter(odd, comm.rank), "not divisible by"),
            (lambda: comm.scatter(even, (comm.rank + 1) % n), "must pass out"),
            (lambda: comm.all_gather(even[:4], even[1 : 4 * n + 1][: 4 * n - 1]), "out has"),
            (lambda: comm.reduce_scatter(even, even[1:5]), "overlap"),
            (lambda: comm.all_gather(even[1:5], even), "overlap"),
            (
                lambda: comm.all_gather_v(even[: comm.rank], [1] * n),
                "counts[" if comm.rank != 1 else "",
            ),
            (
                lambda: comm.all_gather_v(
                    even, [even.size if r == comm.rank else 1 << 61 for r in range(n)]
                ),
                "cannot allocate a result of shape (",
            ),
            (
                lambda: comm.all_gather_v(
                    even, [even.size if r == comm.rank else 1 << 70 for r in range(n)]
                ),
                "cannot allocate a result of shape (",
            ),
            (lambda: comm.send(even, n), "dst is"),
        ):
            if not why:
                continue
            try:
                call()
            except InvalidUsage as error:
                text = str(error)
            else:
                raise AssertionError(f"not refused: {why}")
            assert why in text
        assert (comm.all_reduce(np.ones(5)) == n).all()


@pytest.mark.multiprocess
def test_rejections_leave_the_communicator_usable() -> None:
    run_ranks(rejected_on_all_ranks, 3)


def test_numpy_numbers_and_types_are_accepted(comm: Any) -> None:
    assert comm.all_gather(np.float32(3)).tolist() == [3.0]
    assert comm.broadcast(np.ones(2), np.int64(0)).tolist() == [1.0, 1.0]
    assert comm.all_gather_v(np.ones(3), np.array([3])).shape == (3,)
    assert comm.explain("all_reduce", np.int64(4096), np.float16)[0].chosen
    part = comm.split(np.int64(1), np.int32(0))
    assert part is not None
    part.finalize()


def test_results_have_the_shapes_of_their_inputs(comm: Communicator) -> None:
    grid = np.arange(12.0).reshape(3, 4)
    assert comm.all_gather(grid).shape == (3, 4)
    assert comm.reduce_scatter(grid).shape == (3, 4)
    assert comm.all_to_all(grid).shape == (3, 4)
    assert comm.gather(grid).shape == (3, 4)
    assert comm.scatter(grid).shape == (3, 4)
    assert comm.all_gather(np.array(5.0)).shape == (1,)
    assert comm.all_reduce(np.array(5.0)).shape == ()
    assert comm.all_gather_v(grid, [12]).shape == (12,)
    for dtype in DType:
        assert comm.all_gather(np.zeros(3, ref.DTYPES[dtype])).dtype == ref.DTYPES[dtype]
        assert comm.empty(3, dtype).dtype == ref.DTYPES[dtype]
        assert comm.empty(3, dtype.label).dtype == ref.DTYPES[dtype]
