"""Settings of the stages after the search, read once from an environment.

``ConnectSettings`` controls the number of channels, ``TuningSettings`` the latency and bandwidth
model. Both are plain values; the stages never read the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from miraccl import params
from miraccl.errors import InvalidUsage

MAX_CHANNELS = 64
"""Most channels of a communicator (NCCL ``MAXCHANNELS``)."""

MAX_OVERHEAD_NS = 10**15


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


@dataclass(frozen=True, kw_only=True)
class ConnectSettings:
    """Limits of channel counts.

    ``nvls_channels`` and ``channels_per_net_peer`` are 0 where the planner chooses.
    """

    min_channels: int = 0
    max_channels: int = MAX_CHANNELS
    min_ctas: int = 1
    max_ctas: int = MAX_CHANNELS
    min_p2p_channels: int = 1
    max_p2p_channels: int = MAX_CHANNELS
    channels_per_net_peer: int = 0
    nvls_channels: int = 0
    collnet_node_threshold: int = 2

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> ConnectSettings:
        """Read the settings from an environment.

        Values out of range are clamped like in NCCL (``src/graph/connect.cc``, ``src/init.cc``
        envConfigOverride).
        """

        def either(new: params.Param[int], old: params.Param[int]) -> int:
            value, source = new.resolve(environ)
            return value if source != "default" else old.read(environ)

        def positive(param: params.Param[int]) -> int:
            value = param.read(environ)
            return min(value, MAX_CHANNELS) if value > 0 else param.default

        max_ctas = positive(params.MAX_CTAS)
        return cls(
            min_channels=_clamp(either(params.MIN_NCHANNELS, params.MIN_NRINGS), 0, MAX_CHANNELS),
            max_channels=_clamp(either(params.MAX_NCHANNELS, params.MAX_NRINGS), 1, MAX_CHANNELS),
            min_ctas=min(positive(params.MIN_CTAS), max_ctas),
            max_ctas=max_ctas,
            min_p2p_channels=params.MIN_P2P_NCHANNELS.read(environ),
            max_p2p_channels=params.MAX_P2P_NCHANNELS.read(environ),
            channels_per_net_peer=max(0, params.NCHANNELS_PER_NET_PEER.read(environ)),
            nvls_channels=max(0, params.NVLS_NCHANNELS.read(environ)),
            collnet_node_threshold=params.COLLNET_NODE_THRESHOLD.read(environ),
        )


@dataclass(frozen=True, kw_only=True)
class TuningSettings:
    """Settings of the latency and bandwidth model.

    ``algo`` and ``proto`` are lists in the syntax of ``NCCL_ALGO``, empty without a constraint;
    thread limits are 0 where the model chooses. ``thread_thresholds`` holds six byte counts for
    tree and ring, each LL, LL128, Simple; -2 keeps the default. ``net_overhead_us`` None derives it
    from the CPU. ``pat`` is 0 (off), 1 (on) or 2 (with one rank per node).
    """

    algo: str = ""
    proto: str = ""
    threads: int = 0
    ll128_threads: int = 0
    thread_thresholds: tuple[int, ...] = ()
    ll128_c2c: bool = True
    pat: int = 2
    net_overhead_us: float | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> TuningSettings:
        """Read the settings from an environment. Raises ``InvalidUsage`` for an overhead out of
        range.
        """
        overhead = params.NET_OVERHEAD.read(environ)
        if abs(overhead) > MAX_OVERHEAD_NS:
            raise InvalidUsage(
                f"cannot use {params.NET_OVERHEAD.resolve(environ)[1]}: "
                f"allowed are {-MAX_OVERHEAD_NS} to {MAX_OVERHEAD_NS} ns"
            )
        return cls(
            algo=_read_nccl_variable(params.ALGO, environ),
            proto=_read_nccl_variable(params.PROTO, environ),
            threads=params.NTHREADS.read(environ),
            ll128_threads=params.LL128_NTHREADS.read(environ),
            thread_thresholds=_leading_integers(params.THREAD_THRESHOLDS.read(environ))[:6],
            ll128_c2c=params.LL128_C2C.read(environ) != 0,
            pat=params.PAT_ENABLE.read(environ),
            net_overhead_us=None if overhead == -2 else overhead * 0.001,
        )


def _read_nccl_variable(param: params.Param[str], environ: Mapping[str, str]) -> str:
    """Read NCCL's variable but not ours, which may name algorithms that the model lacks."""
    return param.parse(environ.get(f"NCCL_{param.nccl}", "").strip())


def _leading_integers(text: str) -> tuple[int, ...]:
    """Return the integers at the start of a text like ``sscanf`` with 64 bits."""
    match = re.match(r"(?:\s*[+-]?[0-9]+)*", text)
    numbers = re.findall(r"[+-]?[0-9]+", match[0]) if match else []
    return tuple(_clamp(int(number[:30]), -(1 << 63), (1 << 63) - 1) for number in numbers)
