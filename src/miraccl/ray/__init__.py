"""Communicators for Ray actors; the only package of miraccl that imports ray.

    group = miraccl.ray.create_group(actors)              # driver: actor i becomes rank i
    comm = miraccl.ray.get_group()                        # method of an actor: its communicator
    group.destroy()

``miraccl.ray.register_backend()`` adds MIRACCL to ``ray.util.collective``.
"""

from __future__ import annotations

from miraccl.errors import MissingDependency

try:
    import ray  # noqa: F401
except ImportError as error:
    raise MissingDependency("miraccl.ray needs Ray", hint="pip install 'miraccl[ray]'") from error

from miraccl.ray.groups import Group, create_group, destroy_group
from miraccl.ray.members import get_group, join_group

__all__ = ["Group", "create_group", "destroy_group", "get_group", "join_group", "register_backend"]


def register_backend() -> None:
    """Register MIRACCL with ``ray.util.collective`` in this process; idempotent.

    The driver and every actor must call it.

    Raises:
        MissingDependency: This version of Ray does not accept custom backends.
    """
    from miraccl.ray.backend import (
        register,
    )  # imported late: ray.util.collective imports torch and cupy if installed

    register()
