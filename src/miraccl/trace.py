"""Loggers ``miraccl.<subsystem>``, controlled by ``MIRACCL_DEBUG`` and ``MIRACCL_DEBUG_SUBSYS``."""

from __future__ import annotations

import logging
import os
import sys

from miraccl import params
from miraccl.errors import InvalidUsage

LEVELS = {
    "none": logging.CRITICAL + 1,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "trace": logging.DEBUG,
    "version": logging.WARNING,
    "abort": logging.ERROR,
}
SUBSYSTEMS = (
    "aggregation",
    "bootstrap",
    "cache",
    "graph",
    "init",
    "nccl_plugin",
    "net_plugin",
    "p2p",
    "proxy",
    "socket",
    "tuning",
    "verbs",
)
_NCCL_NAMES = {"net": "socket"}


def logger(subsystem: str) -> logging.Logger:
    return logging.getLogger(f"miraccl.{subsystem}")


def configure() -> None:
    """Apply the current environment. Handlers that the application set on ``miraccl`` are left
    alone.
    """
    level = params.DEBUG.read()
    root = logging.getLogger("miraccl")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter(f"miraccl %(levelname)s [{os.getpid()}] %(name)s: %(message)s")
        )
        root.addHandler(handler)
        root.propagate = False
    text, variable = params.DEBUG_SUBSYS.resolve()
    # NCCL_DEBUG_SUBSYS may name subsystems that miraccl does not have; those are ignored.
    if variable.startswith("MIRACCL_") and (allowed := validate_subsystems(text)):
        raise InvalidUsage(f"{variable}={text!r}: {allowed}")
    inverted, named = parse_subsystems(text)
    quiet = max(LEVELS[level], logging.WARNING)
    root.setLevel(quiet if named and not inverted else LEVELS[level])
    for subsystem in named:
        logger(subsystem).setLevel(quiet if inverted else LEVELS[level])


def parse_subsystems(text: str) -> tuple[bool, frozenset[str]]:
    """Parse a list of subsystems to (inverted, names).

    ``^`` in front selects all but the named ones, as in NCCL. ``all`` means the same as an empty
    list.
    """
    inverted = text.startswith("^")
    names = {name.strip() for name in text.removeprefix("^").split(",")} - {""}
    if "all" in names:
        return inverted, frozenset(SUBSYSTEMS if inverted else ())
    return inverted, frozenset(_NCCL_NAMES.get(name, name) for name in names)


def validate_subsystems(text: str) -> str:
    """Return the allowed values if ``text`` names an unknown subsystem, else an empty string."""
    known = parse_subsystems(text.lower())[1] <= set(SUBSYSTEMS)
    return (
        ""
        if known
        else f"allowed are all, {', '.join(SUBSYSTEMS)}, separated by commas, and ^ in front"
    )
