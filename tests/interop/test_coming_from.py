"""The page "Coming from NCCL, Gloo or MPI": every call in it exists and takes these arguments, and
every variable means what it says.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl import params
from tests.support.ranks import run_ranks

DOCS = Path(__file__).resolve().parents[2] / "docs" / "guide"
PAGE = (DOCS / "coming-from.md").read_text("utf-8")
SPANS = re.findall(r"`([^`\n]+)`", PAGE)
CALLS = sorted({span for span in SPANS if re.match(r"(comm|miraccl)\.\w+\(", span)})
OBJECTS: dict[str, Any] = {"comm": miraccl.Communicator, "miraccl": miraccl}


def _target(node: ast.expr) -> Any:
    assert isinstance(node, ast.Attribute)
    assert isinstance(node.value, ast.Name)
    return getattr(OBJECTS[node.value.id], node.attr)


@pytest.mark.parametrize("text", CALLS)
def test_calls_exist_and_take_these_arguments(text: str) -> None:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    target = _target(call.func)
    positional = [None] * (len(call.args) + (call.func.value.id == "comm"))  # type: ignore[attr-defined]
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    inspect.signature(target).bind(*positional, **keywords)


def test_names_exist() -> None:
    for owner, name in re.findall(
        r"\b(comm|miraccl)\.([A-Za-z_]+)", re.sub(r"\[[^]]*\]\([^)]*\)", "", PAGE)
    ):
        assert hasattr(OBJECTS[owner], name) or name in ("local_rank", "nranks", "rank"), (
            f"{owner}.{name}"
        )
    for name in re.findall(r"`([A-Z][A-Za-z]+)`", PAGE):
        if name.startswith(("Collective", "Peer", "PreMul")):
            assert hasattr(miraccl, name), name


def test_what_the_page_has_of_the_api() -> None:
    """A call that is added has to be put beside those of the others."""
    ours = {
        name
        for name, value in vars(miraccl.Communicator).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    inner = {"split_within", "use_aggregators", "serve_as_aggregator"}
    prepared = {name for name in ours if name.endswith("_init")}
    missing = {name for name in ours - inner - prepared if f"comm.{name}(" not in PAGE}
    assert not missing


def test_variables_of_nccl() -> None:
    honoured = {f"NCCL_{param.nccl}" for param in params.PARAMS.values() if param.nccl}
    table, _, rest = PAGE[PAGE.index("| Read as NCCL does |") :].partition("[Settings](")
    assert set(re.findall(r"NCCL_\w+", table)) <= honoured
    ignored = set(re.findall(r"NCCL_\w+", rest.partition("##")[0]))
    assert ignored
    assert not ignored & honoured
    for name in re.findall(r"MIRACCL_([A-Z]{2,}\w*)", PAGE):
        assert name in params.PARAMS, name


def rank_with_settings_of_nccl() -> str:
    with miraccl.init() as comm:
        total = comm.all_reduce(np.full(1000, comm.rank + 1.0, "float32"))
        assert (total == comm.nranks * (comm.nranks + 1) / 2).all()
        plan = comm.last_plan
        assert plan is not None
        return f"{plan.algo}/{plan.proto}"


def rank_with_a_tree_of_ours() -> str:
    with pytest.raises(miraccl.InvalidUsage) as caught:
        miraccl.init()
    return str(caught.value)


@pytest.mark.multiprocess
def test_algorithms_of_nccl_are_understood_under_its_name() -> None:
    env = {"NCCL_ALGO": "allreduce:Tree", "NCCL_PROTO": "LL128,Simple"}
    assert run_ranks(rank_with_settings_of_nccl, 2, env=env) == ["double_binary_tree/simple"] * 2


@pytest.mark.multiprocess
def test_our_name_takes_our_algorithms_alone() -> None:
    for text in run_ranks(rank_with_a_tree_of_ours, 2, env={"MIRACCL_ALGO": "Tree"}):
        assert "unknown algorithm 'tree'; known are: " in text
        assert "ring" in text
