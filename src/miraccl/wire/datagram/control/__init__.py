"""Congestion controllers by name.  A new one is one file and one line here."""

from __future__ import annotations

from miraccl.errors import InvalidUsage, did_you_mean
from miraccl.wire.datagram.control.base import RATE, WINDOW, AckSample, Controller
from miraccl.wire.datagram.control.bbr import BBR
from miraccl.wire.datagram.control.cubic import CUBIC
from miraccl.wire.datagram.control.fixed import FIXED
from miraccl.wire.datagram.control.nscc import NSCC
from miraccl.wire.datagram.control.reno import RENO
from miraccl.wire.datagram.control.swift import SWIFT
from miraccl.wire.datagram.control.timely import TIMELY

CONTROLLERS = {c.name: c for c in (SWIFT, CUBIC, RENO, BBR, TIMELY, NSCC, FIXED)}

__all__ = ["CONTROLLERS", "RATE", "WINDOW", "AckSample", "Controller", "controller"]


def controller(name: str) -> Controller:
    """Return the controller called ``name``; ``InvalidUsage`` lists the names."""
    try:
        return CONTROLLERS[name]
    except KeyError:
        allowed = ", ".join(sorted(CONTROLLERS))
        raise InvalidUsage(
            f"cannot use the congestion control {name!r}: allowed are {allowed}",
            hint=did_you_mean(name, CONTROLLERS),
        ) from None
