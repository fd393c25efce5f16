"""Words with a private meaning that are not used, and the term to use instead."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch


@dataclass(frozen=True, kw_only=True)
class Word:
    """A word and its replacement.

    ``except_in`` are patterns of the files in which it is a plain term.
    """

    instead: str
    except_in: tuple[str, ...] = ()

    def allowed(self, path: str) -> bool:
        """Return True if the word is a plain term in the file at ``path``."""
        return any(fnmatch(path, pattern) for pattern in self.except_in)


VOCABULARY: dict[str, Word] = {
    "accident": Word(instead="fault injection"),
    "accidents": Word(instead="fault injection"),
    "bank": Word(instead="buffer half, parity"),
    "banks": Word(instead="buffer half, parity"),
    "beliefs": Word(instead="AgreedConfig"),
    "chief": Word(instead="leader"),
    "circle": Word(instead="cycle"),
    "circles": Word(instead="cycles"),
    "door": Word(instead="fast path, admission, FdChannel, handler"),
    "doors": Word(instead="fast path, admission, FdChannel, handler"),
    "elsewhere": Word(instead="wrong device, other backends"),
    "everyday": Word(instead="fast path, common case"),
    "hasten": Word(instead="install_fast_path"),
    "hear": Word(instead="receive"),
    "heard": Word(instead="received"),
    "hurried": Word(instead="saturates_gpu"),
    "judge": Word(instead="compare_ops, validate"),
    "lookout": Word(instead="DeadlockDetector"),
    "mail": Word(instead="p2p_comm"),
    "meeting": Word(instead="rendezvous, ConnectRound, ControlOp"),
    "meetings": Word(instead="control operations"),
    "nap": Word(instead="yield"),
    "patience": Word(instead="timeout"),
    "seat": Word(instead="WaitStateProvider"),
    "seats": Word(instead="WaitStateProvider"),
    "silence": Word(instead="unresponsive"),
    "stranger": Word(instead="UnauthenticatedPeer"),
    "strangers": Word(instead="UnauthenticatedPeer"),
    "taken": Word(instead="handled, received, consumed"),
    "tell": Word(instead="report, notify"),
    "tells": Word(instead="reports"),
    "told": Word(instead="reported"),
    "untaken": Word(instead="unmatched"),
    "untold": Word(instead="pending report"),
    "visits": Word(instead="device guard", except_in=("*/graph/search/*",)),
    "visitor": Word(instead="device guard"),
    "ways": Word(instead="dispatch, mapping kind, direction, candidates"),
    "whereabouts": Word(instead="blocked_ops"),
    "wish": Word(instead="hint, constraint"),
    "wishes": Word(instead="hints, constraints"),
}
"""Words of the glossary's list, in lower case."""

_TEXT_ONLY = ("nobody", "whoever", "meanwhile", "any more", "in words", "one another")
"""Turns of phrase that occur in prose alone."""

TEXT_WORDS = re.compile(
    r"\b(" + "|".join(sorted([*VOCABULARY, *_TEXT_ONLY], key=len, reverse=True)) + r")\b",
    re.IGNORECASE,
)
