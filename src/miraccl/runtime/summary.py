"""Log lines of MIRACCL_DEBUG=info for a new communicator or GPU side (NCCL's INIT lines)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from miraccl import trace
from miraccl.transport import registry
from miraccl.transport.base import PathStatus
from miraccl.transport.registry import TransportChoice

_log = trace.logger("init")
#: Share of bytes that TCP sends again from which another transport is worth a trial, and bytes
#: below which the share says little. At 1 % of lost packets on 500 Mbit/s UDP carries 443 Mbit/s,
#: TCP 103 (cubic) and 167 (bbr); at 0.1 % 458 against 434 and 445 (bench/results/udp_loss).
RESENT_SHARE, RESENT_FROM_BYTES = 0.005, 16 << 20


def log_rank(name: str, describe: Callable[[], str]) -> None:
    """Log the connections of a rank of the communicator ``name``."""
    if _log.isEnabledFor(logging.INFO):  # formatting takes time with many ranks
        _log.info("%s: %s", name, describe())


def describe_rank(rank: int, choices: Mapping[int, TransportChoice], address: str) -> str:
    """Describe the connections of ``rank``.

    Args:
        choices: Transport of each peer.
        address: Address at which this rank listens.
    """
    labels = {"shm": "shared memory", "tcp": f"TCP from {address}", "udp": f"UDP from {address}"}
    parts = [
        f"{labels.get(name, name)} with {_list(peers)}" for name, peers in _by_name(choices).items()
    ]
    return f"rank {rank} of {len(choices) + 1}: {'; '.join(parts) or 'alone'}"


def describe_transports(choices: Mapping[int, TransportChoice]) -> str:
    """Describe the transports of a rank and their reasons in one line, such as ``shm to 1-3 (same
    host); tcp to 4-7 (addresses of a common family, not verbs: ...)``.
    """
    parts = []
    for name, peers in _by_name(choices).items():
        choice = choices[peers[0]]
        reasons = [choice.reason.partition(";")[0]]  # what follows is how it connects
        reasons += [
            f"not {other}: {why}"
            for other, why in choice.rejected.items()
            if registry.spec_of(name).network and registry.spec_of(other).network
        ]
        parts.append(f"{name} to {_list(peers)} ({', '.join(reasons)})")
    return "; ".join(parts)


def explain_transports(choices: Mapping[int, TransportChoice]) -> list[str]:
    """Explain the choice of the transport of each peer, one line per group of equal choices."""
    groups: dict[str, list[int]] = {}
    for peer, choice in sorted(choices.items()):
        others = "; ".join(f"not {name}: {reason}" for name, reason in choice.rejected.items())
        text = f"{choice.name}, {choice.reason}" + (f" ({others})" if others else "")
        groups.setdefault(text, []).append(peer)
    return [f"  to {_list(peers)}: {text}" for text, peers in groups.items()]


def explain_losses(paths: Iterable[PathStatus]) -> list[str]:
    """Name the peers to which TCP has sent a considerable share of the bytes again."""
    sent: Counter[int] = Counter()
    resent: Counter[int] = Counter()
    for path in paths:
        if path.transport == "tcp":
            sent[path.peer] += path.sent_bytes
            resent[path.peer] += path.resent_bytes
    return [
        f"  to {peer}: {resent[peer] / sent[peer]:.1%} of the bytes were sent again: compare TCP "
        "with MIRACCL_NET=udp, which tolerates loss (miraccl net bench --net udp)"
        for peer in sorted(sent)
        if sent[peer] >= RESENT_FROM_BYTES and resent[peer] >= RESENT_SHARE * sent[peer]
    ]


def explain_dead_paths(paths: Iterable[PathStatus]) -> list[str]:
    """Name the paths to each peer that carry nothing now, such as between networks without a
    route.
    """
    by_peer: dict[int, list[PathStatus]] = {}
    for path in paths:
        by_peer.setdefault(path.peer, []).append(path)
    lines = []
    for peer, found in sorted(by_peer.items()):
        dead = [path for path in found if path.state in ("DEAD", "PROBING")]
        if dead:
            names = ", ".join(f"{path.local} to {path.remote} ({path.state})" for path in dead)
            works = len(found) - len(dead)
            lines.append(f"  to {peer}: {works} of {len(found)} paths work; not {names}")
    return lines


def _by_name(choices: Mapping[int, TransportChoice]) -> dict[str, list[int]]:
    """Peers of each transport, the best-scored transport first."""
    peers: dict[str, list[int]] = {}
    for peer, choice in sorted(choices.items(), key=lambda item: (-item[1].score, item[0])):
        peers.setdefault(choice.name, []).append(peer)
    return peers


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
