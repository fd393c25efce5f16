"""State of a channel search: one machine and a pair of graphs as flat arrays of records.

Plain NumPy, so that the kernel runs on it both compiled and as ordinary Python.

- A *vertex* is an end point of a transition: GPUs first, then NETs, then the (first) NVSwitch.
- ``links`` is indexed by global link number; its bandwidths are the rest that the current channels
  leave. ``nets.bw`` likewise.
- ``graphs[CURRENT]`` is the graph under construction, ``graphs[BEST]`` the best complete one;
  ``ranks`` and ``ends`` are their channels.
- A *frame* is a choice point of the search; its alternatives are in the row of ``choices`` with the
  same number.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

CURRENT: Final = 0
BEST: Final = 1

# Patterns as plain numbers, for compiled code; the values are those of ``Pattern``.
BALANCED_TREE: Final = 1
SPLIT_TREE: Final = 2
TREE: Final = 3
RING: Final = 4
NVLS: Final = 5
COLLNET_DIRECT: Final = 6

# Decisions of a choice point.
PICK_NET: Final = 0  # the net where the next channel starts
PICK_FIRST: Final = 1  # the first GPU of the channel
PICK_EXIT: Final = 2  # the net by which the channel leaves the node, from this GPU
PICK_NEXT: Final = 3  # the GPU after this one
CLOSE_RING: Final = 4  # back to the first GPU
FANOUT_NVLS: Final = 5  # this GPU pulls from all others through the NVSwitch
FANOUT_DIRECT: Final = 6  # this GPU exchanges with every other GPU
FINISH: Final = 7  # the channel contains all GPUs
NEXT_CHANNEL: Final = 8  # one more channel

# Order in which GPUs are tried.
FREE: Final = 0  # by score
PCI_ORDER: Final = 1  # the order of the system
REPLAY: Final = 2  # the order of the previous channel


def _record(**fields: Any) -> Any:
    return np.dtype((np.record, list(fields.items())))


_I = np.int64
_F = np.float32

LINK = _record(bw=_F, pci=_I)
"""``pci``: 1 on a PCI link."""

HOP = _record(link=_I, reverse_link=_I, reverse_share=_F)
"""One hop of a path; the opposite link ``reverse_link`` loses ``reverse_share`` of its bandwidth,
too."""

PATH = _record(first=_I, count=_I, type=_I, bw=_F, pci_overhead=_I)
"""The path ``hops[first : first + count]``. ``pci_overhead`` is 1 if its PCI links carry 6/5 of the
data (peer-to-peer through an Intel host bridge)."""

GPU = _record(rank=_I, pci_link=_I, pci_back=_I)
"""``pci_link`` and ``pci_back`` are the links to and from a PCI switch or CPU, -1 for none."""

NET = _record(
    bw=_F, latency=_F, id=_I, asic=_I, collnet=_I, local_gpu=_I, near_first=_I, near_count=_I
)
"""``asic`` is the number of the adapter and port, equal for nets that share its bandwidth;
``lists[near_first : near_first + near_count]`` are its nearest GPUs."""

GRAPH = _record(
    pattern=_I,
    cross_nic=_I,
    collnet=_I,
    min_channels=_I,
    max_channels=_I,
    n_channels=_I,
    bw_intra=_F,
    bw_inter=_F,
    latency_inter=_F,
    type_intra=_I,
    type_inter=_I,
    same_channels=_I,
    n_hops=_I,
)

FRAME = _record(
    pick=_I,
    step=_I,
    gpu=_I,
    net=_I,
    to_net=_I,
    to_first=_I,
    order=_I,
    count=_I,
    position=_I,
    open=_I,
    budget=_I,
)
"""A choice point.

``step`` is the index of the GPU within the channel. ``to_net`` and ``to_first`` are the steps at
which the channel leaves for the network and returns to its first GPU, -1 for never. ``position`` of
``count`` alternatives were tried; ``open`` is 1 while one of them is applied. ``budget`` saves that
of the outer search during a bounded one."""

HEADER = _record(
    ngpus=_I,
    nvs=_I,
    inter=_I,
    depth=_I,
    budget=_I,
    visits=_I,
    improvements=_I,
    starts_first=_I,
    starts_count=_I,
    exits_first=_I,
)
"""Sizes and counters of a search.

``nvs`` is the vertex of the NVSwitch, -1 for none. ``budget`` is the number of visits left, or -1
once the best possible graph was found; ``visits`` counts the visits made, ``improvements`` the
better graphs found. ``lists[starts_first : starts_first + starts_count]`` are the nets to enter by;
``lists[exits_first + 2 * g]`` and the next entry are position in ``lists`` and number of the nets
by which GPU g may leave."""


class ChannelSearchState(NamedTuple):
    """The arrays of a search.

    ``header`` has one record, ``graphs`` two. ``ranks`` is [graph, channel, step], ``ends`` [graph,
    channel, 2], ``used`` [channel, GPU], ``choices`` [frame, alternative].
    """

    header: Any
    graphs: Any
    ranks: Any
    ends: Any
    used: Any
    links: Any
    hops: Any
    paths: Any
    gpus: Any
    nets: Any
    lists: Any
    frames: Any
    choices: Any


RECORDS = (HEADER, GRAPH, _I, _I, _I, LINK, HOP, PATH, GPU, NET, _I, FRAME, _I)
DIMENSIONS = (1, 1, 3, 3, 2, 1, 1, 2, 1, 1, 1, 1, 2)
"""Element type and number of dimensions of each array, in the order of ``Board``."""

ROW: Final = 4
"""int64 words per array in the table that compiled code reads: address and up to three lengths."""
