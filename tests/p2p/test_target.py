"""The compiled target of a stream against its specification, and mutated frames."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.p2p import stream_layout as frames
from miraccl.wire import p2p_target as wire
from tests.p2p.mutate import run
from tests.p2p.target_pair import SIZES, Regions


@pytest.fixture(scope="module")
def regions() -> Regions:
    return Regions()


def test_constants_are_those_of_the_compiled_code() -> None:
    names = ("MAGIC", "PUT", "GET", "NOTIFY", "END", "ACK", "DATA", "LAST", "NOTIFIES")
    limits = ("MAX_NOTIFY", "MAX_PAYLOAD")
    statuses = ("OK", "STALE", "WRONG_KEY", "NO_RIGHT", "OUTSIDE", "CANCELLED")
    for name in names + limits + statuses:
        assert getattr(wire, name) == getattr(frames, name), name
    assert wire.MAX_EXTENTS == frames.MAX_FRAME_EXTENTS
    assert wire.REQUEST.size == frames.REQUEST_BYTES
    assert wire.REPLY.size == frames.REPLY_BYTES


@st.composite
def requests(draw: Any, regions: Regions) -> Any:
    """Return a request that is allowed, or wrong in one field."""
    slot = draw(st.sampled_from(sorted(regions.regions)))
    region = regions.regions[slot]
    kind = draw(st.sampled_from([wire.PUT, wire.PUT, wire.GET, wire.NOTIFY, wire.END]))
    number = draw(st.integers(0, 3))
    key, generation, position = region.key, region.generation, draw(st.integers(0, 100))
    wrong = draw(st.sampled_from([None] * 6 + ["slot", "key", "generation", "range"]))
    if wrong == "slot":
        slot = draw(st.sampled_from([7, 4095, 4096, (1 << 32) - 1]))
    elif wrong == "key":
        key = bytes(16)
    elif wrong == "generation":
        generation += draw(st.sampled_from([1, 2, -1]))
    if kind == wire.NOTIFY:
        data = draw(st.binary(max_size=40))
        status, linked = draw(st.sampled_from([(0, 1), (0, 0), (5, 0)]))
        return (
            wire.TargetRequest(
                kind=kind,
                number=number,
                payload=len(data),
                generation=linked,
                offset=status,
                position=position,
            ).encode()
            + data
        )
    if kind == wire.END:
        return wire.TargetRequest(kind=kind, number=number, position=position).encode()
    extents = []
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, region.nbytes))
        extents.append((start, draw(st.integers(0, region.nbytes - start))))
    if wrong == "range":
        extents[-1] = draw(
            st.sampled_from([(region.nbytes, 1), (-1, 2), (1 << 62, 4), (region.nbytes - 1, 2)])
        )
    payload = sum(n for _, n in extents)
    head = wire.TargetRequest(
        kind=kind,
        flags=draw(st.integers(0, 3)),
        number=number,
        slot=slot,
        payload=payload,
        generation=generation,
        key=key,
        position=position,
        extents=tuple(extents),
    ).encode()
    return head + (bytes([draw(st.integers(0, 255))]) * payload if kind == wire.PUT else b"")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_compiled_target_does_what_the_specification_says(regions: Regions, data: Any) -> None:
    session = b"".join(data.draw(st.lists(requests(regions), max_size=12)))
    if data.draw(st.booleans()) and session:
        at = data.draw(st.integers(0, len(session) - 1))
        changed = session[at] ^ 1 << data.draw(st.integers(0, 7))
        session = session[:at] + bytes([changed]) + session[at + 1 :]
    compare(regions, session)


def compare(regions: Regions, session: bytes) -> None:
    regions.reset()
    replies, notes, kept = regions.run_model(session)
    got, got_notes = regions.run_compiled(session)
    if kept:
        assert got == replies
    else:  # the end of a violating stream may discard replies that were on their way
        assert replies.startswith(got)
    assert [(n, bool(s), d) for n, s, d in notes] == [(n, bool(s), d) for n, s, d in got_notes]
    for slot, memory in regions.memory.items():
        assert memory.tobytes() == bytes(regions.model[slot])
    assert regions.intact()


def test_large_and_many_extents(regions: Regions) -> None:
    slot = next(s for s, r in regions.regions.items() if r.nbytes == SIZES["rw"])
    region = regions.regions[slot]
    extents = tuple((i, 1) for i in range(0, 2048, 2))
    put = wire.TargetRequest(
        kind=wire.PUT,
        flags=wire.LAST,
        number=1,
        slot=slot,
        payload=1024,
        generation=region.generation,
        key=region.key,
        extents=extents,
    )
    get = wire.TargetRequest(
        kind=wire.GET,
        number=2,
        slot=slot,
        payload=region.nbytes,
        generation=region.generation,
        key=region.key,
        extents=((0, region.nbytes),),
    )
    compare(regions, put.encode() + bytes(1024) + get.encode() + put.encode() + bytes([9]) * 1024)


def test_a_partial_frame_at_the_end_is_stored(regions: Regions) -> None:
    slot = next(s for s, r in regions.regions.items() if r.nbytes == SIZES["rw"])
    region = regions.regions[slot]
    put = wire.TargetRequest(
        kind=wire.PUT,
        flags=wire.LAST | wire.NOTIFIES,
        number=1,
        slot=slot,
        payload=3000,
        generation=region.generation,
        key=region.key,
        extents=((0, 3000),),
    )
    compare(regions, put.encode() + bytes([3]) * 100)
    assert (regions.memory[slot][:100] == 3).all()


def test_mutated_frames_write_nothing_outside() -> None:
    """A few; ``python -m tests.p2p.mutate`` sends a million."""
    assert run(2000, seed=7, per_session=20) > 100
