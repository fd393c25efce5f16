"""Latency and bandwidth of every algorithm and protocol on the agreed channels.

``tuning_threads`` has the sizes of thread blocks, ``tuning_choice`` picks for a size. The formulas
are NCCL 2.28.9's (``src/graph/tuning.cc`` ncclTopoTuneModel), down to the precision of each step:
values are single precision, and ``f32`` marks each place where NCCL rounds. A product of two
singles that is computed in double and rounded once equals the single-precision product, so products
need no other care.

Each estimate records the limits of its bandwidth and, if it is disabled, the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from miraccl.graph import tuning_constants as k
from miraccl.graph.kinds import GraphKind, Pattern
from miraccl.graph.plan_settings import TuningSettings
from miraccl.graph.tuning_constants import Hardware, NcclAlgorithm
from miraccl.graph.tuning_filter import Constraint, parse_constraints
from miraccl.graph.tuning_inputs import TuningInputs
from miraccl.graph.tuning_threads import max_threads, thread_thresholds
from miraccl.topo.records import CpuArch, CpuVendor, PathType, f32
from miraccl.types import Collective, Protocol

EstimateKey = tuple[Collective, NcclAlgorithm, Protocol]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Latency (us) and algorithm bandwidth (GB/s) of one combination.

    ``bandwidth`` is 0 if the combination cannot be used, for the reason in ``disabled_reason``;
    ``limits`` lists the factors of the bandwidth.
    """

    latency: float = 0.0
    bandwidth: float = 0.0
    limits: tuple[str, ...] = ()
    disabled_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class TuningModel:
    """Estimates and thread limits of a communicator.

    ``estimates`` lacks combinations without an implementation. ``max_threads`` and
    ``thread_thresholds`` are triples by protocol; a threshold is in bytes per thread and channel.
    """

    inputs: TuningInputs
    max_threads: Mapping[NcclAlgorithm, tuple[int, int, int]]
    thread_thresholds: Mapping[NcclAlgorithm, tuple[int, int, int]]
    estimates: Mapping[EstimateKey, Estimate]

    def estimate(self, coll: Collective, algo: NcclAlgorithm, proto: Protocol) -> Estimate:
        """Return the estimate of a combination; a disabled one if it is not implemented."""
        return self.estimates.get((coll, algo, proto), _MISSING)


_MISSING = Estimate(disabled_reason="not implemented")


def build_model(inputs: TuningInputs, settings: TuningSettings | None = None) -> TuningModel:
    """Build the model of a communicator; a single rank has no estimates.

    Raises ``InvalidUsage`` for an ``NCCL_ALGO`` or ``NCCL_PROTO`` that cannot be parsed.
    """
    settings = settings or TuningSettings()
    single = inputs.nranks <= 1
    return TuningModel(
        inputs=inputs,
        max_threads=max_threads(inputs, settings),
        thread_thresholds=dict.fromkeys(NcclAlgorithm, (0, 0, 0))
        if single
        else thread_thresholds(inputs, settings),
        estimates={} if single else _estimates(inputs, settings),
    )


def is_implemented(coll: Collective, algo: NcclAlgorithm, proto: Protocol) -> bool:
    """Return True if NCCL implements the combination."""
    if algo.uses_nvls and proto != Protocol.SIMPLE:
        return False
    if coll in (Collective.BROADCAST, Collective.REDUCE):
        return algo == NcclAlgorithm.RING
    if coll == Collective.ALL_REDUCE:
        return algo != NcclAlgorithm.PAT
    if algo == NcclAlgorithm.PAT:
        return proto == Protocol.SIMPLE
    return algo in (NcclAlgorithm.RING, NcclAlgorithm.NVLS, NcclAlgorithm.COLLNET_DIRECT)


