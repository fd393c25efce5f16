"""The proxy's machine without sockets: every order of events, credit, wants, ends, and frames that
no peer of ours would send.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.errors import CommunicatorAborted, MiracclError, PeerDied, ProtocolError
from miraccl.wire import proxy_records as rec
from miraccl.wire.proxy import ProxyLink, replay
from miraccl.wire.proxy_check import validate_state
from miraccl.wire.proxy_sender import RAIL_SEGMENTS
from miraccl.wire.proxy_states import (
    LINK_TABLE,
    RECV_TABLE,
    SEND_TABLE,
    LinkState,
    RecvState,
    SendState,
)
from miraccl.wire.stream import MIN_SEGMENT_BYTES, Frame, FrameType
from tests.wire.link_world import World

SLOT = 8192
BIG = 5 * MIN_SEGMENT_BYTES + 7
CONFIG = rec.LinkConfig(
    nstreams=2, send_slot_bytes=SLOT, recv_slot_bytes=SLOT, segment_bytes=2 * MIN_SEGMENT_BYTES
)
ONE_STREAM = rec.LinkConfig(nstreams=1, send_slot_bytes=SLOT, recv_slot_bytes=SLOT)


def sends(instructions, kind=None):
    return [
        do.frame
        for do in instructions
        if isinstance(do, rec.SendFrame) and (kind is None or do.frame.type is kind)
    ]


def lost(instructions: list[rec.Instruction]) -> rec.Loss:
    losses = [do.loss for do in instructions if isinstance(do, rec.PeerLost)]
    assert len(losses) == 1
    return losses[0]


def data(
    message: int = 0,
    nbytes: int = 10,
    *,
    stream: int = 0,
    offset: int = 0,
    length: int | None = None,
    signature: int = 5,
    ack: int = 0,
) -> Frame:
    return Frame(
        FrameType.DATA,
        stream,
        message,
        signature,
        nbytes,
        offset,
        nbytes - offset if length is None else length,
        ack,
    )


# --- messages arrive ---


@pytest.mark.parametrize("nbytes", [0, 1, 31, 32, 33, SLOT - 1, SLOT])
def test_message_up_to_a_slot_needs_no_want(nbytes):
    world = World(ONE_STREAM, ([nbytes], []))
    world.run()
    world.check_complete()
    expected = rec.Placement.INLINE if nbytes <= 32 else rec.Placement.SLOT
    assert world.sides[1].delivered[0].placement is expected
    assert len(sends(world.sides[0].did)) == 1


@pytest.mark.parametrize("nbytes", [33, SLOT, SLOT + 1, BIG])
def test_wanted_message_lands_where_it_is_wanted(nbytes):
    world = World(CONFIG, ([nbytes], []), ({}, {0: BIG}))
    world.want(1, 0)
    world.run()
    world.check_complete()
    assert world.sides[1].delivered[0].placement is rec.Placement.POSTED


def test_want_that_comes_first_saves_the_announcement():
    world = World(CONFIG, ([BIG], []), ({}, {0: BIG}))
    world.want(1, 0)
    world.take(1, 0)
    world.arrive(0, 0)
    world.run()
    world.check_complete()
    assert not world.frames(0, FrameType.ANNOUNCE)


def test_large_message_waits_for_its_want_and_others_pass_it():
    world = World(CONFIG, ([BIG, 5], []), ({}, {}))
    world.run()
    side = world.sides[1]
    assert side.announced == {0: BIG}
    assert side.delivered == []  # message 1 is there, but delivery is in order
    assert side.placed == {1: [(0, 5)]}
    assert world.sides[0].tail == 0
    side.rooms[0] = BIG
    world.run()
    world.check_complete()


def test_announcement_and_want_may_cross():
    world = World(CONFIG, ([BIG], []), ({}, {0: BIG}))
    world.post(0)
    world.want(1, 0)
    world.run()
    world.check_complete()
    assert world.frames(0, FrameType.ANNOUNCE)
    assert world.frames(1, FrameType.CTS)
    assert world.sides[1].announced == {}


def test_data_may_overtake_the_announcement_on_another_stream():
    link = ProxyLink(CONFIG)
    link.handle(rec.ReceivePosted(0, BIG))
    link.handle(rec.FrameReceived(1, data(0, BIG, stream=1, length=MIN_SEGMENT_BYTES)))
    assert link.handle(rec.FrameReceived(0, Frame(FrameType.ANNOUNCE, 0, 0, 5, BIG))) == []
    assert link.alive


def test_data_may_overtake_the_announcement_by_so_much_that_they_are_consumed():
    link = ProxyLink(CONFIG)
    link.handle(rec.ReceivePosted(0, BIG))
    link.handle(rec.FrameReceived(1, data(0, BIG, stream=1)))
    assert link.handle(rec.PayloadPlaced(1)) == [
        rec.DeliverMessage(0, 5, BIG, rec.Placement.POSTED)
    ]
    link.handle(rec.MessagesConsumed(1))
    assert link.handle(rec.FrameReceived(0, Frame(FrameType.ANNOUNCE, 0, 0, 5, BIG))) == []
    assert link.alive


@pytest.mark.parametrize("want_first", [True, False])
def test_room_that_is_too_small_is_delivered_as_oversize_and_no_byte_is_sent(want_first):
    world = World(CONFIG, ([BIG], []), ({}, {0: SLOT + 1}))
    if want_first:
        world.want(1, 0)
        world.take(1, 0)
        world.arrive(0, 0)
    else:
        world.post(0)
        world.take(0, 0)
        world.arrive(1, 0)
    world.run()
    assert [d.placement for d in world.sides[1].delivered] == [rec.Placement.OVERSIZE]
    assert world.sides[1].delivered[0].nbytes == BIG
    assert not world.frames(0, FrameType.DATA)


def test_sender_gets_its_memory_back_when_an_oversize_message_is_consumed():
    world = World(CONFIG, ([BIG, 1, 1, 1, 1], []), ({}, {0: 1}))
    world.want(1, 0)
    world.run()
    assert world.sides[0].tail == 5
    assert not [f for f in world.frames(0, FrameType.DATA) if f.message == 0]


def test_small_room_does_not_stop_a_message_that_fits_into_its_slot():
    world = World(CONFIG, ([100], []), ({}, {0: 50}))
    world.want(1, 0)
    world.run()
    world.check_complete()
    assert world.sides[1].delivered[0].placement is rec.Placement.SLOT


# --- what is sent ---


def test_large_message_is_striped_over_all_streams_and_small_ones_use_the_first():
    world = World(CONFIG, ([BIG, 100], []), ({}, {0: BIG}))
    world.want(1, 0)
    world.run()
    pieces = [f for f in world.frames(0, FrameType.DATA) if f.message == 0]
    assert {f.stream for f in pieces} == {0, 1}
    assert all(f.length >= MIN_SEGMENT_BYTES for f in pieces[:-1])
    assert all(f.length <= CONFIG.segment_bytes for f in pieces)
    assert {f.stream for f in world.frames(0, FrameType.DATA) if f.message == 1} == {0}


def test_stream_that_is_stuck_does_not_hold_the_message_back():
    """Pieces go to whichever stream has room: with stream 1 stuck from its first piece on, stream 0
    carries the rest.
    """
    world = World(CONFIG, ([BIG], []), ({}, {0: BIG}))
    world.want(1, 0)
    world.take(1, 0)
    world.arrive(0, 0)
    world.post(0)
    while world.sides[0].taken[0]:
        world.take(0, 0)
    pieces = world.frames(0, FrameType.DATA)
    assert sum(f.length for f in pieces) == BIG
    assert (
        sum(f.length for f in pieces if f.stream == 1) <= CONFIG.queue_bytes + CONFIG.segment_bytes
    )


@pytest.mark.parametrize("nbytes", [32 * MIN_SEGMENT_BYTES, 300 * MIN_SEGMENT_BYTES - 5])
def test_segments_are_small_where_streams_use_several_networks(nbytes):
    """No network has much to do when the others are done, and the receiver's ranges suffice."""
    config = replace(CONFIG, rails=2, segment_bytes=1 << 22)
    world = World(config, ([nbytes], []), ({}, {0: nbytes}))
    world.want(1, 0)
    world.run()
    lengths = [f.length for f in world.frames(0, FrameType.DATA)]
    assert sum(lengths) == nbytes
    assert len(lengths) == min(32, RAIL_SEGMENTS) if nbytes < 1 << 23 else RAIL_SEGMENTS
    assert max(lengths) <= -(-nbytes // len(lengths) // 4096) * 4096


def run_networks(config: rec.LinkConfig, nbytes: int, rates: list[int]) -> tuple[int, list[int]]:
    """Send a message over networks that deliver ``rates`` bytes per millisecond, whose kernels take
    frames while they hold less than a segment.

    Returns the milliseconds that it takes, and the bytes that went over each.
    """
    world = World(config, ([nbytes], []), ({}, {0: nbytes}))
    world.want(1, 0)
    world.take(1, 0)
    world.arrive(0, 0)
    world.post(0)
    held, carried, milliseconds = [0] * len(rates), [0] * len(rates), 0
    while not world.sides[0].link.sender.done or any(held):
        for stream, rate in enumerate(rates):
            world.handle(0, rec.StreamMeasured(stream, held[stream], rate))
            if world.sides[0].taken[stream] and held[stream] < MIN_SEGMENT_BYTES:
                length = world.sides[0].taken[stream][0].length
                held[stream] += length
                carried[stream] += length
                world.take(0, stream)
            held[stream] = max(0, held[stream] - rate)
        milliseconds += 1
    return milliseconds, carried


@pytest.mark.parametrize("rates", [[6400, 640], [640, 6400, 6400], [6400, 6400]])
def test_all_networks_end_together(rates):
    """A slow network gets no segment that would arrive after the others have ended."""
    nbytes = 64 * MIN_SEGMENT_BYTES
    config = replace(
        CONFIG, rails=2, nstreams=len(rates), queue_bytes=MIN_SEGMENT_BYTES, segment_bytes=1 << 22
    )
    milliseconds, carried = run_networks(config, nbytes, rates)
    assert sum(carried) == nbytes
    assert milliseconds <= nbytes // sum(rates) + MIN_SEGMENT_BYTES // min(rates) + 2


def test_sender_stops_at_the_receivers_slots():
    world = World(ONE_STREAM, ([100] * 30, []))
    for _ in range(1000):
        moves = [i for i, side in enumerate(world.sides) if side.taken[0]]
        if world.sides[0].to_post and world.sides[0].posted - world.sides[0].tail < 8:
            world.post(0)
        elif moves:
            world.take(moves[0], 0)
        elif 0 in world.sides[1].placing:
            world.place(1, 0)
        elif world.sides[0].wire[0]:
            world.arrive(1, 0)
        else:
            break
    assert len(world.sides[1].delivered) == 8
    assert world.sides[0].tail == 8
    assert world.sides[0].posted == 16
    world.run()
    world.check_complete()


def test_credit_is_told_every_half_ring_and_rides_on_data():
    one_way = World(ONE_STREAM, ([1] * 64, []))
    one_way.run()
    assert 8 <= len(one_way.frames(1, FrameType.CREDIT)) <= 17
    link = ProxyLink(ONE_STREAM)
    for message in range(3):
        link.handle(rec.FrameReceived(0, data(message, 1)))
        link.handle(rec.PayloadPlaced(0))
    assert link.handle(rec.MessagesConsumed(3)) == []
    (frame,) = sends(link.handle(rec.MessagePosted(0, 1, 1)))
    assert frame.ack == 3


def test_memory_is_released_only_when_the_kernel_has_taken_it_in_order():
    link = ProxyLink(CONFIG)
    first = sends(link.handle(rec.MessagePosted(0, 1, 3 * MIN_SEGMENT_BYTES)))
    assert [f.type for f in first] == [FrameType.ANNOUNCE]
    pieces = sends(link.handle(rec.FrameReceived(0, Frame(FrameType.CTS, 0, 0, 0, BIG))))
    assert len(pieces) == 2
    assert sends(link.handle(rec.MessagePosted(1, 1, 20)))[0].message == 1
    on_stream_0 = sum(1 for f in [*first, *pieces] if f.stream == 0) + 1
    # message 1 is taken, message 0 is not
    assert link.handle(rec.FramesWritten(0, on_stream_0)) == []
    assert link.handle(
        rec.FramesWritten(1, sum(1 for f in [*first, *pieces] if f.stream == 1))
    ) == [rec.PublishTail(2)]


# --- every order ---

SIZES = st.lists(
    st.sampled_from([0, 1, 32, 33, SLOT, SLOT + 1, MIN_SEGMENT_BYTES, MIN_SEGMENT_BYTES + 1, BIG]),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(SIZES, SIZES),
    nstreams=st.integers(1, 3),
    control=st.integers(0, 2),
    extra=st.sets(st.integers(0, 13)),
    rates=st.lists(st.sampled_from([0, 1, 1000]), min_size=3, max_size=3),
    rng=st.randoms(use_true_random=False),
)
def test_all_messages_arrive_in_any_order_of_events(sizes, nstreams, control, extra, rates, rng):
    config = rec.LinkConfig(
        nstreams=nstreams + control,
        control_streams=control,
        rails=nstreams,
        send_slot_bytes=SLOT,
        recv_slot_bytes=SLOT,
        segment_bytes=MIN_SEGMENT_BYTES,
    )
    rooms = [{m: BIG for m, n in enumerate(sizes[1 - i]) if n > SLOT or m in extra} for i in (0, 1)]
    world = World(config, sizes, (rooms[0], rooms[1]))
    for stream, rate in enumerate(rates[:nstreams]):
        for i in (0, 1):
            world.handle(i, rec.StreamMeasured(stream, 1000 * stream, rate))
    world.run(lambda n: rng.randrange(n))
    world.check_complete()
    for i, side in enumerate(world.sides):
        again, instructions = replay(config, side.link.log or [])
        assert instructions == side.did, i
        assert again.state is side.link.state
    for i in (0, 1):
        world.handle(i, rec.CloseRequested())
    world.run(lambda n: rng.randrange(n))
    assert [side.link.state for side in world.sides] == [LinkState.FINISHED] * 2


# --- ends ---


def test_close_sends_what_is_posted_and_the_peer_learns_that_it_was_orderly():
    world = World(CONFIG, ([100, BIG], []), ({}, {1: BIG}))
    world.post(0)
    world.post(0)
    world.handle(0, rec.CloseRequested())
    world.run()
    assert len(world.sides[1].delivered) == 2
    assert world.sides[1].loss == rec.Loss(rec.LossKind.CLOSED, "closed its communicator")
    assert world.sides[0].link.state is LinkState.CLOSING  # until the peer's sockets are closed
    for stream in (0, 1):
        world.handle(0, rec.StreamEnded(stream, "end"))
    assert world.sides[0].finished
    assert world.sides[0].loss is None


def test_close_does_not_wait_for_a_peer_that_takes_nothing_any_more():
    """Its kernel had no room for our CLOSE, and then the process was killed."""
    link = ProxyLink(CONFIG)
    link.handle(rec.CloseRequested())
    assert link.state is LinkState.CLOSING
    link.handle(rec.FramesWritten(0, 1))
    link.handle(rec.StreamEnded(0, "gone"))
    assert isinstance(link.handle(rec.StreamEnded(1, "gone"))[-1], rec.LinkFinished)
    assert link.loss is None


def test_close_that_the_kernel_takes_after_the_peer_ended_its_stream_is_no_news():
    """The peer was killed when our CLOSE frames were queued; its end came over one stream first,
    where the kernel took the frame still.
    """
    link = ProxyLink(CONFIG)
    link.handle(rec.CloseRequested())
    assert link.handle(rec.StreamEnded(0, "gone")) == []
    assert link.handle(rec.FramesWritten(0, 1)) == []
    validate_state(link)
    assert isinstance(link.handle(rec.StreamEnded(1, "gone"))[-1], rec.LinkFinished)
    assert link.loss is None


def test_close_of_an_idle_link_does_not_wait_for_the_executor():
    world = World(CONFIG, ([], []))
    world.handle(0, rec.CloseRequested())
    world.handle(1, rec.CloseRequested())
    world.run()
    assert all(side.finished and side.loss is None for side in world.sides)


def test_peer_that_closes_first_ends_a_link_that_still_has_to_send():
    world = World(CONFIG, ([BIG], []))
    world.post(0)
    world.handle(0, rec.CloseRequested())
    world.handle(1, rec.CloseRequested())
    world.run()
    assert world.sides[0].link.state is LinkState.FINISHED
    assert world.sides[0].loss is None


@pytest.mark.parametrize("stream", [0, 1])
def test_stream_that_ends_without_close_is_a_loss(stream):
    link = ProxyLink(CONFIG)
    loss = lost(link.handle(rec.StreamEnded(stream, "gone")))
    assert loss == rec.Loss(rec.LossKind.RESET, "gone")
    assert link.state is LinkState.LOST
    assert link.handle(rec.MessagePosted(0, 1, 1)) == []


def test_one_stream_closed_and_the_other_broken_is_a_loss():
    link = ProxyLink(CONFIG)
    assert link.handle(rec.FrameReceived(0, Frame(FrameType.CLOSE, 0))) == []
    assert link.handle(rec.StreamEnded(0, "end")) == []
    assert lost(link.handle(rec.StreamEnded(1, "gone"))).kind is rec.LossKind.RESET


def test_abort_reaches_the_peer_with_its_text():
    world = World(CONFIG, ([], []))
    world.handle(0, rec.AbortRequested("rank 0 is tired"))
    assert world.sides[0].cut == "rank 0 is tired"
    assert world.sides[0].loss is None
    world.handle(1, rec.FrameReceived(0, Frame(FrameType.ABORT, 0, length=15), "rank 0 is tired"))
    assert world.sides[1].loss == rec.Loss(rec.LossKind.ABORTED, "gave up: rank 0 is tired")


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (rec.LossKind.CLOSED, PeerDied),
        (rec.LossKind.RESET, PeerDied),
        (rec.LossKind.PROTOCOL, ProtocolError),
        (rec.LossKind.ABORTED, CommunicatorAborted),
        (rec.LossKind.INTERNAL, MiracclError),
    ],
)
def test_loss_becomes_an_error_that_names_the_peer(kind, error):
    raised = rec.Loss(kind, "did something").error(rank=3, peer=7)
    assert type(raised) is error
    assert (raised.rank, raised.peer) == (3, 7)
    assert "rank 7" in str(raised)
    assert "did something" in str(raised)


