"""Order in which GPUs are tried, and the nets allowed at each point.

Ordinary Python over the arrays of ``state``, compiled unchanged (see ``walk``). The rules are NCCL
2.28's (``src/graph/search.cc`` ncclTopoSearchNextGpuSort, ncclTopoSearchRecNet,
ncclTopoSearchCheckNet).
"""

from __future__ import annotations

from miraccl.graph.search.kernel.state import (
    BALANCED_TREE,
    CURRENT,
    RING,
    SPLIT_TREE,
    TREE,
    ChannelSearchState,
)


def gpu_pci_bw(state: ChannelSearchState, gpu: int) -> int:
    """Return the rest of a GPU's PCI link: whole GB/s of the worse direction, -1 without a link."""
    if state.gpus[gpu].pci_link < 0:
        return -1
    up = state.links[state.gpus[gpu].pci_link].bw
    down = state.links[state.gpus[gpu].pci_back].bw
    return int(min(up, down))


def compare_gpus(state: ChannelSearchState, here: int, net: int, a: int, b: int) -> int:
    """Compare GPUs a and b: below 0 if a is tried first, above 0 if b, 0 for equal scores.

    ``net`` -1 ignores the network. Criteria in order: more bandwidth to the net, more on PCI, fewer
    hops to the net, more bandwidth from here, fewer hops from here. Scores are integers.
    """
    ngpus = state.header[0].ngpus
    if net >= 0:
        net_a = state.paths[ngpus + net, a]
        net_b = state.paths[ngpus + net, b]
        if int(net_a.bw) != int(net_b.bw):
            return int(net_b.bw) - int(net_a.bw)
        pci_a = gpu_pci_bw(state, a)
        pci_b = gpu_pci_bw(state, b)
        if pci_a != pci_b:
            return pci_b - pci_a
        if net_a.count != net_b.count:
            return int(net_a.count - net_b.count)
    path_a = state.paths[here, a]
    path_b = state.paths[here, b]
    if int(path_a.bw) != int(path_b.bw):
        return int(path_b.bw) - int(path_a.bw)
    return int(path_a.count - path_b.count)


def list_next_gpus(state: ChannelSearchState, here: int, sort_net: int, row: int) -> int:
    """Write the GPUs to try next into a row of choices, best first; return their number.

    ``sort_net`` is 1 if the next GPU sends to the network, -1 if a later one does, 0 if none will.
    """
    header = state.header[0]
    channel = state.graphs[CURRENT].n_channels
    choices = state.choices[row]
    net = -1
    if sort_net != 0:
        net = find_net(state, state.ends[CURRENT, channel, 0])
    count = 0
    for offset in range(1, header.ngpus):
        gpu = (here + offset) % header.ngpus
        if state.paths[here, gpu].count == 0 or state.used[channel, gpu]:
            continue
        at = count  # insertion sort; equal scores keep the order of the ring of indices
        while at > 0 and compare_gpus(state, here, net, gpu, choices[at - 1]) < 0:
            choices[at] = choices[at - 1]
            at -= 1
        choices[at] = gpu
        count += 1
    if sort_net == -1 and same_distance(state, here, row, count):
        for i in range(count // 2):
            other = choices[count - 1 - i]
            choices[count - 1 - i] = choices[i]
            choices[i] = other
    return neighbours_first(state, here, row, count) if header.nvs >= 0 else count


def same_distance(state: ChannelSearchState, here: int, row: int, count: int) -> bool:
    """Return True if all choices are equally far from ``here``."""
    for i in range(1, count):
        first = state.paths[here, state.choices[row, 0]]
        other = state.paths[here, state.choices[row, i]]
        if int(first.bw) != int(other.bw) or first.count != other.count:
            return False
    return True


def neighbours_first(state: ChannelSearchState, here: int, row: int, count: int) -> int:
    """Restrict the choices to the neighbours by index; return the number that remains.

    Used with an NVSwitch, where traffic among few peers performs best.
    """
    ngpus = state.header[0].ngpus
    pattern = state.graphs[CURRENT].pattern
    next_gpu = (here + 1) % ngpus
    previous_gpu = (here - 1 + ngpus) % ngpus
    remaining = 0
    if pattern == RING:
        remaining += move_to_front(state, row, count, next_gpu)
        if previous_gpu != next_gpu:
            remaining += move_to_front(state, row, count, previous_gpu)
    elif pattern in (SPLIT_TREE, BALANCED_TREE):
        remaining += move_to_front(state, row, count, previous_gpu)
        if previous_gpu != next_gpu:
            remaining += move_to_front(state, row, count, next_gpu)
    else:
        remaining += move_to_front(state, row, count, next_gpu)
    return remaining


def move_to_front(state: ChannelSearchState, row: int, count: int, gpu: int) -> int:
    """Move a GPU to the front of the choices; return 1 if it was among them, else 0."""
    choices = state.choices[row]
    for i in range(count):
        if choices[i] == gpu:
            for j in range(i, 0, -1):
                choices[j] = choices[j - 1]
            choices[0] = gpu
            return 1
    return 0


# Nets


def find_net(state: ChannelSearchState, id: int) -> int:
    """Return the first net with this id."""
    for net in range(len(state.nets)):
        if state.nets[net].id == id:
            return net
    return -1


def can_enter_by(state: ChannelSearchState, net: int, bw: int) -> bool:
    """Return True if the next channel may enter by this net."""
    graph = state.graphs[CURRENT]
    if graph.collnet and state.nets[net].collnet == 0:
        return False
    if state.nets[net].bw < bw:
        return False
    if (
        graph.pattern == RING and graph.cross_nic == 2 and graph.n_channels % 2 == 1
    ):  # odd channels mirror the one before
        return bool(state.nets[net].id == state.ends[CURRENT, graph.n_channels - 1, 1])
    return True


def can_leave_by(state: ChannelSearchState, net: int, step: int) -> bool:
    """Return True if the channel may leave by this net at this step."""
    graph = state.graphs[CURRENT]
    channel = graph.n_channels
    id = state.nets[net].id
    start = find_net(state, state.ends[CURRENT, channel, 0])
    if graph.pattern == TREE and id != state.nets[start].id:  # its traffic is symmetric
        return False
    if graph.pattern == RING and graph.cross_nic == 2:
        if channel % 2 == 1 and id != state.ends[CURRENT, channel - 1, 0]:
            return False
    elif graph.cross_nic == 0 and state.nets[net].asic != state.nets[start].asic:
        return False
    return not (
        graph.pattern == BALANCED_TREE and step != 0 and id != state.ends[CURRENT, channel, 1]
    )


ORDER = (
    gpu_pci_bw,
    compare_gpus,
    find_net,
    same_distance,
    move_to_front,
    neighbours_first,
    list_next_gpus,
    can_enter_by,
    can_leave_by,
)
"""Compiled functions of this module."""
