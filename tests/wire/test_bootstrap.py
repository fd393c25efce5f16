"""The machines of the meeting and of the control plane, driven without sockets, clocks or
threads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.errors import ProtocolError
from miraccl.wire import framing
from miraccl.wire.auth import Hello, Unsupported
from miraccl.wire.bootstrap import (
    JOB_TRANSITIONS,
    MEMBER_TRANSITIONS,
    PEER_TRANSITIONS,
    Drop,
    HubLost,
    HubRejected,
    JobState,
    MemberState,
    PeerState,
    Received,
    Send,
    SendMessage,
    Start,
    advance,
    format_ranks,
    replay,
)
from miraccl.wire.bootstrap_failover import SEARCH_TRANSITIONS, SearchState
from miraccl.wire.bootstrap_hub import HubMachine
from miraccl.wire.bootstrap_member import MemberMachine
from miraccl.wire.bootstrap_messages import (
    Accepted,
    Gather,
    Gathered,
    GatherTimeout,
    Gone,
    Goodbye,
    JoinRejected,
    LeaveGroup,
    NoticeMessage,
    OpenGroup,
    RejectCode,
    StatusQuery,
    StatusReply,
    Welcome,
)
from miraccl.wire.framing import encode, encode_frame
from tests.wire.bootstrap_kit import SECRET, Member, Net, meet, nonce


def _gather(
    member: Member,
    data: bytes,
    tag: str = "t",
    number: int = 0,
    group: int = 0,
    timeout: float = 5.0,
) -> None:
    member.send(Gather(group=group, tag=tag, round=number, timeout=timeout, data=data))


# --- meeting ---


@given(st.permutations(range(5)), st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_ranks_join_however_the_bytes_are_cut(order, cuts):
    turn = iter(range(10**9))
    net, members = meet(5, order, chunk=lambda waiting: cuts[next(turn) % len(cuts)])
    assert net.hub.state is JobState.FORMED
    for member in members:
        (welcome,) = member.got(Welcome)
        assert welcome.hub_token == b"hub-proc"
        assert len(welcome.members) == 5
        assert member.machine.state is MemberState.UP


def test_a_job_of_one():
    net, (member,) = meet(1)
    assert member.got(Welcome)
    assert net.hub.state is JobState.FORMED


@pytest.mark.parametrize(
    ("pid", "told"),
    [
        (110, "process 101 from 10.0.0.9:2 joined first, then process 110 from 10.0.0.9:3"),
        (101, "process 101 joined twice"),
    ],
)
def test_duplicate_rank_is_rejected_and_the_job_continues(pid, told):
    net = Net()
    first, second, twin = net.member(0, 2), net.member(1, 2), net.member(1, 2, pid=pid)
    net.run()
    (refused,) = twin.got(JoinRejected)
    assert refused.code == RejectCode.ALREADY_FORMED  # the job has met by then
    assert f"rank 1 is taken: {told}" in refused.text
    assert first.got(Welcome)
    assert second.got(Welcome)


def test_reconnect_replaces_the_old_connection():
    net = Net()
    first, cut = net.member(0, 3), net.member(1, 3)
    net.run()
    assert cut.got(Accepted)  # for all that the hub knows
    again = net.member(1, 3, after=cut)
    third = net.member(1, 3, after=again)
    other = net.member(2, 3)
    net.run()
    assert not cut.open
    assert not again.open
    assert [len(member.got(Welcome)) for member in (first, third, other)] == [1, 1, 1]
    assert net.hub.state is JobState.FORMED


def test_reconnect_after_the_job_formed_counts_as_death():
    net, (first, cut) = meet(2)
    again = net.member(1, 2, after=cut)
    net.run()
    (gone,) = first.got(Gone)
    assert (gone.rank, gone.left, gone.reason) == (
        1,
        False,
        "its connection was cut before the job formed",
    )
    (refused,) = again.got(JoinRejected)
    assert refused.code == RejectCode.DIED
    assert "rank 1 counts as dead: its connection was cut before the job formed" in refused.text


def test_duplicate_explains_a_missing_rank():
    net = Net()
    members = [net.member(rank, 3, timeout=4.0) for rank in (0, 1, 1)]
    net.run()
    net.tick(4.5)
    net.run()
    (refused,) = members[0].got(JoinRejected)
    assert members[2].got(JoinRejected)[0].code == RejectCode.DUPLICATE
    assert refused.ranks == (2,)
    assert "rank 2 of 3 did not join" in refused.text
    assert "rank 1 is taken" in refused.text


def test_different_nranks_end_the_rendezvous():
    net = Net()
    members = [net.member(0, 4), net.member(1, 4), net.member(2, 5)]
    net.run()
    for member in members:
        (refused,) = member.got(JoinRejected)
        assert refused.code == RejectCode.NRANKS
        assert refused.text == "rank 2 was started with nranks=5, rank 0 with nranks=4"
    late = net.member(3, 4)
    net.run()
    assert late.got(JoinRejected)[0].code == RejectCode.NRANKS


def test_the_hub_can_know_nranks_from_the_start():
    net = Net(nranks=2)
    member = net.member(0, 3)
    net.run()
    assert (
        member.got(JoinRejected)[0].text
        == "rank 0 was started with nranks=3, the hub with nranks=2"
    )


def test_late_ranks_learn_of_another_job_size():
    net = Net(nranks=2)
    net.member(1, 3)
    net.run()
    assert not net.finished
    own = net.member(0, 2)
    net.run()
    assert (
        own.got(JoinRejected)[0].text == "rank 1 was started with nranks=3, the hub with nranks=2"
    )
    assert net.finished


def test_missing_ranks_are_named_at_the_deadline_of_the_first():
    net = Net()
    members = [net.member(rank, 8, timeout=10.0 + rank) for rank in (0, 1, 3, 4, 6, 7)]
    net.run()
    net.tick(9.9)
    net.run()
    assert not any(member.got(JoinRejected) for member in members)
    net.tick(10.1)
    net.run()
    for member in members:
        (refused,) = member.got(JoinRejected)
        assert refused.code == RejectCode.MISSING
        assert refused.ranks == (2, 5)
        assert "ranks 2 and 5 of 8 did not join" in refused.text
    late = net.member(5, 8)
    net.run()
    assert late.got(JoinRejected)[0].ranks == (2, 5)
    assert not net.finished
    net.tick(21.0)
    assert net.finished


def test_death_during_rendezvous_is_named_to_all():
    net = Net()
    first, second = net.member(0, 3), net.member(1, 3)
    net.run()
    net.disconnect(second)
    net.run()
    late = net.member(2, 3)
    net.run()
    for member in (first, late):
        (refused,) = member.got(JoinRejected)
        assert refused.code == RejectCode.DIED
        assert refused.ranks == (1,)
        assert "rank 1 of 3 died before all ranks had joined" in refused.text
    assert net.finished


def test_rank_that_leaves_during_rendezvous_is_not_dead():
    net = Net()
    first, second = net.member(0, 3), net.member(1, 3)
    net.run()
    second.send(Goodbye(reason="interrupted"))
    net.run()
    assert first.got(JoinRejected)[0].code == RejectCode.LEFT


def test_hub_closed_during_rendezvous_gives_the_reason():
    net = Net()
    member = net.member(0, 2)
    net.run()
    net.close_hub("changed its mind")
    net.run()
    assert member.got(JoinRejected)[0].code == RejectCode.CLOSED
    assert "changed its mind" in member.got(JoinRejected)[0].text
    assert net.finished


# --- strangers ---


def test_member_with_another_secret():
    net = Net()
    good, bad = net.member(0, 2, timeout=3.0), net.member(1, 2, secret=b"?" * 32)
    net.run()
    (rejected,) = bad.got(HubRejected)
    assert rejected.kind == "secret"
    assert bad.conn in net.dropped
    net.tick(3.5)
    net.run()
    assert (
        "did not know the secret (it claimed to be rank 1 of 2)" in good.got(JoinRejected)[0].text
    )


def test_member_that_ignores_a_wrong_proof_is_rejected():
    """An attacker would not look at the hub's proof; its own proof is wrong all the same."""
    net = Net()
    bad = net.member(0, 1, secret=b"?" * 32)
    bad.machine._handshake = None
    hello = bytes(bad.outbox)
    net.bytes_to_hub(bad.conn, hello)
    bad.outbox.clear()
    net.bytes_to_hub(bad.conn, encode_frame(bytes([3]) + b"p" * 32))
    assert bad.conn in net.dropped
    assert net.hub.state is JobState.GATHERING