def _estimates(inputs: TuningInputs, settings: TuningSettings) -> dict[EstimateKey, Estimate]:
    algos = parse_constraints(
        settings.algo, {algo: algo.label for algo in NcclAlgorithm}, "NCCL_ALGO"
    )
    protos = parse_constraints(settings.proto, k.PROTOCOL_LABELS, "NCCL_PROTO")
    result: dict[EstimateKey, Estimate] = {}
    for coll in k.TUNED:
        for algo in NcclAlgorithm:
            for proto in Protocol:
                missing = not is_implemented(coll, algo, proto) or (
                    algo == NcclAlgorithm.PAT and not _pat_enabled(inputs, settings)
                )
                # NVLS reserves one of its channels, so a graph with a single one is not used.
                if missing or (algo.uses_nvls and inputs.graphs[GraphKind.NVLS].n_channels < 2):
                    continue
                bandwidth, limits = _algorithm_bandwidth(inputs, coll, algo, proto)
                disabled_reason = _disabled_reason(
                    inputs, settings, algo, proto, algos[coll][algo], protos[coll][proto]
                )
                if not disabled_reason and not bandwidth:
                    disabled_reason = limits[-1] if limits else "its graph has no channels"
                result[coll, algo, proto] = Estimate(
                    latency=_latency(inputs, settings, coll, algo, proto),
                    bandwidth=0.0 if disabled_reason else bandwidth,
                    limits=tuple(limits),
                    disabled_reason=disabled_reason,
                )
    return result


def _pat_enabled(inputs: TuningInputs, settings: TuningSettings) -> bool:
    if inputs.min_sm < 60:
        return False
    return settings.pat != 0 if settings.pat != 2 else inputs.nnodes == inputs.nranks


# Bandwidth


def _algorithm_bandwidth(
    inputs: TuningInputs, coll: Collective, algo: NcclAlgorithm, proto: Protocol
) -> tuple[float, list[str]]:
    """Return the algorithm bandwidth before anything is disabled, and its factors as text."""
    graph = inputs.graphs[algo.graph]
    if not graph.n_channels:
        return 0.0, [f"the {algo.graph.label} search found no channels"]
    limits: list[str] = []
    per_channel = _channel_bandwidth(inputs, coll, algo, limits)
    bus = f32(graph.n_channels * per_channel)
    bus = _correct_bandwidth(inputs, coll, algo, proto, bus, limits)
    return _bus_to_algorithm(inputs, coll, algo, bus, limits), limits


def _channel_bandwidth(
    inputs: TuningInputs, coll: Collective, algo: NcclAlgorithm, limits: list[str]
) -> float:
    graph = inputs.graphs[algo.graph]
    inside = inputs.nnodes <= 2 or algo.uses_collnet
    bw = graph.bw_intra if inside else graph.bw_inter
    if not algo.uses_nvls:
        limits.append(
            f"{graph.n_channels} channels of {bw:g} GB/s {'inside' if inside else 'between'} nodes"
        )
        return bw
    channels = graph.n_channels
    efficiency = f32(k.NVLS_EFFICIENCY[inputs.generation])
    intra = f32(f32(f32(graph.bw_intra * efficiency) * (channels - 1)) / channels)
    how = f"{efficiency:.2g} of {graph.bw_intra:g}, one channel reserved"
    if coll == Collective.ALL_REDUCE:
        intra = f32(intra * 2)
        how += ", twice as reduction and broadcast overlap"
    else:
        ppn = inputs.ranks_per_node
        intra = f32(intra * f32(f32(ppn - 1) / ppn))
        how += f", {f32(ppn - 1) / ppn:.3g} of it from other GPUs"
    inter = f32(
        graph.bw_inter * (2 if inputs.nnodes <= 2 and algo == NcclAlgorithm.NVLS_TREE else 1)
    )
    found = {"inside nodes": intra, "between nodes": inter}
    if algo == NcclAlgorithm.NVLS_TREE:
        found["as measured per channel"] = f32(
            k.NVLS_TREE_PER_CHANNEL[inputs.generation][inputs.scale]
        )
    where = min(found, key=lambda name: found[name])
    limits.append(
        f"{channels} channels of {found[where]:g} GB/s {where}"
        + (f" ({how})" if where == "inside nodes" else "")
    )
    return found[where]


