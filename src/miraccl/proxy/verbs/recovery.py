"""Recovery of the queue pairs of a connection: carries out what ``wire.verbs.failover`` decides.

Everything here runs on the engine's thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from miraccl import clock, trace
from miraccl.errors import MiracclError, ProtocolError
from miraccl.proxy.compiled_thread import Kernel
from miraccl.proxy.kernels import link_layout
from miraccl.proxy.verbs.connection_memory import MOVING, PAUSED, EngineConnection
from miraccl.proxy.verbs.kernels import verbs_layout as layout
from miraccl.wire.verbs import failover as machine
from miraccl.wire.verbs.failover import NEVER, DownRow, QpState, ReopenRow
from miraccl.wire.verbs.rows import (
    KIND_CREDIT,
    KIND_DOWN,
    KIND_GONE,
    KIND_HELLO,
    KIND_REOPEN,
    KIND_REOPENED,
    ROW_FLAGS,
)
from miraccl.wire.verbs.status import describe_status

log = trace.logger("verbs")

#: Time in which a stopped queue pair completes its receives; then it is reset. Soft-RoCE of Linux
#: 6.1 forgets them.
DRAIN_S = 0.02
#: Pause before a row that found no room is tried again, and between looks at a stopped pair.
RETRY_S = 0.002
#: Attempts to connect a pair after the peer was heard on another one.
CONNECT_ATTEMPTS = 3
_RUNNING = (QpState.UP, QpState.UNPROVEN)


class Recovery:
    """Recovery of all connections of an engine.

    Args:
        kernels: Compiled functions by name.
    """

    def __init__(self, kernels: dict[str, Kernel]) -> None:
        self._kernels = kernels

    def service(self, each: EngineConnection) -> None:
        """Process failed queue pairs, rows for Python, and whatever waits."""
        each.store(layout.CONN_ATTENTION, 0)
        now = clock.monotonic()
        for qp in range(each.count):
            failed = each.qp_word(qp, layout.QP_STATE) == layout.QP_FAILED
            fresh = failed and each.failover.pairs[qp].state in _RUNNING
            if fresh and not self._connect_again(each, qp, now):
                self.fail_pair(each, qp, self._text_of(each, qp))
        for row in each.take_inbox():
            if each.alive:
                self._receive(each, row, now)
        for qp in list(each.stopped_at):
            self._look_if_drained(each, qp, now)
        self._finish_moves(each)
        self._look_if_proven(each)
        self._send_pending(each)

    def start(self, each: EngineConnection, qp: int) -> None:
        """Post receives on a queue pair, connect it, and send the first row of its stream."""
        self._kernels["post_receives"](each.state.address, qp)
        try:
            each.conn.qps[qp].connect(each.conn.ends[qp])
        except MiracclError as error:
            self.fail_pair(each, qp, str(error))
            return
        each.store_qp(qp, layout.QP_STATE, layout.QP_ACTIVE)
        words = each.write_arguments(qp, KIND_HELLO)
        self._kernels["post_special"](each.state.address, words)

    def _connect_again(self, each: EngineConnection, qp: int, now: float) -> bool:
        """Connect a pair once more if the peer may not have connected its end yet.

        Its first packet keeps its number: a peer that has received it ignores the repetition.
        """
        heard = each.word(layout.CONN_HELLOS)
        if each.conn.ready.is_set() or heard >> qp & 1 or now > each.conn.connect_until:
            return False
        each.attempts[qp] = each.attempts.get(qp, 0) + 1
        if heard and each.attempts[qp] > CONNECT_ATTEMPTS:
            return False  # the peer is there, but not on this path
        try:
            each.conn.qps[qp].to_reset()
            self._kernels["drain"](each.state.address, 0)
            each.conn.qps[qp].to_init()
        except MiracclError:
            return False
        self._clear(each, qp)
        each.store_stream(qp, layout.STREAM_POSTED_ROWS, 0)
        each.store_stream(qp, layout.STREAM_REPORTED, 0)
        each.store_qp(qp, layout.QP_STATE, layout.QP_CONNECTING)
        self.start(each, qp)
        return True

    def timer(self, each: EngineConnection) -> None:
        """Reopen queue pairs whose pause is over."""
        now = clock.monotonic()
        if now >= each.failover.next_timer:
            psns = [int.from_bytes(clock.random_bytes(3), "little") for _ in range(each.count)]
            self._carry_out(each, each.failover.on_timer(psns, now))

    def next_timer(self, each: EngineConnection) -> float:
        """Return the time at which ``service`` or ``timer`` must run again."""
        if not each.alive:
            return NEVER
        waiting = each.pending or each.stopped_at or each.moves or self._unproven(each)
        soon = clock.monotonic() + RETRY_S if waiting else NEVER
        return min(soon, each.failover.next_timer)

    def fail_pair(self, each: EngineConnection, qp: int, text: str) -> None:
        """Stop using a queue pair because of ``text``."""
        each.texts.setdefault(qp, text)
        log.warning("queue pair %d, %s: %s", qp, each.conn.edges[qp], text)
        self._carry_out(each, each.failover.on_failed(qp, clock.monotonic()))

    def _text_of(self, each: EngineConnection, qp: int) -> str:
        errno = each.qp_word(qp, layout.QP_ERRNO)
        if errno:
            return f"posting failed: {os.strerror(errno)}"
        vendor = each.qp_word(qp, layout.QP_VENDOR)
        return describe_status(each.qp_word(qp, layout.QP_STATUS), vendor)

    # --- events

    def _receive(self, each: EngineConnection, row: bytes, now: float) -> None:
        kind = row[ROW_FLAGS]
        try:
            if kind == KIND_DOWN:
                down = DownRow.decode(row, each.count)
                for qp in range(each.count):
                    if down.mask >> qp & 1:
                        each.texts.setdefault(qp, "the peer has stopped its end")
                self._carry_out(each, each.failover.on_down(down, each.received(), now))
            elif kind == KIND_REOPEN:
                psn = int.from_bytes(clock.random_bytes(3), "little")
                reopen = ReopenRow.decode(row, each.count)
                self._carry_out(each, each.failover.on_reopen(reopen, psn, now))
            elif kind == KIND_REOPENED:
                reopened = ReopenRow.decode(row, each.count)
                self._carry_out(each, each.failover.on_reopened(reopened, now))
            elif kind == KIND_GONE:
                self._kernels["end_streams"](each.state.address, 0)
            else:
                raise ProtocolError(f"a row of kind {kind}")
        except ProtocolError:
            self._fail_link(each, link_layout.FAULT_PROTOCOL, layout.BAD_ROW)

    def _look_if_drained(self, each: EngineConnection, qp: int, now: float) -> None:
        """Report a stopped pair as drained once all of its receives have completed."""
        self._kernels["drain"](each.state.address, 0)
        left = each.qp_word(qp, layout.QP_RECV_POSTED) - each.qp_word(qp, layout.QP_RECV_DONE)
        if left and now - each.stopped_at[qp] < DRAIN_S:
            return
        if left:
            self._cut_off(each, qp)
            self._kernels["drain"](each.state.address, 0)
        del each.stopped_at[qp]
        self._carry_out(each, each.failover.on_drained(qp, each.received(), now))

    def _cut_off(self, each: EngineConnection, qp: int) -> None:
        """Make sure that nothing can arrive on a pair that does not complete its receives."""
        try:
            each.conn.qps[qp].to_reset()
        except MiracclError:  # the device is gone
            each.conn.qps[qp].close()
            each.store_qp(qp, layout.QP_POINTER, 0)

    # --- instructions

    def _carry_out(
        self, each: EngineConnection, instructions: Iterable[machine.Instruction]
    ) -> None:
        for instruction in instructions:
            if not each.alive:
                return
            if isinstance(instruction, machine.StopPair):
                self._stop(each, instruction)
            elif isinstance(instruction, machine.SendRow):
                each.pending.append((instruction.kind, instruction.row.encode()))
                self._send_pending(each)
            elif isinstance(instruction, machine.ResumeStream):
                self._resume(each, instruction)
            elif isinstance(instruction, machine.ResetPair):
                self._reset(each, instruction)
            elif isinstance(instruction, machine.ConnectPair):
                self._connect(each, instruction.qp, instruction.peer_psn)
            elif isinstance(instruction, machine.MoveStream):
                self._move(each, instruction.stream)
            else:
                self._all_down(each)

    def _stop(self, each: EngineConnection, instruction: machine.StopPair) -> None:
        qp = instruction.qp
        each.store_qp(qp, layout.QP_STATE, layout.QP_FAILED)
        for stream in instruction.streams:
            each.moves.pop(stream, None)
            each.store_stream(stream, layout.STREAM_PAUSED, PAUSED)
        try:
            each.conn.qps[qp].to_error()
        except MiracclError as error:  # the device is gone
            log.info("queue pair %d cannot be stopped: %s", qp, error)
        each.stopped_at[qp] = clock.monotonic()

    def _send_pending(self, each: EngineConnection) -> None:
        """Post rows on any stream that works; what finds no room waits."""
        while each.pending and each.alive:
            kind, data = each.pending[0]
            if not self.post(each, kind, data):
                return
            each.pending.pop(0)

    def post(self, each: EngineConnection, kind: int, data: bytes = b"") -> bool:
        """Post a row on the first stream that has room; return True if one had."""
        for stream in range(each.count):
            words = each.write_arguments(stream, kind, data=data)
            if self._kernels["post_special"](each.state.address, words):
                return True
        return False

    def _resume(self, each: EngineConnection, instruction: machine.ResumeStream) -> None:
        stream, low, qp = instruction
        known = each.stream_word(stream, layout.STREAM_DONE_ROWS)
        received = known + ((low - known) & 0xFFFF)
        if received > each.stream_word(stream, layout.STREAM_POSTED_ROWS):
            self._fail_link(each, link_layout.FAULT_PROTOCOL, layout.BAD_ROW)
            return
        self._change_route(each, stream, qp)
        words = each.write_arguments(stream, received, qp)
        self._kernels["resolve"](each.state.address, words)

    def _change_route(self, each: EngineConnection, stream: int, qp: int) -> None:
        """Count a stream on its new queue pair."""
        old = each.stream_word(stream, layout.STREAM_QP)
        for pair, change in ((old, -1), (qp, 1)):
            count = each.qp_word(pair, layout.QP_NSTREAMS) + change
            each.store_qp(pair, layout.QP_NSTREAMS, count)
        each.store_stream(stream, layout.STREAM_QP, qp)

    def _reset(self, each: EngineConnection, instruction: machine.ResetPair) -> None:
        qp, peer_psn, psn = instruction
        pair = each.conn.qps[qp]
        try:
            if not pair.pointer:
                raise MiracclError("the queue pair was destroyed")
            pair.to_reset()
            self._kernels["drain"](each.state.address, 0)
            pair.psn = psn
            pair.to_init()
        except MiracclError as error:
            log.info("queue pair %d cannot be reset: %s", qp, error)
            return
        self._clear(each, qp)
        self._kernels["post_receives"](each.state.address, qp)
        if peer_psn >= 0:
            self._connect(each, qp, peer_psn)

    def _clear(self, each: EngineConnection, qp: int) -> None:
        """Start the counts of a queue pair that was reset."""
        for offset in (
            layout.QP_POSTED,
            layout.QP_DONE,
            layout.QP_UNSIGNALED,
            layout.QP_RECV_POSTED,
            layout.QP_RECV_DONE,
            layout.QP_STATUS,
            layout.QP_VENDOR,
            layout.QP_ERRNO,
        ):
            each.store_qp(qp, offset, 0)

    def _connect(self, each: EngineConnection, qp: int, peer_psn: int) -> None:
        end = replace(each.conn.ends[qp], psn=peer_psn)
        try:
            each.conn.qps[qp].connect(end)
        except MiracclError as error:
            self.fail_pair(each, qp, str(error))
            return
        each.texts.pop(qp, None)
        each.store_qp(qp, layout.QP_STATE, layout.QP_ACTIVE)

    # --- the way back

    def _move(self, each: EngineConnection, stream: int) -> None:
        """Pause a stream behind a signalled row; ``_finish_moves`` does the rest."""
        words = each.write_arguments(stream, KIND_CREDIT)
        if not self._kernels["post_special"](each.state.address, words):
            each.moves[stream] = -1
            return
        old = each.stream_word(stream, layout.STREAM_QP)
        each.moves[stream] = each.qp_word(old, layout.QP_POSTED)
        each.store_stream(stream, layout.STREAM_PAUSED, MOVING)

    def _finish_moves(self, each: EngineConnection) -> None:
        """Move streams whose old queue pair has completed everything that they had posted."""
        for stream, number in list(each.moves.items()):
            if number < 0:
                del each.moves[stream]
                self._move(each, stream)
                continue
            old = each.stream_word(stream, layout.STREAM_QP)
            posted = each.stream_word(stream, layout.STREAM_POSTED_ENTRIES)
            if each.qp_word(old, layout.QP_DONE) < number or posted:
                continue
            del each.moves[stream]
            self._change_route(each, stream, stream)
            each.failover.on_moved(stream)
            each.store_stream(stream, layout.STREAM_PAUSED, 0)
            log.info("queue pair %d, %s, works again", stream, each.conn.edges[stream])
            words = each.write_arguments(stream, KIND_CREDIT)  # shows the peer that it works
            self._kernels["post_special"](each.state.address, words)

    def _unproven(self, each: EngineConnection) -> list[int]:
        """Return the pairs that are connected again and whose streams are elsewhere."""
        machine_ = each.failover
        return [
            qp
            for qp, pair in enumerate(machine_.pairs)
            if pair.state in _RUNNING and machine_.route[qp] != qp and qp not in each.moves
        ]

    def _look_if_proven(self, each: EngineConnection) -> None:
        for qp in self._unproven(each):
            up = each.failover.pairs[qp].state is QpState.UP
            if up or each.qp_word(qp, layout.QP_RECV_DONE):
                self._carry_out(each, each.failover.on_proven(qp))

    # --- the end

    def _all_down(self, each: EngineConnection) -> None:
        closing = each.link_word(link_layout.LINK_STATE) == link_layout.STATE_CLOSING
        if closing and each.all_closed():
            each.store_link(link_layout.LINK_STATE, link_layout.STATE_FINISHED)
            return
        self._fail_link(each, link_layout.FAULT_RESET, layout.ALL_PATHS_FAILED)

    def _fail_link(self, each: EngineConnection, kind: int, code: int) -> None:
        words = each.write_arguments(kind, code, 0, 0, 0)
        self._kernels["fail_link"](each.state.address, words)
