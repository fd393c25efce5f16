"""The two passes of one graph's search (NCCL 2.28 ``src/graph/search.cc`` ncclTopoCompute).

Pass 1 finds a graph: it starts at the highest bandwidth and, if that fails, relaxes the request:
different channels, a simpler tree, farther GPUs, farther nets, other nets to leave by, and finally
less bandwidth. Pass 2 starts from the result and requests more bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from miraccl.graph.channel_graph import ChannelGraph, start_graph
from miraccl.graph.kinds import GraphKind, Pattern
from miraccl.graph.search.kernel.state import BEST, CURRENT, ChannelSearchState
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
from miraccl.graph.search.run import Walk
from miraccl.graph.search.saturation import find_saturated_links
from miraccl.graph.search.settings import SearchSettings
from miraccl.graph.search.speeds import first_at_most, speeds_for
from miraccl.graph.search.state_builder import set_candidates
from miraccl.topo.queries import NearestDevices
from miraccl.topo.records import CpuArch, CpuVendor, NodeType, PathTable, PathType, System, f32

TOTAL_BUDGET = 1 << 19
TRY_BUDGET = 1 << 14
SAME_CHANNELS_BUDGET = 1 << 8
"""Visits of all tries of pass 1, of one try, and of one try with equal channels (NCCL
``NCCL_SEARCH_*TIMEOUT*``)."""

MAX_NVLS_HEADS = 32
MAX_DIRECT_HEADS = 8
"""NCCL_MAX_NVLS_ARITY and NCCL_MAX_DIRECT_ARITY + 1."""

DUPLICATE_FROM_BW = 25.0
DUPLICATE_FEW_FROM_BW = 50.0
FEW_CHANNELS = 4
"""Channels of at least the first bandwidth (GB/s) are doubled; from Hopper on, more than
``FEW_CHANNELS`` of at least the second."""

FALLBACK_BW = f32(0.1)

CROSS_NIC_PATTERNS = (Pattern.RING, Pattern.BALANCED_TREE, Pattern.SPLIT_TREE)


@dataclass(frozen=True, kw_only=True)
class SearchContext:
    """Inputs shared by all searches on one machine.

    All walks use the same ``state``: the bandwidths that one leaves are the input of the next.
    """

    nearest: NearestDevices
    settings: SearchSettings
    state: ChannelSearchState
    walk: Walk
    from_file: Mapping[GraphKind, ChannelGraph]

    @property
    def system(self) -> System:
        return self.nearest.system

    @property
    def paths(self) -> PathTable:
        return self.nearest.paths

    @property
    def ngpus(self) -> int:
        return len(self.system.gpus)

    @property
    def inter(self) -> bool:
        return bool(self.system.inter)

    @property
    def sm(self) -> int:
        """Lowest compute capability of the GPUs, times ten."""
        return min(gpu.sm for gpu in self.system.gpus)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Request of one walk: the fields of ``Try`` that vary."""

    pattern: Pattern
    bw_intra: float
    bw_inter: float
    type_intra: PathType
    type_inter: PathType
    same_channels: int
    cross_nic: int
    min_channels: int
    max_channels: int


def search_graph(context: SearchContext, kind: GraphKind, ring_channels: int) -> SearchReport:
    """Search one graph.

    ``ring_channels`` is the channel count of this machine's ring, which trees and CollNet chains
    have to match.
    """
    start = _start(context, kind, ring_channels)
    loaded = context.from_file.get(kind)
    if (
        loaded is not None
        and loaded.n_channels
        and not (context.settings.cross_nic == 0 and loaded.cross_nic == 1)
    ):
        graph = replace(loaded, min_channels=start.min_channels, max_channels=start.max_channels)
        return _report(context, graph, Origin.FILE)
    if kind is GraphKind.NVLS and (context.sm < 90 or not context.system.count(NodeType.NVS)):
        return _report(context, start, Origin.NO_NVSWITCH)
    return _GraphSearch(context, _limits(context, start)).run()


def _report(context: SearchContext, graph: ChannelGraph, origin: Origin) -> SearchReport:
    system = context.system
    return SearchReport(
        kind=graph.kind,
        origin=origin,
        inter=context.inter,
        max_bw=system.max_bw,
        total_bw=system.total_bw,
        sm=context.sm,
        graph=graph,
    )


def _start(context: SearchContext, kind: GraphKind, ring_channels: int) -> ChannelGraph:
    """Return the empty graph with the strictest path types and, if forced, cross-NIC."""
    graph = start_graph(kind, ring_channels)
    cross_nic = _cross_nic(context, graph.pattern)
    nearest_gpu, nearest_net = PathType.LOC, PathType.PIX
    if context.ngpus > 1:
        nearest_gpu = path_type_range(context, NodeType.GPU)[0]
    if context.inter:
        nearest_net = path_type_range(context, NodeType.NET)[0]
    return replace(
        graph,
        computed=True,
        cross_nic=1 if cross_nic == 1 else 0,
        type_intra=nearest_gpu,
        type_inter=nearest_net,
        same_channels=int(graph.pattern is not Pattern.NVLS),
    )


