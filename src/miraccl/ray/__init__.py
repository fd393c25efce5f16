"""Communicators for Ray actors; the only package of miraccl that imports ray.

    group = miraccl.ray.create_group(actors)              # driver: actor i becomes rank i
    comm = miraccl.ray.get_group()                        # method of an actor: its communicator
    group.destroy()

``miraccl.ray.register_backend()`` adds MIRACCL to ``ray.util.collective``, and
``miraccl.ray.register_tensor_transport()`` to the tensor transports of actors.
"""

from __future__ import annotations

from miraccl.errors import MissingDependency

try:
    import ray  # noqa: F401
except ImportError as error:
    raise MissingDependency("miraccl.ray needs Ray", hint="pip install 'miraccl[ray]'") from error

from miraccl.ray.groups import Group, create_group, destroy_group
from miraccl.ray.members import get_group, join_group

__all__ = [
    "Group",
    "create_group",
    "destroy_group",
    "get_group",
    "join_group",
    "register_backend",
    "register_tensor_transport",
]


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


def register_tensor_transport() -> None:
    """Register the tensor transport ``MIRACCL`` in this process, for actors made after it.

    Methods with ``@ray.method(tensor_transport="MIRACCL")``, of actors with
    ``@ray.remote(enable_tensor_transport=True)``, then return PyTorch tensors that stay in the
    actor, and that other actors read directly. Idempotent.

    Raises:
        MissingDependency: PyTorch is not installed, or Ray accepts no tensor transports.
    """
    try:
        import torch
        from ray.experimental import register_tensor_transport as register
        from ray.experimental.rdt.util import transport_manager_info

        from miraccl.ray.tensor_transport import NAME, MiracclTensorTransport
    except ImportError as error:
        raise MissingDependency(
            f"cannot register a tensor transport: {error}", hint="pip install torch 'ray>=2.60'"
        ) from error
    if NAME not in transport_manager_info:
        register(NAME, ["cpu", "cuda"], MiracclTensorTransport, torch.Tensor)
