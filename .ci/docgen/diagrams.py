"""Diagrams of the design pages, drawn from the code that they describe."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from codecheck.imports import LAYERS, LEAVES, ImportGraph, layer_of
from docgen.graph_svg import Edge, draw_graph

ROOT = Path(__file__).resolve().parents[2]

_STEPS = (
    "miraccl.topo.load:load_topology",
    "miraccl.topo.build:build_system",
    "miraccl.topo.paths:compute_paths",
    "miraccl.graph.search:search_channels",
    "miraccl.graph.connect:connect",
    "miraccl.graph.tuning_inputs:TuningInputs.of",
    "miraccl.graph.tuning:build_model",
    "miraccl.graph.tuning_choice:choose",
    "miraccl.schedule.catalog:Algorithm.build",
    "miraccl.executor.cpu.lower:lower",
)
"""Functions of the flow from a machine to a running program; their annotations name the records."""

_SAME = {"SearchedDomain": "SearchResult", "XmlNode": "XmlFile"}
"""Records that wrap another one of the flow."""


@functools.cache
def package_diagram() -> str:
    """Subpackages and their imports, without imports that follow from others."""
    graph = ImportGraph.read(ROOT)
    edges = {layer: targets - {LEAVES} for layer, targets in graph.layer_edges().items()}
    upward = {(layer_of(item.source), layer_of(item.target)) for item in graph.upward}
    for source, target in upward:
        edges[source].discard(target)
    nodes = {layer: (f"{layer}/",) for layer in reversed(LAYERS) if layer != LEAVES}
    reduced = [
        Edge(source=source, target=target)
        for source in nodes
        for target in sorted(edges[source])
        if not _reaches(edges, edges[source] - {target}, target)
    ]
    return draw_graph(nodes, reduced, title="Packages and their imports")


def _reaches(edges: Mapping[str, set[str]], starts: set[str], target: str) -> bool:
    seen: set[str] = set()
    queue = list(starts)
    while queue:
        node = queue.pop()
        if node == target:
            return True
        if node not in seen:
            seen.add(node)
            queue += edges[node]
    return False


@functools.cache
def records_diagram() -> str:
    """Records of the flow from a machine to a program, and the functions between them."""
    nodes: dict[str, tuple[str, ...]] = {}
    edges: list[Edge] = []
    for step in _STEPS:
        function = _resolve(step)
        module = step.partition(":")[0].removeprefix("miraccl.")
        inputs = [name for name in _records(function) if name in nodes]
        output = next(_record_names(_hints(function)["return"]))
        nodes.setdefault(output, (output, _home(function, "return")))
        label = f"{module.rpartition('.')[2]}.{function.__name__}"
        edges += [
            Edge(source=name, target=output, label=label if not number else "")
            for number, name in enumerate(inputs)
        ]
    return draw_graph(nodes, edges, title="Records from the machine to the program")


def _resolve(step: str) -> Callable[..., Any]:
    module, _, path = step.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return typing.cast("Callable[..., Any]", found)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(inspect.unwrap(getattr(function, "__func__", function)))


def _records(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the records among the parameters, settings excepted."""
    for name, hint in _hints(function).items():
        if name != "return":
            yield from _record_names(hint)


def _record_names(hint: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not hint.__name__.endswith(("Settings", "Options")):
            yield _SAME.get(hint.__name__, hint.__name__)
        return
    for part in typing.get_args(hint):
        yield from _record_names(part)


def _home(function: Callable[..., Any], name: str) -> str:
    """Return the module of the record in an annotation."""

    def find(hint: Any) -> str:
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return hint.__module__.removeprefix("miraccl.")
        return next((text for part in typing.get_args(hint) if (text := find(part))), "")

    return find(_hints(function)[name])


def state_diagram(table: Mapping[Any, enum.Enum], title: str) -> str:
    """States of a transition table: (state, event) -> next state; None is the start."""
    order: list[enum.Enum | None] = []
    for (state, _), after in table.items():
        order += [item for item in (state, after) if item not in order]
    states = [item for item in type(next(iter(table.values()))) if item in order]
    names = ["new"] * (None in order) + [state.name for state in states]
    labels: dict[tuple[str, str], list[str]] = {}
    for (state, event), after in table.items():
        labels.setdefault((state.name if state else "new", after.name), []).append(event)
    edges = [
        Edge(source=source, target=target, label=" / ".join(events))
        for (source, target), events in labels.items()
    ]
    return draw_graph({name: (name,) for name in names}, edges, title=title)


def proxy_diagram(name: str) -> Callable[[], str]:
    """Return a generator of the diagram of one table of ``wire/proxy_states.py``."""

    def draw() -> str:
        from miraccl.wire import proxy_states

        titles = {
            "SEND_TABLE": "States of an outgoing message",
            "RECV_TABLE": "States of an incoming message",
            "LINK_TABLE": "States of a link",
        }
        return state_diagram(getattr(proxy_states, name), titles[name])

    return draw


def machine_diagram(module: str, table: str, title: str) -> Callable[[], str]:
    """Return a generator of the diagram of a transition table."""
    return lambda: state_diagram(getattr(importlib.import_module(module), table), title)


FILES: dict[str, Callable[[], str]] = {
    "images/packages.svg": package_diagram,
    "images/records.svg": records_diagram,
    "images/proxy_send.svg": proxy_diagram("SEND_TABLE"),
    "images/proxy_recv.svg": proxy_diagram("RECV_TABLE"),
    "images/proxy_link.svg": proxy_diagram("LINK_TABLE"),
    "images/verbs_pairs.svg": machine_diagram(
        "miraccl.wire.verbs.failover", "PAIR_TABLE", "States of a queue pair"
    ),
    "images/bootstrap_job.svg": machine_diagram(
        "miraccl.wire.bootstrap", "JOB_TRANSITIONS", "States of a job at its hub"
    ),
    "images/bootstrap_member.svg": machine_diagram(
        "miraccl.wire.bootstrap", "MEMBER_TRANSITIONS", "States of a rank's control connection"
    ),
    "images/failover.svg": machine_diagram(
        "miraccl.wire.bootstrap_failover", "SEARCH_TRANSITIONS", "Search for the new hub"
    ),
    "images/faults.svg": machine_diagram(
        "miraccl.diagnosis.fault_machine", "FAULT_TRANSITIONS", "States of a communicator's fault"
    ),
}
"""Generated files below ``docs/``."""
