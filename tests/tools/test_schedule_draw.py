"""Pictures of schedules: legend, contrast, folding by symmetry, and the HTML page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from miraccl.schedule import catalog
from miraccl.schedule.ir import Op, Schedule
from miraccl.schedule.steps import inp, one_channel, out, put, signal, wait
from miraccl.tools.cli import cli
from miraccl.tools.schedule_draw import draw_svg
from miraccl.tools.schedule_page import draw_html
from miraccl.types import Collective

SVG = "{http://www.w3.org/2000/svg}"


def build(name: str, nranks: int, collective: str = "all_reduce") -> Schedule:
    return catalog.build(name, Collective[collective.upper()], nranks)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def steps(svg: str) -> list[ET.Element]:
    return [group for group in ET.fromstring(svg).iter(f"{SVG}g") if group.get("class") == "step"]


def size(svg: str) -> tuple[int, int]:
    root = ET.fromstring(svg)
    return int(root.get("width", "0")), int(root.get("height", "0"))


def test_the_legend_explains_what_occurs_and_nothing_else() -> None:
    schedule = build("ring", 4)
    shown = texts(draw_svg(schedule))
    used = {step.op for channel in schedule.channels for rank in channel for step in rank}
    explained = {text.partition(":")[0] for text in shown if ": " in text}
    assert explained == {op.name.lower() for op in used}
    assert any("cut into 4 chunks" in text for text in shown)
    assert any("time, in steps" in text for text in shown)


def test_a_step_shows_its_primitive_chunks_and_peers() -> None:
    schedule = one_channel(
        "pushed",
        Collective.BROADCAST,
        [[put(inp(0), out(0), 1), signal([1]), put(inp(0), out(0), 0)], [wait([0])]],
    )
    boxes = [
        [line.text for line in group.iter(f"{SVG}text")] for group in steps(draw_svg(schedule))
    ]
    assert ["put", "in[0] → out[0]", "to 1"] in boxes
    assert ["signal", "peers 1"] in boxes


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.1."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_the_contrast_of_wcag_aaa() -> None:
    root = ET.fromstring(draw_svg(build("ring", 4)))
    text = luminance(root.get("fill", ""))
    fills = {rect.get("fill", "") for rect in root.iter(f"{SVG}rect")} - {"white"}
    assert fills
    for fill in fills:
        assert (luminance(fill) + 0.05) / (text + 0.05) >= 7
    muted = {element.get("fill") for element in root.iter(f"{SVG}text")} - {None}
    assert all(1.05 / (luminance(str(colour)) + 0.05) >= 7 for colour in muted)


@pytest.mark.parametrize("nranks", [16, 64])
def test_a_ring_is_one_row_of_relative_numbers(nranks: int) -> None:
    svg = draw_svg(build("ring", nranks))
    shown = texts(svg)
    assert f"ranks 0–{nranks - 1}" in shown
    assert "from r−1, to r+1" in shown
    assert "in[r−1]" in shown
    assert f"{nranks - 4} more" in shown
    assert size(svg)[0] < 1500
    assert any(text.startswith("r is the number of the rank itself") for text in shown)


def test_exclusive_or_and_pairs_are_recognised() -> None:
    assert "from r^1" in " ".join(texts(draw_svg(build("recursive_doubling", 16))))
    pairwise = draw_svg(build("pairwise", 64, "all_to_all"))
    assert len(steps(pairwise)) == 5  # copy, the first and the last pair
    assert "122 more" in texts(pairwise)


def test_a_chain_folds_its_inner_ranks() -> None:
    shown = texts(draw_svg(build("chain", 64, "broadcast")))
    assert {"rank 0", "ranks 1–62", "rank 63"} <= set(shown)


EVERY = [
    (name, collective, nranks)
    for name in catalog.names()
    for collective in sorted(catalog.get(name).collectives)
    for nranks in (16, 64)
    if catalog.get(name).supports(collective, nranks)
]


@pytest.mark.parametrize(("name", "collective", "nranks"), EVERY)
def test_16_and_64_ranks_fit_a_screen_in_height(
    name: str, collective: Collective, nranks: int
) -> None:
    assert size(draw_svg(catalog.build(name, collective, nranks)))[1] < 1200


def test_folding_can_be_turned_off_and_on() -> None:
    assert len(steps(draw_svg(build("ring", 16), fold=False))) == 16 * 31
    assert len(steps(draw_svg(build("ring", 4), fold=True))) == 7


class _PageParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.ends: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        self.ends |= set((values.get("data-ends") or "").split())


def test_the_page_links_messages_to_their_steps() -> None:
    page = draw_html(build("ring", 4))
    parser = _PageParser()
    parser.feed(page)
    assert parser.ends
    assert parser.ends <= parser.ids
    assert {"details", "picture", "labels"} <= parser.ids
    assert not re.search(r'(src|href)="', page)  # self-contained


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--out", "x.svg"], "<svg"),
        (["--out", "x.html"], "<!doctype html>"),
        (["--format", "html"], "<!doctype html>"),
        ([], "<svg"),
    ],
)
def test_the_suffix_or_an_option_selects_the_format(
    arguments: list[str], start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["schedule", "draw", "ring", *arguments])
    assert done.exit_code == 0, done.output
    files = list(tmp_path.iterdir())
    written = files[0].read_text() if files else done.output
    assert written.startswith(start)


def test_every_primitive_has_an_explanation() -> None:
    from miraccl.tools.schedule_draw import _MEANINGS

    assert set(_MEANINGS) == set(Op)
