"""Algorithm, protocol, channels and warps of an operation of a given size.

The rules are NCCL 2.28.9's (``src/graph/tuning.cc`` ncclTopoGetAlgoTime, ``src/enqueue.cc``
topoGetAlgoInfo) for a single ungrouped operation on float32 with sum. This module also owns the
JSON of section ``tuning``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miraccl.graph import tuning_constants as k
from miraccl.graph.collnet import MAX_DIRECT_RANKS
from miraccl.graph.tuning import TuningModel
from miraccl.graph.tuning_constants import NcclAlgorithm
from miraccl.topo.records import f32
from miraccl.topo.system_json import number
from miraccl.types import Collective, Protocol

TABLE_SIZES = tuple(8 << (2 * i) for i in range(16))
"""Bytes of the rows of the choice table: 8 B, 32 B, ... 8 GiB."""

_LONGEST_US = 3600000000.0
_PLATEAU_BYTES = 64
"""Bytes per channel and rank from which a ring over several nodes shows its plateau."""


@dataclass(frozen=True, kw_only=True)
class TuningCandidate:
    """One combination for an operation.

    ``time`` is in us, or None if it cannot be used, for the reason in ``disabled_reason``.
    """

    algorithm: NcclAlgorithm
    protocol: Protocol
    time: float | None
    disabled_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class TuningChoice:
    """The selected combination for ``nbytes``.

    ``time`` is in us, ``channels`` is the maximum number of channels used, ``warps`` the size of
    their thread blocks.
    """

    nbytes: int
    algorithm: NcclAlgorithm
    protocol: Protocol
    time: float
    channels: int
    warps: int


def candidates(model: TuningModel, coll: Collective, nbytes: int) -> list[TuningCandidate]:
    """Return all combinations of a collective in NCCL's order.

    ``nbytes`` is the larger of the send and the receive buffer of a rank.
    """
    if model.inputs.nranks == 1:
        return [TuningCandidate(algorithm=NcclAlgorithm.RING, protocol=Protocol.SIMPLE, time=0.0)]
    result = []
    for algo in NcclAlgorithm:
        unsupported = _unsupported_reason(model, coll, algo)
        for proto in Protocol:
            if (coll, algo, proto) in model.estimates:
                disabled_reason = model.estimate(coll, algo, proto).disabled_reason or unsupported
                time = None if disabled_reason else predict_time(model, coll, algo, proto, nbytes)
                result.append(
                    TuningCandidate(
                        algorithm=algo, protocol=proto, time=time, disabled_reason=disabled_reason
                    )
                )
    return result


def _unsupported_reason(model: TuningModel, coll: Collective, algo: NcclAlgorithm) -> str:
    """Return the reason why the kernels do not support a combination that the model estimates."""
    inputs = model.inputs
    if algo.uses_collnet and inputs.max_local_ranks > MAX_DIRECT_RANKS:
        return f"CollNet serves at most {MAX_DIRECT_RANKS} GPUs per node"
    if algo.uses_nvls and not inputs.nvls_support:
        return "NVLS is not in use"
    if (
        algo.uses_nvls
        and coll != Collective.ALL_REDUCE
        and inputs.max_local_ranks > k.MAX_NVLS_RANKS
    ):
        return f"NVLS serves at most {k.MAX_NVLS_RANKS} GPUs per node"
    return ""


def predict_time(
    model: TuningModel, coll: Collective, algo: NcclAlgorithm, proto: Protocol, nbytes: int
) -> float | None:
    """Return the time in us, or None if the combination cannot be used."""
    if model.estimate(coll, algo, proto).bandwidth == 0:
        return None
    latency, bw = estimate_at_size(model, coll, algo, proto, nbytes)
    return f32(latency + f32(f32(nbytes) / f32(1000 * bw)))


def estimate_at_size(
    model: TuningModel, coll: Collective, algo: NcclAlgorithm, proto: Protocol, nbytes: int
) -> tuple[float, float]:
    """Return latency (us) and bandwidth (GB/s) after the corrections for the size."""
    estimate = model.estimate(coll, algo, proto)
    bw, latency = estimate.bandwidth, estimate.latency
    inputs = model.inputs
    all_reduce = coll == Collective.ALL_REDUCE
    octave = (nbytes >> 6).bit_length() - 1
    if algo == NcclAlgorithm.TREE and all_reduce and 0 <= octave < len(k.TREE_CORRECTION[proto]):
        bw = f32(bw * f32(k.TREE_CORRECTION[proto][octave]))
    long_ring = (
        algo == NcclAlgorithm.RING and proto == Protocol.SIMPLE and inputs.nnodes > 1 and all_reduce
    )
    if long_ring and nbytes // (inputs.channels * inputs.nranks) >= _PLATEAU_BYTES:
        latency = f32(latency * (1.9 if inputs.min_sm < 80 else 1.4))
    return latency, bw


def choose(model: TuningModel, coll: Collective, nbytes: int) -> TuningChoice | None:
    """Return the fastest candidate (the first of equals), or None without a usable one."""
    best: TuningCandidate | None = None
    best_time = _LONGEST_US
    for candidate in candidates(model, coll, nbytes):
        if candidate.time is not None and 0 <= candidate.time < best_time:
            best, best_time = candidate, candidate.time
    if best is None:
        return None
    channels, threads = _size(model, best.algorithm, best.protocol, nbytes)
    return TuningChoice(
        nbytes=nbytes,
        algorithm=best.algorithm,
        protocol=best.protocol,
        time=best_time,
        channels=channels,
        warps=threads // k.WARP,
    )


def _size(model: TuningModel, algo: NcclAlgorithm, proto: Protocol, nbytes: int) -> tuple[int, int]:
    """Return channels and threads, reduced while a thread would have less than its threshold."""
    inputs = model.inputs
    channels = inputs.channels
    threads = model.max_threads[algo][proto]
    threshold = model.thread_thresholds[algo][proto]
    if algo == NcclAlgorithm.COLLNET_DIRECT:
        channels, threshold = _collnet_direct_channels(
            channels, threads * inputs.collnet_direct_heads, threshold, nbytes
        )
    elif algo == NcclAlgorithm.NVLS and inputs.nnodes > 1:
        channels = min(inputs.nvls_channels, channels)
    elif algo.uses_nvls:
        channels = inputs.nvls_channels
    else:
        while nbytes < channels * threads * threshold and channels >= 2:
            channels -= 1
    if not algo.uses_nvls and algo != NcclAlgorithm.COLLNET_DIRECT:
        while nbytes < channels * threads * threshold and threads % 128 == 0:
            threads //= 2
    if proto == Protocol.SIMPLE and algo == NcclAlgorithm.RING:
        threads += k.WARP  # one warp synchronises
    if algo in (NcclAlgorithm.TREE, NcclAlgorithm.PAT):
        threads = k.MAX_THREADS
    return channels, max(threads, 3 * k.WARP)


def _collnet_direct_channels(
    channels: int, work: int, threshold: int, nbytes: int
) -> tuple[int, int]:
    """Reduce the channels in stages.

    Past one and a half times each power of two, the threshold of a thread is halved.
    """
    stage, short = 16, True
    while stage >= 1 and short:
        while (short := nbytes < channels * work * threshold) and channels > stage:
            if channels == stage + stage // 2:
                threshold //= 2
            channels -= 1
        stage //= 2
    return channels, threshold


# JSON


def tuning_to_json(model: TuningModel) -> dict[str, Any]:
    """Return section ``tuning`` of the reference results."""
    return {
        "maxThreads": {algo.label: list(model.max_threads[algo]) for algo in NcclAlgorithm},
        "threadThresholds": {
            algo.label: list(model.thread_thresholds[algo]) for algo in NcclAlgorithm
        },
        "latencies": _table(model, "latency"),
        "bandwidths": _table(model, "bandwidth"),
        "choice": {
            name: [choice_to_json(choose(model, coll, size), size) for size in TABLE_SIZES]
            for coll, name in k.TUNED.items()
        },
    }


def _table(model: TuningModel, field: str) -> dict[str, Any]:
    return {
        name: {
            algo.label: [number(getattr(model.estimate(coll, algo, p), field)) for p in Protocol]
            for algo in NcclAlgorithm
        }
        for coll, name in k.TUNED.items()
    }


def choice_to_json(choice: TuningChoice | None, nbytes: int) -> list[Any]:
    """Return a row of the choice table: bytes, algorithm, protocol, us, channels, warps.

    Without a choice, algorithm and protocol are None and the numbers are 0.
    """
    if choice is None:
        return [nbytes, None, None, 0, 0, 0]
    protocol = k.PROTOCOL_LABELS[choice.protocol]
    return [
        choice.nbytes,
        choice.algorithm.label,
        protocol,
        number(choice.time),
        choice.channels,
        choice.warps,
    ]
