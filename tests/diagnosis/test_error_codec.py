"""Round trip of errors through their JSON notices."""

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


def round_trip(error: MiracclError, rank: int = 1, source: int = 0) -> MiracclError:
    decoded = decode_error(json.loads(json.dumps(encode_error(error))), rank=rank, source=source)
    assert decoded is not None
    return decoded


@pytest.mark.parametrize("kind", KINDS)
def test_all_fields_survive(kind: type[MiracclError]) -> None:
    error = kind("it failed", rank=0, peer=2, op="all_reduce #7", hint="do it again")
    if isinstance(error, CollectiveTimeout):
        error.graph = ("rank 0: waits for rank 2", "rank 2: did not answer")
    decoded = round_trip(error)
    assert type(decoded) is kind
    assert vars(decoded) == {**vars(error), "rank": 1}


def test_class_of_another_module_becomes_its_base() -> None:
    assert type(round_trip(CompileError("no kernel"))) is MiracclError


def test_peer_defaults_to_the_source() -> None:
    assert round_trip(CollectiveTimeout("late"), source=3).peer == 3


def test_own_death_becomes_loss_of_the_source() -> None:
    assert (
        round_trip(
            PeerDied("rank 0 has lost its connection to rank 1", peer=1), rank=1, source=0
        ).peer
        == 0
    )
    assert round_trip(CommunicatorAborted("rank 1 aborted", peer=1), rank=1, source=0).peer == 1


@pytest.mark.parametrize(
    "payload",
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
def test_other_notices_decode_to_none(payload: Any) -> None:
    assert decode_error(payload, rank=0, source=1) is None