@pytest.mark.parametrize(
    "event",
    [
        rec.MessagePosted(1, 0, 0),
        rec.MessagePosted(0, 0, -1),
        rec.MessagePosted(0, 0, 1 << 50),
        rec.MessagesConsumed(1),
        rec.MessagesConsumed(-1),
        rec.InternalError("bug"),
    ],
)
def test_impossible_event_of_this_side_ends_the_link_as_internal(event):
    link = ProxyLink(CONFIG)
    instructions = link.handle(event)
    assert lost(instructions).kind is rec.LossKind.INTERNAL
    assert isinstance(instructions[0], rec.AbortStreams)


# --- frames that cannot be true ---


def started() -> ProxyLink:
    """Message 0 of 100 bytes delivered, message 1 of BIG wanted, message 2 announced without a
    want; two messages of ours sent.
    """
    link = ProxyLink(CONFIG)
    for event in (
        rec.FrameReceived(0, data(0, 100)),
        rec.PayloadPlaced(0),
        rec.ReceivePosted(1, BIG),
        rec.FrameReceived(0, Frame(FrameType.ANNOUNCE, 0, 2, 5, BIG)),
        rec.MessagePosted(0, 7, 10),
        rec.MessagePosted(1, 7, BIG),
    ):
        link.handle(event)
    assert link.alive
    return link


