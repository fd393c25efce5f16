"""Parser for lists of algorithms and protocols in the syntax of ``NCCL_ALGO`` and ``NCCL_PROTO``.

    ring,collnetdirect;allreduce:tree       ring and CollNet direct; tree alone for all-reduce
    ^LL128;allreduce:LL128                  everything except LL128; LL128 alone for all-reduce

Entries are separated by ``;``. An entry is a list with an optional collective and ``:`` before it;
only the first entry may lack the collective. ``^`` before a list means all others. Case does not
matter (NCCL ``src/graph/tuning.cc`` parseList).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from miraccl.errors import InvalidUsage
from miraccl.graph.tuning_constants import TUNED
from miraccl.types import Collective


class Constraint(enum.IntEnum):
    """Constraint of a setting on one element; without one the model decides."""

    EXCLUDED = 0
    ALLOWED = 1
    UNCONSTRAINED = 2


E = TypeVar("E", bound=enum.IntEnum)


def parse_constraints(
    text: str, labels: Mapping[E, str], variable: str
) -> dict[Collective, dict[E, Constraint]]:
    """Return the constraint of each collective and element of ``labels``.

    ``variable`` is named in errors. An empty text leaves all elements unconstrained. Raises
    ``InvalidUsage`` for an unknown name or a misplaced entry.
    """
    constraints = {coll: dict.fromkeys(labels, Constraint.UNCONSTRAINED) for coll in TUNED}
    by_name = {label.lower(): element for element, label in labels.items()}
    collectives = {label.lower(): coll for coll, label in TUNED.items()}
    for number, entry in enumerate(part for part in text.lower().split(";") if part.strip()):
        collective, _, elements = (word.strip() for word in entry.partition(":"))
        if not elements:
            if number:
                raise InvalidUsage(
                    f"cannot parse {variable}={text!r}: only the first entry may lack a collective"
                )
            collective, elements = "", collective
        if collective and collective not in collectives:
            raise InvalidUsage(
                f"cannot parse {variable}={text!r}: unknown collective {collective!r}; "
                f"known are {', '.join(collectives)}"
            )
        excluded = elements.startswith("^")
        names = [name.strip() for name in elements.removeprefix("^").split(",") if name.strip()]
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise InvalidUsage(
                f"cannot parse {variable}={text!r}: unknown name {unknown[0]!r}; "
                f"known are {', '.join(by_name)}"
            )
        listed = {by_name[name] for name in names}
        for coll in [collectives[collective]] if collective else constraints:
            constraints[coll] = {
                element: Constraint.ALLOWED
                if (element in listed) != excluded
                else Constraint.EXCLUDED
                for element in labels
            }
    return constraints
