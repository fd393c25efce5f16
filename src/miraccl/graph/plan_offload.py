"""Reductions in switches, explained: whether NVLS and CollNet are possible and used, and the gain.

NVLS reduces in NVSwitches (NVLink SHARP), CollNet in network switches or aggregators behind NCCL's
CollNet plugin (SHARP). Between nodes, NCCL's algorithm NVLS goes through CollNet as well; only
NVLSTree does not. The gain compares the model's best time with and without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from miraccl.graph.format import format_bytes, format_time
from miraccl.graph.tuning import TuningModel
from miraccl.graph.tuning_choice import TABLE_SIZES, TuningCandidate, candidates
from miraccl.graph.tuning_constants import NcclAlgorithm
from miraccl.types import Collective

#: Sizes of which the gain is reported.
GAIN_SIZES = (512 << 10, 32 << 20, 512 << 20)
_NVLS_SM = 90  # first compute capability with NVLink SHARP, times 10


@dataclass(frozen=True, kw_only=True)
class Offload:
    """One kind of switch that reduces, for all_reduce.

    Attributes:
        possible: The model has a candidate for it.
        used: Sizes in bytes at which it is the fastest, of ``TABLE_SIZES``.
        reason: Text why it is not possible or not used; empty if it is used.
        gains: (bytes, time without it, time with it) in us.
    """

    name: str
    possible: bool
    used: tuple[int, ...]
    reason: str
    gains: tuple[tuple[int, float, float], ...]

    def describe(self) -> str:
        """Return one line."""
        if not self.possible:
            return f"{self.name}: not possible: {self.reason}"
        parts = [
            f"{format_bytes(size)} {without / within:.2f} times as fast"
            f" ({format_time(within)} instead of {format_time(without)})"
            for size, without, within in self.gains
        ]
        gain = f"; all_reduce of {', '.join(parts)}" if parts else ""
        if not self.used:
            return f"{self.name}: possible, not used: {self.reason}{gain}"
        where = f"from {format_bytes(self.used[0])} to {format_bytes(self.used[-1])}"
        return f"{self.name}: possible, used {where}{gain}"


def find_offloads(model: TuningModel) -> list[Offload]:
    """Return NVLS and CollNet, in this order."""
    between_nodes = model.inputs.nnodes > 1
    return [
        _find(model, "NVLS", lambda algo: algo.uses_nvls),
        _find(
            model,
            "CollNet (SHARP)",
            lambda algo: algo.uses_collnet or (between_nodes and algo is NcclAlgorithm.NVLS),
        ),
    ]


def _find(model: TuningModel, name: str, belongs: Callable[[NcclAlgorithm], bool]) -> Offload:
    everything = {size: candidates(model, Collective.ALL_REDUCE, size) for size in TABLE_SIZES}
    usable = {
        size: [c for c in found if c.time is not None and belongs(c.algorithm)]
        for size, found in everything.items()
    }
    if not any(usable.values()):
        off = sorted(
            {
                c.disabled_reason
                for c in everything[TABLE_SIZES[-1]]
                if belongs(c.algorithm) and c.disabled_reason
            }
        )
        reason = _why_not(model, name) or "; ".join(off) or "the model has no channels for it"
        return Offload(name=name, possible=False, used=(), reason=reason, gains=())
    used, gains = [], []
    for size, found in everything.items():
        within, without = _best(usable[size]), _best([c for c in found if not belongs(c.algorithm)])
        if within is not None and (without is None or within < without):
            used.append(size)
        if size in GAIN_SIZES and within and without:
            gains.append((size, without, within))
    reason = "" if used else "other algorithms are faster at every size"
    return Offload(name=name, possible=True, used=tuple(used), reason=reason, gains=tuple(gains))


def _best(found: list[TuningCandidate]) -> float | None:
    return min((c.time for c in found if c.time is not None), default=None)


def _why_not(model: TuningModel, name: str) -> str:
    """Return the property of the machine that excludes it, or an empty string."""
    inputs = model.inputs
    if inputs.nranks == 1:
        return "one rank reduces nothing"
    if name == "NVLS":
        if inputs.min_sm < _NVLS_SM:
            capability = f"{inputs.min_sm / 10:.1f}"
            return f"it needs compute capability 9.0, the GPUs have {capability}"
        if inputs.nvls_support:
            return ""
        return "the GPUs of a node do not share NVSwitches, or NCCL_NVLS_ENABLE=0"
    if inputs.nnodes == 1:
        return "all ranks are on one node"
    if not inputs.collnet_enabled:
        return (
            "no CollNet plugin is assumed (--collnet), or NCCL_COLLNET_ENABLE=0; a software switch"
            " is one (MIRACCL_SWITCH)"
        )
    return ""
