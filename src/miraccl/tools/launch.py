"""Environment of the ranks started by the tools, and detection of a launcher.

The hub of a job (its rendezvous) runs in a forked process of its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from miraccl import clock
from miraccl.errors import InvalidUsage, SystemFailure, as_system_failure
from miraccl.tools.spawn import RankContext, Ranks

Environ = Callable[[int], dict[str, str]]
_START_SECONDS = 30.0


@contextmanager
def local_job(
    nranks: int, extra: Mapping[str, str] | None = None, *, torchrun: bool = False
) -> Iterator[Environ]:
    """Run a hub for ranks on this host; yield a function from rank to environment variables.

    Ranks may join repeatedly. With ``torchrun`` the variables of torchrun are among them.
    """
    from miraccl import bootstrap  # noqa: F401 - import before the fork

    # In a process of its own: a tool that forks or kills ranks must have a single thread.
    with Ranks(_run_hub, 1, (nranks,)) as hub:
        unique_id = _first_message(hub)
        port = free_port() if torchrun else 0

        def environ(rank: int) -> dict[str, str]:
            return {
                **_rank_environ(rank, nranks, rank, nranks),
                "MIRACCL_UNIQUE_ID": unique_id,
                **(
                    _torchrun_environ(rank, nranks, rank, nranks, "127.0.0.1", port)
                    if torchrun
                    else {}
                ),
                **(extra or {}),
            }

        yield environ


def _run_hub(context: RankContext, nranks: int) -> None:
    from miraccl.bootstrap.hub import create_hub

    unique_id, root = create_hub(nranks=nranks, reusable=True)
    context.emit(str(unique_id))
    root.join()


def _first_message(hub: Ranks) -> str:
    deadline = clock.monotonic() + _START_SECONDS
    while hub.running and clock.monotonic() < deadline:
        for _, message in hub.poll(max(0.0, deadline - clock.monotonic())):
            return str(message)
    failure = hub.first_failure()
    if failure and failure.fault == "usage":
        raise InvalidUsage(failure.summary.partition(": ")[2])
    raise SystemFailure(
        "cannot start the hub of the job",
        hint=failure.summary if failure else "the hub does not respond",
    )


@contextmanager
def static_job(
    nproc: int, nnodes: int, node_rank: int, master: str, environ: Mapping[str, str]
) -> Iterator[Environ]:
    """Yield a function from local rank to environment variables for a job on several hosts.

    Ranks meet at ``master`` (host:port) and share the secret MIRACCL_SECRET.
    """
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidUsage(
            f"cannot use --master {master!r}: expected HOST:PORT with a port of 1..65535"
        )
    if not environ.get("MIRACCL_SECRET"):
        raise InvalidUsage(
            "cannot start a job on several hosts without MIRACCL_SECRET: set it to the same"
            " unguessable text on each host"
        )

    def environ_of(local_rank: int) -> dict[str, str]:
        place = (node_rank * nproc + local_rank, nnodes * nproc, local_rank, nproc)
        return {
            **_rank_environ(*place),
            "MIRACCL_UNIQUE_ID": "",
            **_torchrun_environ(*place, host.strip("[]"), int(port)),
        }

    yield environ_of


def _rank_environ(rank: int, nranks: int, local_rank: int, local_nranks: int) -> dict[str, str]:
    return {
        "MIRACCL_RANK": str(rank),
        "MIRACCL_NRANKS": str(nranks),
        "MIRACCL_LOCAL_RANK": str(local_rank),
        "MIRACCL_LOCAL_NRANKS": str(local_nranks),
    }


def _torchrun_environ(
    rank: int, nranks: int, local_rank: int, local_nranks: int, host: str, port: int
) -> dict[str, str]:
    """Return the variables that ``torch.distributed.init_process_group`` and scripts read.

    Source: torch/distributed/run.py, "Environment Variables". Rank 0 listens at ``port``.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_nranks),
        "GROUP_RANK": str(rank // local_nranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Return a TCP port of the loopback interface at which nothing listens."""
    with as_system_failure("cannot choose MASTER_PORT"), socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def detect_ranks() -> int | None:
    """Return the number of ranks of the job this process was launched into, None without a
    launcher.
    """
    from miraccl.bootstrap.launch import detect_launch

    launch = detect_launch(os.environ)
    return None if launch.launcher == "none" else launch.nranks


def warm_up() -> None:
    """Import and load everything a rank needs before forking; compiles kernels on first use."""
    import miraccl.api.init  # noqa: F401
    from miraccl import native
    from miraccl.executor.cpu import context
    from miraccl.schedule import catalog

    native.library(context.ENGINE)
    native.library("miraccl.native.words")
    catalog.names()
