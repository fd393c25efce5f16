"""The model of how long a collective takes: latency and bandwidth of every algorithm and protocol on the agreed channels.

Owns ``TuningModel`` and its times; ``tuning_threads`` has the sizes of thread blocks, ``tuning_choice`` picks for a size.  The formulas are
NCCL 2.28.9's (``src/graph/tuning.cc``, ncclTopoTuneModel), down to the precision of each step: values live in single precision, and
``f32`` marks each place where NCCL rounds to it. A product of singles computed in double and then rounded once is the single-precision
product, so no other care is needed.

Each estimate carries its reasons: what limited the bandwidth, and why it is switched off if it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from miraccl.graph import tuning_constants as k
from miraccl.graph.channel_graph import GraphKind, Pattern
from miraccl.graph.plan_settings import TuningSettings
from miraccl.graph.tuning_constants import Algorithm, Hardware
from miraccl.graph.tuning_facts import TuningFacts
from miraccl.graph.tuning_filter import Wish, parse_wishes
from miraccl.graph.tuning_threads import max_threads, thread_thresholds
from miraccl.topo.records import CpuArch, CpuVendor, PathType, f32
from miraccl.types import Collective, Protocol

Key = tuple[Collective, Algorithm, Protocol]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Latency us and algorithm bandwidth GB/s (0: cannot be used); ``limits`` says what makes the bandwidth, ``off`` why it is 0."""

    latency: float = 0.0
    bandwidth: float = 0.0
    limits: tuple[str, ...] = ()
    off: str = ""


@dataclass(frozen=True, kw_only=True)
class TuningModel:
    """``estimates`` lacks combinations that no implementation exists for. ``max_threads`` and ``thread_thresholds`` are by algorithm and
    protocol; a threshold is in bytes per thread and channel."""

    facts: TuningFacts
    max_threads: Mapping[Algorithm, tuple[int, int, int]]
    thread_thresholds: Mapping[Algorithm, tuple[int, int, int]]
    estimates: Mapping[Key, Estimate]

    def estimate(self, coll: Collective, algo: Algorithm, proto: Protocol) -> Estimate:
        return self.estimates.get((coll, algo, proto), _MISSING)


_MISSING = Estimate(off="there is no such implementation")


def build_model(facts: TuningFacts, settings: TuningSettings | None = None) -> TuningModel:
    """The model for a communicator; with one rank there is nothing to estimate."""
    settings = settings or TuningSettings()
    single = facts.nranks <= 1
    return TuningModel(
        facts=facts,
        max_threads=max_threads(facts, settings),
        thread_thresholds=dict.fromkeys(Algorithm, (0, 0, 0))
        if single
        else thread_thresholds(facts, settings),
        estimates={} if single else _estimates(facts, settings),
    )


def exists(coll: Collective, algo: Algorithm, proto: Protocol) -> bool:
    """Whether the combination is modelled at all."""
    if algo.uses_nvls and proto != Protocol.SIMPLE:
        return False
    if coll in (Collective.BROADCAST, Collective.REDUCE):
        return algo == Algorithm.RING
    if coll == Collective.ALL_REDUCE:
        return algo != Algorithm.PAT
    if algo == Algorithm.PAT:
        return proto == Protocol.SIMPLE
    return algo in (Algorithm.RING, Algorithm.NVLS, Algorithm.COLLNET_DIRECT)


def _estimates(facts: TuningFacts, settings: TuningSettings) -> dict[Key, Estimate]:
    algos = parse_wishes(settings.algo, {algo: algo.label for algo in Algorithm}, "NCCL_ALGO")
    protos = parse_wishes(settings.proto, k.PROTOCOL_LABELS, "NCCL_PROTO")
    result: dict[Key, Estimate] = {}
    for coll in k.TUNED:
        for algo in Algorithm:
            for proto in Protocol:
                missing = not exists(coll, algo, proto) or (
                    algo == Algorithm.PAT and not _pat_enabled(facts, settings)
                )
                # NVLS keeps one of its channels back, so a graph with a single one is not used.
                if missing or (algo.uses_nvls and facts.graphs[GraphKind.NVLS].n_channels < 2):
                    continue
                bandwidth, limits = _algorithm_bandwidth(facts, coll, algo, proto)
                off = _switched_off(
                    facts, settings, algo, proto, algos[coll][algo], protos[coll][proto]
                )
                if not off and not bandwidth:
                    off = limits[-1] if limits else "its graph has no channels"
                result[coll, algo, proto] = Estimate(
                    latency=_latency(facts, settings, coll, algo, proto),
                    bandwidth=0.0 if off else bandwidth,
                    limits=tuple(limits),
                    off=off,
                )
    return result