def test_other_version_is_answered_with_ours():
    net = Net()
    conn = net.connect()
    net.bytes_to_hub(
        conn, encode_frame(encode(Hello(version=9, rank=0, nranks=1, nonce=bytes(32))))
    )
    assert conn in net.dropped
    member = MemberMachine(secret=SECRET, rank=0, nranks=1, nonce=nonce(1))
    member.handle(Start(now=0.0))
    answer = bytes(net.raw[conn]).replace(b"\x04\x00\x02", b"\x04\x00\x07")
    (_, rejected) = member.handle(Received(now=0.0, data=answer))
    assert rejected == HubRejected(
        kind="version", reason="the hub speaks version 7, this is version 2"
    )
    assert (
        framing.decode(bytes(net.raw[conn])[4:], {Unsupported.KIND: Unsupported}) == Unsupported()
    )


def test_silent_connection_is_dropped_at_the_handshake_deadline():
    net = Net(handshake_timeout=2.0)
    silent = net.connect()
    member = net.member(0, 2)
    net.run()
    net.tick(1.9)
    assert silent not in net.dropped
    net.tick(2.1)
    assert "took too long" in net.dropped[silent]
    assert member.conn not in net.dropped


def test_oldest_silent_connection_is_evicted():
    net = Net(max_pending=4)
    rank0 = net.member(0, 2)
    net.run()
    strangers = [net.connect() for _ in range(10)]
    rank1 = net.member(1, 2)
    net.run()
    assert set(net.dropped) == set(strangers[:7])
    assert rank0.got(Welcome)
    assert rank1.got(Welcome)


