"""The kernels themselves, on emulated GPUs: every collective and protocol gives what its definition says and leaves memory as it was."""

from __future__ import annotations

import functools

import pytest

from miraccl.executor.cuda.plan import DevicePlan, Request, choose
from miraccl.types import Collective, DType, RedOp
from tests.gpu.emulator import COMPILER, Machine
from tests.gpu.emulator.collective import run

pytestmark = pytest.mark.skipif(COMPILER is None, reason="kernels are emulated with a C++ compiler (g++ or clang++), and there is none")


@functools.cache
def machine(nranks: int) -> Machine:
    return Machine(nranks)


def asked(collective: Collective, dtype: DType, count: int, nranks: int, algo: str, proto: str, root: int = 0) -> Request:
    return Request(collective=collective, dtype=dtype, op=RedOp.SUM, count=count, nranks=nranks, root=root, algo=algo, proto=proto)


def small(request: Request, unroll: int = 1) -> DevicePlan:
    """The plan of a request with two blocks of 64 threads, so that there are several pieces."""
    plan = choose(request)
    if not plan.packets:
        return plan
    return DevicePlan(algo=plan.algo, proto=plan.proto, blocks=2, threads=64, unroll=unroll)


ALL_REDUCE = [
    ("one_shot", "ll128", DType.FLOAT32),
    ("one_shot", "ll", DType.INT8),
    ("two_shot", "ll128", DType.BFLOAT16),
    ("two_shot", "ll", DType.INT64),
    ("ring", "ll128", DType.FLOAT16),
    ("ring", "simple", DType.FLOAT64),
]


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize(("algo", "proto", "dtype"), ALL_REDUCE)
def test_all_reduce(algo: str, proto: str, dtype: DType, nranks: int) -> None:
    for count in (1, 3001):
        request = asked(Collective.ALL_REDUCE, dtype, count, nranks, algo, proto)
        assert run(machine(nranks), request, small(request), repeat=2, close=algo == "ring") == [""] * nranks


OTHERS = [Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL, Collective.BROADCAST, Collective.REDUCE]


@pytest.mark.parametrize("collective", OTHERS)
@pytest.mark.parametrize("proto", ["", "simple"])
def test_others(collective: Collective, proto: str) -> None:
    for count, root, offset in ((1, 0, 0), (1501, 2, 1)):
        request = asked(collective, DType.FLOAT32, count, 3, "", proto, root=root)
        assert run(machine(3), request, small(request), repeat=2, offset=offset, close=True) == [""] * 3
