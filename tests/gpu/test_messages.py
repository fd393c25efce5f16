"""Sends and receives on emulated GPUs: the kernel, and the lowering of messages."""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import types
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.lower import CommArgs
from miraccl.executor.cuda.message_collectives import describe_signature, op_signature
from miraccl.executor.cuda.message_lowering import (
    LoweredMessages,
    P2pMessage,
    WarpQueueRules,
    lower_messages,
)
from miraccl.executor.cuda.source import Framing
from miraccl.runtime.gpu.flight_recorder import read_progress_header, read_snapshot
from miraccl.runtime.gpu.messages import message_frame, read_rejected_size
from miraccl.topo.records import PathType
from miraccl.transport.cuda_pairs import HOST, IPC, P2pChoice
from miraccl.types import Collective, DType
from tests.gpu.emulator import EmulatedMachine, exchange, needs_compiler
from tests.gpu.emulator.exchange import EmulatedSend, run

FRAMES = [Framing.LINE, Framing.PAIR]
GPU: Any = types.SimpleNamespace(read=ctypes.string_at)  # its memory is host memory


@functools.cache
def machine(nranks: int, frame: Framing) -> EmulatedMachine:
    """Machine shared by tests, so counters persist as in a communicator."""
    return EmulatedMachine(nranks)


def rules(nranks: int, frame: Framing = Framing.LINE, nqueues: int = 2) -> WarpQueueRules:
    """Return rules with few warp queues, so short messages wrap around row FIFOs."""
    found = WarpQueueRules(nranks=nranks, multiprocessors=128, frame=frame)
    return (
        FewWarpQueueRules(nranks=nranks, multiprocessors=128, frame=frame, width=nqueues)
        if nqueues < found.max_warp_queues
        else found
    )


class FewWarpQueueRules(WarpQueueRules):
    def __init__(self, *, width: int, **more: object) -> None:
        super().__init__(**more)  # type: ignore[arg-type]
        object.__setattr__(self, "width", width)

    @property
    def max_warp_queues(self) -> int:
        return int(self.width)  # type: ignore[attr-defined]


def check_messages(
    sends: list[EmulatedSend], nranks: int = 2, frame: Framing = Framing.LINE, nqueues: int = 2
) -> None:
    where = machine(nranks, frame)
    assert [text for text in run(where, rules(nranks, frame, nqueues), sends) if text] == []
    assert where.errors() == [0] * nranks


# around the limits of vectors, rows, groups and pairs of groups, in both frames
EDGES = (0, 16, 120, 448, 496, 1008, 1344, 1792, 2032, 3776, 5000)
SIZES = sorted({max(0, edge + change) for edge in EDGES for change in (-1, 0, 1)})


@needs_compiler
@pytest.mark.parametrize("frame", FRAMES)
def test_sizes(frame: Framing) -> None:
    check_messages([EmulatedSend(0, 1, size) for size in SIZES], frame=frame)
    check_messages([EmulatedSend(1, 0, size) for size in reversed(SIZES)], frame=frame, nqueues=1)


@needs_compiler
@pytest.mark.parametrize("frame", FRAMES)
def test_addresses(frame: Framing) -> None:
    offsets = [1, 2, 4, 8, 12]
    check_messages(
        [EmulatedSend(0, 1, 1000 + a, a, b) for a, b in itertools.product(offsets, [0, *offsets])],
        frame=frame,
    )


@needs_compiler
@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("nqueues", [1, 3])
def test_row_fifos_wrap_around(frame: Framing, nqueues: int) -> None:
    """Several times the capacity of the row FIFOs, in both directions at once."""
    size = 3 * nqueues * layout.FIFO_ROWS * layout.ROW_BYTES
    check_messages(
        [EmulatedSend(0, 1, size + 5), EmulatedSend(1, 0, size)], frame=frame, nqueues=nqueues
    )


@needs_compiler
@pytest.mark.parametrize("frame", FRAMES)
def test_all_pairs_at_once(frame: Framing) -> None:
    pairs = [EmulatedSend(a, b, 4000 + 700 * a + 90 * b) for a in range(3) for b in range(3)]
    check_messages(pairs + pairs[::-1], 3, frame)


@needs_compiler
def test_four_ranks() -> None:
    check_messages(
        [EmulatedSend(a, b, 3000 * (1 + a)) for a in range(4) for b in range(4)], 4, nqueues=1
    )


