"""Slurm's compact lists of host names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

from miraccl.errors import InvalidUsage


def expand_nodelist(text: str) -> Iterator[str]:
    """Yield the host names of Slurm's compact form in order:
    ``n[1-2],gpu[08-10,12]x,a[1-2]b[1-2]``.

    Widths of numbers are preserved. Raises ``InvalidUsage`` for unbalanced brackets and ranges that
    run backwards.
    """
    if re.search(r"\[[^\]]*(\[|$)", text) or re.search(r"(^|\])[^\[]*\]", text):
        raise InvalidUsage(f"cannot parse the node list {text!r}: unbalanced brackets")
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", item.strip())
        choices: list[Callable[[], Iterator[str]] | str] = []
        for index, part in enumerate(parts):
            choices.append(part if index % 2 == 0 else (lambda part=part: _expand_ranges(part)))  # type: ignore[misc]
        yield from _combine(choices)


def _combine(choices: list[Callable[[], Iterator[str]] | str]) -> Iterator[str]:
    pools = [[choice] if isinstance(choice, str) else list(choice()) for choice in choices]
    return map("".join, itertools.product(*pools))


def _expand_ranges(text: str) -> Iterator[str]:
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", piece)
        if match is None or (
            match[2] and not int(match[1]) <= int(match[2]) < int(match[1]) + 1_000_000
        ):
            raise InvalidUsage(f"cannot parse the node range {piece!r}: a range is such as 08-12")
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield f"{number:0{len(match[1])}d}"
