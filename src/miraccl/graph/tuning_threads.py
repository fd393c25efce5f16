"""Thread block sizes and thresholds (NCCL 2.28.9 ``src/graph/tuning.cc`` ncclTopoTuneModel)."""

from __future__ import annotations

from miraccl.graph import tuning_constants as k
from miraccl.graph.kinds import GraphKind
from miraccl.graph.plan_settings import TuningSettings
from miraccl.graph.tuning_constants import NcclAlgorithm
from miraccl.graph.tuning_inputs import TuningInputs
from miraccl.topo.records import f32
from miraccl.types import Protocol


def _clamp_threads(requested: int, least: int, most: int, default: int) -> int:
    if requested <= 0:
        return default
    return most if requested % k.WARP or requested > most else max(least, requested)


def max_threads(
    inputs: TuningInputs, settings: TuningSettings
) -> dict[NcclAlgorithm, tuple[int, int, int]]:
    """Return the maximum threads of a block, by algorithm and protocol."""
    ring = inputs.graphs[GraphKind.RING]
    slow = f32(ring.bw_intra * ring.n_channels) <= k.SLOW_MACHINE_BW
    simple = k.SIMPLE_MAX_THREADS
    ring_default = k.SLOW_MACHINE_THREADS if slow else simple
    ll = _clamp_threads(settings.threads, 2 * k.WARP, k.LL_MAX_THREADS, k.LL_MAX_THREADS)
    ll128 = _clamp_threads(
        settings.ll128_threads, k.LL128_MAX_THREADS // 4, k.LL128_MAX_THREADS, k.LL128_MAX_THREADS
    )
    result = {
        algo: (0, 0, 0 if algo == NcclAlgorithm.PAT else k.MAX_THREADS) for algo in NcclAlgorithm
    }
    result[NcclAlgorithm.TREE] = (
        ll,
        ll128,
        _clamp_threads(settings.threads, 2 * k.WARP, simple, simple),
    )
    result[NcclAlgorithm.RING] = (
        ll,
        ll128,
        _clamp_threads(settings.threads, 2 * k.WARP, simple, ring_default),
    )
    return result


def thread_thresholds(
    inputs: TuningInputs, settings: TuningSettings
) -> dict[NcclAlgorithm, tuple[int, int, int]]:
    """Return the bytes per thread and channel below which fewer are used, by algorithm and
    protocol.
    """
    table = {
        algo: [k.LL_THRESHOLD, k.LL128_THRESHOLD, k.SIMPLE_THRESHOLD] for algo in NcclAlgorithm
    }
    table[NcclAlgorithm.RING][Protocol.LL] *= inputs.nranks
    for algo in (NcclAlgorithm.COLLNET_DIRECT, NcclAlgorithm.COLLNET_CHAIN):
        table[algo][Protocol.SIMPLE] = k.COLLNET_THRESHOLD
    for i, value in enumerate(settings.thread_thresholds):
        if value >= 0:
            table[(NcclAlgorithm.TREE, NcclAlgorithm.RING)[i // 3]][i % 3] = value
    return {algo: (row[0], row[1], row[2]) for algo, row in table.items()}
