"""Errors come out of notices as they went in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miraccl import errors
from miraccl.diagnosis.error_codec import decode_error, encode_error
from miraccl.errors import CollectiveTimeout, CommunicatorAborted, MiracclError, PeerDied
from miraccl.executor.cuda.toolkit import CompileError

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, MiracclError)
]


def told(error: MiracclError, rank: int = 1, source: int = 0) -> MiracclError:
    heard = decode_error(json.loads(json.dumps(encode_error(error))), rank=rank, source=source)
    assert heard is not None
    return heard


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost(kind: type[MiracclError]) -> None:
    error = kind("it failed", rank=0, peer=2, op="all_reduce #7", hint="do it again")
    if isinstance(error, CollectiveTimeout):
        error.graph = ("rank 0: waits for rank 2", "rank 2: did not answer")
    heard = told(error)
    assert type(heard) is kind
    assert vars(heard) == {**vars(error), "rank": 1}


def test_an_error_that_another_module_defines_is_told_as_what_it_is_derived_from() -> None:
    assert type(told(CompileError("no kernel"))) is MiracclError


def test_what_says_nothing_of_a_peer_is_about_who_told() -> None:
    assert told(CollectiveTimeout("late"), source=3).peer == 3


def test_a_rank_that_hears_of_its_own_death_has_lost_who_told() -> None:
    assert (
        told(PeerDied("rank 0 has lost its connection to rank 1", peer=1), rank=1, source=0).peer
        == 0
    )
    assert told(CommunicatorAborted("rank 1 aborted", peer=1), rank=1, source=0).peer == 1


@pytest.mark.parametrize(
    "words",
    [
        None,
        "enough",
        {},
        {"kind": None},
        {"kind": "SystemExit"},
        {"kind": "Fault"},
        {"kind": "for a test"},
    ],
)
def test_notices_that_are_no_errors(words: Any) -> None:
    assert decode_error(words, rank=0, source=1) is None