def test_connection_with_a_hello_outlives_silent_ones():
    net = Net(max_pending=2)
    member = net.member(0, 1)
    net._move_up(member)  # Hello is in, Proof is not
    flood = [net.connect() for _ in range(5)]
    net.run()
    assert member.got(Welcome)
    assert set(net.dropped) == set(flood[:4])


def test_newcomers_wait_for_pending_handshakes():
    net = Net(max_pending=2)
    assert net.hub.may_accept(net.now)
    net.connect()
    net.now = 0.01
    hello_sayer = net.member(0, 2)
    net._move_up(hello_sayer)
    assert not net.hub.may_accept(0.015)
    assert net.hub.may_accept(0.025)  # the silent one has had its 20 ms
    net.now = 0.025
    net._move_down(hello_sayer)
    net._move_up(hello_sayer)  # proved: no stranger any more
    assert net.hub.may_accept(0.0)


def test_many_ranks_do_not_evict_each_other():
    """More ranks than strangers may be held: all are let in, none is dropped, when the kernel's
    queue is used.
    """
    net = Net(max_pending=4)
    waiting = list(range(20))
    members: list[Member] = []
    while waiting:
        while waiting and net.hub.may_accept(net.now):
            members.append(net.member(waiting.pop(), 20))
        net.run()
    assert not net.dropped
    assert all(member.got(Welcome) for member in members)


def test_idle_connection_with_a_hello_is_evicted_finally():
    net = Net(max_pending=2)
    for _ in range(2):
        conn = net.connect()
        net.bytes_to_hub(conn, encode_frame(encode(Hello(rank=0, nranks=2, nonce=bytes(32)))))
    assert not net.hub.may_accept(0.4)
    assert net.hub.may_accept(0.6)


