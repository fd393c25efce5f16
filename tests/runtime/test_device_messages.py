"""Sends and receives by compiled code on its own streams, over socket pairs in one process."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.executor.cpu.context import Context, WaitPolicy, call_kernel
from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.nogil.operations import NOT_BEGUN
from miraccl.executor.cpu.lower import signature
from miraccl.runtime import group
from miraccl.runtime.core_access import CoreAccess
from miraccl.runtime.multinode.message_rounds import StagedMessage
from miraccl.runtime.multinode.messages import MessageOperation
from miraccl.types import Collective, DType, RedOp

WAIT_S = 30.0


class Rank:
    """Stand-in for the streams and the core that ``MessageOperation`` needs."""

    def __init__(self, rank: int, nranks: int, timeout: float) -> None:
        self.control = np.zeros(layout.PAGE // 8, np.int64)
        self.context = Context(
            rank=rank,
            nranks=nranks,
            ctrl=int(self.control.ctypes.data),
            connections={},
            policy=WaitPolicy(timeout_s=timeout),
            window=(0, 0),
            threaded=True,
            groups=group.address(),
        )
        core: Any = types.SimpleNamespace(context=self.context, rank=rank, nranks=nranks)
        self.core = CoreAccess(core)
        self.rank = rank
        self.sockets: dict[int, socket.socket] = {}
        self.counts = {peer: np.zeros(2, np.int64) for peer in range(nranks)}

    def descriptor(self, peer: int) -> int:
        return self.sockets[peer].fileno()

    def counter_address(self, peer: int, receives: bool) -> int:
        return int(self.counts[peer].ctypes.data) + 8 * receives

    def run(
        self, messages: Sequence[StagedMessage], memory: np.ndarray
    ) -> tuple[int, MessageOperation]:
        streams: Any = self
        operation = MessageOperation(streams, messages, int(memory.ctypes.data))
        function, context, exchange = operation.unlocked()
        return call_kernel(function, context, exchange, 0, 0), operation

    def board(self, place: int) -> int:
        return int(self.control[place // 8])


@contextlib.contextmanager
def connected(nranks: int, timeout: float = WAIT_S, buffer_bytes: int = 0) -> Iterator[list[Rank]]:
    ranks = [Rank(r, nranks, timeout) for r in range(nranks)]
    for a in range(nranks):
        for b in range(a):
            pair = socket.socketpair()
            for end in pair:
                end.setblocking(False)
                if buffer_bytes:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            ranks[a].sockets[b], ranks[b].sockets[a] = pair
    try:
        yield ranks
    finally:
        for rank in ranks:
            for end in rank.sockets.values():
                end.close()


def message(
    receives: bool, peer: int, count: int, host: int = 0, whole: int = 0, dtype: DType = DType.UINT8
) -> StagedMessage:
    return StagedMessage(receives, peer, host, count, dtype, whole or count)


def header(count: int, number: int, dtype: DType = DType.UINT8) -> bytes:
    """Return a message header, encoded independently of the library."""
    return struct.pack(
        "<qq",
        signature(Collective.SEND_RECV, dtype, RedOp.SUM, 0, count) | number,
        count * dtype.itemsize,
    )


CALLS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 2), st.sampled_from([0, 1, 15, 4096, 70_000])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(calls=CALLS, data=st.data())
def test_receives_match_sends_for_any_grouping(
    calls: list[tuple[int, int, int]], data: Any
) -> None:
    """``calls`` are (source, distance of the target, bytes); each rank groups its part freely."""
    fills = np.random.default_rng(1).integers(0, 256, (len(calls), 70_000), np.uint8)
    rounds: list[list[list[tuple[StagedMessage, int]]]] = []
    sizes = []
    for rank in range(3):
        groups: list[list[tuple[StagedMessage, int]]] = [[]]
        host = 0
        for number, (source, distance, nbytes) in enumerate(calls):
            target = (source + distance) % 3
            if rank in (source, target):
                if data.draw(st.booleans()):
                    groups.append([])
                groups[-1].append(
                    (
                        message(rank == target, source if rank == target else target, nbytes, host),
                        number,
                    )
                )
                host += nbytes
        rounds.append(groups)
        sizes.append(host)
    with connected(3, buffer_bytes=4096) as ranks:
        outcomes: list[Any] = [None] * 3

        def play(rank: int) -> None:
            memory = np.zeros(max(1, sizes[rank]), np.uint8)
            for group in rounds[rank]:
                for m, number in group:
                    if not m.receives:
                        memory[m.host : m.host + m.count] = fills[number, : m.count]
                outcomes[rank] = ranks[rank].run([m for m, _ in group], memory)[0]
                if outcomes[rank] != layout.OK:
                    return
            received = [(m, number) for group in rounds[rank] for m, number in group if m.receives]
            if all(
                (memory[m.host : m.host + m.count] == fills[number, : m.count]).all()
                for m, number in received
            ):
                outcomes[rank] = "all there"

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert outcomes == ["all there"] * 3
        for a in range(3):
            assert ranks[a].board(layout.PROGRESS_P2P_SIG) == 0
            for b in range(3):
                assert ranks[a].counts[b][0] == ranks[b].counts[a][1], "both ends count alike"


def test_stream_contents() -> None:
    """Headers have the transfer's size and the message number, which continues across calls."""
    with connected(2) as ranks:
        me, (wire,) = ranks[0], ranks[1].sockets.values()
        memory = np.arange(12, dtype=np.float32)
        sends = [
            message(False, 1, 3, 0, 10, DType.FLOAT32),
            message(False, 1, 7, 16, 10, DType.FLOAT32),
        ]
        assert me.run(sends, memory)[0] == layout.OK
        assert me.run(sends[:1], memory)[0] == layout.OK
        parts = [memory[:3], memory[4:11], memory[:3]]
        want = b"".join(
            header(10, number + 1, DType.FLOAT32) + part.tobytes()
            for number, part in enumerate(parts)
        )
        assert wire.recv(1000) == want