@needs_compiler
def test_orders_that_would_deadlock_ungrouped() -> None:
    """Ranks 0 and 1 both send first, more than the row FIFOs hold."""
    big = 2 * layout.FIFO_ROWS * layout.ROW_BYTES
    check_messages(
        [
            EmulatedSend(0, 1, big),
            EmulatedSend(0, 1, big),
            EmulatedSend(1, 0, big),
            EmulatedSend(1, 0, 0),
            EmulatedSend(0, 1, 3),
        ],
        nqueues=1,
    )


@needs_compiler
def test_many_messages_are_read_from_a_table() -> None:
    check_messages(
        [EmulatedSend(i % 2, 1 - i % 2, 1 + i % 40) for i in range(2 * layout.MAX_MESSAGES)]
    )


@needs_compiler
def test_launches_of_changing_shapes() -> None:
    for round_ in range(12):
        sends = [EmulatedSend(0, 1, 300 * round_), EmulatedSend(1, 0, 5000 - 400 * round_)]
        check_messages(sends[round_ % 3 == 0 : 1 + (round_ % 3 < 2)], nqueues=2)


@needs_compiler
def test_messages_may_be_distributed_over_launches_differently() -> None:
    """Rank 0 sends three messages in three launches, rank 1 receives them in one."""
    where = machine(2, Framing.LINE)
    sends = [EmulatedSend(0, 1, 100), EmulatedSend(0, 1, 3000), EmulatedSend(0, 1, 20)]
    for number in range(3):
        run(where, rules(2), sends[number : number + 1], seed=1, only=[0])
    assert run(where, rules(2), [EmulatedSend(0, 1, 100)], seed=1, only=[1]) == [""]
    run(where, rules(2), [EmulatedSend(0, 1, 3000), EmulatedSend(0, 1, 20)], only=[1])
    check_messages([EmulatedSend(0, 1, 9), EmulatedSend(1, 0, 8)])


def rejected_size(where: EmulatedMachine) -> int | None:
    """Return the size of rank 0's message that rank 1 has rejected."""
    return read_rejected_size(GPU, where.comm_args(0), 1)


@needs_compiler
@pytest.mark.parametrize(
    ("sent", "expected"), [(100, 99), (0, 1), (16, 0), (5000, 100), (100, 5000), (200_000, 300_000)]
)
@pytest.mark.parametrize("frame", FRAMES)
def test_sizes_that_differ_are_reported(sent: int, expected: int, frame: Framing) -> None:
    where = EmulatedMachine(2)
    run(where, rules(2, frame), [EmulatedSend(0, 1, sent, expected=expected)])
    host = where.host[1]
    assert host[layout.HOST_ERROR] == layout.ERROR_SIZES
    assert (host[layout.HOST_PEER], host[layout.HOST_AWAITED]) == (0, layout.AWAIT_RECV)
    tag = int(DType.UINT8) << layout.TYPE_SHIFT
    assert host[layout.HOST_SIZES : layout.HOST_SIZES + 4].view("u8").tolist() == [
        expected | tag,
        sent | tag,
    ]
    assert rejected_size(where) == sent | tag
    if where.host[0][layout.HOST_ERROR]:  # the sender had to wait for room
        assert where.host[0][layout.HOST_SIZES : layout.HOST_SIZES + 4].view("u8").tolist() == [
            sent | tag,
            expected | tag,
        ]
    # a sender that did not wait gets the error with its next message that needs credit
    run(where, rules(2, frame), [EmulatedSend(0, 1, 1 << 17)], only=[0])
    assert where.host[0][layout.HOST_ERROR] == layout.ERROR_SIZES


# ---- collectives that are messages

GATHER, SCATTER = (
    op_signature(Collective.GATHER, 0, (40, 40)),
    op_signature(Collective.SCATTER, 0, (40, 40)),
)


def message_ops_of(where: EmulatedMachine, rank: int) -> tuple[int, dict[int, int]]:
    """Return the number of message collectives of a rank, and its entries by peer."""
    (_, count), boards = (
        read_progress_header(GPU, where.comm_args(rank)).op_counts,
        read_snapshot(GPU, where.comm_args(rank)),
    )
    assert count == boards.own.last_message_op
    return count, {peer: said.last_message_op for peer, said in boards.peers.items()}


