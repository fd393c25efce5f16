"""docs/design/kernels.md agrees with the code: the memory map, figures, file names, programs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from miraccl.executor.cuda import layout
from tests.gpu.emulator import needs_compiler

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "design" / "kernels.md").read_text("utf-8")
FLAT = " ".join(PAGE.split())
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
UNITS = {"": 1, "KiB": layout.KIB, "MiB": layout.MIB}
MEMORY_MAP = re.findall(r"^ *(\d+) (KiB|MiB|) +([A-Z_]+)\b", PAGE, re.MULTILINE)


def test_the_memory_map_has_the_offsets_of_the_layout() -> None:
    found = {name: int(number) * UNITS[unit] for number, unit, name in MEMORY_MAP}
    assert found == {name: getattr(layout, name) for name in found}
    assert list(found.values()) == sorted(found.values())
    missing = {name for name in vars(layout) if name.endswith("_OFFSET")} - found.keys()
    # The words of large messages are one line; those of sparse sums lie in memory of their own.
    assert all(name.startswith(("BULK_", "SPARSE_")) for name in missing)


def test_figures_of_the_memory_are_those_of_the_layout() -> None:
    assert f"half 0, {layout.HALF_BYTES // layout.MIB} MiB" in FLAT
    assert f"{layout.FIFO_ROWS} rows of {layout.ROW_BYTES} bytes per" in FLAT
    assert (
        f"{layout.BULK_BYTES // layout.CHUNK_BYTES} chunks of "
        f"{layout.CHUNK_BYTES // layout.KIB} KiB" in FLAT
    )
    queues = [layout.message_warp_queues(nranks) for nranks in (2, 4, 8)]
    text = "up to {} warp queues between 2 ranks, {} between 4, {} between 8".format(*queues)
    assert text in FLAT
    assert f"{layout.MAX_MESSAGES} messages fit into the arguments" in FLAT


def test_files_that_are_named_are_there() -> None:
    """Names with a folder are below the package or the repository, .cuh files in ``source/``."""
    named = re.findall(
        r"`((?:executor|fastpath|runtime|diagnosis|transport|proxy|schedule|source|tests|bench)/[\w/]+\.(?:py|cuh|h))`",
        PAGE,
    )
    named += [f"source/{name}" for name in re.findall(r"`(\w+\.cuh)`", PAGE)]
    table = PAGE.partition("| files of `tests/gpu` |")[2].partition("\n\n")[0]
    named += [f"tests/gpu/{name}" for name in re.findall(r"`([\w/]+\.py)`", table)]
    assert len(named) > 60
    folders = (ROOT / "src" / "miraccl", ROOT / "src" / "miraccl" / "executor" / "cuda", ROOT)
    missing = [
        name
        for name in named
        if "NAME" not in name and not any((folder / name).exists() for folder in folders)
    ]
    assert missing == []


def test_the_text_of_a_kernel_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    exec(PROGRAMS[0], {})
    shown = capsys.readouterr().out
    assert "fanout.cuh" in shown
    assert "#define RANKS 4\n" in shown
    assert "__global__" in shown


@needs_compiler
def test_a_kernel_runs_in_the_emulator_as_described() -> None:
    names: dict[str, Any] = {}
    exec(PROGRAMS[1], names)
    assert names["wrong"] == [""] * 4