def test_absurd_job_size_is_rejected():
    net = Net()
    conn = net.connect()
    net.bytes_to_hub(conn, encode_frame(encode(Hello(rank=0, nranks=2**31, nonce=bytes(32)))))
    assert "rank 0 of 2147483648" in net.dropped[conn]


def test_long_unauthenticated_frame_is_dropped():
    net = Net()
    conn = net.connect()
    net.bytes_to_hub(conn, b"GET / HTTP/1.1\r\n")
    assert "allowed are 128" in net.dropped[conn]
    assert net.raw[conn] == b""


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=120), max_size=6), st.booleans())
def test_arbitrary_bytes_never_crash_the_hub(pieces, framed):
    net = Net()
    rank0 = net.member(0, 2)
    net.run()
    conn = net.connect()
    for piece in pieces:
        if conn not in net.dropped:
            net.bytes_to_hub(conn, encode_frame(piece) if framed else piece)
    assert conn not in {peer.conn for peer in net.hub._ranks.values()}
    rank1 = net.member(1, 2)
    net.run()
    assert rank0.got(Welcome)
    assert rank1.got(Welcome)


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=120), max_size=6), st.booleans())
def test_arbitrary_bytes_never_crash_a_member(pieces, framed):
    member = MemberMachine(secret=SECRET, rank=0, nranks=2, nonce=nonce(1))
    member.handle(Start(now=0.0))
    for piece in pieces:
        member.handle(Received(now=0.0, data=encode_frame(piece) if framed else piece))
        member.validate_state()
    assert member.state in (MemberState.HELLO, MemberState.CLOSED)


