"""The reasons of a channel search as JSON and as sentences, made from its report alone."""

from __future__ import annotations

from typing import Any

from miraccl.graph.channel_graph import GraphKind, Pattern
from miraccl.graph.search.records import Duplication, End, Origin, Phase, Reason, SearchReport, Stop, Try
from miraccl.topo.jsonform import number

Json = dict[str, Any]

_STOPS = {
    Stop.PERFECT: "as many channels as allowed were found",
    Stop.SATURATED: "channels times bandwidth reach the {total:g} GB/s of a GPU",
    Stop.BUDGET: "the visits of the first pass were used up",
    Stop.SPEEDS: "no slower channel could be better",
}

_ENDS = {
    End.PERFECT: "ended at once with as many channels as allowed",
    End.BUDGET: "used up its visits",
    End.COMPLETE: "tried everything",
}


def explain_search(report: SearchReport) -> Json:
    """What was tried for one graph, what each try found and where its budget went; ``sentences`` tell the short story."""
    return {
        "graph": report.kind.label,
        "origin": report.origin.value,
        "visits": report.visits,
        "tries": [_try(t) for t in report.tries],
        "stop": report.stop.value if report.stop else None,
        "duplication": _duplication(report.duplication),
        "sentences": list(search_sentences(report)),
    }


def _try(t: Try) -> Json:
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
        "sentence": try_sentence(t),
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


def try_sentence(t: Try) -> str:
    """One walk: why, what was asked for, how it ended."""
    bw = f"{t.bw_intra:g} GB/s" if t.bw_intra == t.bw_inter else f"{t.bw_intra:g} GB/s inside and {t.bw_inter:g} to the network"
    found = f"best so far {t.found_channels} x {t.found_bw_intra:g} GB/s" if t.found_channels else "nothing found so far"
    return (
        f"{_reason(t)}: {'equal' if t.same_channels else 'different'} channels of {bw} over paths up to {t.type_intra.name} and "
        f"{t.type_inter.name}; {_ENDS[t.end]} ({t.visits} visits of {t.budget}), {'better; ' if t.improved else ''}{found}"
    )


def _reason(t: Try) -> str:
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


def search_sentences(report: SearchReport) -> list[str]:
    """The story of one graph in a few sentences; none for a graph that was not asked for."""
    name = report.kind.label
    match report.origin:
        case Origin.NOT_RUN:
            return []
        case Origin.FILE:
            return [f"{name}: {_in_words(report)}, from the graph file"]
        case Origin.NO_NVSWITCH:
            return [f"{name}: not possible, it needs an NVSwitch and GPUs of sm 90 or more (here sm {report.sm})"]
    tries = report.tries
    lines = [f"{name}: {_in_words(report)}, after {len(tries)} walks and {report.visits} visits"]
    lines.append(f"{name}: the first walk asked for {_first_speed(report)}")
    lines += [f"{name}: pass {int(t.phase)}, {try_sentence(t)}" for t in tries if t.improved]
    if report.stop is not None:
        lines.append(f"{name}: pass 1 ended because {_STOPS[report.stop].format(total=report.total_bw)}")
    lines += [f"{name}: {_in_words_of(report.duplication)}"] if report.duplication else []
    if report.origin is Origin.FALLBACK:
        lines.append(f"{name}: no walk found a channel, so one in the order of the GPUs was made, at 0.1 GB/s")
    faster = [t for t in tries if t.phase is Phase.IMPROVE]
    if faster and not faster[-1].improved:
        lines.append(f"{name}: pass 2 gave up at {max(faster[-1].bw_intra, faster[-1].bw_inter):g} GB/s per channel")
    return lines


def _first_speed(report: SearchReport) -> str:
    first = report.tries[0]
    where = "GPU to a net" if report.inter else "GPU to another"
    return (
        f"{first.bw_intra:g} GB/s per channel: a path from one {where} carries {report.max_bw:g} GB/s, "
        f"a GPU {report.total_bw:g}, and there have to be at least {first.min_channels} channels"
    )


def _in_words(report: SearchReport) -> str:
    graph = report.graph
    if not graph.n_channels:
        return "no channel"
    plural = "" if graph.n_channels == 1 else "s"
    shape = {Pattern.BALANCED_TREE: "balanced tree, ", Pattern.SPLIT_TREE: "split tree, ", Pattern.TREE: "simple tree, "}
    kind = shape.get(graph.pattern, "") if graph.kind is GraphKind.TREE else ""
    inside = f"{graph.n_channels} channel{plural} of {graph.bw_intra:g} GB/s between GPUs ({kind}paths up to {graph.type_intra.name})"
    if not report.inter:
        return inside
    nets = {0: "", 1: ", forced over different NICs", 2: ", over different NICs in turn"}[graph.cross_nic]
    return f"{inside} and {graph.bw_inter:g} GB/s to the network (paths up to {graph.type_inter.name}{nets})"


def _in_words_of(duplication: Duplication) -> str:
    return (
        f"{duplication.before} channels of {duplication.bw_intra:g} GB/s became {duplication.after} slower ones: "
        "one channel cannot drive links that fast"
    )