def _pat_enabled(facts: TuningFacts, settings: TuningSettings) -> bool:
    if facts.min_sm < 60:
        return False
    return settings.pat != 0 if settings.pat != 2 else facts.nnodes == facts.nranks


# Bandwidth


def _algorithm_bandwidth(
    facts: TuningFacts, coll: Collective, algo: Algorithm, proto: Protocol
) -> tuple[float, list[str]]:
    """Algorithm bandwidth (bytes of the operation per time) before anything is switched off, and what it comes from, factor by factor."""
    graph = facts.graphs[algo.graph]
    if not graph.n_channels:
        return 0.0, [f"the {algo.graph.label} search found no channels"]
    limits: list[str] = []
    per_channel = _channel_bandwidth(facts, coll, algo, limits)
    bus = f32(graph.n_channels * per_channel)
    bus = _refined(facts, coll, algo, proto, bus, limits)
    return _bus_to_algorithm(facts, coll, algo, bus, limits), limits


def _channel_bandwidth(
    facts: TuningFacts, coll: Collective, algo: Algorithm, limits: list[str]
) -> float:
    graph = facts.graphs[algo.graph]
    inside = facts.nnodes <= 2 or algo.uses_collnet
    bw = graph.bw_intra if inside else graph.bw_inter
    if not algo.uses_nvls:
        limits.append(
            f"{graph.n_channels} channels of {bw:g} GB/s {'inside' if inside else 'between'} nodes"
        )
        return bw
    channels = graph.n_channels
    efficiency = f32(k.NVLS_EFFICIENCY[facts.generation])
    intra = f32(f32(f32(graph.bw_intra * efficiency) * (channels - 1)) / channels)
    how = f"{efficiency:.2g} of {graph.bw_intra:g}, one channel kept back"
    if coll == Collective.ALL_REDUCE:
        intra = f32(intra * 2)
        how += ", twice as reduction and broadcast overlap"
    else:
        ppn = facts.ranks_per_node
        intra = f32(intra * f32(f32(ppn - 1) / ppn))
        how += f", {f32(ppn - 1) / ppn:.3g} of it from other GPUs"
    inter = f32(graph.bw_inter * (2 if facts.nnodes <= 2 and algo == Algorithm.NVLS_TREE else 1))
    found = {"inside nodes": intra, "between nodes": inter}
    if algo == Algorithm.NVLS_TREE:
        found["as measured per channel"] = f32(
            k.NVLS_TREE_PER_CHANNEL[facts.generation][facts.scale]
        )
    where = min(found, key=lambda name: found[name])
    limits.append(
        f"{channels} channels of {found[where]:g} GB/s {where}"
        + (f" ({how})" if where == "inside nodes" else "")
    )
    return found[where]


def _refined(
    facts: TuningFacts,
    coll: Collective,
    algo: Algorithm,
    proto: Protocol,
    bus: float,
    limits: list[str],
) -> float:
    """Bus bandwidth after the corrections that measurements asked for."""
    channels = facts.graphs[algo.graph].n_channels
    generation, scale = facts.generation, facts.scale

    def at_most(value: float, cap: float, why: str) -> float:
        if cap < value:
            limits.append(f"{why} {cap:g} GB/s")
            return cap
        return value

    if algo == Algorithm.RING and proto == Protocol.LL:
        limits.append("half of it: LL sends a flag with every 4 bytes")
        bus = f32(at_most(bus * 0.5, _ll_max(facts), "LL reaches at most"))
    if algo == Algorithm.RING and proto == Protocol.LL128:
        limits.append("92 % of it: LL128 sends 8 bytes of flag with 120")
        cap = channels * k.RING_LL128_PER_CHANNEL[generation][scale]
        bus = f32(at_most(bus * 0.92, cap, f"{channels} channels of LL128 reach at most"))
    if algo == Algorithm.TREE:
        if coll == Collective.ALL_REDUCE:
            limits.append("92 % of it: a tree")
            cap = channels * k.TREE_PER_CHANNEL[generation][scale]
            bus = f32(at_most(bus * 0.92, cap, f"{channels} tree channels reach at most"))
        if proto == Protocol.LL:
            limits.append("divided by 3.8: a tree over LL")
            bus = f32(at_most(bus * 1.0 / 3.8, _ll_max(facts), "LL reaches at most"))
        if proto == Protocol.LL128:
            factor = 7.0 / 9.0 if facts.nnodes == 1 else 120.0 / 128.0
            limits.append(f"times {factor:.3g}: a tree over LL128")
            cap = channels * k.TREE_LL128_PER_CHANNEL[generation][scale]
            bus = f32(
                at_most(bus * factor, cap, f"{channels} tree channels of LL128 reach at most")
            )
        if facts.max_tree_pattern == Pattern.TREE:
            limits.append("85 % of it: one GPU of a node carries parent and children")
            bus = f32(bus * 0.85)
    if algo == Algorithm.PAT:
        limits.append("75 % of it: PAT")
        bus = f32(bus * 0.75)
    if algo.uses_collnet and proto != Protocol.SIMPLE:
        limits.append("CollNet runs over Simple only")
        return 0.0
    if algo == Algorithm.COLLNET_DIRECT:
        bus = _collnet_direct(facts, coll, bus, limits)
    gathers = coll in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    if (
        gathers
        and facts.nnodes > 1
        and algo in (Algorithm.NVLS, Algorithm.COLLNET_DIRECT)
        and facts.max_local_ranks > facts.collnet_heads
    ):
        limits.append(
            f"{facts.max_local_ranks} GPUs per node need as many CollNet heads, there are {facts.collnet_heads}"
        )
        return 0.0
    return bus


