"""Comparison of two plans: machine, channels, rings and choices side by side, with reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from miraccl.graph import tuning_constants as k
from miraccl.graph.channel_graph import ChannelGraph
from miraccl.graph.format import format_bytes, format_time
from miraccl.graph.kinds import GraphKind
from miraccl.graph.plan import Plan
from miraccl.graph.search.explain import describe_limit
from miraccl.graph.tuning import Estimate, TuningModel
from miraccl.graph.tuning_choice import TABLE_SIZES, TuningChoice, choose, predict_time
from miraccl.topo.diff import TopologyDifference, compare_topologies
from miraccl.topo.system_json import number
from miraccl.types import Collective

SAME_TIME = 1e-3
"""Relative difference up to which two times count as equal."""


@dataclass(frozen=True, kw_only=True)
class ValueDifference:
    """A property of a plan with its value on both sides and, where known, the reason."""

    name: str
    left: str
    right: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RingDifference:
    """Rings of some channels that differ; a ring is empty where that side has no such channel."""

    channels: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ChoiceDifference:
    """Choice for one collective and size on both sides; ``reason`` is empty if they are equal."""

    collective: Collective
    nbytes: int
    left: TuningChoice | None
    right: TuningChoice | None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Time on the right divided by time on the left, None unless both have one."""
        if not self.left or not self.right or not self.left.time:
            return None
        return self.right.time / self.left.time


@dataclass(frozen=True, kw_only=True)
class PlanDiff:
    """Differences of two plans. ``choices`` holds all collectives and sizes, also equal ones."""

    machine: tuple[TopologyDifference, ...]
    settings: tuple[ValueDifference, ...]
    channels: tuple[ValueDifference, ...]
    rings: tuple[RingDifference, ...]
    choices: tuple[ChoiceDifference, ...]

    @property
    def equal(self) -> bool:
        """True if the plans decide the same; machines and settings may differ."""
        return not (self.channels or self.rings or any(c.reason for c in self.choices))


def compare_plans(left: Plan, right: Plan) -> PlanDiff:
    """Compare two plans; their machines, sizes and settings may all differ."""
    return PlanDiff(
        machine=tuple(compare_topologies(left.topology, right.topology)),
        settings=tuple(_settings(left, right)),
        channels=tuple(_channels(left, right)),
        rings=tuple(_rings(left, right)),
        choices=tuple(_choices(left.model, right.model)),
    )