def _correct_bandwidth(
    inputs: TuningInputs,
    coll: Collective,
    algo: NcclAlgorithm,
    proto: Protocol,
    bus: float,
    limits: list[str],
) -> float:
    """Apply the protocol and algorithm factors that NCCL measured to a bus bandwidth."""
    channels = inputs.graphs[algo.graph].n_channels
    generation, scale = inputs.generation, inputs.scale

    def limit_to(value: float, cap: float, why: str) -> float:
        if cap < value:
            limits.append(f"{why} {cap:g} GB/s")
            return cap
        return value

    if algo == NcclAlgorithm.RING and proto == Protocol.LL:
        limits.append("half of it: LL sends a flag with every 4 bytes")
        bus = f32(limit_to(bus * 0.5, _ll_max(inputs), "LL reaches at most"))
    if algo == NcclAlgorithm.RING and proto == Protocol.LL128:
        limits.append("92 % of it: LL128 sends 8 bytes of flag with 120")
        cap = channels * k.RING_LL128_PER_CHANNEL[generation][scale]
        bus = f32(limit_to(bus * 0.92, cap, f"{channels} channels of LL128 reach at most"))
    if algo == NcclAlgorithm.TREE:
        if coll == Collective.ALL_REDUCE:
            limits.append("92 % of it: a tree")
            cap = channels * k.TREE_PER_CHANNEL[generation][scale]
            bus = f32(limit_to(bus * 0.92, cap, f"{channels} tree channels reach at most"))
        if proto == Protocol.LL:
            limits.append("divided by 3.8: a tree over LL")
            bus = f32(limit_to(bus * 1.0 / 3.8, _ll_max(inputs), "LL reaches at most"))
        if proto == Protocol.LL128:
            factor = 7.0 / 9.0 if inputs.nnodes == 1 else 120.0 / 128.0
            limits.append(f"times {factor:.3g}: a tree over LL128")
            cap = channels * k.TREE_LL128_PER_CHANNEL[generation][scale]
            bus = f32(
                limit_to(bus * factor, cap, f"{channels} tree channels of LL128 reach at most")
            )
        if inputs.max_tree_pattern == Pattern.TREE:
            limits.append("85 % of it: one GPU of a node carries parent and children")
            bus = f32(bus * 0.85)
    if algo == NcclAlgorithm.PAT:
        limits.append("75 % of it: PAT")
        bus = f32(bus * 0.75)
    if algo.uses_collnet and proto != Protocol.SIMPLE:
        limits.append("CollNet runs over Simple only")
        return 0.0
    if algo == NcclAlgorithm.COLLNET_DIRECT:
        bus = _collnet_direct(inputs, coll, bus, limits)
    gathers = coll in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    if (
        gathers
        and inputs.nnodes > 1
        and algo in (NcclAlgorithm.NVLS, NcclAlgorithm.COLLNET_DIRECT)
        and inputs.max_local_ranks > inputs.collnet_heads
    ):
        limits.append(
            f"{inputs.max_local_ranks} GPUs per node need as many CollNet heads, "
            f"there are {inputs.collnet_heads}"
        )
        return 0.0
    return bus


def _ll_max(inputs: TuningInputs) -> float:
    """Return the LL limit: bound by the GPU on one node, by the CPU over several."""
    if inputs.nnodes == 1:
        return k.LL_MAX[inputs.generation][inputs.scale]
    return k.LL_MAX[1 if inputs.cpu_vendor == CpuVendor.AMD else 0][inputs.scale]


