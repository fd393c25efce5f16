"""Validators for JSON documents.

A validator is a function of (value, where) that raises ``TopologyError`` with the place, the value
and the allowed values; ``where`` is a path such as ``graphs[2].intra[0]``. Consistency between
values is left to the reader of the document.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from miraccl.errors import TopologyError

Validator = Callable[[Any, str], None]

INT32_MAX = (1 << 31) - 1
_LARGEST_SINGLE = (2 - 2**-23) * 2.0**127


def raise_invalid(where: str, value: object, allowed: str) -> NoReturn:
    """Raise ``TopologyError`` for a value that is not allowed."""
    shown = repr(value)
    raise TopologyError(
        f"cannot read {where or 'the document'}: "
        f"it is {shown if len(shown) <= 60 else shown[:57] + '...'}; allowed is {allowed}"
    )


def integer(low: int = -INT32_MAX - 1, high: int = INT32_MAX) -> Validator:
    """Accept an integer from ``low`` to ``high``."""

    def check(value: Any, where: str) -> None:
        if type(value) is not int or not low <= value <= high:
            raise_invalid(where, value, f"a whole number from {low} to {high}")

    return check


def float32(value: Any, where: str) -> None:
    """Accept a finite number of single precision."""
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > _LARGEST_SINGLE:
        raise_invalid(where, value, "a finite number of single precision")


def any_value(value: Any, where: str) -> None:
    """Accept any value; its reader validates it."""


def string(pattern: str = ".*", like: str = "a text") -> Validator:
    """Accept a text that matches ``pattern``; ``like`` describes it in errors."""
    compiled = re.compile(pattern, re.DOTALL)

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise_invalid(where, value, like)

    return check


def one_of(*values: str | int) -> Validator:
    """Accept one of the given values, with its type."""

    def check(value: Any, where: str) -> None:
        if not any(
            type(value) is type(item_value) and value == item_value for item_value in values
        ):
            raise_invalid(where, value, " or ".join(map(repr, values)))

    return check


def list_of(item: Validator, min_length: int = 0, max_length: int | None = None) -> Validator:
    """Accept a list of ``min_length`` to ``max_length`` items."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list):
            raise_invalid(where, value, "a list")
        if len(value) < min_length or (max_length is not None and len(value) > max_length):
            raise_invalid(
                where,
                value,
                f"a list of {min_length} or more"
                if max_length is None
                else f"a list of {min_length} to {max_length}",
            )
        for index, item_value in enumerate(value):
            item(item_value, f"{where}[{index}]")

    return check


def fixed_list(*items: Validator) -> Validator:
    """Accept a list with one validator per item."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or len(value) != len(items):
            raise_invalid(where, value, f"a list of {len(items)}")
        for index, (item, item_value) in enumerate(zip(items, value, strict=True)):
            item(item_value, f"{where}[{index}]")

    return check


def record(fields: Mapping[str, Validator], optional: Iterable[str] = ()) -> Validator:
    """Accept an object with these keys; other keys are ignored."""
    optional_keys = frozenset(optional)

    def check(value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            raise_invalid(where, value, "an object")
        for key, validator in fields.items():
            name = f"{where}.{key}" if where else key
            if key in value:
                validator(value[key], name)
            elif key not in optional_keys:
                raise TopologyError(f"cannot read {name}: it is missing")

    return check


def mapping(item: Validator) -> Validator:
    """Accept an object with arbitrary keys."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            raise_invalid(where, value, "an object")
        for key, item_value in value.items():
            item(item_value, f"{where}.{key}")

    return check