BAD_FRAMES = {
    "other stream": (0, data(1, 10, stream=1)),
    "again": (0, data(0, 100)),
    "beyond the ring": (0, data(8, 10)),
    "too far": (0, data(1 << 40, 10)),
    "larger than a slot, unasked": (0, data(3, SLOT + 1)),
    "larger than the room": (0, data(1, BIG + MIN_SEGMENT_BYTES)),
    "announced, not wanted": (0, data(2, BIG, length=MIN_SEGMENT_BYTES)),
    "announced again": (0, Frame(FrameType.ANNOUNCE, 0, 2, 5, BIG)),
    "announces a small one": (0, Frame(FrameType.ANNOUNCE, 0, 3, 5, SLOT)),
    "announces another size": (0, Frame(FrameType.ANNOUNCE, 0, 0, 5, BIG)),
    "announces too far": (0, Frame(FrameType.ANNOUNCE, 0, 8, 5, BIG)),
    "credit for unsent": (0, Frame(FrameType.CREDIT, 0, ack=3)),
    "wants too far": (0, Frame(FrameType.CTS, 0, 8, 0, BIG)),
    "wants less than a slot": (0, Frame(FrameType.CTS, 0, 1, 0, SLOT)),
    "closes with missing messages": (0, Frame(FrameType.CLOSE, 0, 5)),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_frame_that_cannot_be_true_ends_the_link(name):
    link = started()
    stream, frame = BAD_FRAMES[name]
    instructions = link.handle(rec.FrameReceived(stream, frame))
    if frame.type is FrameType.CLOSE:
        assert instructions == []
        instructions = link.handle(rec.FrameReceived(1, frame._replace(stream=1)))
    loss = lost(instructions)
    assert loss.kind is rec.LossKind.PROTOCOL
    assert "violated the protocol" in loss.detail
    assert not [do for do in instructions if isinstance(do, rec.ReceivePayload)]
    assert [do for do in instructions if isinstance(do, rec.AbortStreams)]


@pytest.mark.parametrize(
    "second",
    [
        data(1, BIG, length=MIN_SEGMENT_BYTES, stream=1),
        data(1, BIG, offset=MIN_SEGMENT_BYTES - 1, length=MIN_SEGMENT_BYTES, stream=1),
        data(1, BIG - 1, offset=MIN_SEGMENT_BYTES, length=MIN_SEGMENT_BYTES, stream=1),
        data(1, BIG, offset=MIN_SEGMENT_BYTES, length=MIN_SEGMENT_BYTES, stream=1, signature=6),
    ],
)
def test_piece_that_contradicts_another_piece_ends_the_link(second):
    link = started()
    assert link.handle(rec.FrameReceived(0, data(1, BIG, length=MIN_SEGMENT_BYTES)))
    assert lost(link.handle(rec.FrameReceived(1, second))).kind is rec.LossKind.PROTOCOL


def test_nothing_comes_after_close():
    link = ProxyLink(CONFIG)
    link.handle(rec.FrameReceived(0, Frame(FrameType.CLOSE, 0)))
    assert (
        lost(link.handle(rec.FrameReceived(0, Frame(FrameType.CREDIT, 0)))).kind
        is rec.LossKind.PROTOCOL
    )


def test_garbage_names_itself():
    assert "xyz" in lost(ProxyLink(CONFIG).handle(rec.Garbage(1, "xyz"))).detail


NUMBERS = st.one_of(
    st.integers(0, 10), st.sampled_from([SLOT, SLOT + 1, BIG, MIN_SEGMENT_BYTES, 1 << 45, 1 << 62])
)
FRAMES = st.builds(
    Frame,
    type=st.sampled_from([t for t in FrameType if t is not FrameType.ABORT]),
    stream=st.integers(0, 1),
    message=NUMBERS,
    signature=st.integers(5, 6),
    nbytes=NUMBERS,
    offset=st.sampled_from([0, 0, 0, MIN_SEGMENT_BYTES, 2 * MIN_SEGMENT_BYTES, 3]),
    length=NUMBERS,
    ack=st.integers(0, 3),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(FRAMES, st.booleans()), max_size=20))
