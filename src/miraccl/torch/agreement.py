"""Agreement of all ranks on whether the arguments of a call are valid.

A rank that refuses its arguments alone leaves the others waiting in the operation. Ranks that first
exchange whether they refuse raise the same error together, and the group continues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from miraccl.errors import InvalidUsage

if TYPE_CHECKING:
    from miraccl.api.communicator import Communicator

#: Longest text that a rank sends, in bytes.
TEXT_LIMIT = 1000


def refuse_together(communicator: Communicator, error: InvalidUsage | None) -> None:
    """Raise ``InvalidUsage`` on every rank if any rank passes an error.

    Collective over all ranks, in CPU memory: one ``all_gather`` of 8 bytes per rank, and one of the
    texts if there is an error.

    Args:
        communicator: Communicator of the group.
        error: Why this rank refuses its arguments, or None.
    """
    text = b"" if error is None else error.message.encode()[:TEXT_LIMIT]
    lengths = np.zeros(communicator.nranks, np.int64)
    communicator.all_gather(np.array([len(text)], np.int64), lengths)
    if not lengths.any():
        return
    texts = np.zeros((communicator.nranks, int(lengths.max())), np.uint8)
    own = np.zeros(texts.shape[1], np.uint8)
    own[: len(text)] = np.frombuffer(text, np.uint8)
    communicator.all_gather(own, texts)
    ranks_of: dict[str, list[int]] = {}
    for rank, length in enumerate(lengths):
        if length:
            reason = texts[rank, :length].tobytes().decode(errors="replace")
            ranks_of.setdefault(reason, []).append(rank)
    raise InvalidUsage(
        "; ".join(f"{_name(ranks)}: {reason}" for reason, ranks in ranks_of.items()),
        hint="no rank has run the operation; the group can be used further",
    )


def _name(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