@settings(max_examples=200)
@given(st.data())
def test_altered_handshake_is_never_accepted(data):
    """The only way in is the untouched conversation of Hello, Challenge, Proof and Join."""
    net = Net(nranks=1, handshake_timeout=5.0)
    member = net.member(0, 1)
    spoilt = data.draw(st.integers(0, 2), label="flight")
    for flight in range(3):
        box = member.inbox if flight == 1 else member.outbox
        if flight == spoilt:
            how = data.draw(
                st.sampled_from(["flip", "cut", "double"] if flight < 2 else ["flip", "cut"])
            )
            if how == "flip":
                bit = data.draw(st.integers(0, len(box) * 8 - 1))
                box[bit // 8] ^= 1 << bit % 8
            elif how == "cut":
                del box[data.draw(st.integers(0, len(box) - 1)) :]
            else:
                box += bytes(box)
        net._move_down(member) if flight == 1 else net._move_up(member)
    net.run()
    net.tick(6.0)
    assert net.hub.state is JobState.GATHERING
    assert member.conn in net.dropped
    assert not member.got(Welcome)


@settings(max_examples=100)
@given(st.data())
def test_altered_frames_harm_their_sender_only(data):
    net, (a, b, c) = meet(3)
    _gather(b, b"part")
    frame = b.outbox
    how = data.draw(st.sampled_from(["flip", "garbage", "replay"]))
    if how == "flip":
        bit = data.draw(
            st.integers(32, len(frame) * 8 - 1)
        )  # not the length: a longer one only waits for more
        frame[bit // 8] ^= 1 << bit % 8
    elif how == "garbage":
        frame[:] = encode_frame(data.draw(st.binary(max_size=60)))
    else:
        frame += bytes(frame)
    net.run()
    assert b.conn in net.dropped
    for member in (a, c):
        (gone,) = member.got(Gone)
        assert (gone.rank, gone.left) == (1, False)
        assert member.machine.state is MemberState.UP


def test_a_member_whose_hub_sends_an_altered_frame_ends_the_connection():
    _net, (a, _) = meet(2)
    a.input(Received(now=0.0, data=encode_frame(b"x" * 40)))
    (lost,) = a.got(HubLost)
    assert not lost.left
    assert a.machine.state is MemberState.CLOSED


# --- the job ---


def test_gathers_overlap_by_tag_and_keep_order():
    net, (a, b) = meet(2)
    _gather(a, b"a-x0", "x")
    _gather(a, b"a-y0", "y")
    _gather(a, b"a-x1", "x", 1)
    _gather(b, b"b-y0", "y")
    _gather(b, b"b-x0", "x")
    net.run()
    expected = [("y", 0, (b"a-y0", b"b-y0")), ("x", 0, (b"a-x0", b"b-x0"))]
    for member in (a, b):
        assert [(g.tag, g.round, g.parts) for g in member.got(Gathered)] == expected
    _gather(b, b"b-x1", "x", 1)
    net.run()
    assert a.got(Gathered)[-1].parts == (b"a-x1", b"b-x1")


def test_gather_timeout_names_missing_ranks():
    net, (a, b, c) = meet(3)
    _gather(a, b"a", timeout=1.0)
    _gather(c, b"c", timeout=9.0)
    net.run()
    net.tick(1.5)
    net.run()
    assert a.got(GatherTimeout)[0].missing == (1,)
    assert not c.got(GatherTimeout)
    _gather(b, b"b")
    net.run()
    assert c.got(Gathered)[0].parts == (b"a", b"b", b"c")


def test_a_result_comes_before_the_loss_that_came_later():
    net, (a, b, c) = meet(3)
    for member in (a, b, c):
        _gather(member, b"x")
    net.run()
    net.disconnect(b)
    net.run()
    kinds = [type(message) for message in a.news]
    assert kinds.index(Gathered) < kinds.index(Gone)


def send_both(member, *messages):
    for message in messages:
        member.send(message)


def test_hub_process_receives_broadcasts_last():
    """Rank 1 may end with the hub as soon as it has heard: then everybody else has been sent the
    same.
    """
    net, (a, b, c, d) = meet(4, token=bytes([101]) * 8)
    told = [net.outputs[-1]]  # Welcome
    answer = StatusReply(group=0, rank=1, ident=1, payload=b"{}")
    for member in (a, b, c):
        _gather(member, b"x")
    for word in (
        lambda: _gather(d, b"x"),
        lambda: a.send(NoticeMessage(group=0, rank=0, seq=1, payload=b"{}")),
        lambda: send_both(a, answer, NoticeMessage(group=0, rank=0, seq=1, payload=b"{}")),
        lambda: net.disconnect(d),
        lambda: net.close_hub(),
    ):
        word()
        net.run()
        told.append(net.outputs[-1])
    for outputs, others in zip(
        told, ((0, 2, 3), (0, 2, 3), (2, 3), (2, 3), (0, 2), (0, 2)), strict=True
    ):
        conns = [output.conn for output in outputs if isinstance(output, Send)]
        hears_last = conns.index(b.conn)
        assert set(conns[hears_last:]) == {
            b.conn
        }  # the answer to its question among them, which came before the notice
        assert conns[hears_last - len(others) : hears_last] == [
            [a, b, c, d][rank].conn for rank in others
        ]


def test_gather_with_a_gone_rank_is_dropped():
    net, (a, b) = meet(2)
    _gather(a, b"x")
    net.run()
    net.disconnect(b)
    assert net.hub._groups._rounds == {}
    _gather(a, b"x", number=1)
    net.run()
    assert net.hub._groups._rounds == {}


def test_notices_carry_the_true_sender():
    net, members = meet(4)
    members[2].send(NoticeMessage(group=0, rank=0, seq=1, payload=b"{}"))  # it claims to be rank 0
    net.run()
    for member in members:
        notices = member.got(NoticeMessage)
        assert [n.rank for n in notices] == ([] if member.rank == 2 else [2])


def test_status_goes_round_and_back():
    net, (a, b, c) = meet(3)
    a.send(StatusQuery(group=0, rank=0, ident=7))
    net.run()
    assert not a.got(StatusQuery)
    for member in (b, c):
        (ask,) = member.got(StatusQuery)
        member.send(StatusReply(group=0, rank=ask.rank, ident=ask.ident, payload=b"{}"))
    net.run()
    assert sorted((r.rank, r.ident) for r in a.got(StatusReply)) == [(1, 7), (2, 7)]


def test_goodbye_is_not_a_loss_and_the_last_one_ends_the_hub():
    net, (a, b, c) = meet(3)
    b.send(Goodbye(reason="finalized"))
    net.run()
    assert [(g.rank, g.left, g.reason) for g in a.got(Gone)] == [(1, True, "finalized")]
    net.disconnect(c)
    net.run()
    assert [(g.rank, g.left) for g in a.got(Gone)] == [(1, True), (2, False)]
    assert not net.finished
    a.send(Goodbye(reason="finalized"))
    net.run()
    assert net.finished
    assert a.machine.state is MemberState.CLOSED
    assert a.got(HubLost)[0].left


def test_closing_hub_notifies_all():
    net, members = meet(2)
    net.close_hub("the interpreter exited")
    net.run()
    for member in members:
        (lost,) = member.got(HubLost)
        assert lost.left
        assert lost.reason == "the interpreter exited"


def test_loss_of_the_hub():
    net, (a, _) = meet(2)
    net.dropped[a.conn] = "the process was killed"
    net.run()
    (lost,) = a.got(HubLost)
    assert not lost.left
    assert lost.state is MemberState.UP


def test_group_traffic_is_separate():
    net, (a, b, c, d) = meet(4)
    for member in (d, b):
        member.send(OpenGroup(group=77, ranks=(3, 1)))
    _gather(d, b"d", group=77)
    _gather(b, b"b", group=77)
    b.send(NoticeMessage(group=77, rank=1, seq=1, payload=b"{}"))
    net.run()
    assert b.got(Gathered)[0].parts == (b"d", b"b")  # in the order of the group
    assert d.got(NoticeMessage)[0].group == 77
    for member in (a, c):
        assert not member.got(Gathered)
        assert not member.got(NoticeMessage)
    b.send(LeaveGroup(group=77, rank=1, reason="done"))
    net.run()
    assert (d.got(LeaveGroup)[0].rank, d.got(LeaveGroup)[0].reason) == (1, "done")
    assert not d.got(Gone)
    d.send(LeaveGroup(group=77, rank=3, reason="done"))
    net.run()
    assert 77 not in net.hub._groups._groups


def test_late_opener_of_a_group_learns_of_departures():
    net, (a, b) = meet(2)
    a.send(OpenGroup(group=5, ranks=(0, 1)))
    a.send(LeaveGroup(group=5, rank=0, reason="short"))
    net.run()
    b.send(OpenGroup(group=5, ranks=(0, 1)))
    net.run()
    assert b.got(LeaveGroup)[0].reason == "short"


@pytest.mark.parametrize(
    "message",
    [
        Gather(group=9, tag="", round=0, timeout=1.0, data=b""),
        OpenGroup(group=9, ranks=(0, 2)),
        OpenGroup(group=9, ranks=(1, 1)),
        OpenGroup(group=9, ranks=(1, 99)),
        OpenGroup(group=9, ranks=()),
        OpenGroup(group=0, ranks=(1,)),
        NoticeMessage(group=9, rank=1, seq=1, payload=b""),
    ],
)
def test_protocol_violation_counts_as_loss(message):
    net, (a, b, _) = meet(3)
    b.send(message)
    net.run()
    assert b.conn in net.dropped
    assert [(gone.rank, gone.left) for gone in a.got(Gone)] == [(1, False)]


def test_two_parts_for_one_gather_are_a_violation():
    net, (_, b) = meet(2)
    _gather(b, b"1")
    _gather(b, b"2")
    net.run()
    assert "twice" in net.dropped[b.conn]


# --- any course of events ---

_ACTIONS = st.sampled_from(
    ["arrive", "stranger", "gather", "notify", "die", "leave", "move", "tick", "garbage", "open"]
)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(_ACTIONS, st.integers(0, 5)), max_size=40))
def test_any_course_of_events_keeps_the_invariants_and_can_be_replayed(actions):
    net = Net(max_pending=3, handshake_timeout=3.0)
    for step, (action, number) in enumerate(actions):
        up = [m for m in net.members.values() if m.open and m.machine.state is MemberState.UP]
        who = up[number % len(up)] if up else None
        if net.finished:
            break
        if action == "arrive":
            net.member(number % 3, 4 if number == 5 else 3, timeout=6.0)
        elif action == "stranger":
            net.connect()
        elif action == "move":
            net.run()
        elif action == "tick":
            net.tick(net.now + number)
        elif action == "garbage" and net._next > 1:
            conn = 1 + number % (net._next - 1)
            if conn not in net.dropped:
                net.bytes_to_hub(conn, bytes([number]) * 7)
        elif who is not None:
            _act(net, who, action, step)
    net.run()
    fresh = HubMachine(**net.options)
    assert replay(fresh, net.log) == net.outputs


