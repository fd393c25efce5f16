"""Arguments of ``explain``, for real and virtual communicators."""

from __future__ import annotations

from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage, did_you_mean
from miraccl.ops.arguments import data_type
from miraccl.ops.array_errors import MAX_BYTES
from miraccl.planning.cost_model import default_block_bytes
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
