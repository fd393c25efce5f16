"""Number of compute channels of a communicator, and the searched channel that each one copies.

The search finds as many channels as the links can carry; one thread block per channel is often too
few to drive them, so channels are copied. The rules are NCCL's (``src/graph/connect.cc``
ncclTopoPostset). Each rule that changes the count is recorded with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from miraccl.graph.plan_settings import MAX_CHANNELS, ConnectSettings

FAST_NODE_BW = 45.0
"""GB/s of a ring channel inside a node above which fewer than ``FEW_CHANNELS`` are doubled."""

FEW_CHANNELS = 16


@dataclass(frozen=True, kw_only=True)
class CountStep:
    """One change of the channel count and its reason."""

    before: int
    after: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ChannelCount:
    """Compute channels and how they were derived.

    ``source[c]`` is the searched channel that compute channel c copies; ``tree[c]`` is the index (0
    or 1) of the tree of the double binary tree that it carries.
    """

    source: tuple[int, ...]
    tree: tuple[int, ...]
    steps: tuple[CountStep, ...]

    @property
    def total(self) -> int:
        return len(self.source)


@dataclass(frozen=True, kw_only=True)
class ChannelCountInputs:
    """Inputs of the channel count rules.

    Bandwidths are GB/s per channel. ``collnet`` holds the bandwidths (inside a node, between nodes)
    of the CollNet chain graph, or None if CollNet is not in use. ``min_sm`` is the lowest compute
    capability times ten.
    """

    searched: int
    nnodes: int
    nranks: int
    min_sm: int
    ring_bw_intra: float
    collnet: tuple[float, float] | None = None


def count_channels(inputs: ChannelCountInputs, settings: ConnectSettings) -> ChannelCount:
    """Apply the channel count rules in NCCL's order."""
    channels = [(c, t) for t in (0, 1) for c in range(inputs.searched)]
    steps: list[CountStep] = []

    def resize(count: int, reason: str) -> None:
        """Grow the list by repeating it from its start, or truncate it."""
        before = len(channels)
        if count != before:
            steps.append(CountStep(before=before, after=count, reason=reason))
        while len(channels) < count:
            channels.append(channels[len(channels) - before])
        del channels[count:]

    steps.append(
        CountStep(
            before=inputs.searched,
            after=2 * inputs.searched,
            reason="each searched channel carries both trees of a double binary tree",
        )
    )
    resize(min(MAX_CHANNELS, len(channels)), f"the maximum is {MAX_CHANNELS}")
    if inputs.collnet and inputs.collnet[0] > inputs.collnet[1] and inputs.nranks > inputs.nnodes:
        inside, between = inputs.collnet
        resize(
            min(MAX_CHANNELS, len(channels) * 3 // 2),
            f"half as many again: the CollNet chain has {inside:g} GB/s inside the node, "
            f"{between:g} GB/s beyond",
        )
    if (
        inputs.min_sm >= 90
        and inputs.nnodes > 1
        and inputs.ring_bw_intra > FAST_NODE_BW
        and len(channels) < FEW_CHANNELS
    ):
        resize(
            2 * len(channels),
            f"sm {inputs.min_sm} over {inputs.nnodes} nodes with {inputs.ring_bw_intra:g} GB/s "
            f"per ring channel (more than {FAST_NODE_BW:g}) "
            f"and fewer than {FEW_CHANNELS} channels: four compute channels for each searched one",
        )
    most = min(settings.max_channels, settings.max_ctas)
    if len(channels) > most:
        resize(most, f"the setting for the maximum channels is {most}")
    least = max(settings.min_channels, settings.min_ctas)
    if len(channels) < least:
        resize(least, f"the setting for the minimum channels is {least}")
    return ChannelCount(
        source=tuple(c for c, _ in channels), tree=tuple(t for _, t in channels), steps=tuple(steps)
    )
