"""Communicators for Ray actors.  This package and nothing else in miraccl imports ray.

    group = miraccl.ray.create_group(actors)              # in the driver: actor number i becomes rank i
    comm = miraccl.ray.get_group()                        # in a method of an actor: its communicator
    group.destroy()

``miraccl.ray.register_backend()`` makes MIRACCL a backend of ``ray.util.collective``.  See docs/ray.md.
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
    """Make MIRACCL a backend of ``ray.util.collective`` in this process; the driver and every actor call it. May be called twice.

    Raises ``MissingDependency`` if this version of Ray takes no backends of others.
    """
    from miraccl.ray.backend import (
        register,
    )  # ray.util.collective imports torch and cupy where they are installed

    register()