def _ll_max(facts: TuningFacts) -> float:
    """LL is bound by the GPU on one node, by the CPU over several."""
    if facts.nnodes == 1:
        return k.LL_MAX[facts.generation][facts.scale]
    return k.LL_MAX[1 if facts.cpu_vendor == CpuVendor.AMD else 0][facts.scale]


def _collnet_direct(facts: TuningFacts, coll: Collective, bus: float, limits: list[str]) -> float:
    graph = facts.graphs[GraphKind.COLLNET_DIRECT]
    ppn = facts.ranks_per_node
    if coll != Collective.ALL_REDUCE:
        each = min(graph.bw_intra, f32(graph.bw_inter * f32(0.9)))
        why = f"the least of {graph.bw_intra:g} inside and 0.9 of {graph.bw_inter:g} between nodes"
        limits[:] = [f"{ppn:g} GPUs per node of {each:g} GB/s: {why}"]
        return f32(ppn * each)
    gpus_per_nic = f32(ppn / (1.0 * graph.n_channels))
    gpus_per_nic = f32(gpus_per_nic - f32(f32(gpus_per_nic - 1) / 2))
    if gpus_per_nic != 1:
        limits.append(
            f"divided by {gpus_per_nic:g}: {ppn:g} GPUs per node on {graph.n_channels} channels"
        )
    bus = f32(bus / gpus_per_nic)
    if facts.min_sm < 90:
        return bus
    limits.append("85 % of it: CollNet direct from sm 90 on")
    return f32(bus * 0.85)


def _steps(coll: Collective, nranks: int) -> int:
    """Steps of a ring."""
    if coll == Collective.ALL_REDUCE:
        return 2 * (nranks - 1)
    return nranks - 1 if coll in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER) else nranks


def _bus_to_algorithm(
    facts: TuningFacts, coll: Collective, algo: Algorithm, bus: float, limits: list[str]
) -> float:
    """Bus bandwidth is what the links carry; the operation itself is shorter by the number of times that its bytes cross them."""
    if not bus or (
        algo != Algorithm.RING and coll in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    ):
        return bus
    if algo == Algorithm.RING or algo.uses_nvls:
        steps = _steps(coll, facts.nranks)
        if steps != facts.nranks:
            limits.append(
                f"times {facts.nranks / steps:.4g}: a link carries {steps}/{facts.nranks} of the bytes"
            )
        return f32(bus * f32((1.0 * facts.nranks) / steps))
    ways = "up the tree and down again" if algo == Algorithm.TREE else "to the network and back"
    limits.append(f"half of it: bytes go {ways}")
    return f32(bus * 0.5)


# Latency


def _step_latency(
    facts: TuningFacts, hardware: Hardware, algo: Algorithm, proto: Protocol
) -> float:
    if facts.cpu_arch == CpuArch.POWER and (hardware, algo, proto) == (
        Hardware.PCI,
        Algorithm.TREE,
        Protocol.SIMPLE,
    ):
        algo = Algorithm.RING  # trees are not penalised on POWER
    return f32(k.STEP_LATENCY[hardware][algo][proto])


