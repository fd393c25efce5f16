"""What ranks are given so that ``miraccl.init()`` finds its communicator, and whether a launcher has done so already."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from miraccl.errors import InvalidUsage


def local_environ(nranks: int, extra: Mapping[str, str] | None = None) -> Callable[[int], dict[str, str]]:
    """The environment of each rank of a new job on this host, as a function of the rank."""
    from miraccl.bootstrap import get_unique_id

    unique_id = str(get_unique_id())

    def environ(rank: int) -> dict[str, str]:
        return {**_numbers(rank, nranks, rank, nranks), "MIRACCL_UNIQUE_ID": unique_id, **(extra or {})}

    return environ


def static_environ(
    nproc: int, nnodes: int, node_rank: int, master: str, environ: Mapping[str, str]
) -> Callable[[int], dict[str, str]]:
    """The environment of each local rank of a job on several hosts that meet at ``master`` (host:port) with a shared secret."""
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidUsage(f"--master is HOST:PORT with a port of 1..65535, got {master!r}")
    if not environ.get("MIRACCL_SECRET"):
        raise InvalidUsage("several hosts need the same MIRACCL_SECRET in the environment: any text that others cannot guess")

    def of_rank(local_rank: int) -> dict[str, str]:
        rank = node_rank * nproc + local_rank
        return {**_numbers(rank, nnodes * nproc, local_rank, nproc), "MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}

    return of_rank


def _numbers(rank: int, nranks: int, local_rank: int, local_nranks: int) -> dict[str, str]:
    return {
        "MIRACCL_RANK": str(rank),
        "MIRACCL_NRANKS": str(nranks),
        "MIRACCL_LOCAL_RANK": str(local_rank),
        "MIRACCL_LOCAL_NRANKS": str(local_nranks),
    }


def warm_up() -> None:
    """Import what every rank needs, so that forked ranks have it already."""
    import numpy  # noqa: F401

    import miraccl  # noqa: F401
