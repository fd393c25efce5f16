"""The counterexample that docs/design/kernels.md shows."""

from __future__ import annotations

from tests.gpu.protocols.chain import chain
from tests.gpu.protocols.search import search


def early_acknowledgement() -> str:
    """Return the trace of a chain that acknowledges a packet before it has seen it cleared."""
    return str(search(chain(2, tiles=2, nslots=1, awaits_cleared=False, hellos=False)))