def _cross_nic(context: SearchContext, pattern: Pattern) -> int:
    several = len(context.system.nets) > 1
    return context.settings.cross_nic if several and pattern in CROSS_NIC_PATTERNS else 0


def path_type_range(context: SearchContext, target: NodeType) -> tuple[PathType, PathType]:
    """Return the best and worst type of the paths from GPUs to GPUs or nets.

    NCCL ncclTopoGetGpuMinPath, ncclTopoGetGpuMaxPath.
    """
    types = [
        path.type
        for i in range(context.ngpus)
        for j, path in enumerate(context.paths.row(NodeType.GPU, i, target))
        if target is not NodeType.GPU or i != j
    ]
    return min([PathType.SYS, *types]), max([PathType.LOC, *types])


def _limits(context: SearchContext, graph: ChannelGraph) -> ChannelGraph:
    """Adapt channel limits and pattern to the machine."""
    least, most, pattern = graph.min_channels, graph.max_channels, graph.pattern
    if pattern is Pattern.NVLS:
        most = min(MAX_NVLS_HEADS, context.ngpus)
        if not context.inter:
            least = most  # pull evenly from all GPUs
    if pattern is Pattern.COLLNET_DIRECT:
        most = min(MAX_DIRECT_HEADS, context.ngpus)
    if context.ngpus == 1 and pattern is not Pattern.RING:
        pattern = Pattern.TREE
    if pattern is Pattern.RING and most >= 2 and least == 1 and has_split_nvlink(context):
        # A tree performs better there, needs two channels, and must match the ring.
        least = 2
    return replace(graph, min_channels=least, max_channels=most, pattern=pattern)


def has_split_nvlink(context: SearchContext) -> bool:
    """Return True for two NVLink groups of GPUs with something slower between them."""
    domain = list(range(context.ngpus))
    for g in range(context.ngpus):
        for p in range(g + 1, context.ngpus):
            if context.paths.gpu_gpu(g, p).type == PathType.NVL:
                domain[p] = domain[g]
    return sum(domain.count(d) > 1 for d in set(domain)) == 2


