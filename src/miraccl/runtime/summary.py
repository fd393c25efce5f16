"""Log lines of MIRACCL_DEBUG=info for a new communicator or GPU side (NCCL's INIT lines)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def describe_rank(rank: int, hosts: Sequence[int], address: str) -> str:
    """Describe the connections of ``rank``.

    Args:
        hosts: Host number of each rank.
        address: Address at which this rank listens.
    """
    near = [r for r, host in enumerate(hosts) if host == hosts[rank] and r != rank]
    far = [r for r, host in enumerate(hosts) if host != hosts[rank]]
    parts = [f"shared memory with {_list(near)}"] if near else []
    parts += [f"TCP from {address} with {_list(far)}"] if far else []
    return f"rank {rank} of {len(hosts)}: {'; '.join(parts) or 'alone'}"


def describe_gpu(
    rank: int,
    ordinal: int,
    mappings: Mapping[int, str],
    order: Sequence[int],
    reason: str,
    multiprocessors: int,
) -> str:
    """Describe the connections of the GPU of ``rank``.

    Args:
        mappings: Mapping method of each peer.
        order: Ring order of the ranks, chosen for ``reason``.
    """
    peers_by_mapping: dict[str, list[int]] = {}
    for peer, way in sorted(mappings.items()):
        peers_by_mapping.setdefault(way, []).append(peer)
    reached = (
        "; ".join(f"{way} with {_list(peers)}" for way, peers in peers_by_mapping.items())
        or "alone"
    )
    neighbours = " ".join(map(str, order))
    return (
        f"rank {rank} on GPU {ordinal}: {reached}; ring {neighbours} ({reason}); "
        f"kernels take up to {multiprocessors} multiprocessors"
    )


def _list(ranks: Sequence[int]) -> str:
    """Format ranks as ranges, such as ``0 2-5 7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
