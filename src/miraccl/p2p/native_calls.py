"""Compiled entry points of this package, bound at first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from miraccl import native
from miraccl.native.atomics import bound

LOCAL = "miraccl.p2p.kernels.local"
NOTIFY = "miraccl.p2p.kernels.notify"
RECEIVE = "miraccl.p2p.kernels.receive"
EXTENTS = "miraccl.p2p.kernels.extents"
SERVE = "miraccl.p2p.kernels.serve"
REQUEST = "miraccl.p2p.kernels.request"


@functools.cache
def entry(module: str, name: str) -> Callable[..., Any]:
    """Return the builtin for an export of a kernel source of this package."""
    return bound_entry(module, name, None)


def bound_entry(module: str, name: str, address: int | None) -> Callable[..., Any]:
    """Return a builtin whose first argument is bound: the address of memory that outlives it."""
    return native.builtin(name, native.library(module).address(native.PREFIX + name), address)


def local(name: str) -> Callable[..., Any]:
    return entry(LOCAL, name)


def notify(name: str) -> Callable[..., Any]:
    return entry(NOTIFY, name)


load_word = functools.cache(lambda: bound("load_word"))
store_word = functools.cache(lambda: bound("store_word"))
exchange_word = functools.cache(lambda: bound("exchange_word"))


@functools.cache
def serve() -> Callable[..., int]:
    return entry(SERVE, "serve")


@functools.cache
def run_op() -> Callable[..., int]:
    return entry(REQUEST, "run_op")


@functools.cache
def begin_op() -> Callable[..., int]:
    return entry(REQUEST, "begin_op")
