"""Translation of kernel sources: compiled functions compute what Python computes."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import llvmlite.binding as llvm
import pytest

from miraccl.native import frontend
from miraccl.native.compiler import compile_module
from miraccl.native.loader import CodeLibrary
from tests.native.test_native import LIBRARIES

WITH_NUMBA = {
    "miraccl.executor.cpu.kernels.fold",
    "miraccl.graph.search.kernel.channel_search",
}

SOURCE = '''
from types import SimpleNamespace

constants = SimpleNamespace(LIMIT=100, FLAG=True)
OFFSET = -3


def _two(a, b):
    """Two results, and a loop that ends early."""
    total = 0
    for i in range(a, b):
        if i % 7 == 5:
            continue
        if i > constants.LIMIT:
            break
        total += i * OFFSET
    return total, a < b


def _same(a, b):
    return _two(b, a)


def arithmetic(a, b):
    c = a + b * 3 - (a & 0xFF) + (a | b) - (a ^ b)
    c -= -a
    return c + (~b) + (a << 3) + (b >> 2)


def divide(a, b):
    return (a // b) * 5 + a % b if b != 0 else 0


def divide_by_constants(a, b):
    return a // 8 + a % 8 + b // -3 + b % -3 + a // 1 + a % 1000000007


def compare(a, b):
    result = 0
    if a < b:
        result += 1
    elif a == b:
        result += 2
    else:
        result += 4
    if -10 <= a < b <= 10 or not (a != b):
        result += 8
    is_large = a > 50 and b > 50
    return result + is_large * 16 + (a >= b)


def decide(a, b):
    return (a and b) * 3 + (a or b) + (7 if a > 0 and b > 0 else not a)


def loops(a, b):
    count = 0
    n = a % 50
    while n > 0:
        n = n // 2 if n % 2 == 0 else n * 3 + 1
        count += 1
        if n == 1 or count > 60:
            break
    for i in range(20, 3, -4):
        count = count * 3 + i
    step = b % 5 + 1
    for i in range(0, b % 40, step):
        count += i
        i = 1000
    return count + i


def tuples(a, b):
    a, b = b, a
    first, second = _same(a, b)
    x = y = first + min(a, b, 9) - max(a, b)
    return x + y * 2 + (1 if second else 0)


def nothing(a, b):
    pass


EXPORTS = {
    "arithmetic": arithmetic,
    "divide": divide,
    "divide_by_constants": divide_by_constants,
    "compare": compare,
    "decide": decide,
    "loops": loops,
    "tuples": tuples,
    "nothing": nothing,
}
'''


def _module(folder: Path, name: str, text: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ModuleType, Callable[[str, int, int], int]]]:
    """A kernel source, and a function that calls its compiled exports."""
    source = _module(tmp_path_factory.mktemp("kernel"), "a_kernel_source", SOURCE)
    library = CodeLibrary(compile_module("a_kernel_source", "test_"))
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    functions = {name: kind(library.address(f"test_{name}")) for name in source.EXPORTS}
    yield source, lambda name, a, b: functions[name](a, b)
    del sys.modules["a_kernel_source"]


def _wrapped(value: int) -> int:
    """Return a number as an int64 that has wrapped around."""
    return (int(value) + (1 << 63)) % (1 << 64) - (1 << 63)


VALUES = (0, 1, 2, 5, 7, 39, 97, 1 << 20, (1 << 61) + 12345)


@pytest.mark.parametrize(
    "name",
    ["arithmetic", "divide", "divide_by_constants", "compare", "decide", "loops", "tuples"],
)
def test_compiled_functions_compute_what_python_does(
    name: str, compiled: tuple[ModuleType, Callable[[str, int, int], int]]
) -> None:
    source, call = compiled
    numbers = [sign * value for value in VALUES for sign in (1, -1)]
    if name in ("loops", "tuples"):  # Python takes too long for large ones
        numbers = [number for number in numbers if abs(number) < 1000]
        if name == "loops":
            numbers = [number for number in numbers if number % 40]
    for a, b in itertools.product(numbers, numbers):
        assert call(name, a, b) == _wrapped(source.EXPORTS[name](a, b)), (a, b)


def test_division_never_traps(
    compiled: tuple[ModuleType, Callable[[str, int, int], int]], tmp_path: Path
) -> None:
    """A zero divisor gives 0, as Numba does; the smallest number by -1 wraps around."""
    text = (
        "def quotient(a, b):\n    return a // b\n\n\n"
        "def rest(a, b):\n    return a % b\n\n\n"
        "EXPORTS = {'quotient': quotient, 'rest': rest}\n"
    )
    _module(tmp_path, "a_division", text)
    library = CodeLibrary(compile_module("a_division", "test_"))
    del sys.modules["a_division"]
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    quotient, rest = (kind(library.address(f"test_{name}")) for name in ("quotient", "rest"))
    least = -(1 << 63)
    assert (quotient(5, 0), rest(5, 0)) == (0, 0)
    assert (quotient(least, -1), rest(least, -1)) == (least, 0)
    assert (quotient(-7, -1), rest(-7, -1)) == (7, 0)


def test_a_function_without_a_result_returns_zero(
    compiled: tuple[ModuleType, Callable[[str, int, int], int]],
) -> None:
    assert compiled[1]("nothing", 3, 4) == 0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return a / b", r":2 \(f\): operator Div"),
        ("return 1.5", r":2 \(f\): 1.5 = 1.5 is not an int64"),
        ("return 1 << 64 - 1 if a else 0x8000000000000000", "is not an int64"),
        ("with a: pass", "With statements"),
        ("return [a]", "List expressions"),
        ("for i in (a, b): pass", r"loops other than over range\(\)"),
        ("x = a, b\n    return x", "2 values for 1 variables"),
        ("return print(a)", "calls of print"),
        ("return max(a, key=b)", "only positional arguments"),
        ("return a is b", "operator Is"),
        ("if a:\n        return a, b\n    return a", "another number of results"),
    ],
)
def test_unsupported_syntax_is_named_with_its_line(body: str, reason: str, tmp_path: Path) -> None:
    module = _module(tmp_path, "a_refused_kernel", f"def f(a, b):\n    {body}\n")
    with pytest.raises(frontend.UnsupportedSyntax, match=reason):
        frontend.translate({"f": module.f}, "test_", llvm.get_process_triple(), "")
    del sys.modules["a_refused_kernel"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_kernel_sources_are_translated_without_numbas_type_inference(name: str) -> None:
    """Numba takes ten times as long; only sources with other types than int64 may need it."""
    source = importlib.import_module(name)
    assert (getattr(source, "COMPILER", "") == "numba") is (name in WITH_NUMBA)
    if name not in WITH_NUMBA:
        text = frontend.translate(source.EXPORTS, "miraccl_", llvm.get_process_triple(), "")
        assert all(f'@"miraccl_{export}"' in text for export in source.EXPORTS)