@needs_compiler
@pytest.mark.parametrize("frame", FRAMES)
def test_message_collectives_are_numbered(frame: Framing) -> None:
    """On ranks without a message and with large ones as well; plain messages are not counted."""
    where = EmulatedMachine(3)
    for number in range(1, 2 * layout.MESSAGE_OP_ENTRIES):
        sends = [EmulatedSend(1, 0, 40), EmulatedSend(2, 0, 5000), EmulatedSend(0, 0, 9)][
            : number % 4
        ]
        assert run(where, rules(3, frame), sends, seed=number, signatures=[GATHER] * 3) == [
            ""
        ] * len(sends)
        assert run(
            where, rules(3, frame), [EmulatedSend(0, 1, 100), EmulatedSend(1, 2, 3)], seed=number
        ) == [
            "",
            "",
        ]
        for rank in range(3):
            assert message_ops_of(where, rank) == (
                number,
                {peer: number for peer in range(3) if peer != rank},
            )
    assert where.errors() == [0] * 3


@needs_compiler
@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("theirs", [SCATTER, 0])
@pytest.mark.parametrize("nbytes", [40, 0, 5000])
def test_a_message_of_another_operation_is_rejected(
    nbytes: int, theirs: int, frame: Framing
) -> None:
    """Its size matches. The sender, which did not wait, gets the error with its next message."""
    where = EmulatedMachine(2)
    run(where, rules(2, frame), [EmulatedSend(1, 0, nbytes)], only=[1], signatures=[0, theirs])
    run(where, rules(2, frame), [EmulatedSend(1, 0, nbytes)], only=[0], signatures=[GATHER, 0])
    host = where.host[0]
    assert (host[layout.HOST_ERROR], host[layout.HOST_PEER]) == (layout.ERROR_MISMATCH, 1)
    assert (host[layout.HOST_LAUNCH], host[layout.HOST_SIGNATURE]) == (0, GATHER)
    run(where, rules(2, frame), [EmulatedSend(1, 0, 1 << 17)], only=[1])
    assert where.errors() == [layout.ERROR_MISMATCH] * 2


@needs_compiler
@pytest.mark.parametrize("frame", FRAMES)
def test_an_unmatched_message_is_not_received_later(frame: Framing) -> None:
    where = EmulatedMachine(2)
    run(where, rules(2, frame), [EmulatedSend(1, 0, 40)], only=[1], signatures=[0, GATHER])
    run(where, rules(2, frame), [], only=[0], signatures=[GATHER, 0])
    run(where, rules(2, frame), [EmulatedSend(1, 0, 40)], signatures=[GATHER] * 2)
    assert where.errors()[0] == layout.ERROR_MISMATCH


@needs_compiler
@pytest.mark.parametrize("other", ["another", "later", "launch"])
def test_waits_in_different_collectives_end(other: str) -> None:
    """The peer has published another one, or continued to a later one, or to a launch."""
    where = EmulatedMachine(2, timeout_s=600)
    for _ in range({"another": 1, "later": layout.MESSAGE_OP_ENTRIES + 2, "launch": 0}[other]):
        run(where, rules(2), [], only=[1], signatures=[0, SCATTER])
    if other == "launch":
        run(where, rules(2), [], signatures=[SCATTER] * 2)
        entry = (
            where.comm_args(0).inboxes[1]
            + layout.OP_LOG_OFFSET
            + (1 * layout.OP_LOG_ENTRIES + 1) * 16
        )
        ctypes.memmove(entry, struct.pack("<IIII", 1, 5, 0, 0), 16)
    run(
        where,
        rules(2),
        [EmulatedSend(1, 0, 40)],
        only=[0],
        signatures=[SCATTER if other == "later" else GATHER, 0],
    )
    assert where.errors() == [layout.ERROR_MISMATCH, 0]
    assert message_ops_of(where, 0)[0] == 1 + (other == "launch")
    run(where, rules(2), [], only=[0], signatures=[GATHER, 0])
    assert message_ops_of(where, 0)[0] == 1 + (other == "launch"), (
        "what follows a failed wait is not begun"
    )


@needs_compiler
@pytest.mark.parametrize("pool", [False, True], ids=["warp queues", "bulk"])
def test_nothing_is_sent_after_a_failed_wait(monkeypatch: pytest.MonkeyPatch, pool: bool) -> None:
    if pool:
        shrink_pool(monkeypatch)
    where = EmulatedMachine(2, timeout_s=0.3)
    run(where, pool_rules(2), [EmulatedSend(0, 1, 40)], only=[1])
    run(where, pool_rules(2), [EmulatedSend(1, 0, 6000)])
    assert where.errors() == [layout.ERROR_TIMEOUT] * 2


