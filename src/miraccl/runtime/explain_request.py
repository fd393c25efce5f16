"""Requests of ``explain`` on CPU memory, for real and virtual communicators."""

from __future__ import annotations

from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage, did_you_mean
from miraccl.ops.arguments import data_type
from miraccl.ops.array_errors import MAX_BYTES
from miraccl.ops.spec import ALL_REDUCE_SPARSE
from miraccl.planning.cost_model import default_block_bytes
from miraccl.planning.planner import Candidate, Planner
from miraccl.types import Collective, DType


def parse_explain_request(
    collective: str | Collective, nbytes: int, dtype: Any, nranks: int
) -> tuple[Collective, int, DType]:
    """Validate the arguments and return (collective, bytes per block, element type)."""
    name = collective.upper() if isinstance(collective, str) else getattr(collective, "name", "")
    if name not in Collective.__members__ or name == "SEND_RECV":
        known = [c.label for c in Collective if c is not Collective.SEND_RECV]
        raise InvalidUsage(
            f"unknown collective {collective!r}; known are {', '.join(known)}",
            hint=did_you_mean(str(collective), known),
        )
    if (
        isinstance(nbytes, bool)
        or not isinstance(nbytes, int | np.integer)
        or not 0 <= nbytes <= MAX_BYTES
    ):
        raise InvalidUsage(f"explain: nbytes is {nbytes!r}; allowed are 0 to {MAX_BYTES} bytes")
    kind = Collective[name]
    return kind, default_block_bytes(kind, int(nbytes), nranks), data_type(dtype)


def explain_planned(
    planner: Planner,
    nranks: int,
    collective: str | Collective,
    nbytes: int,
    dtype: Any,
    *,
    density: float,
    block: int,
) -> list[Candidate]:
    """Return the candidates of a planner, those of rows for ``all_reduce_sparse``.

    Raises:
        InvalidUsage: An argument is not allowed.
    """
    if collective == ALL_REDUCE_SPARSE.name:
        from miraccl.planning.sparse_planner import SparseModel  # late: few programs need it

        element = data_type(dtype)
        row = block * element.itemsize
        model = SparseModel(planner)
        return [*model.explain(int(nbytes), element, density, row, in_window=False)]
    kind, block_bytes, element = parse_explain_request(collective, nbytes, dtype, nranks)
    return planner.candidates(kind, block_bytes, element)
