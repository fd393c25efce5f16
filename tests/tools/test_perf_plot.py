"""The picture of ``miraccl perf``: both panels, algorithm changes, earlier runs, the bound."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from miraccl.errors import InvalidUsage
from miraccl.graph.bound import bandwidth_bound
from miraccl.tools.perf import plot
from miraccl.tools.perf.bound import Bound, detect_bound, read_bound
from miraccl.tools.perf.spec import PerfRow, build_case, build_row
from miraccl.topo.analyse import analyse_topology
from miraccl.topo.load import load_topology
from miraccl.topo.options import TopoOptions
from tests.topo.golden import TOPOLOGIES

DGX = str(TOPOLOGIES / "nvidia-dgxh100.xml")


def rows(*, factor: float = 1.0, peer: str = "", in_place: bool = False) -> list[PerfRow]:
    made = []
    for exponent in (3, 10, 18, 22, 26):
        case = build_case("all_reduce", 1 << exponent, nranks=8, dtype="float32")
        algo, proto = ("one_shot", "ll") if exponent < 18 else ("ring", "simple")
        made.append(
            build_row(
                case,
                [factor * (5 + case.nbytes / 200e3)],
                in_place=in_place,
                wrong=0,
                iters=20,
                algo=algo,
                proto=proto,
                channels=8,
                peer=peer,
                peer_time_us=10.0 if peer else None,
            )
        )
    return made


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (8, "8 B"),
        (1 << 10, "1 KiB"),
        (256 << 10, "256 KiB"),
        (3 << 19, "1.5 MiB"),
        (1 << 30, "1 GiB"),
    ],
)
def test_sizes_have_binary_units(nbytes: int, text: str) -> None:
    assert plot.format_size(nbytes) == text


def test_algorithm_changes_are_found_per_form() -> None:
    expected = [(8, "one_shot/ll"), (1 << 18, "ring/simple")]
    assert plot.algorithm_changes(rows()) == expected
    assert plot.algorithm_changes(rows(in_place=True)[::-1]) == expected
    assert plot.algorithm_changes([]) == []


def drawn(tmp_path: Path, **options: object) -> str:
    """Return the SVG with its text as text."""
    matplotlib = pytest.importorskip("matplotlib")
    target = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot.draw(rows(peer="nccl"), str(target), **options)  # type: ignore[arg-type]
    return target.read_text()


def test_the_picture_has_both_panels_peers_runs_and_the_bound(tmp_path: Path) -> None:
    old = plot.EarlierRun(name="october", rows=tuple(rows(factor=2)))
    svg = drawn(tmp_path, runs=[old], bound=Bound(busbw=360, label="bound: 360 GB/s"))
    for text in (
        "time (µs)",
        "bus bandwidth (GB/s)",
        "256 KiB",
        "miraccl, out of place",
        "nccl, out of place",
        "october, out of place",
        "bound: 360 GB/s",
    ):
        assert f">{text}</text>" in svg
    assert svg.count(">one_shot/ll</text>") == svg.count(">ring/simple</text>") == 2


def test_earlier_runs_are_read_from_json(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    records = [row.to_json() | {"unknown": 1} for row in rows()]
    path.write_text(json.dumps(records))
    run = plot.read_run(str(path), "all_reduce")
    assert run.name == "old"
    assert [row.bytes for row in run.rows] == [row.bytes for row in rows()]
    with pytest.raises(InvalidUsage, match="it has no rows of broadcast"):
        plot.read_run(str(path), "broadcast")
    path.write_text('{"op": 3}')
    with pytest.raises(InvalidUsage, match="not a file of miraccl perf --json"):
        plot.read_run(str(path), "all_reduce")


def test_bounds_are_numbers_or_those_of_a_topology() -> None:
    assert read_bound("12.5", "broadcast", 4).busbw == 12.5
    system = analyse_topology(load_topology(DGX).root, TopoOptions()).system
    expected = bandwidth_bound(system)
    assert read_bound(DGX, "all_gather", 8).busbw == float(expected.all_gather)
    assert read_bound(DGX, "all_reduce", 8).busbw == float(expected.all_reduce_ceiling)
    assert read_bound(DGX, "all_reduce", 4).label.startswith("bound of the links: ")
    assert detect_bound((0,), "all_reduce") is None
    assert detect_bound((0, 1), "broadcast") is None
    for text, op in (("-3", "all_reduce"), ("inf", "all_reduce"), (DGX, "broadcast")):
        with pytest.raises(click.UsageError, match="--bound"):
            read_bound(text, op, 8)