def _collnet_direct(inputs: TuningInputs, coll: Collective, bus: float, limits: list[str]) -> float:
    graph = inputs.graphs[GraphKind.COLLNET_DIRECT]
    ppn = inputs.ranks_per_node
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
    if inputs.min_sm < 90:
        return bus
    limits.append("85 % of it: CollNet direct from sm 90 on")
    return f32(bus * 0.85)


def _steps(coll: Collective, nranks: int) -> int:
    """Return the number of steps of a ring."""
    if coll == Collective.ALL_REDUCE:
        return 2 * (nranks - 1)
    return nranks - 1 if coll in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER) else nranks


def _bus_to_algorithm(
    inputs: TuningInputs, coll: Collective, algo: NcclAlgorithm, bus: float, limits: list[str]
) -> float:
    """Convert bus bandwidth (carried by the links) to bytes of the operation per time."""
    if not bus or (
        algo != NcclAlgorithm.RING and coll in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    ):
        return bus
    if algo == NcclAlgorithm.RING or algo.uses_nvls:
        steps = _steps(coll, inputs.nranks)
        if steps != inputs.nranks:
            limits.append(
                f"times {inputs.nranks / steps:.4g}: "
                f"a link carries {steps}/{inputs.nranks} of the bytes"
            )
        return f32(bus * f32((1.0 * inputs.nranks) / steps))
    route = (
        "up the tree and down again" if algo == NcclAlgorithm.TREE else "to the network and back"
    )
    limits.append(f"half of it: bytes go {route}")
    return f32(bus * 0.5)


# Latency


def _step_latency(
    inputs: TuningInputs, hardware: Hardware, algo: NcclAlgorithm, proto: Protocol
) -> float:
    if inputs.cpu_arch == CpuArch.POWER and (hardware, algo, proto) == (
        Hardware.PCI,
        NcclAlgorithm.TREE,
        Protocol.SIMPLE,
    ):
        algo = NcclAlgorithm.RING  # trees are not penalised on POWER
    return f32(k.STEP_LATENCY[hardware][algo][proto])


def _latency(
    inputs: TuningInputs,
    settings: TuningSettings,
    coll: Collective,
    algo: NcclAlgorithm,
    proto: Protocol,
) -> float:
    """Return the latency (us) until the first byte has arrived on all ranks."""
    graph = inputs.graphs[algo.graph]
    inside = Hardware.NVLINK if graph.type_intra == PathType.NVL else Hardware.PCI
    base = f32(k.BASE_LATENCY.get(algo, (0.0, 0.0, 0.0))[proto])
    intra = _step_latency(inputs, inside, algo, proto)
    # With one rank per node the network latency is not hidden: use the larger one of a tree.
    inter = _step_latency(
        inputs, Hardware.NET, NcclAlgorithm.TREE if inputs.ranks_per_node == 1 else algo, proto
    )
    inter = f32(inter + graph.latency_inter)
    if proto == Protocol.SIMPLE:  # the flush
        inter = f32(inter + graph.latency_inter)
    others = inputs.nranks // inputs.nnodes - 1
    levels = inputs.nnodes.bit_length() - 1
    match algo:
        case NcclAlgorithm.RING:
            return _ring_latency(inputs, settings, coll, proto, base, intra, inter)
        case NcclAlgorithm.TREE:
            return f32(base + f32(2 * f32(f32(others * intra) + f32(levels * inter))))
        case NcclAlgorithm.COLLNET_DIRECT:
            # 0.4 us for each peer, which are served serially; summed in double precision.
            return f32(base + (2 * (f32(min(1, others) * intra) + others * 0.4) + inter))
        case NcclAlgorithm.COLLNET_CHAIN:
            return f32(base + f32(f32(2 * others * intra) + inter))
        case NcclAlgorithm.NVLS:
            return f32(intra + inter) if inputs.nnodes > 1 else intra
        case NcclAlgorithm.NVLS_TREE:
            return f32(base + f32(intra + f32(2 * levels * inter)))
        case NcclAlgorithm.PAT:  # a logarithmic and a linear part
            return f32(base + (levels * (inter / 3.5) + inputs.nranks * 2.8))


