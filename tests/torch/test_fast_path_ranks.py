"""GPU fast paths between ranks with running kernels: results and errors equal the slow path's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.emulator import folder, needs_compiler
from tests.support.ranks import run_ranks

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')", exc_type=ImportError
)
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip(
        f"tensors of PyTorch {torch.__version__} have no interface for compiled code",
        allow_module_level=True,
    )

from tests.torch import fast_path_ranks  # noqa: E402

pytestmark = [
    pytest.mark.multiprocess,
    needs_compiler,
]


def run(target: Any, nranks: int) -> list[Any]:
    return run_ranks(
        target,
        nranks,
        env={"MIRACCL_SMS": "2", "MIRACCL_EMULATOR_CACHE": str(folder())},
        timeout=100.0,
    )


def test_collectives() -> None:
    run(fast_path_ranks.collectives, 3)


def test_changes_of_streams() -> None:
    run(fast_path_ranks.streams, 2)


def test_collectives_that_are_messages() -> None:
    run(fast_path_ranks.moves, 3)


def test_counts_that_are_new() -> None:
    run(fast_path_ranks.new_counts, 3)


def test_arrays_of_cupy() -> None:
    run(fast_path_ranks.arrays, 2)


def test_arrays_that_speak_a_protocol() -> None:
    run(fast_path_ranks.protocols, 2)


def test_messages() -> None:
    run(fast_path_ranks.messages, 2)


def test_groups_of_all_kinds() -> None:
    run(fast_path_ranks.groups_of_all_kinds, 3)


def test_messages_that_do_not_match() -> None:
    first, second = run(fast_path_ranks.unlike, 2)
    assert (
        "rank 1 receives 60 x float32 (240 bytes) "
        "where rank 0 sends 100000 x float32 (400000 bytes)" in second
    )
    assert (
        "rank 0 sends 100000 x float32 (400000 bytes) where rank 1 receives 60 x float32" in first
    )


def test_closed_communicators() -> None:
    run(fast_path_ranks.after_the_end, 2)