def test_messages_arrive_byte_by_byte() -> None:
    with connected(2) as ranks:
        me, (wire,) = ranks[0], ranks[1].sockets.values()
        memory = np.zeros(8, np.uint8)
        text = header(3, 1) + b"abc" + header(0, 2) + header(5, 3) + b"defgh"
        codes: list[int] = []
        receives = [message(True, 1, 3, 0), message(True, 1, 0, 3), message(True, 1, 5, 3)]
        thread = threading.Thread(target=lambda: codes.append(me.run(receives, memory)[0]))
        thread.start()
        for byte in text:
            wire.send(bytes([byte]))
        thread.join(WAIT_S)
        assert codes == [layout.OK]
        assert memory.tobytes() == b"abcdefgh"


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (header(10, 1, DType.INT32), layout.ERR_MISMATCH),
        (header(11, 1), layout.ERR_MISMATCH),
        (header(10, 2), layout.ERR_MISMATCH),
        (header(10 + (1 << 23), 1), layout.ERR_SIZE),  # the hash of its count is the same
    ],
    ids=["type", "size", "number", "hash"],
)
def test_mismatched_message_is_an_error(sent: bytes, code: int) -> None:
    with connected(2) as ranks:
        me, (wire,) = ranks[0], ranks[1].sockets.values()
        wire.send(sent)
        found, _ = me.run([message(True, 1, 10)], np.zeros(10, np.uint8))
        assert found == code
        assert me.context.get(layout.CTX_ERR_PEER) == 1
        words = struct.unpack("<qq", sent)
        assert me.context.get(layout.CTX_ERR_ACTUAL) == words[code == layout.ERR_SIZE]


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("receives", [False, True])
def test_wait_ends_at_deadline(receives: bool, closed: bool) -> None:
    """A wait ends at the deadline, even if the peer has closed the stream, and uses no CPU time.

    A closed stream alone is no reason to fail: the control plane reports deaths.
    """
    with connected(3, timeout=0.3, buffer_bytes=4096) as ranks:
        count = 3 if receives else 1 << 20
        if closed:
            ranks[2].sockets[0].close()
        began = time.thread_time()
        assert (
            ranks[0].run([message(receives, 2, count)], np.zeros(count, np.uint8))[0]
            == layout.ERR_TIMEOUT
        )
        assert time.thread_time() - began < 0.15
        assert ranks[0].context.get(layout.CTX_ERR_PEER) == 2
        assert (ranks[0].board(layout.PROGRESS_PEER), ranks[0].board(layout.PROGRESS_STATE)) == (
            2,
            layout.STATE_WAITING,
        )
        assert ranks[0].board(layout.PROGRESS_P2P_COUNT) == count
        assert ranks[0].board(layout.PROGRESS_P2P_SIG) == signature(
            Collective.SEND_RECV, DType.UINT8, RedOp.SUM, 0, count
        )


def test_wait_ends_on_abort_and_on_peer_exit() -> None:
    for code in (layout.ERR_ABORTED, layout.ERR_LEFT):
        with connected(2) as ranks:
            codes: list[int] = []
            thread = threading.Thread(
                target=lambda: codes.append(  # noqa: B023
                    ranks[0].run([message(True, 1, 1)], np.zeros(1, np.uint8))[0]
                )
            )
            thread.start()
            while ranks[0].board(layout.PROGRESS_STATE) != layout.STATE_WAITING:
                pass
            if code == layout.ERR_ABORTED:
                ranks[0].control[layout.CTRL_ABORT // 8] = layout.ERR_ABORTED
            else:
                ranks[0].context.gone[1] = 1
                ranks[1].sockets[0].shutdown(socket.SHUT_WR)
            thread.join(WAIT_S)
            assert codes == [code]


def test_data_sent_before_exit_is_received() -> None:
    with connected(2) as ranks:
        ranks[0].context.gone[1] = 1
        got, codes = np.zeros(1, np.uint8), list[int]()
        thread = threading.Thread(
            target=lambda: codes.append(ranks[0].run([message(True, 1, 1)], got)[0])
        )
        thread.start()
        while ranks[0].board(layout.PROGRESS_STATE) != layout.STATE_WAITING:
            pass
        assert ranks[1].run([message(False, 0, 1)], np.full(1, 7, np.uint8))[0] == layout.OK
        thread.join(WAIT_S)
        assert (codes, got[0]) == ([layout.OK], 7)


def test_nothing_begins_while_busy_or_after_abort() -> None:
    with connected(2) as ranks:
        ranks[0].context.set(layout.CTX_BUSY, 1)
        assert ranks[0].run([message(False, 1, 1)], np.zeros(1, np.uint8))[0] == NOT_BEGUN
        ranks[0].context.set(layout.CTX_BUSY, 0)
        ranks[0].control[layout.CTRL_ABORT // 8] = layout.ERR_ABORTED
        assert ranks[0].run([message(False, 1, 1)], np.zeros(1, np.uint8))[0] == layout.ERR_ABORTED
        assert ranks[0].counts[1].tolist() == [0, 0]
        with pytest.raises(BlockingIOError):
            ranks[1].sockets[0].recv(1)