def _settings(left: Plan, right: Plan) -> Iterator[ValueDifference]:
    one, two = dict(left.request.variables), dict(right.request.variables)
    pairs = {"nodes": (str(left.request.nodes), str(right.request.nodes))}
    pairs["GPUs per node"] = (
        str(left.topology.nranks // left.request.nodes),
        str(right.topology.nranks // right.request.nodes),
    )
    for name in sorted({*one, *two}):
        pairs[name] = (one.get(name, "not set"), two.get(name, "not set"))
    for name, (a, b) in pairs.items():
        if a != b:
            yield ValueDifference(name=name, left=a, right=b)


# Channels


def _channels(left: Plan, right: Plan) -> Iterator[ValueDifference]:
    for kind in GraphKind:
        one, two = left.connections.graphs[kind], right.connections.graphs[kind]
        a, b = _describe_graph(one), _describe_graph(two)
        if a != b:
            yield ValueDifference(
                name=f"{kind.label.replace('_', ' ')} graph",
                left=a,
                right=b,
                reason=_search_reason(left, right, kind),
            )
    a_count, b_count = left.connections.count, right.connections.count
    if a_count.total != b_count.total:
        yield ValueDifference(
            name="channels of collectives",
            left=str(a_count.total),
            right=str(b_count.total),
            reason=_other_reason(
                [step.reason for step in a_count.steps], [step.reason for step in b_count.steps]
            ),
        )
    p2p = left.connections.p2p, right.connections.p2p
    if (p2p[0].total, p2p[0].per_peer) != (p2p[1].total, p2p[1].per_peer):
        yield ValueDifference(
            name="channels of send and receive",
            left=f"{p2p[0].total}, {p2p[0].per_peer} per peer",
            right=f"{p2p[1].total}, {p2p[1].per_peer} per peer",
            reason=_other_reason(
                [f"limited by {p2p[0].limited_by}"], [f"limited by {p2p[1].limited_by}"]
            ),
        )
    for name, one_value, two_value in (
        ("NVLS channels", left.connections.nvls_channels, right.connections.nvls_channels),
        ("nodes of NCCL", left.connections.layout.nnodes, right.connections.layout.nnodes),
    ):
        if one_value != two_value:
            yield ValueDifference(name=name, left=str(one_value), right=str(two_value))


def _describe_graph(graph: ChannelGraph) -> str:
    if not graph.n_channels:
        return "none"
    text = f"{graph.n_channels} x {graph.bw_intra:g} GB/s ({graph.type_intra.name})"
    if graph.inter:
        text += f", {graph.bw_inter:g} GB/s to the network ({graph.type_inter.name})"
    return text


def _search_reason(left: Plan, right: Plan, kind: GraphKind) -> str:
    """Return the limits of both searches, as far as the plans hold their reports."""
    reports = [
        next((r for r in plan.searches[0].reports if r.kind is kind), None)
        for plan in (left, right)
    ]
    return _other_reason(*([describe_limit(report)] if report else [] for report in reports))


def _other_reason(left: Sequence[str], right: Sequence[str]) -> str:
    """Join the reasons of one side that the other one lacks."""
    parts = [
        f"{side}: {'; '.join(own)}"
        for side, own in (
            ("left", [text for text in left if text and text not in right]),
            ("right", [text for text in right if text and text not in left]),
        )
        if own
    ]
    return " | ".join(parts)


def _rings(left: Plan, right: Plan) -> Iterator[RingDifference]:
    one, two = left.connections.rings, right.connections.rings
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for channel in range(max(len(one), len(two))):
        a = tuple(one[channel].tolist()) if channel < len(one) else ()
        b = tuple(two[channel].tolist()) if channel < len(two) else ()
        if a != b:
            groups.setdefault((a, b), []).append(channel)
    for (a, b), channels in groups.items():
        yield RingDifference(channels=tuple(channels), left=a, right=b)


# Choices


def _choices(left: TuningModel, right: TuningModel) -> Iterator[ChoiceDifference]:
    for coll in k.TUNED:
        for nbytes in TABLE_SIZES:
            one, two = choose(left, coll, nbytes), choose(right, coll, nbytes)
            yield ChoiceDifference(
                collective=coll,
                nbytes=nbytes,
                left=one,
                right=two,
                reason="" if _alike(one, two) else _choice_reason(left, right, coll, one, two),
            )


def _alike(one: TuningChoice | None, two: TuningChoice | None) -> bool:
    if one is None or two is None:
        return one is two
    same = (one.algorithm, one.protocol, one.channels, one.warps) == (
        two.algorithm,
        two.protocol,
        two.channels,
        two.warps,
    )
    return same and abs(one.time - two.time) <= SAME_TIME * max(one.time, two.time)


def _name(choice: TuningChoice) -> str:
    return f"{choice.algorithm.label}/{k.PROTOCOL_LABELS[choice.protocol]}"


def _choice_reason(
    left: TuningModel,
    right: TuningModel,
    coll: Collective,
    one: TuningChoice | None,
    two: TuningChoice | None,
) -> str:
    """Explain a difference: the fate of the left winner on the right side, and the right one's."""
    if one is None or two is None:
        return "no algorithm is available on the " + ("left" if one is None else "right")
    if (one.algorithm, one.protocol) == (two.algorithm, two.protocol):
        return _estimate_reason(left, right, coll, one) or "channels or warps differ"
    parts = []
    for model, winner, other, side in ((right, one, two, "right"), (left, two, one, "left")):
        estimate = model.estimate(coll, winner.algorithm, winner.protocol)
        time = predict_time(model, coll, winner.algorithm, winner.protocol, winner.nbytes)
        if time is None:
            why = estimate.disabled_reason or "not available"
            parts.append(f"{_name(winner)} on the {side}: {why}")
        else:
            parts.append(
                f"{_name(winner)} on the {side} would take {format_time(time)}, "
                f"{(time / other.time - 1) * 100:.3g} % more than {_name(other)}"
            )
    detail = _estimate_reason(left, right, coll, one)
    return "; ".join([*parts, *([f"{_name(one)}: {detail}"] if detail else [])])


def _estimate_reason(
    left: TuningModel, right: TuningModel, coll: Collective, choice: TuningChoice
) -> str:
    """Compare latency and bandwidth of one combination, with the limits that differ."""
    one = left.estimate(coll, choice.algorithm, choice.protocol)
    two = right.estimate(coll, choice.algorithm, choice.protocol)
    if not one.bandwidth or not two.bandwidth:
        return ""
    parts = []
    if one.latency != two.latency:
        parts.append(f"latency {format_time(one.latency)} -> {format_time(two.latency)}")
    if one.bandwidth != two.bandwidth:
        text = f"bandwidth {one.bandwidth:.4g} -> {two.bandwidth:.4g} GB/s"
        limits = _different_limit(one, two)
        parts.append(f"{text} ({limits})" if limits else text)
    return ", ".join(parts)


def _different_limit(one: Estimate, two: Estimate) -> str:
    """Return the first factor of the bandwidth that differs."""
    for a, b in zip(one.limits, two.limits):
        if a != b:
            return f"{a} -> {b}"
    return ""


# JSON


def diff_to_json(diff: PlanDiff) -> dict[str, Any]:
    """Return plain data for ``--json``; times in us."""

    def choice(value: TuningChoice | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return {
            "algorithm": value.algorithm.label,
            "protocol": k.PROTOCOL_LABELS[value.protocol],
            "time": number(value.time),
            "channels": value.channels,
            "warps": value.warps,
        }

    return {
        "equal": diff.equal,
        "machine": [
            {"where": d.where, "left": d.left, "right": d.right, "count": d.count}
            for d in diff.machine
        ],
        "settings": [{"name": d.name, "left": d.left, "right": d.right} for d in diff.settings],
        "channels": [
            {"name": d.name, "left": d.left, "right": d.right, "reason": d.reason}
            for d in diff.channels
        ],
        "rings": [
            {"channels": list(d.channels), "left": list(d.left), "right": list(d.right)}
            for d in diff.rings
        ],
        "choices": [
            {
                "collective": k.TUNED[d.collective],
                "bytes": d.nbytes,
                "left": choice(d.left),
                "right": choice(d.right),
                "ratio": None if d.ratio is None else number(d.ratio),
                "reason": d.reason,
            }
            for d in diff.choices
        ],
    }


def summarize_diff(diff: PlanDiff) -> list[str]:
    """Return the largest changes of the predicted times, one line per collective."""
    lines = []
    for coll, name in k.TUNED.items():
        rows = [d for d in diff.choices if d.collective is coll and d.reason and d.ratio]
        if not rows:
            continue
        worst = max(rows, key=lambda d: max(d.ratio or 0, 1 / (d.ratio or 1)))
        assert worst.left is not None
        assert worst.right is not None
        ratio = worst.ratio or 1.0
        change = f"{ratio:.3g} x the time" if ratio >= 1 else f"{1 / ratio:.3g} x as fast"
        lines.append(
            f"{name} of {format_bytes(worst.nbytes)}: {change} on the right, "
            f"{_name(worst.left)} {format_time(worst.left.time)} -> "
            f"{_name(worst.right)} {format_time(worst.right.time)}"
        )
    return lines
