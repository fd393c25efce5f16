"""What own ranks are given so that ``miraccl.init()`` finds its communicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def local_environ(nranks: int, extra: Mapping[str, str] | None = None) -> Callable[[int], dict[str, str]]:
    """The environment of each rank of a new job on this host, as a function of the rank."""
    from miraccl.bootstrap import get_unique_id

    unique_id = str(get_unique_id())

    def environ(rank: int) -> dict[str, str]:
        return {
            "MIRACCL_RANK": str(rank),
            "MIRACCL_NRANKS": str(nranks),
            "MIRACCL_LOCAL_RANK": str(rank),
            "MIRACCL_LOCAL_NRANKS": str(nranks),
            "MIRACCL_UNIQUE_ID": unique_id,
            **(extra or {}),
        }

    return environ


def warm_up() -> None:
    """Import what every rank needs, so that forked ranks have it already."""
    import numpy  # noqa: F401

    import miraccl  # noqa: F401