def _ring_latency(
    inputs: TuningInputs,
    settings: TuningSettings,
    coll: Collective,
    proto: Protocol,
    base: float,
    intra: float,
    inter: float,
) -> float:
    graph = inputs.graphs[GraphKind.RING]
    nsteps = _steps(coll, inputs.nranks)
    if coll in (Collective.REDUCE, Collective.BROADCAST):
        hardware = (
            Hardware.NET
            if inputs.nnodes > 1
            else Hardware.NVLINK
            if graph.type_intra == PathType.NVL
            else Hardware.PCI
        )
        if graph.same_channels:
            return f32(base + _step_latency(inputs, hardware, NcclAlgorithm.RING, proto))
        like = NcclAlgorithm.TREE if proto == Protocol.SIMPLE else NcclAlgorithm.RING
        return f32(base + f32(nsteps * _step_latency(inputs, hardware, like, proto)))
    if inputs.nnodes > 1:
        overhead = _net_overhead(inputs, settings)
        intra = max(intra, f32(overhead * 3) if proto == Protocol.SIMPLE else overhead)
    between = (2 if coll == Collective.ALL_REDUCE else 1) * (inputs.nnodes - 1)
    return f32(base + f32(f32((nsteps - between) * intra) + f32(between * inter)))


def _net_overhead(inputs: TuningInputs, settings: TuningSettings) -> float:
    if settings.net_overhead_us is not None:
        return f32(settings.net_overhead_us)
    return 2.0 if inputs.cpu_arch == CpuArch.X86 and inputs.cpu_vendor == CpuVendor.AMD else 1.0


# Disabled combinations


def _disabled_reason(
    inputs: TuningInputs,
    settings: TuningSettings,
    algo: NcclAlgorithm,
    proto: Protocol,
    algo_constraint: Constraint,
    proto_constraint: Constraint,
) -> str:
    """Return the reason why the combination is disabled, or an empty text."""
    if algo_constraint == Constraint.EXCLUDED:
        return "NCCL_ALGO excludes it"
    if proto_constraint == Constraint.EXCLUDED:
        return "NCCL_PROTO excludes it"
    if inputs.nnodes == 1 and algo == NcclAlgorithm.NVLS_TREE:
        return "trees between nodes need several nodes"
    if not inputs.collnet_enabled and (
        algo.uses_collnet or (algo == NcclAlgorithm.NVLS and inputs.nnodes > 1)
    ):
        return "CollNet is not in use"
    if not inputs.nvswitch and algo == NcclAlgorithm.COLLNET_DIRECT:
        return "CollNet direct needs an NVSwitch"
    if proto == Protocol.LL128 and proto_constraint == Constraint.UNCONSTRAINED:
        return _ll128_unsafe_reason(inputs, settings, algo)
    return ""


def _ll128_unsafe_reason(
    inputs: TuningInputs, settings: TuningSettings, algo: NcclAlgorithm
) -> str:
    """Return the reason why LL128 is unsafe: it needs paths that keep 128-byte stores whole."""
    graph = inputs.graphs[algo.graph]
    worst = PathType.PXN if settings.ll128_c2c and inputs.min_sm >= 90 else PathType.PXB
    if graph.type_inter > worst:
        return (
            f"LL128 between nodes needs paths up to {worst.name}, these are {graph.type_inter.name}"
        )
    if graph.type_intra > PathType.NVB:
        return f"LL128 inside nodes needs paths up to NVB, these are {graph.type_intra.name}"
    if inputs.min_sm != inputs.max_sm:
        return f"LL128 needs equal GPUs, these are sm {inputs.min_sm} to {inputs.max_sm}"
    return "LL128 needs sm 70" if inputs.min_sm < 70 else ""
