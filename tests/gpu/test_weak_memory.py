"""Kernels with stores that land late and in any order: they rely only on fences and on seeing
cleared
memory.

A ``Flaw`` removes something that a kernel relies on and must be detected, or these tests detect
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.plan import DevicePlan
from miraccl.executor.cuda.source import Framing
from miraccl.types import Collective, DType
from tests.gpu.emulator import EmulatedMachine, needs_compiler, patch_kernels, weak_memory
from tests.gpu.emulator.collective import make_request, run, run_in_a_row
from tests.gpu.emulator.exchange import EmulatedSend
from tests.gpu.emulator.exchange import run as exchange
from tests.gpu.test_messages import pool_rules, rules, shrink_pool

pytestmark = needs_compiler

SEEDS = (1, 2, 3)
MANY = range(1, 10_000)  # a flaw is detected after 1 to 4 seeds, by thread order
HALF_BYTES = 18 << 10
PACKETS = [
    (Collective.ALL_REDUCE, "one_shot", 2),
    (Collective.ALL_REDUCE, "two_shot", 2),
    (Collective.ALL_REDUCE, "two_shot", 3),
    (Collective.ALL_REDUCE, "ring", 3),
    (Collective.ALL_REDUCE, "double_binary_tree", 3),
    (Collective.BROADCAST, "chain", 3),
    (Collective.REDUCE, "chain", 2),
    (Collective.REDUCE, "double_binary_tree", 2),
    (Collective.BROADCAST, "double_binary_tree", 3),
]


@dataclass(frozen=True)
class Flaw:
    """Fragment removed from a kernel's source, and its replacement."""

    text: str
    instead: str = ""


@pytest.fixture
def flaw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Flaw:
    found: Flaw = request.param
    patch_kernels(monkeypatch, {found.text: found.instead})
    return found


@pytest.fixture
def small_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "HALF_BYTES", HALF_BYTES)


def packet_errors(
    collective: Collective,
    algo: str,
    nranks: int,
    seeds: Sequence[int] = SEEDS,
    timeout_s: float = 60.0,
) -> Iterator[str]:
    """Yield errors of several launches in a row, with more tiles than slots, for each seed."""
    request = make_request(collective, DType.INT32, 6001, nranks, algo, "ll128", root=nranks - 1)
    plan = DevicePlan(algo=algo, proto="ll128", blocks=2, threads=32, unroll=1)
    for seed in seeds:
        with weak_memory(seed):
            yield from filter(
                None, run_in_a_row(EmulatedMachine(nranks, timeout_s), [(request, plan)] * 4)
            )


@pytest.mark.parametrize(("collective", "algo", "nranks"), PACKETS)
@pytest.mark.usefixtures("small_half")
def test_packets(collective: Collective, algo: str, nranks: int) -> None:
    assert not list(packet_errors(collective, algo, nranks))


@pytest.mark.parametrize(
    ("flaw", "collective", "algo"),
    [
        (
            Flaw("      await_iteration_cleared(a, g, w, links, iter, spin);\n"),
            Collective.REDUCE,
            "double_binary_tree",
        ),
        (
            Flaw("      await_iteration_cleared(a, g, w, links, iter, spin);\n"),
            Collective.ALL_REDUCE,
            "double_binary_tree",
        ),
        (
            Flaw("    if (w.reuses_slots) await_tile_cleared(a, g, w, k, slot, 0, spin);\n"),
            Collective.ALL_REDUCE,
            "one_shot",
        ),
    ],
    indirect=["flaw"],
)
@pytest.mark.usefixtures("small_half", "flaw")
def test_slots_reused_before_they_were_seen_cleared_are_detected(
    collective: Collective, algo: str
) -> None:
    assert next(packet_errors(collective, algo, 2, MANY, timeout_s=1.0))


