"""Signatures of collectives that are sent as messages: 32 bits on which all ranks must agree.

They are part of message headers and of the entries ``layout.MESSAGE_OP`` (source/p2p.cuh).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from miraccl.native.hashing import mix
from miraccl.types import Collective

NO_ROOT = 15
#: Message collectives as named in errors. gather and scatter cover gather_v and scatter_v.
_LABELS = {
    Collective.GATHER: "gather",
    Collective.SCATTER: "scatter",
    Collective.ALL_GATHER: "all_gather_v",
    Collective.ALL_TO_ALL: "all_to_all_v",
    Collective.BARRIER: "barrier",
}


def pack_signature(collective: int, root: int, hashed: int) -> int:
    """Return the signature of a collective; never 0. Compiled code computes it as well.

    ``root`` is a rank or ``NO_ROOT``; ``hashed`` is a hash of the counts that all ranks know. Roots
    that exceed the field (ranks of several hosts) change the hash.
    """
    field = min(root, NO_ROOT)
    return collective << 28 | field << 24 | (hashed ^ (root - field) * 0x9E3779B1) & 0xFFFFFF


def op_signature(collective: Collective, root: int = NO_ROOT, counts: Sequence[int] = ()) -> int:
    """Return the signature of a collective with these ``counts`` per rank; no counts if ranks do
    not
    know them.
    """
    return pack_signature(
        int(collective), root if collective.rooted else NO_ROOT, functools.reduce(mix, counts, 0)
    )


def op_tag(number: int, launches: int, signature: int) -> int:
    """Return the tag of a collective in headers and entries (``op_tag`` of source/p2p.cuh).

    ``number``: number of the message collective; ``launches``: launches before it.
    """
    return (signature ^ number * 0x9E3779B1 ^ launches * 0x85EBCA6B) & 0xFFFFFFFF or 1


def describe_signature(signature: int) -> str:
    """Return a collective as text: ``gather (root 1)``."""
    code, root = signature >> 28 & 15, signature >> 24 & 15
    if code not in Collective._value2member_map_ or code not in _LABELS:
        return "an unknown collective"
    label, rooted = _LABELS[Collective(code)], Collective(code).rooted
    text = f"{NO_ROOT} or above" if root == NO_ROOT else f"{root}"
    return f"{label} (root {text})" if rooted else label
