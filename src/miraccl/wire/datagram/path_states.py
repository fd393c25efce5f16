"""States of a path and their transitions: the table from which the documentation's picture is
drawn.

A path is never given up: DEAD paths are probed until the connection ends.
"""

from __future__ import annotations

import enum


class PathState(enum.Enum):
    """State of one path.

    OPEN: carries data.  SUSPECT: a probe timeout has passed; its data are also sent on other paths.
    DEAD: several probe timeouts in a row; carries probes only.  PROBING: a probe is in flight.
    """

    OPEN = "open"
    SUSPECT = "suspect"
    DEAD = "dead"
    PROBING = "probing"


#: (state, trigger) -> state; a pair that is absent leaves the state as it is.
PATH_TABLE: dict[tuple[PathState, str], PathState] = {
    (PathState.OPEN, "probe timeout"): PathState.SUSPECT,
    (PathState.OPEN, "unreachable"): PathState.SUSPECT,
    (PathState.SUSPECT, "acknowledged"): PathState.OPEN,
    (PathState.SUSPECT, "timeouts exhausted"): PathState.DEAD,
    (PathState.DEAD, "probe sent"): PathState.PROBING,
    (PathState.DEAD, "acknowledged"): PathState.OPEN,
    (PathState.PROBING, "acknowledged"): PathState.OPEN,
    (PathState.PROBING, "probe lost"): PathState.DEAD,
}
