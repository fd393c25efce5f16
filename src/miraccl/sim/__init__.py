"""Simulation on virtual links and a virtual clock: machines that are not at hand.

``links`` describes the links that messages cross, ``clock`` times a schedule over them, and
``World`` runs whole programs on virtual ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miraccl.sim.world import World

__all__ = ["World"]


def __getattr__(name: str) -> Any:
    """Import ``World`` on first access: it needs the runtime, which a simulation does not."""
    if name == "World":
        from miraccl.sim.world import World

        return World
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