def _latency(
    facts: TuningFacts, settings: TuningSettings, coll: Collective, algo: Algorithm, proto: Protocol
) -> float:
    """us before the first byte arrives everywhere."""
    graph = facts.graphs[algo.graph]
    inside = Hardware.NVLINK if graph.type_intra == PathType.NVL else Hardware.PCI
    base = f32(k.BASE_LATENCY.get(algo, (0.0, 0.0, 0.0))[proto])
    intra = _step_latency(facts, inside, algo, proto)
    # With one rank per node nothing hides the network, so the larger latency of a tree counts.
    inter = _step_latency(
        facts, Hardware.NET, Algorithm.TREE if facts.ranks_per_node == 1 else algo, proto
    )
    inter = f32(inter + graph.latency_inter)
    if proto == Protocol.SIMPLE:  # the flush
        inter = f32(inter + graph.latency_inter)
    others = facts.nranks // facts.nnodes - 1
    levels = facts.nnodes.bit_length() - 1
    match algo:
        case Algorithm.RING:
            return _ring_latency(facts, settings, coll, proto, base, intra, inter)
        case Algorithm.TREE:
            return f32(base + f32(2 * f32(f32(others * intra) + f32(levels * inter))))
        case (
            Algorithm.COLLNET_DIRECT
        ):  # 0.4 us for each peer that is served in turn; summed in double precision
            return f32(base + (2 * (f32(min(1, others) * intra) + others * 0.4) + inter))
        case Algorithm.COLLNET_CHAIN:
            return f32(base + f32(f32(2 * others * intra) + inter))
        case Algorithm.NVLS:
            return f32(intra + inter) if facts.nnodes > 1 else intra
        case Algorithm.NVLS_TREE:
            return f32(base + f32(intra + f32(2 * levels * inter)))
        case Algorithm.PAT:  # a logarithmic and, still, a linear part
            return f32(base + (levels * (inter / 3.5) + facts.nranks * 2.8))


def _ring_latency(
    facts: TuningFacts,
    settings: TuningSettings,
    coll: Collective,
    proto: Protocol,
    base: float,
    intra: float,
    inter: float,
) -> float:
    graph = facts.graphs[GraphKind.RING]
    nsteps = _steps(coll, facts.nranks)
    if coll in (Collective.REDUCE, Collective.BROADCAST):
        hardware = (
            Hardware.NET
            if facts.nnodes > 1
            else Hardware.NVLINK
            if graph.type_intra == PathType.NVL
            else Hardware.PCI
        )
        if graph.same_channels:
            return f32(base + _step_latency(facts, hardware, Algorithm.RING, proto))
        like = Algorithm.TREE if proto == Protocol.SIMPLE else Algorithm.RING
        return f32(base + f32(nsteps * _step_latency(facts, hardware, like, proto)))
    if facts.nnodes > 1:
        overhead = _net_overhead(facts, settings)
        intra = max(intra, f32(overhead * 3) if proto == Protocol.SIMPLE else overhead)
    between = (2 if coll == Collective.ALL_REDUCE else 1) * (facts.nnodes - 1)
    return f32(base + f32(f32((nsteps - between) * intra) + f32(between * inter)))


def _net_overhead(facts: TuningFacts, settings: TuningSettings) -> float:
    if settings.net_overhead_us is not None:
        return f32(settings.net_overhead_us)
    return 2.0 if facts.cpu_arch == CpuArch.X86 and facts.cpu_vendor == CpuVendor.AMD else 1.0


# What is switched off


def _switched_off(
    facts: TuningFacts,
    settings: TuningSettings,
    algo: Algorithm,
    proto: Protocol,
    algo_wish: Wish,
    proto_wish: Wish,
) -> str:
    """Why the combination is not used, or an empty text."""
    if algo_wish == Wish.NO:
        return "NCCL_ALGO excludes it"
    if proto_wish == Wish.NO:
        return "NCCL_PROTO excludes it"
    if facts.nnodes == 1 and algo == Algorithm.NVLS_TREE:
        return "trees between nodes need several nodes"
    if not facts.collnet_enabled and (
        algo.uses_collnet or (algo == Algorithm.NVLS and facts.nnodes > 1)
    ):
        return "CollNet is not in use"
    if not facts.nvswitch and algo == Algorithm.COLLNET_DIRECT:
        return "CollNet direct needs an NVSwitch"
    if proto == Protocol.LL128 and proto_wish == Wish.FREE:
        return _ll128_unsafe(facts, settings, algo)
    return ""


def _ll128_unsafe(facts: TuningFacts, settings: TuningSettings, algo: Algorithm) -> str:
    """LL128 relies on 128-byte stores staying whole, which not every path keeps."""
    graph = facts.graphs[algo.graph]
    worst = PathType.PXN if settings.ll128_c2c and facts.min_sm >= 90 else PathType.PXB
    if graph.type_inter > worst:
        return (
            f"LL128 between nodes needs paths up to {worst.name}, these are {graph.type_inter.name}"
        )
    if graph.type_intra > PathType.NVB:
        return f"LL128 inside nodes needs paths up to NVB, these are {graph.type_intra.name}"
    if facts.min_sm != facts.max_sm:
        return f"LL128 needs equal GPUs, these are sm {facts.min_sm} to {facts.max_sm}"
    return "LL128 needs sm 70" if facts.min_sm < 70 else ""