def in_launch(
    where: EmulatedMachine, rank: int, peer: int, number: int, needs: int, flag: int | None = None
) -> None:
    """Publish a peer's launch, which does not end without ``needs``."""
    entry = (
        where.comm_args(rank).inboxes[peer]
        + layout.OP_LOG_OFFSET
        + (peer * layout.OP_LOG_ENTRIES + number % layout.OP_LOG_ENTRIES) * 16
    )
    word = (number if flag is None else flag) << layout.NEEDS_ALL_SHIFT + 1 & 0xFFFFFFFF | needs
    ctypes.memmove(entry, struct.pack("<IIII", number, 5, 0, word), 16)


@needs_compiler
@pytest.mark.parametrize("pool", [False, True], ids=["warp queues", "bulk"])
@pytest.mark.parametrize(("src", "needs"), [(1, layout.NEEDS_ALL), (1, 1), (0, layout.NEEDS_ALL)])
def test_a_plain_wait_for_a_rank_blocked_in_a_launch_ends(
    monkeypatch: pytest.MonkeyPatch, src: int, needs: int, pool: bool
) -> None:
    if pool:
        shrink_pool(monkeypatch)
    where = EmulatedMachine(2, timeout_s=600)
    in_launch(where, 0, 1, 1, needs)
    run(where, pool_rules(2), [EmulatedSend(src, 1 - src, 60_000)], only=[0])
    assert where.errors() == [layout.ERROR_CROSSED, 0]
    assert where.host[0][
        [layout.HOST_PEER, layout.HOST_LAUNCH, layout.HOST_SIGNATURE]
    ].tolist() == [1, 1, 5]


@needs_compiler
@pytest.mark.parametrize(
    ("needs", "flag"), [(0, None), (2, None), (layout.NEEDS_ALL, 0), (layout.NEEDS_ALL, 2)]
)
def test_a_plain_wait_for_a_rank_in_an_independent_launch_continues(
    needs: int, flag: int | None
) -> None:
    """Including a half-written record whose other half is of an earlier launch."""
    where = EmulatedMachine(2, timeout_s=0.3)
    in_launch(where, 0, 1, 1, needs, flag)
    run(where, rules(2), [EmulatedSend(1, 0, 40)], only=[0])
    assert where.errors() == [layout.ERROR_TIMEOUT, 0]


