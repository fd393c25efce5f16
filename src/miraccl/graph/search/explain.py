"""Reasons of a channel search as JSON and as text, derived from its report alone."""

from __future__ import annotations

from typing import Any

from miraccl.graph.kinds import GraphKind, Pattern
from miraccl.graph.search.report import (
    Duplication,
    End,
    Origin,
    Phase,
    Reason,
    SearchReport,
    Stop,
    Try,
)
from miraccl.topo.system_json import number

Json = dict[str, Any]

_ENDS = {
    End.PERFECT: "ended at once with as many channels as allowed",
    End.BUDGET: "used up its visits",
    End.COMPLETE: "tried everything",
}


def explain_search(report: SearchReport) -> Json:
    """Return the tries of one graph with results and budgets; ``sentences`` is the summary."""
    return {
        "graph": report.kind.label,
        "origin": report.origin.value,
        "visits": report.visits,
        "tries": [_try(t, report.inter) for t in report.tries],
        "stop": report.stop.value if report.stop else None,
        "duplication": _duplication(report.duplication),
        "fullLinks": [
            {
                "from": link.source,
                "to": link.target,
                "type": link.type.name,
                "bw": number(link.bw),
                "left": number(link.left),
            }
            for link in report.saturated_links
        ],
        "summary": brief_summary(report),
        "sentences": list(summarize_search(report)),
    }


def _try(t: Try, inter: bool) -> Json:
    return {
        "pass": int(t.phase),
        "why": t.reason.value,
        "pattern": int(t.pattern),
        "bwIntra": number(t.bw_intra),
        "bwInter": number(t.bw_inter),
        "typeIntra": t.type_intra.name,
        "typeInter": t.type_inter.name,
        "sameChannels": t.same_channels,
        "crossNic": t.cross_nic,
        "minChannels": t.min_channels,
        "maxChannels": t.max_channels,
        "budget": t.budget,
        "visits": t.visits,
        "end": t.end.value,
        "improved": t.improved,
        "best": {
            "nChannels": t.found_channels,
            "bwIntra": number(t.found_bw_intra),
            "bwInter": number(t.found_bw_inter),
            "total": number(t.found_channels * t.found_bw_intra),
        },
        "sentence": describe_try(t, inter),
    }


def _duplication(duplication: Duplication | None) -> Json | None:
    if duplication is None:
        return None
    return {
        "before": duplication.before,
        "after": duplication.after,
        "bwIntra": number(duplication.bw_intra),
        "bwInter": number(duplication.bw_inter),
    }


def describe_try(t: Try, inter: bool) -> str:
    """Describe one walk: reason, request and outcome."""
    bw = (
        f"{t.bw_intra:g} GB/s"
        if t.bw_intra == t.bw_inter
        else f"{t.bw_intra:g} GB/s inside and {t.bw_inter:g} to the network"
    )
    paths = (
        f"{t.type_intra.name} inside and {t.type_inter.name} to the network"
        if inter
        else t.type_intra.name
    )
    found = (
        f"best so far {t.found_channels} x {t.found_bw_intra:g} GB/s"
        if t.found_channels
        else "nothing found so far"
    )
    kind = "equal channels" if t.same_channels else "channels"
    return (
        f"{_describe_reason(t)}: {kind} of {bw} over paths up to {paths}; "
        f"{_ENDS[t.end]} ({t.visits} visits, allowed {t.budget}); "
        f"{'better: ' if t.improved else ''}{found}"
    )


def _describe_reason(t: Try) -> str:
    return {
        Reason.START: "first try",
        Reason.DIFFERENT_CHANNELS: "channels may differ from each other",
        Reason.SIMPLER_TREE: "a tree that enters and leaves by one GPU",
        Reason.FARTHER_GPUS: f"GPUs may be as far as {t.type_intra.name}",
        Reason.FARTHER_NETS: f"nets may be as far as {t.type_inter.name}",
        Reason.CROSS_NIC: "channels may leave by another NIC than they enter",
        Reason.SLOWER: f"less bandwidth, {t.bw_intra:g} GB/s",
        Reason.FASTER: f"more bandwidth, {t.bw_intra:g} GB/s",
        Reason.FASTER_INSIDE: f"more bandwidth between GPUs, {t.bw_intra:g} GB/s",
        Reason.FASTER_NETWORK: f"more bandwidth to the network, {t.bw_inter:g} GB/s",
    }[t.reason]


