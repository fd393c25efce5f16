"""``NCCL_ALGO`` and ``NCCL_PROTO`` as hints for the choice of algorithms.

They were set for NCCL, whose algorithms differ from ours, so they are hints and never errors: an
algorithm with a counterpart here is used, everything else is logged and left to the model.
``MIRACCL_ALGO`` and ``MIRACCL_PROTO`` are strict (``Overrides``).

A list says what is allowed. It is a hint only if it leaves exactly one algorithm of ours: ``^Tree``
allows Ring and PAT, which is no hint. Hints are per collective. CPU ranks have one protocol for all
collectives; GPUs follow the algorithms of ``gpu_algorithms``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from miraccl import params, trace
from miraccl.errors import InvalidUsage
from miraccl.graph.tuning_constants import PROTOCOL_LABELS, TUNED, NcclAlgorithm
from miraccl.graph.tuning_filter import Constraint, parse_constraints
from miraccl.schedule import catalog
from miraccl.types import Collective, Protocol

_ALGORITHMS = {
    NcclAlgorithm.RING: "ring",
    NcclAlgorithm.TREE: "double_binary_tree",
    NcclAlgorithm.PAT: "pat",
}
_PROTOCOLS = {Protocol.SIMPLE: "simple", Protocol.LL: "ll", Protocol.LL128: "ll128"}
_CPU_PROTOCOLS = ("simple", "ll")
#: algorithm -> GPU algorithm by collective. NCCL's rings of broadcast and reduce are chains here.
_GPU_ALGORITHMS = {
    name: dict.fromkeys(Collective, name) for name in ("one_shot", "two_shot", "chain")
} | {
    "ring": {
        Collective.ALL_REDUCE: "ring",
        Collective.BROADCAST: "chain",
        Collective.REDUCE: "chain",
    },
    "double_binary_tree": dict.fromkeys(
        (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE), "double_binary_tree"
    ),
}
_log = trace.logger("tuning")

E = TypeVar("E", NcclAlgorithm, Protocol)


def read_algorithms(environ: Mapping[str, str] | None = None) -> tuple[str, dict[Collective, str]]:
    """Return (algorithm required by ``MIRACCL_ALGO``, hints of ``NCCL_ALGO`` by collective).

    One of the two is empty.
    """
    value, source = params.ALGO.resolve(environ)
    if source == "MIRACCL_ALGO" and value:
        try:
            catalog.get(value)
        except InvalidUsage as error:
            raise InvalidUsage(f"MIRACCL_ALGO: {error}") from None
    return (value, {}) if source != "NCCL_ALGO" else ("", hinted_algorithms(value))


def read_protocols(environ: Mapping[str, str] | None = None) -> tuple[str, dict[Collective, str]]:
    """Return (protocol required by ``MIRACCL_PROTO``, hints of ``NCCL_PROTO`` by collective).

    One of the two is empty.
    """
    value, source = params.PROTO.resolve(environ)
    return (
        (value, {})
        if source != "NCCL_PROTO"
        else ("", _translate(value, PROTOCOL_LABELS, _PROTOCOLS, "NCCL_PROTO"))
    )


@dataclass(frozen=True, kw_only=True)
class NcclHints:
    """Suggested algorithms and protocols, by collective."""

    algorithms: Mapping[Collective, str] = field(default_factory=dict)
    protocols: Mapping[Collective, str] = field(default_factory=dict)


def hinted_algorithms(text: str) -> dict[Collective, str]:
    """Return the algorithms that ``text`` suggests. Names of ours apply to all collectives."""
    labels = {algo: algo.label for algo in NcclAlgorithm}
    if text in catalog.names() and text not in map(str.lower, labels.values()):
        return dict.fromkeys(Collective, text)
    return _translate(text, labels, _ALGORITHMS, "NCCL_ALGO")


def collnet_hints(text: str) -> dict[Collective, str]:
    """Return the collectives for which ``text`` allows algorithms of CollNet alone, and which.

    They run through the aggregators of a communicator; without them the hint has no effect.
    """
    labels = {algo: algo.label for algo in NcclAlgorithm}
    try:
        parsed = parse_constraints(text, labels, "NCCL_ALGO")
    except InvalidUsage:
        return {}  # ``hinted_algorithms`` logs it
    result = {}
    for collective, constraints in parsed.items():
        allowed = [algo for algo in NcclAlgorithm if constraints[algo] is not Constraint.EXCLUDED]
        if allowed and all(algo.uses_collnet for algo in allowed):
            result[collective] = allowed[0].label
    return result


def read_collnet(environ: Mapping[str, str] | None = None) -> dict[Collective, str]:
    """Return the result of ``collnet_hints`` for ``NCCL_ALGO``; empty if MIRACCL_ALGO is set."""
    value, source = params.ALGO.resolve(environ)
    return collnet_hints(value) if source == "NCCL_ALGO" else {}


def cpu_protocol(protocols: Mapping[Collective, str]) -> str:
    """Return the suggested protocol of CPU ranks, one for all collectives, or an empty string."""
    hinted = {protocols.get(collective, "") for collective in TUNED}
    if len(hinted) == 1 and hinted <= set(_CPU_PROTOCOLS):
        return hinted.pop()
    if any(hinted):
        _log.info(
            "NCCL_PROTO is ignored on CPU ranks: they have %s, one for all collectives",
            " and ".join(_CPU_PROTOCOLS),
        )
    return ""


def gpu_algorithms(algorithms: Mapping[Collective, str]) -> dict[Collective, str]:
    """Return the suggested algorithms that have GPU kernels, by the kernels' names."""
    result: dict[Collective, str] = {}
    for collective, name in algorithms.items():
        if found := _GPU_ALGORITHMS.get(name, {}).get(collective):
            result[collective] = found
    ignored = [
        f"{name} for {coll.label}"
        for coll, name in algorithms.items()
        if coll in TUNED and coll not in result
    ]
    if ignored:
        _log.info(
            "NCCL_ALGO is ignored on GPU memory, which has no kernel of %s: the model chooses",
            ", ".join(ignored),
        )
    return result


def _translate(
    text: str, labels: Mapping[E, str], ours: Mapping[E, str], variable: str
) -> dict[Collective, str]:
    try:
        parsed = parse_constraints(text, labels, variable)
    except InvalidUsage as error:
        _log.info("ignored: %s", error)
        return {}
    result: dict[Collective, str] = {}
    for collective, constraints in parsed.items():
        left = [
            name for element, name in ours.items() if constraints[element] is Constraint.ALLOWED
        ]
        if len(left) == 1:
            result[collective] = left[0]
        elif Constraint.UNCONSTRAINED not in constraints.values():
            _log.info(
                "%s=%s allows %s of the algorithms for %s: the model chooses",
                variable,
                text,
                ", ".join(left) or "none",
                collective.label,
            )
    return result