@needs_compiler
def test_a_peer_in_a_launch_not_yet_published_here_is_not_past_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A warp may wait before any drawing warp of its launch has run: the last entry is of the
    launch
    before.
    """

    def draws_nothing(*args: Any) -> LoweredMessages:
        lowered = lower_messages(*args)
        struct.pack_into("<I", lowered.args, len(lowered.args) - lowered.capacity - 4, 0)
        return lowered

    where = EmulatedMachine(2, timeout_s=0.3)
    run(where, rules(2), [], signatures=[GATHER] * 2)
    run(where, rules(2), [], only=[1], signatures=[GATHER] * 2)
    monkeypatch.setattr(exchange, "lower_messages", draws_nothing)
    run(where, rules(2), [EmulatedSend(1, 0, 40)], only=[0], signatures=[GATHER] * 2)
    assert where.errors() == [layout.ERROR_TIMEOUT, 0]


@needs_compiler
def test_a_peer_whose_wait_failed_is_not_past() -> None:
    where = EmulatedMachine(2, timeout_s=0.3)
    run(where, rules(2), [EmulatedSend(1, 0, 40)], only=[0], signatures=[GATHER, 0])
    entry = where.comm_args(1).inboxes[0] + layout.OP_LOG_OFFSET + 16
    ctypes.memmove(
        entry, struct.pack("<IIII", 1, 5, 0, 0), 16
    )  # a launch that it has begun all the same
    run(where, rules(2), [EmulatedSend(0, 1, 40)], only=[1], signatures=[0, GATHER])
    assert where.errors() == [layout.ERROR_TIMEOUT] * 2


@needs_compiler
def test_a_peer_that_is_ahead_has_sent_its_message() -> None:
    """Its entries of later collectives do not end a valid wait."""
    where = EmulatedMachine(2, timeout_s=600)
    for number in range(12):
        run(
            where, rules(2), [EmulatedSend(1, 0, 40)], seed=number, only=[1], signatures=[0, GATHER]
        )
    for number in range(12):
        assert run(
            where, rules(2), [EmulatedSend(1, 0, 40)], seed=number, only=[0], signatures=[GATHER, 0]
        ) == [""]
    assert where.errors() == [0, 0]


def test_a_collective_as_text() -> None:
    assert [describe_signature(GATHER), describe_signature(op_signature(Collective.BARRIER))] == [
        "gather (root 0)",
        "barrier",
    ]
    assert describe_signature(op_signature(Collective.ALL_TO_ALL)) == "all_to_all_v"
    many = [
        op_signature(Collective.SCATTER, root, (1, 2)) for root in range(1000)
    ]  # over several hosts
    assert len(set(many)) == len(many)
    assert {describe_signature(signature) for signature in many[15:]} == {
        "scatter (root 15 or above)"
    }
    assert describe_signature(many[14]) == "scatter (root 14)"
    assert op_signature(Collective.ALL_GATHER, 3, (1, 2)) != op_signature(
        Collective.ALL_GATHER, 3, (2, 1)
    )


@needs_compiler
@pytest.mark.parametrize("alone", [0, 1])
def test_waits_end_at_the_deadline(alone: int) -> None:
    where = EmulatedMachine(2, timeout_s=0.2)
    run(where, rules(2), [EmulatedSend(0, 1, 200_000)], only=[alone])
    host = where.host[alone]
    what = layout.AWAIT_MESSAGE if alone else layout.AWAIT_CREDIT
    assert (host[layout.HOST_ERROR], host[layout.HOST_PEER], host[layout.HOST_AWAITED]) == (
        layout.ERROR_TIMEOUT,
        1 - alone,
        what,
    )


@needs_compiler
def test_an_abort_ends_the_wait() -> None:
    where = EmulatedMachine(2)
    where.host[1][layout.HOST_ABORT] = 1
    run(where, rules(2), [EmulatedSend(0, 1, 10)], only=[1])
    assert where.errors() == [0, 0]


@needs_compiler
@pytest.mark.parametrize("alone", [0, 1])
def test_the_wait_for_an_exited_rank_ends(alone: int) -> None:
    where = EmulatedMachine(2, timeout_s=60)
    where.host[alone][layout.HOST_EXITED] = 1 << 1 - alone
    run(where, rules(2), [EmulatedSend(0, 1, 200_000)], only=[alone])
    assert where.errors()[alone] == layout.ERROR_EXITED


@needs_compiler
def test_a_message_of_an_exited_rank_is_received() -> None:
    where = EmulatedMachine(2, timeout_s=60)
    run(where, rules(2), [EmulatedSend(0, 1, 500)], only=[0])
    where.host[1][layout.HOST_EXITED] = 1
    assert run(where, rules(2), [EmulatedSend(0, 1, 500)], only=[1]) == [""]
    assert where.errors() == [0, 0]


# ---- large messages


def shrink_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make messages large from 5000 bytes on, in chunks of 1 KiB and six slots."""
    monkeypatch.setattr(layout, "BULK_MIN_BYTES", 5000)
    monkeypatch.setattr(layout, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(layout, "BULK_BYTES", 6 * 1024)


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_pool(monkeypatch)


def pool_rules(nranks: int, frame: Framing = Framing.LINE, blocks: int = 4) -> WarpQueueRules:
    """Return rules with about ``blocks`` blocks for large messages."""
    return FewWarpQueueRules(
        nranks=nranks, multiprocessors=max(2 * (nranks - 1), blocks // 2 + 1), frame=frame, width=2
    )


@needs_compiler
@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.usefixtures("small_pool")
def test_large_messages(frame: Framing) -> None:
    where = EmulatedMachine(2)
    for sizes in (
        [5000],
        [5001, 9000, 4999],
        [40_000, 16, 30_001],
        [5000] * 5,
        [1792 + 1024, 5000, 1792 + 5 * 1024],
    ):
        both = [EmulatedSend(src, 1 - src, size) for size in sizes for src in (0, 1)]
        assert [text for text in run(where, pool_rules(2, frame), both) if text] == []
        assert [text for text in run(where, pool_rules(2, frame), both[::2]) if text] == []
    assert where.errors() == [0, 0]


@needs_compiler
@pytest.mark.usefixtures("small_pool")
def test_large_messages_of_fewer_chunks_than_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block without a chunk may run after the grants of several messages."""
    monkeypatch.setattr(layout, "BULK_MIN_BYTES", 2000)
    where = EmulatedMachine(2)
    for _ in range(3):
        assert [
            text for text in run(where, pool_rules(2), [EmulatedSend(0, 1, 2000)] * 60) if text
        ] == []
    assert where.errors() == [0, 0]


@needs_compiler
@pytest.mark.usefixtures("small_pool")
def test_large_messages_share_the_pool_of_their_receiver() -> None:
    where = EmulatedMachine(4)
    everybody = [
        EmulatedSend(a, b, 8000 + 500 * a + 77 * b, offset=a, out_offset=b)
        for a in range(4)
        for b in range(4)
    ]
    for sends in (
        everybody,
        everybody[::-1],
        [EmulatedSend(r, (r + 1) % 4, 20_000) for r in range(4)],
        [EmulatedSend(r, 3, 9000) for r in range(3)],
    ):
        assert [text for text in run(where, pool_rules(4, blocks=14), sends) if text] == []
    assert where.errors() == [0] * 4


@needs_compiler
@pytest.mark.usefixtures("small_pool")
def test_large_messages_may_be_distributed_over_launches_differently() -> None:
    where = EmulatedMachine(2)
    sends = [EmulatedSend(0, 1, 5200), EmulatedSend(0, 1, 3000), EmulatedSend(0, 1, 6000)]
    # data sent early need the receiver's grant, so both launches run concurrently
    assert run(where, pool_rules(2), sends) == [""] * 3
    assert run(where, pool_rules(2, blocks=6), sends[::-1]) == [""] * 3
    assert where.errors() == [0, 0]


@needs_compiler
@pytest.mark.usefixtures("small_pool")
@pytest.mark.parametrize(
    ("sent", "expected"), [(100, 9000), (9000, 100), (9000, 9001), (0, 5000), (90_000, 9000)]
)
def test_sizes_of_large_messages_that_differ_are_reported(sent: int, expected: int) -> None:
    where = EmulatedMachine(2)
    run(where, pool_rules(2), [EmulatedSend(0, 1, sent, expected=expected)])
    tag = int(DType.UINT8) << layout.TYPE_SHIFT
    assert where.errors()[1] == layout.ERROR_SIZES
    assert where.host[1][layout.HOST_SIZES : layout.HOST_SIZES + 4].view("u8").tolist() == [
        expected | tag,
        sent | tag,
    ]
    assert rejected_size(where) == sent | tag
    if (
        expected < layout.BULK_MIN_BYTES <= sent or sent > 2 * expected
    ):  # the sender waits for a grant, or for a slot that is never freed
        assert where.errors()[0] == layout.ERROR_SIZES


@needs_compiler
@pytest.mark.usefixtures("small_pool")
def test_the_rejected_large_message_is_recorded_at_its_sender() -> None:
    where = EmulatedMachine(2)
    run(
        where,
        pool_rules(2),
        [
            EmulatedSend(0, 1, 9000),
            EmulatedSend(0, 1, 40_000),
            EmulatedSend(0, 1, 20_000, expected=20_001),
            EmulatedSend(0, 1, 50_000),
        ],
    )
    assert where.errors()[1] == layout.ERROR_SIZES
    assert rejected_size(where) == 20_000 | int(DType.UINT8) << layout.TYPE_SHIFT


@needs_compiler
@pytest.mark.usefixtures("small_pool")
def test_a_rejection_between_two_large_messages_ends_all_threads() -> None:
    where = EmulatedMachine(2)
    run(where, pool_rules(2), [EmulatedSend(0, 1, 100, expected=50)])
    assert where.errors() == [0, layout.ERROR_SIZES]
    struct.pack_into(
        "<Q", where.memory[0], layout.BULK_GRANTS_OFFSET + layout.BULK_STRIDE, 1 << 32 | 6
    )  # of the first one, before that
    run(where, pool_rules(2), [EmulatedSend(0, 1, 5000), EmulatedSend(0, 1, 5000)], only=[0])
    assert where.errors()[0] == layout.ERROR_SIZES


@needs_compiler
@pytest.mark.usefixtures("small_pool")
@pytest.mark.parametrize("alone", [0, 1])
def test_waits_with_large_messages_end(alone: int) -> None:
    where = EmulatedMachine(2, timeout_s=0.2)
    run(where, pool_rules(2), [EmulatedSend(0, 1, 20_000)], only=[alone])
    assert (where.errors()[alone], int(where.host[alone][layout.HOST_PEER])) == (
        layout.ERROR_TIMEOUT,
        1 - alone,
    )


@needs_compiler
@pytest.mark.usefixtures("small_pool")
@pytest.mark.parametrize("alone", [0, 1])
def test_large_message_waits_in_different_collectives_end(alone: int) -> None:
    where = EmulatedMachine(2, timeout_s=600)
    run(where, pool_rules(2), [], only=[1 - alone], signatures=[GATHER] * 2)
    run(where, pool_rules(2), [EmulatedSend(0, 1, 20_000)], only=[alone], signatures=[SCATTER] * 2)
    assert where.errors()[alone] == layout.ERROR_MISMATCH


@needs_compiler
@pytest.mark.usefixtures("small_pool")
@pytest.mark.parametrize("alone", [0, 1])
def test_large_message_waits_for_an_exited_rank_end(alone: int) -> None:
    where = EmulatedMachine(2, timeout_s=60)
    where.host[alone][layout.HOST_EXITED] = 1 << 1 - alone
    run(where, pool_rules(2), [EmulatedSend(0, 1, 20_000)], only=[alone])
    assert where.errors()[alone] == layout.ERROR_EXITED


sends = st.builds(
    EmulatedSend,
    src=st.integers(0, 2),
    dst=st.integers(0, 2),
    nbytes=st.one_of(st.integers(0, 600), st.integers(0, 40_000)),
    offset=st.sampled_from([0, 0, 1, 2, 4, 8]),
    out_offset=st.sampled_from([0, 0, 1, 2, 4, 8]),
)


@needs_compiler
@given(
    program=st.lists(st.lists(sends, min_size=1, max_size=8), min_size=1, max_size=3),
    nqueues=st.integers(1, 4),
    frame=st.sampled_from(FRAMES),
)
@settings(max_examples=20, deadline=None)
def test_random_messages_arrive(
    program: list[list[EmulatedSend]], nqueues: int, frame: Framing
) -> None:
    where = EmulatedMachine(3)
    for number, launch in enumerate(program):
        assert [
            text for text in run(where, rules(3, frame, nqueues), launch, seed=number) if text
        ] == []
    assert where.errors() == [0, 0, 0]


# ---- lowering


def comm_args(nranks: int, rank: int = 0) -> CommArgs:
    boxes = tuple(1 << 40 | r for r in range(nranks))
    return CommArgs(
        rank=rank, own=1 << 41, inboxes=boxes, outboxes=boxes, host=4096, timeout_ns=10**9
    )


def message(
    peer: int, nbytes: int, receives: bool = False, dtype: DType = DType.UINT8
) -> P2pMessage:
    return P2pMessage(receives, peer, 4096, nbytes, int(dtype))


def test_arguments_stay_below_the_limit_of_a_launch() -> None:
    everything = [message(1, layout.BULK_MIN_BYTES)] * layout.MAX_MESSAGES
    for count in (1, layout.MAX_MESSAGES):
        assert len(lower_messages(everything[:count], comm_args(8), rules(8)).args) <= 4096
    assert lower_messages(everything, comm_args(8), rules(8)).table is None
    assert lower_messages([*everything, message(1, 1)], comm_args(8), rules(8)).table is not None


@pytest.mark.parametrize(("nranks", "most"), [(2, 448), (8, 1024)])
def test_launches_of_few_messages_have_short_arguments(nranks: int, most: int) -> None:
    """The driver copies them with every launch."""
    barrier = [
        message(peer, 0, receives) for peer in range(1, nranks) for receives in (False, True)
    ]
    to_all = [message(peer, 1000, receives) for peer in range(nranks) for receives in (False, True)]
    several = [message(1, 1000, receives) for receives in (False, True) for _ in range(6)]
    for messages in ([message(1, 5)], barrier, to_all, several):
        lowered = lower_messages(messages, comm_args(nranks), rules(nranks))
        assert lowered.capacity == layout.small_capacity(nranks)
        assert len(lowered.args) <= most
    longest = lower_messages(
        [message(1, 5)] * (len(to_all) + 12 * nranks), comm_args(nranks), rules(nranks)
    )
    assert longest.capacity == layout.LARGE_CAPACITY


def test_memory_regions_do_not_overlap() -> None:
    for nranks in range(2, layout.MAX_RANKS + 1):
        nqueues, rows = layout.message_warp_queues(nranks), layout.FIFO_ROWS
        assert (nranks - 1) * nqueues * rows * 512 <= layout.ROW_FIFOS_BYTES
        assert (
            nranks * nqueues * layout.WORD_STRIDE
            <= layout.ROWS_RECEIVED_OFFSET - layout.ROWS_SENT_OFFSET
        )
        slots = layout.BULK_BYTES // layout.CHUNK_BYTES
        assert slots * layout.BULK_STRIDE <= layout.BULK_FREED_OFFSET - layout.BULK_ARRIVED_OFFSET
        assert rows & (rows - 1) == 0, (
            "rows are counted beyond any number, and places follow from the lowest bits"
        )
        assert 8 + rows // 4 - 1 <= rows, "credit that is not yet given back leaves room for a step"


@pytest.mark.parametrize("multiprocessors", [1, 2, 8, 132])
@pytest.mark.parametrize("nranks", [2, 3, 5, 8])
def test_all_warp_queues_are_resident_together(nranks: int, multiprocessors: int) -> None:
    where = WarpQueueRules(nranks=nranks, multiprocessors=multiprocessors)
    everything = [
        message(peer, 1 << 20, receives) for peer in range(nranks) for receives in (False, True)
    ]
    lowered = lower_messages(everything, comm_args(nranks), where)
    assert lowered.threads <= 512
    assert lowered.blocks <= multiprocessors
    heads = queues(lowered.args, nranks, 2 * nranks - 1)
    taken = [queue for _, _, nqueues, begin, *_ in heads for queue in range(begin, begin + nqueues)]
    assert taken == list(range(len(taken)))
    assert len(taken) <= lowered.blocks * lowered.threads // 32


def queues(args: bytearray, nranks: int, count: int) -> list[tuple[int, ...]]:
    start = layout.args_bytes(nranks) + struct.calcsize(layout.P2P_HEAD)
    return [
        struct.unpack_from(layout.QUEUE, args, start + struct.calcsize(layout.QUEUE) * i)
        for i in range(count)
    ]


@pytest.mark.parametrize("multiprocessors", [2, 14, 128])
@pytest.mark.parametrize("nranks", [2, 3, 5, 8])
def test_large_message_blocks_are_resident_with_all_warp_queues(
    nranks: int, multiprocessors: int
) -> None:
    where = WarpQueueRules(nranks=nranks, multiprocessors=multiprocessors)
    sizes = (1 << 20, layout.BULK_MIN_BYTES)
    everything = [
        message(peer, size, receives)
        for peer in range(nranks)
        for size in sizes
        for receives in (False, True)
    ]
    lowered = lower_messages(everything, comm_args(nranks), where)
    if multiprocessors < 2 * (nranks - 1):  # too few for a block per queue: no message is large
        assert lowered.bulk_blocks == 0
        return
    assert lowered.threads == 512
    assert lowered.blocks <= 2 * multiprocessors
    heads = queues(lowered.args, nranks, 4 * nranks - 3)
    nqueues, blocks = (
        [h for h in heads if h[0] <= layout.TO_SELF],
        [h for h in heads if h[0] > layout.TO_SELF],
    )
    warps = sum(h[2] for h in nqueues)
    assert warps <= (lowered.blocks - lowered.bulk_blocks) * 16
    assert [b for _, _, each, begin, *_ in blocks for b in range(begin, begin + each)] == list(
        range(lowered.bulk_blocks)
    )
    slots = [
        s
        for kind, *_, slot, each in blocks
        if kind == layout.FROM_BULK
        for s in range(slot, slot + each)
    ]
    assert len(slots) == len(set(slots)) > 0
    assert max(slots) < layout.BULK_BYTES // layout.CHUNK_BYTES


def test_both_sides_use_the_same_warp_queues() -> None:
    where = WarpQueueRules(nranks=2, multiprocessors=128)
    counts = [where.warp_queues_for(size) for size in range(0, 1 << 20, 1000)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1], where.warp_queues_for(1792), where.warp_queues_for(1793)) == (
        1,
        512,
        1,
        2,
    )


def test_messages_to_the_own_rank_pair_up() -> None:
    lowered = lower_messages([message(0, 5), message(0, 5, receives=True)], comm_args(2), rules(2))
    assert len(lowered.positions) == 2
    with pytest.raises(InvalidUsage, match="to itself: 1 sends and 0 receives"):
        lower_messages([message(0, 5)], comm_args(2), rules(2))
    with pytest.raises(InvalidUsage, match=r"5 x uint8 .* received 1 x float32"):
        lower_messages(
            [message(0, 5), message(0, 4, receives=True, dtype=DType.FLOAT32)],
            comm_args(2),
            rules(2),
        )


@pytest.mark.parametrize(
    ("path", "kind", "arch", "frame"),
    [
        (PathType.NVL, IPC, 80, Framing.LINE),
        (PathType.PIX, IPC, 90, Framing.PAIR),
        (PathType.NVL, HOST, 90, Framing.PAIR),
        (None, IPC, 90, Framing.LINE),
        (None, IPC, 80, Framing.PAIR),
    ],
)
def test_line_framing_is_used_where_paths_keep_lines_whole(
    path: PathType | None, kind: str, arch: int, frame: Framing
) -> None:
    memory: Any = types.SimpleNamespace(
        choices={(0, 1): P2pChoice(kind=kind, reason="")},
        facts=[types.SimpleNamespace(arch=arch)] * 2,
        path=lambda a, b: path,
    )
    assert message_frame(memory) is frame
