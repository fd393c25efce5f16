"""What a JSON document has to look like, checked before it is read: an error says where, what is there and what is allowed.

A shape is a function of (value, where) that returns nothing or raises ``TopologyError``; ``where`` is a path such as
``graphs[2].intra[0]``.  Whether values fit one another is for the reader to say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from miraccl.errors import TopologyError

Shape = Callable[[Any, str], None]

INT32_MAX = (1 << 31) - 1
_LARGEST_SINGLE = (2 - 2**-23) * 2.0**127


def refuse(where: str, value: object, allowed: str) -> NoReturn:
    shown = repr(value)
    raise TopologyError(
        f"{where or 'the document'} is {shown if len(shown) <= 60 else shown[:57] + '...'}; allowed is {allowed}"
    )


def whole(low: int = -INT32_MAX - 1, high: int = INT32_MAX) -> Shape:
    """A whole number from ``low`` to ``high``."""

    def check(value: Any, where: str) -> None:
        if type(value) is not int or not low <= value <= high:
            refuse(where, value, f"a whole number from {low} to {high}")

    return check


def single(value: Any, where: str) -> None:
    """A number of single precision."""
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > _LARGEST_SINGLE:
        refuse(where, value, "a finite number of single precision")


def anything(value: Any, where: str) -> None:
    """The reader looks at it."""


def text(pattern: str = ".*", like: str = "a text") -> Shape:
    """A text that matches ``pattern``; ``like`` says so in words."""
    compiled = re.compile(pattern, re.DOTALL)

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            refuse(where, value, like)

    return check


def one_of(*values: str | int) -> Shape:
    def check(value: Any, where: str) -> None:
        if not any(type(value) is type(one) and value == one for one in values):
            refuse(where, value, " or ".join(map(repr, values)))

    return check


def list_of(item: Shape, least: int = 0, most: int | None = None) -> Shape:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, list):
            refuse(where, value, "a list")
        if len(value) < least or (most is not None and len(value) > most):
            refuse(
                where,
                value,
                f"a list of {least} or more" if most is None else f"a list of {least} to {most}",
            )
        for number, one in enumerate(value):
            item(one, f"{where}[{number}]")

    return check


def row(*items: Shape) -> Shape:
    """A list with a shape for each of its places."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or len(value) != len(items):
            refuse(where, value, f"a list of {len(items)}")
        for number, (item, one) in enumerate(zip(items, value, strict=True)):
            item(one, f"{where}[{number}]")

    return check


def record(fields: Mapping[str, Shape], optional: Iterable[str] = ()) -> Shape:
    """An object with these keys; others are left alone."""
    may_lack = frozenset(optional)

    def check(value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            refuse(where, value, "an object")
        for key, shape in fields.items():
            name = f"{where}.{key}" if where else key
            if key in value:
                shape(value[key], name)
            elif key not in may_lack:
                raise TopologyError(f"{name} is missing")

    return check


def mapping(item: Shape) -> Shape:
    """An object with any keys."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            refuse(where, value, "an object")
        for key, one in value.items():
            item(one, f"{where}.{key}")

    return check