def _act(net: Net, who: Member, action: str, step: int) -> None:
    if action == "gather":
        _gather(who, b"x", tag=str(step), timeout=2.0)
    elif action == "notify":
        who.send(NoticeMessage(group=0, rank=who.rank, seq=1, payload=b"{}"))
    elif action == "die":
        net.disconnect(who)
    elif action == "leave":
        who.send(Goodbye(reason="done"))
    elif action == "open":
        who.send(OpenGroup(group=1 + step, ranks=(who.rank,)))


def test_a_member_can_be_replayed():
    log: list[Any] = []
    net = Net(nranks=1)
    conn = net.connect()
    first = MemberMachine(secret=SECRET, rank=0, nranks=1, nonce=nonce(1), log=log)
    outputs = [first.handle(Start(now=0.0))]
    net.bytes_to_hub(conn, outputs[0][0].data)
    outputs.append(first.handle(Received(now=0.1, data=bytes(net.raw[conn]))))
    assert replay(MemberMachine(secret=SECRET, rank=0, nranks=1, nonce=nonce(1)), log) == outputs
    assert [type(event) for event in log] == [Start, Received]


# --- tables and words ---


@pytest.mark.parametrize(
    ("table", "states", "starts"),
    [
        (PEER_TRANSITIONS, PeerState, {PeerState.HELLO}),
        (JOB_TRANSITIONS, JobState, {JobState.GATHERING, JobState.RECOVERING}),
        (MEMBER_TRANSITIONS, MemberState, {MemberState.NEW}),
        (SEARCH_TRANSITIONS, SearchState, {SearchState.DIALING}),
    ],
)
def test_every_state_of_a_table_can_be_reached(table, states, starts):
    reached, frontier = set(starts), list(starts)
    while frontier:
        here = frontier.pop()
        for (state, _), then in table.items():
            if state is here and then not in reached:
                reached.add(then)
                frontier.append(then)
    assert reached == set(states)


def test_unexpected_event_is_a_protocol_error():
    with pytest.raises(ProtocolError, match=r"Welcome is not expected while the state is HELLO"):
        advance(MEMBER_TRANSITIONS, MemberState.HELLO, "Welcome")


def test_command_in_the_wrong_state_is_rejected():
    machine = MemberMachine(secret=SECRET, rank=0, nranks=2, nonce=nonce(1))
    with pytest.raises(ProtocolError):
        machine.handle(
            SendMessage(now=0.0, message=NoticeMessage(group=0, rank=0, seq=1, payload=b"{}"))
        )


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "ranks none"),
        ([3], "rank 3"),
        ([5, 2], "ranks 2 and 5"),
        ([1, 2], "ranks 1 and 2"),
        ([0, 1, 2, 3, 7, 9, 10], "ranks 0-3, 7, 9 and 10"),
        (range(0, 100, 2), "ranks " + ", ".join(str(r) for r in range(0, 46, 2)) + " and 27 more"),
    ],
)
def test_format_ranks(ranks, text):
    assert format_ranks(list(ranks)) == text


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Drop(conn=1, reason="x").conn = 2  # type: ignore[misc]