class _GraphSearch:
    """State of one graph's search."""

    def __init__(self, context: SearchContext, start: ChannelGraph) -> None:
        self.context = context
        self.start = start
        self.speeds = speeds_for(context.sm, context.inter)
        self.tries: list[Try] = []
        self.candidates_for: PathType | None = None
        self.cross_nic = _cross_nic(context, start_graph(start.kind, 1).pattern)
        self.farthest_gpu = (
            path_type_range(context, NodeType.GPU)[1] if context.ngpus > 1 else PathType.SYS
        )
        self.farthest_net = path_type_range(context, NodeType.NET)[1]
        for graph in (CURRENT, BEST):
            self._write(graph, self._attempt(start))
            record = context.state.graphs[graph]
            record.n_channels = record.n_hops = 0
            record.latency_inter = 0.0
            record.collnet = start.kind.uses_collnet

    # State of the kernel

    @property
    def best(self) -> ChannelGraph:
        """The best graph found so far."""
        state, start = self.context.state, self.start
        graph = state.graphs[BEST]
        channels = range(graph.n_channels)
        steps = 1 if graph.pattern == Pattern.NVLS else self.context.ngpus
        return replace(
            start,
            pattern=Pattern(int(graph.pattern)),
            bw_intra=float(graph.bw_intra),
            bw_inter=float(graph.bw_inter),
            latency_inter=float(graph.latency_inter),
            type_intra=PathType(int(graph.type_intra)),
            type_inter=PathType(int(graph.type_inter)),
            same_channels=int(graph.same_channels),
            cross_nic=int(graph.cross_nic),
            n_hops=int(graph.n_hops),
            min_channels=int(graph.min_channels),
            max_channels=int(graph.max_channels),
            intra=tuple(
                tuple(int(rank) for rank in state.ranks[BEST, c, :steps]) for c in channels
            ),
            inter=tuple(
                (int(state.ends[BEST, c, 0]), int(state.ends[BEST, c, 1])) for c in channels
            )
            if self.context.inter
            else (),
        )

    @staticmethod
    def _attempt(graph: ChannelGraph) -> Attempt:
        return Attempt(
            pattern=graph.pattern,
            bw_intra=graph.bw_intra,
            bw_inter=graph.bw_inter,
            type_intra=graph.type_intra,
            type_inter=graph.type_inter,
            same_channels=graph.same_channels,
            cross_nic=graph.cross_nic,
            min_channels=graph.min_channels,
            max_channels=graph.max_channels,
        )

    def _write(self, graph: int, attempt: Attempt) -> None:
        record = self.context.state.graphs[graph]
        for name, value in vars(attempt).items():
            record[name] = value

    def _walk(self, phase: Phase, reason: Reason, attempt: Attempt) -> int:
        """Run one walk; return the rest of its budget, -1 if it found the best possible graph."""
        context, state = self.context, self.context.state
        if context.inter and self.candidates_for != attempt.type_inter:
            set_candidates(state, context.nearest, attempt.type_inter)
            self.candidates_for = attempt.type_inter
        self._write(CURRENT, attempt)
        state.graphs[CURRENT].n_channels = 0
        header, best = state.header[0], state.graphs[BEST]
        header.budget = budget = SAME_CHANNELS_BUDGET if attempt.same_channels else TRY_BUDGET
        header.visits = header.improvements = header.depth = 0
        context.walk(state)
        left = int(header.budget)
        self.tries.append(
            Try(
                phase=phase,
                reason=reason,
                **vars(attempt),
                budget=budget,
                visits=int(header.visits),
                end=End.PERFECT if left == -1 else End.BUDGET if left == 0 else End.COMPLETE,
                improved=bool(header.improvements),
                found_channels=int(best.n_channels),
                found_bw_intra=float(best.bw_intra),
                found_bw_inter=float(best.bw_inter),
            )
        )
        return left

    @property
    def _saturated(self) -> bool:
        best = self.context.state.graphs[BEST]
        return f32(int(best.n_channels) * float(best.bw_inter)) >= self.context.system.total_bw

    # Passes

    def run(self) -> SearchReport:
        stop = self._find()
        slower = self.speeds[self.speed + 1 :]
        duplication = self._duplicate()
        self._improve()
        origin = Origin.SEARCH
        graph = self.best
        if (
            not graph.n_channels
            and not graph.kind.uses_collnet
            and graph.pattern is not Pattern.NVLS
        ):
            origin = Origin.FALLBACK
            graph = self._fallback(graph)
        full = (
            find_saturated_links(self.context.system, self.context.paths, graph)
            if origin is Origin.SEARCH
            else ()
        )
        report = _report(self.context, graph, origin)
        next_bw = slower[0] if slower else 0.0
        return replace(
            report,
            tries=tuple(self.tries),
            stop=stop,
            next_bw=next_bw,
            duplication=duplication,
            saturated_links=full,
        )

    def _find(self) -> Stop:
        """Pass 1."""
        context, start, speeds = self.context, self.start, self.speeds
        total_bw = context.system.total_bw
        if context.ngpus > 1 and start.pattern is not Pattern.RING:
            total_bw = f32(total_bw * (context.ngpus * 1.0 / (context.ngpus - 1)))
        self.speed = next(
            (
                i
                for i, bw in enumerate(speeds)
                if bw <= context.system.max_bw and f32(bw * start.min_channels) <= total_bw
            ),
            len(speeds) - 1,
        )
        attempt = replace(
            self._attempt(start), bw_intra=speeds[self.speed], bw_inter=speeds[self.speed]
        )
        reason: Reason | Stop = Reason.START
        budget = TOTAL_BUDGET
        while isinstance(reason, Reason):
            budget -= SAME_CHANNELS_BUDGET if attempt.same_channels else TRY_BUDGET
            left = self._walk(Phase.FIND, reason, attempt)
            if left == -1:
                return Stop.PERFECT
            if self._saturated:
                return Stop.SATURATED
            if attempt.same_channels and not self._crosses_amd_sockets(attempt):
                reason, attempt = Reason.DIFFERENT_CHANNELS, replace(attempt, same_channels=0)
                continue
            budget += left
            reason, attempt = self._relax(
                replace(attempt, same_channels=start.same_channels), budget
            )
        return reason

    def _crosses_amd_sockets(self, attempt: Attempt) -> bool:
        """Return True if the path crosses sockets of AMD CPUs."""
        first = self.context.system.cpus[:1]
        amd = any(cpu.arch == CpuArch.X86 and cpu.vendor == CpuVendor.AMD for cpu in first)
        return amd and attempt.type_intra == PathType.SYS

    def _relax(self, attempt: Attempt, budget: int) -> tuple[Reason | Stop, Attempt]:
        """Return the next request after an inconclusive walk.

        It makes the next relaxation and withdraws all lesser ones.
        """
        context, start = self.context, self.start
        best = self.context.state.graphs[BEST]
        found = best.n_channels > 0
        if budget < 0 and found:
            return Stop.BUDGET, attempt
        if context.sm >= 90 and attempt.pattern is Pattern.BALANCED_TREE:
            return Reason.SIMPLER_TREE, replace(attempt, pattern=Pattern.TREE)
        attempt = replace(attempt, pattern=Pattern(int(best.pattern)))

        farthest = attempt.type_inter if context.inter else self.farthest_gpu
        if attempt.type_intra < min(farthest, PathType.NET) and (
            not found or attempt.type_intra < best.type_intra
        ):
            return Reason.FARTHER_GPUS, replace(
                attempt, type_intra=PathType(attempt.type_intra + 1)
            )
        attempt = replace(attempt, type_intra=start.type_intra)

        worthwhile = (
            not found or attempt.type_inter < best.type_inter or attempt.type_inter < PathType.PXN
        )
        if (
            context.inter
            and attempt.type_inter < min(self.farthest_net, PathType.NET)
            and worthwhile
        ):
            return Reason.FARTHER_NETS, replace(
                attempt, type_inter=PathType(attempt.type_inter + 1)
            )
        attempt = replace(attempt, type_inter=start.type_inter)

        if (
            self.cross_nic == 2
            and attempt.cross_nic == 0
            and best.pattern in (Pattern.RING, Pattern.BALANCED_TREE)
        ):
            return Reason.CROSS_NIC, replace(attempt, cross_nic=2)
        attempt = replace(attempt, cross_nic=start.cross_nic)

        if self.speed < len(self.speeds) - 1 and (
            not found or f32(self.speeds[self.speed + 1] / float(best.bw_inter)) > 0.49
        ):
            self.speed += 1
            bw = self.speeds[self.speed]
            return Reason.SLOWER, replace(attempt, bw_intra=bw, bw_inter=bw)
        return Stop.SPEEDS, attempt

    def _duplicate(self) -> Duplication | None:
        """Double channels over fast links at half the bandwidth (NCCL ncclTopoDupChannels)."""
        state = self.context.state
        best = state.graphs[BEST]
        count, bw_intra, bw_inter = int(best.n_channels), float(best.bw_intra), float(best.bw_inter)
        if not count or best.pattern == Pattern.NVLS or bw_intra < DUPLICATE_FROM_BW:
            return None
        if self.context.sm > 80 and bw_intra < DUPLICATE_FEW_FROM_BW and count > FEW_CHANNELS:
            return None
        doubled = min(2 * count, int(best.max_channels))
        state.ranks[BEST, count:doubled] = state.ranks[BEST, : doubled - count]
        state.ends[BEST, count:doubled] = state.ends[BEST, : doubled - count]
        times = -(-doubled // count)
        best.bw_intra, best.bw_inter, best.n_channels = (
            f32(bw_intra / times),
            f32(bw_inter / times),
            doubled,
        )
        return Duplication(before=count, after=doubled, bw_intra=bw_intra, bw_inter=bw_inter)

    def _improve(self) -> None:
        """Run pass 2: the same number of channels, faster ones, while each walk succeeds."""
        state, speeds = self.context.state, self.speeds
        best = state.graphs[BEST]
        state.graphs[CURRENT] = best  # NCCL continues counting hops from the best graph
        at = first_at_most(speeds, float(best.bw_inter))
        attempt = replace(
            self._attempt(self.best),
            bw_intra=speeds[at],
            bw_inter=speeds[at],
            min_channels=int(best.n_channels),
        )
        left = -1
        while left != 0 and at > 0:
            faster = speeds[at - 1]
            if best.pattern == Pattern.RING:
                reason, attempt = Reason.FASTER, replace(attempt, bw_intra=faster, bw_inter=faster)
            elif (
                best.pattern == Pattern.NVLS
                and attempt.bw_inter == best.bw_inter
                and attempt.bw_inter < 2 * attempt.bw_intra
            ):
                count = int(best.n_channels)
                reason, attempt = (
                    Reason.FASTER_NETWORK,
                    replace(attempt, min_channels=count, max_channels=count, bw_inter=faster),
                )
            elif attempt.bw_intra == best.bw_intra and attempt.bw_intra < 2 * attempt.bw_inter:
                reason, attempt = Reason.FASTER_INSIDE, replace(attempt, bw_intra=faster)
            else:
                return
            at -= 1
            left = self._walk(Phase.IMPROVE, reason, attempt)

    def _fallback(self, graph: ChannelGraph) -> ChannelGraph:
        """Return one slow channel in the order of the GPUs."""
        return replace(
            graph,
            intra=(tuple(gpu.rank for gpu in self.context.system.gpus),),
            inter=((0, 0),) if self.context.inter else (),
            bw_intra=FALLBACK_BW,
            bw_inter=FALLBACK_BW,
            type_intra=PathType.SYS,
            type_inter=PathType.SYS,
        )