def double_buffered_errors(
    nranks: int, between: int = 1, seeds: Sequence[int] = SEEDS, timeout_s: float = 60.0
) -> Iterator[str]:
    """Yield errors of double-buffered launches in a row, with single-tile launches in between."""
    request = make_request(
        Collective.ALL_REDUCE, DType.INT32, 128 * 2 * nranks + 5, nranks, "two_shot", "ll128"
    )
    plan = DevicePlan(
        algo="two_shot", proto="ll128", blocks=2, threads=32, unroll=1, double_buffered=True
    )
    less = make_request(
        Collective.ALL_REDUCE, DType.INT32, 60 * nranks, nranks, "two_shot", "ll128"
    )
    more = make_request(
        Collective.ALL_REDUCE, DType.INT32, 128 * 4 * nranks, nranks, "two_shot", "ll128"
    )
    for seed in seeds:
        with weak_memory(seed):
            once = [(less, plan)] * between
            launches = [
                (request, plan),
                (request, plan),
                *once,
                (more, plan),
                *once,
                (request, plan),
            ]
            yield from filter(None, run_in_a_row(EmulatedMachine(nranks, timeout_s), launches))


@pytest.mark.parametrize("nranks", [2, 3])
def test_double_buffered(nranks: int) -> None:
    assert not list(double_buffered_errors(nranks))


@pytest.mark.parametrize(
    "flaw",
    [
        Flaw(
            "      await_tile_cleared(a, previous, w, k - 1, 0, 0, spin);\n"
            "      await_tile_cleared(a, previous, w, k - 1, 0, 1, spin);\n"
        )
    ],
    indirect=True,
    ids=["settle"],
)
@pytest.mark.usefixtures("flaw")
def test_tiles_not_seen_cleared_are_detected() -> None:
    assert next(double_buffered_errors(2, 0, MANY, timeout_s=1.0))


def step_errors(algo: str, seeds: Sequence[int] = SEEDS, timeout_s: float = 60.0) -> Iterator[str]:
    request = make_request(Collective.ALL_REDUCE, DType.INT32, 9001, 2, algo, "simple")
    plan = DevicePlan(algo=algo, proto="simple", blocks=2, threads=32, unroll=1)
    for seed in seeds:
        with weak_memory(seed):
            yield from filter(None, run(EmulatedMachine(2, timeout_s), request, plan, repeat=3))


@pytest.fixture
def half_for_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "HALF_BYTES", 64 << 10)


@pytest.mark.parametrize("algo", ["ring", "two_shot", "recursive_doubling"])
@pytest.mark.usefixtures("half_for_steps")
def test_steps(algo: str) -> None:
    assert not list(step_errors(algo))


@pytest.mark.parametrize(
    "flaw",
    [Flaw("    fence();\n    store_word(tail_word(", "    store_word(tail_word(")],
    indirect=True,
)
@pytest.mark.usefixtures("half_for_steps", "flaw")
def test_a_message_without_a_fence_is_detected() -> None:
    assert next(step_errors("ring", MANY, timeout_s=1.0))


def message_errors(
    large: bool, seeds: Sequence[int] = SEEDS, timeout_s: float = 60.0
) -> Iterator[str]:
    sizes = (5000, 9000, 40_000) if large else (1, 500, 9000)
    sends = [EmulatedSend(src, 1 - src, size) for size in sizes for src in (0, 1)]
    for seed in seeds:
        where = EmulatedMachine(2, timeout_s)
        with weak_memory(seed):
            for _ in range(3):
                yield from filter(
                    None, exchange(where, pool_rules(2) if large else rules(2, Framing.PAIR), sends)
                )


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_pool(monkeypatch)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.usefixtures("small_pool")
def test_messages(large: bool) -> None:
    assert not list(message_errors(large))


@pytest.mark.parametrize(
    "flaw",
    [
        Flaw(
            "        fence();\n        store_word(arrived_word(", "        store_word(arrived_word("
        )
    ],
    indirect=True,
)
@pytest.mark.usefixtures("small_pool", "flaw")
def test_a_chunk_without_a_fence_is_detected() -> None:
    assert next(message_errors(True, MANY, timeout_s=1.0))