def test_no_frame_can_place_a_byte_outside_what_was_granted(frames):
    """Whatever comes: no exception, invariants hold, placements stay inside slot, line or wanted
    room, and a loss is final.
    """
    world = World(CONFIG, ([], []), ({1: BIG, 3: SLOT + 5}, {}))
    side = world.sides[0]
    for message in (1, 3):
        world.want(0, message)
    for message in (0, 1):
        side.posted += 1
        world.handle(0, rec.MessagePosted(message, 7, (10, BIG)[message]))
    for frame, place in frames:
        valid = frame.type is not FrameType.DATA or frame.offset + frame.length <= frame.nbytes
        if frame.stream in side.placing:
            world.place(0, frame.stream)
        if valid:
            world.handle(0, rec.FrameReceived(frame.stream, frame))
        else:
            world.handle(0, rec.Garbage(frame.stream, "the codec refuses this"))
        if not side.link.alive:
            assert side.loss is not None
            assert side.loss.kind in (rec.LossKind.PROTOCOL, rec.LossKind.CLOSED)
            assert side.link.handle(rec.FrameReceived(0, frame)) == []
            return
        if place and frame.stream in side.placing:
            world.place(0, frame.stream)


# --- the tables and the checker themselves ---


def test_every_state_can_be_reached_and_final_states_have_no_exit():
    assert {state for state, _ in SEND_TABLE} | set(SEND_TABLE.values()) == set(SendState)
    assert set(RECV_TABLE.values()) == set(RecvState)
    assert {state for state, _ in LINK_TABLE} | set(LINK_TABLE.values()) == set(LinkState)
    assert SendState.WRITTEN not in {state for state, _ in SEND_TABLE}
    assert RecvState.DELIVERED not in {state for state, _ in RECV_TABLE}
    assert not {LinkState.FINISHED, LinkState.LOST} & {state for state, _ in LINK_TABLE}


def test_validate_state_notices_a_broken_link():
    link = started()
    validate_state(link)
    link.receiver.tail += 2
    with pytest.raises(AssertionError):
        validate_state(link)


@pytest.mark.parametrize(
    "numbers",
    [
        {"nstreams": 0},
        {"nstreams": 65},
        {"nstreams": 1, "segment_bytes": 4096},
        {"nstreams": 2, "control_streams": 2},
    ],
)
def test_config_refuses_what_cannot_work(numbers):
    with pytest.raises(ValueError, match=r"streams|segments"):
        rec.LinkConfig(send_slot_bytes=SLOT, recv_slot_bytes=SLOT, **numbers)