def summarize_search(report: SearchReport) -> list[str]:
    """Return the search of one graph as lines of text; empty for a graph that was not requested."""
    name = report.kind.label
    match report.origin:
        case Origin.NOT_RUN:
            return []
        case Origin.FILE:
            return [f"{name}: {_describe_result(report)}, from the graph file"]
        case Origin.NO_NVSWITCH:
            return [
                f"{name}: not possible, needs an NVSwitch and GPUs of sm 90 or more "
                f"(here sm {report.sm})"
            ]
    find = [t for t in report.tries if t.phase is Phase.FIND]
    improve = [t for t in report.tries if t.phase is Phase.IMPROVE]
    lines = [
        f"{_describe_result(report)}, after {_count(len(report.tries), 'walk')} "
        f"and {_count(report.visits, 'visit')}",
        _describe_first_try(report),
    ]
    lines += [f"pass 1, {describe_try(t, report.inter)}" for t in find if t.improved]
    if report.stop is not None:
        lines.append(f"pass 1 ended after {_count(len(find), 'walk')}: {_describe_stop(report)}")
    if report.duplication:
        lines.append(_describe_duplication(report.duplication))
    lines += [f"pass 2, {describe_try(t, report.inter)}" for t in improve if t.improved]
    if improve and not improve[-1].improved:
        lines.append(
            "pass 2 found no graph at "
            f"{max(improve[-1].bw_intra, improve[-1].bw_inter):g} GB/s per channel and ended"
        )
    if report.origin is Origin.FALLBACK:
        lines.append(
            "no walk found a channel; the fallback is one in the order of the GPUs, at 0.1 GB/s"
        )
    if report.saturated_links:
        lines.append(_describe_saturated_links(report))
    return [f"{name}: {line}" for line in lines]


def brief_summary(report: SearchReport) -> list[str]:
    """Return result, effort and limit of the search of one graph, in at most three lines."""
    if not report.tries:
        return summarize_search(report)[:3]
    improving = sum(t.improved for t in report.tries)
    return [
        _describe_result(report),
        f"{_count(len(report.tries), 'walk')} with {_count(report.visits, 'visit')}; "
        f"{improving} found a better graph",
        describe_limit(report),
    ]


def describe_limit(report: SearchReport) -> str:
    """Describe the reason why the search found no more or faster channels."""
    if report.origin is Origin.NO_NVSWITCH:
        return f"needs an NVSwitch and GPUs of sm 90 or more (here sm {report.sm})"
    if report.origin is Origin.FILE:
        return "taken from the graph file"
    parts = [_describe_saturated_links(report, 1)] if report.saturated_links else []
    if report.stop is not None and not parts:
        parts.append(f"the search ended: {_describe_stop(report)}")
    where = "net" if report.inter else "GPU"
    if report.tries:
        parts.append(f"a path to a {where} carries {report.max_bw:g} GB/s")
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _describe_stop(report: SearchReport) -> str:
    match report.stop:
        case Stop.PERFECT:
            return "there are as many channels as allowed"
        case Stop.SATURATED:
            return f"channels times bandwidth reach the {report.total_bw:g} GB/s that a GPU carries"
        case Stop.BUDGET:
            return "all its visits were used up"
    if report.next_bw and report.graph.n_channels:
        return (
            f"the next lower bandwidth per channel, {report.next_bw:g} GB/s, "
            "is less than half of the bandwidth found"
        )
    return "the lowest bandwidth per channel was tried"


def _describe_saturated_links(report: SearchReport, most: int = 3) -> str:
    """Name up to ``most`` saturated links."""
    shown = ", ".join(
        f"{link.source} to {link.target} ({link.left:g} of {link.bw:g} GB/s left)"
        for link in report.saturated_links[:most]
    )
    more = len(report.saturated_links) - most
    return f"no capacity for another channel on {shown}" + (
        f" and {_count(more, 'more link')}" if more > 0 else ""
    )


def _describe_first_try(report: SearchReport) -> str:
    first = report.tries[0]
    where = "GPU to a net" if report.inter else "GPU to another"
    return (
        f"the first walk requested {first.bw_intra:g} GB/s per channel: "
        f"a path from one {where} carries {report.max_bw:g} GB/s, a GPU {report.total_bw:g}, "
        f"and at least {_count(first.min_channels, 'channel')} is required"
    )


def _describe_result(report: SearchReport) -> str:
    graph = report.graph
    if not graph.n_channels:
        return "no channel"
    plural = "" if graph.n_channels == 1 else "s"
    shape = {
        Pattern.BALANCED_TREE: "balanced tree, ",
        Pattern.SPLIT_TREE: "split tree, ",
        Pattern.TREE: "simple tree, ",
    }
    kind = shape.get(graph.pattern, "") if graph.kind is GraphKind.TREE else ""
    inside = (
        f"{graph.n_channels} channel{plural} of {graph.bw_intra:g} GB/s between GPUs "
        f"({kind}paths up to {graph.type_intra.name})"
    )
    if not report.inter:
        return inside
    nets = {0: "", 1: ", forced over different NICs", 2: ", over different NICs in turn"}[
        graph.cross_nic
    ]
    return (
        f"{inside} and {graph.bw_inter:g} GB/s to the network "
        f"(paths up to {graph.type_inter.name}{nets})"
    )


def _describe_duplication(duplication: Duplication) -> str:
    return (
        f"{duplication.before} channels of {duplication.bw_intra:g} GB/s "
        f"became {duplication.after} slower ones: "
        "one channel cannot drive links that fast"
    )
