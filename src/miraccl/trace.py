"""Log lines of this package: ``miraccl.<subsystem>`` loggers, switched by ``MIRACCL_DEBUG`` and ``MIRACCL_DEBUG_SUBSYS``."""

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


def logger(subsystem: str) -> logging.Logger:
    return logging.getLogger(f"miraccl.{subsystem}")


def configure() -> None:
    """Apply the environment once; a handler that the application installed on ``miraccl`` is left alone."""
    level = params.DEBUG.read()
    if level not in LEVELS:
        raise InvalidUsage(f"MIRACCL_DEBUG={level!r}: allowed are {', '.join(LEVELS)}")
    root = logging.getLogger("miraccl")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"miraccl %(levelname)s [{os.getpid()}] %(name)s: %(message)s"))
        root.addHandler(handler)
        root.propagate = False
    chosen = {s for s in params.DEBUG_SUBSYS.read().split(",") if s and s != "all"}
    root.setLevel(LEVELS[level] if not chosen else logging.WARNING)
    for subsystem in chosen:
        logger(subsystem).setLevel(LEVELS[level])
