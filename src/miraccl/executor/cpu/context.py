"""Context of a rank: the private memory that the engine works on, fast calls, and cached runs.

Compiled code receives the address of the context only. Everything it points to is owned here or by
the transports, and stays valid until ``close``.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np

from miraccl import native
from miraccl.executor.cpu import arrays
from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.lower import BlockCounts, Run, Words
from miraccl.native import atomics
from miraccl.types import Collective, DType, RedOp

ENGINE = "miraccl.executor.cpu.kernels.engine"
FOLDS = "miraccl.executor.cpu.kernels.fold"
NOGIL = "miraccl.executor.cpu.kernels.nogil.operations"
PLAN_SLOTS = 1024  # entries of the table of plans; a power of two


@dataclass(frozen=True, kw_only=True)
class PeerConnections:
    """Both connections of one peer; addresses are of this process.

    Attributes:
        capabilities: ``layout.CAP_*`` bits (``transport.base.Capability``).
        ctrl: Control page of the peer; 0 where a proxy moves the messages.
        pid: Process of the peer on this machine, else 0.
        window: Address of the peer's window memory.
        readable: True if the peer, or the proxy, can read this process's private memory.
        doorbell, asleep: Eventfd of the proxy, and address of the word that is 1 while it sleeps.
    """

    capabilities: int
    slot_bytes: int
    send_descs: int
    send_tail: int
    send_slots: int
    recv_descs: int
    recv_tail: int
    recv_slots: int
    recv_cts: int = 0
    ctrl: int = 0
    pid: int = 0
    window: int = 0
    readable: bool = False
    doorbell: int = -1
    asleep: int = 0


_FUNCTION4 = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64
)


class VirtualSleeper:
    """Time and sleep of a virtual rank, in place of CLOCK_MONOTONIC and futexes.

    Args:
        now_address: Address of a word with the time in nanoseconds.
        sleep: Called with (doorbell, value, nanoseconds) without the GIL held by compiled code; it
            returns when the 32-bit word at ``doorbell`` differs from ``value`` or the time has
            passed, and must not raise.
    """

    def __init__(self, now_address: int, sleep: Callable[[int, int, int], None]) -> None:
        def call(doorbell: int, value: int, nanoseconds: int, _: int) -> int:
            sleep(doorbell, value, nanoseconds)
            return 0

        self.now_address = now_address
        self._function = _FUNCTION4(call)  # kept alive: compiled code has its address
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0


@dataclass(frozen=True, kw_only=True)
class WaitPolicy:
    """Stages of a wait: spinning, yielding, sleeping.

    Attributes:
        spin: Polls with a pause before the first yield.
        yields: Yields of the processor before the first sleep.
        max_sleep_s: Longest sleep between checks for other ends of the wait.
        membarrier: True if a sleeper issues the barrier that its waker would need.
        sleeper: Clock of a virtual rank; None: that of the system.
        migrate: True if a sleeper leaves a core that has more ranks than another one (see
            ``kernels.waiting``).
    """

    spin: int = 2000
    yields: int = 2
    max_sleep_s: float = 0.05
    timeout_s: float = 300.0
    sleeper: VirtualSleeper | None = None
    membarrier: bool = True
    migrate: bool = True


@functools.cache
def _engine(name: str) -> int:
    return native.library(ENGINE).address(native.PREFIX + name)


@functools.cache
def fold_kernel(dtype: DType, op: RedOp) -> int:
    """Return the address of a compiled reduction, compiling it at its first use on this machine."""
    name = f"fold_{dtype.label}_{op.name.lower()}"
    return native.library(FOLDS, (name,)).address(native.PREFIX + name)


@functools.cache
def scale_kernel(dtype: DType, divides: bool) -> int:
    """Return the address of the multiplication or division of an array by a scalar.

    ``divides``: by an integer; otherwise multiplication by a number in memory, a float64 for
    floats, else an element.
    """
    name = f"{'over' if divides else 'times'}_{dtype.label}"
    return native.library(FOLDS, (name,)).address(native.PREFIX + name)


@functools.cache
def nogil_kernel(name: str) -> int:
    """Return the address of an export of ``kernels.nogil.operations``, such as ``run_nogil``."""
    return native.library(NOGIL).address(native.PREFIX + name)


_restore_exception = ctypes.pythonapi.PyErr_Restore
_restore_exception.restype = None
_restore_exception.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
_this_thread = ctypes.pythonapi.PyThreadState_Get
_this_thread.restype = ctypes.c_void_p


def call_kernel(address: int, a: int, b: int, c: int, d: int) -> int:
    """Call a compiled ``f(a, b, c, d)`` from Python, without the GIL."""
    return int(_FUNCTION4(address)(a, b, c, d))


def set_counts(run: Run, counts: BlockCounts) -> None:
    """Write counts into a run that is not in use."""
    call_kernel(_engine("set_counts"), run.address, counts.address, 0, 0)


class Context:
    """Engine state of one communicator on one rank. Not thread-safe: the caller admits one thread.

    Attributes:
        gone: Table, not 0 for ranks that have left in an orderly way.
        control_waits: Table of waits on the control plane (``layout.CONTROL_WAIT_*``).
        launch: Fast call that runs any cached run on given addresses.
    """

    def __init__(
        self,
        *,
        rank: int,
        nranks: int,
        ctrl: int,
        connections: Mapping[int, PeerConnections],
        policy: WaitPolicy,
        window: tuple[int, int],
        threaded: bool,
        groups: int,
        fanout: int = 0,
        stage_bytes: int = 128 << 10,
        stream_from: int = 1 << 62,
    ) -> None:
        self.rank, self.nranks, self.connections = rank, nranks, dict(connections)
        self._policy = policy  # its sleeper must stay alive
        self.words = np.zeros(layout.CTX_SIZE // 8, np.int64)
        self._send = np.zeros((nranks, layout.CONN_SIZE // 8), np.int64)
        self._recv = np.zeros((nranks, layout.CONN_SIZE // 8), np.int64)
        self._ctrls = np.zeros(nranks, np.int64)
        # three words per source: ``kernels.operands``
        self._scratch = np.zeros(layout.SCRATCH_SOURCES // 8 + 1 + 3 * nranks, np.int64)
        self._fanout_tails = np.zeros((layout.NFANOUT, nranks), np.int64)
        self._stage = np.zeros(stage_bytes + 64, np.int8)
        self._sendrecv_ops = np.zeros(2 * layout.OP_SIZE // 8, np.int64)
        self._counts = np.zeros(layout.COUNTS_BLOCKS // 8 + 2 * nranks, np.int64)
        self._masks = np.zeros(2 * layout.CPU_SET_BYTES // 8, np.int64)
        self.gone = np.zeros(nranks, np.int64)
        self.control_waits = np.zeros((nranks, layout.CONTROL_WAIT_SIZE // 8), np.int64)
        self._accumulators = np.zeros(layout.FOLD_BLOCK, np.int64)
        self._dtypes = arrays.descriptor_addresses()
        self._plans = np.full((PLAN_SLOTS, layout.PLAN_SIZE // 8), -1, np.int64)
        self._runs: dict[int, Run] = {}
        self._fast_calls: list[Any] = []
        for peer, connection in connections.items():
            self._write_connection(peer, connection)
        for place, value in (
            (layout.CTX_RANK, rank),
            (layout.CTX_NRANKS, nranks),
            (layout.CTX_CTRL, ctrl),
            (layout.CTX_CTRLS, self._ctrls.ctypes.data),
            (layout.CTX_SEND, self._send.ctypes.data),
            (layout.CTX_RECV, self._recv.ctypes.data),
            (layout.CTX_SPIN, policy.spin),
            (layout.CTX_YIELDS, policy.yields),
            (layout.CTX_TIMEOUT_NS, int(policy.timeout_s * 1e9)),
            (layout.CTX_MAX_SLEEP_NS, int(policy.max_sleep_s * 1e9)),
            (layout.CTX_SCRATCH, self._scratch.ctypes.data),
            (layout.CTX_STAGE, (self._stage.ctypes.data + 63) // 64 * 64),
            (layout.CTX_STAGE_BYTES, stage_bytes),
            (layout.CTX_SENDRECV_OPS, self._sendrecv_ops.ctypes.data),
            (layout.CTX_COUNTS, self._counts.ctypes.data),
            (layout.CTX_CPU_MASKS, self._masks.ctypes.data),
            (layout.CTX_STREAM_FROM, stream_from),
            (layout.CTX_OPERATE, _engine("operate")),
            (layout.CTX_MIGRATE, int(policy.migrate)),
            (layout.CTX_GONE, self.gone.ctypes.data),
            (layout.CTX_CONTROL_WAITS, self.control_waits.ctypes.data),
            (layout.CTX_ACCUMULATORS, self._accumulators.ctypes.data),
            (layout.CTX_PLANS, self._plans.ctypes.data),
            (layout.CTX_PLANS_MASK, PLAN_SLOTS - 1),
            (layout.CTX_DTYPES, self._dtypes.ctypes.data),
            # No object has address 1: without readable headers no array matches the type.
            (layout.CTX_ARRAY_TYPE, id(np.ndarray) if arrays.headers_are_readable() else 1),
            (layout.CTX_NONE, id(None)),
            (layout.CTX_FALSE, id(False)),
            (layout.CTX_GROUPS, groups),
            (layout.CTX_INT_TYPE, id(int)),
            (layout.CTX_LIST_TYPE, id(list)),
            (layout.CTX_TUPLE_TYPE, id(tuple)),
            (layout.CTX_REDOP_TYPE, id(RedOp)),
            (layout.CTX_WINDOW, window[0]),
            (layout.CTX_WINDOW_END, window[1]),
            (layout.CTX_FANOUT, fanout),
            (layout.CTX_FANOUT_TAILS, self._fanout_tails.ctypes.data),
            (layout.CTX_PID, os.getpid()),
            (layout.CTX_THREADED, int(threaded)),
            (layout.CTX_P2P_DIRECT, -1),
            (layout.CTX_MEMBARRIER, int(policy.membarrier)),
            (layout.CTX_DETECTOR, -1),
            (layout.CTX_TIME, policy.sleeper.now_address if policy.sleeper else 0),
            (layout.CTX_SLEEPER, policy.sleeper.address if policy.sleeper else 0),
        ):
            self.words[place // 8] = value
        self.address = int(self.words.ctypes.data)
        self.launch = self.fast_call("launch", Collective.BARRIER)

    def _write_connection(self, peer: int, connection: PeerConnections) -> None:
        self._ctrls[peer] = connection.ctrl
        common = (
            (layout.CONN_CAPS, connection.capabilities),
            (layout.CONN_SLOT_BYTES, connection.slot_bytes),
            (layout.CONN_CTRL, connection.ctrl),
            (layout.CONN_PID, connection.pid),
            (layout.CONN_WINDOW, connection.window),
            (layout.CONN_DOORBELL, connection.doorbell),
            (layout.CONN_ASLEEP, connection.asleep),
        )
        send = (
            (layout.CONN_DESCS, connection.send_descs),
            (layout.CONN_SLOTS, connection.send_slots),
            (layout.CONN_REVERSE_SLOTS, connection.recv_slots),
            (layout.CONN_TAIL_ADDR, connection.send_tail),
            (layout.CONN_FREE, sum(number << 8 * number for number in range(layout.NSLOTS))),
            (layout.CONN_NFREE, layout.NSLOTS),
        )
        recv = (
            (layout.CONN_DESCS, connection.recv_descs),
            (layout.CONN_SLOTS, connection.recv_slots),
            (layout.CONN_REVERSE_SLOTS, connection.send_slots),
            (layout.CONN_TAIL_ADDR, connection.recv_tail),
        )
        for table, fields in ((self._send, send), (self._recv, recv)):
            for place, value in (*common, *fields):
                table[peer, place // 8] = value
        self._send[peer, layout.CONN_DIRECT // 8] = int(connection.readable)
        self._recv[peer, layout.CONN_CTS // 8] = connection.recv_cts

    # ---- state

    def get(self, place: int) -> int:
        return int(self.words[place // 8])

    def set(self, place: int, value: int) -> None:
        self.words[place // 8] = value

    def last_run_word(self) -> tuple[Any, int]:
        """Return a view of the word with the address of the last run, and its address."""
        word = layout.CTX_LAST_RUN // 8
        return self.words.data[word : word + 1], self.address + layout.CTX_LAST_RUN

    @property
    def in_engine(self) -> bool:
        """True while a thread is in the engine."""
        return self.get(layout.CTX_INSIDE) != 0

    @property
    def interrupted(self) -> bool:
        """True if the calling thread is in the engine, that is, runs a signal handler during a
        wait.
        """
        return self.in_engine and self.get(layout.CTX_TSTATE) == _this_thread()

    def reraise_deferred(self) -> NoReturn:
        """Raise the exception that a signal handler raised while the engine was waiting."""
        first = layout.CTX_EXCEPTION // 8
        kept = [int(word) or None for word in self.words[first : first + 3]]
        self.words[first : first + 3] = 0
        if kept[0] is None:
            raise KeyboardInterrupt
        # ctypes raises the exception that is set when the call returns.
        _restore_exception(*kept)
        raise AssertionError("unreachable")

    def record_control_wait(self, rank: int, seq: int, sent: int) -> None:
        """Record that ``rank`` waits on the control plane, for ``waiting.peer_diverged``.

        Args:
            seq: Sequence number of its last operation.
            sent: Messages that it has sent to this rank, -1 if unknown.
        """
        row = self.control_waits[rank]
        row[layout.CONTROL_WAIT_SEQ // 8], row[layout.CONTROL_WAIT_SENT // 8] = seq, sent
        atomics.store_release(int(row.ctypes.data) + layout.CONTROL_WAIT_SET, 1)

    def messages_sent(self) -> list[int]:
        """Return the number of messages posted to each rank."""
        return [int(count) for count in self._send[:, layout.CONN_COUNT // 8]]

    def messages_received(self, rank: int) -> int:
        """Return the number of messages of ``rank`` that were consumed."""
        return int(self._recv[rank, layout.CONN_COUNT // 8])

    def pending_sendrecv(self) -> list[tuple[int, bool]]:
        """Return (peer, receives) for each unfinished half of the current ``sendrecv``."""
        rows = self._sendrecv_ops.reshape(2, -1)
        left = [row for row in rows if row[layout.OP_DONE // 8] < row[layout.OP_SEGMENTS // 8]]
        return [(int(row[layout.OP_PEER // 8]), bool(row[layout.OP_RECEIVES // 8])) for row in left]

    def private_bytes(self) -> int:
        """Return the bytes of the context's own arrays and of all cached runs."""
        own = (
            self.words,
            self._send,
            self._recv,
            self._ctrls,
            self._scratch,
            self._stage,
            self._accumulators,
            self._plans,
        )
        runs = sum(
            r.words.nbytes + r.in_blocks.nbytes + r.out_blocks.nbytes + r.scratch.nbytes
            for r in self._runs.values()
        )
        return sum(a.nbytes for a in own) + runs

    # ---- fast calls and cached runs

    def fast_call(
        self, kind: str, collective: Collective, *, arg: int = 0, run: Run | None = None
    ) -> Callable[..., int]:
        """Return a builtin of the engine bound to this context.

        Args:
            kind: Entry point of ``kernels.engine``, such as ``collective`` or ``prepared``.
            run: Run of a persistent operation; it owns the builtin's record, so the caller keeps
                the run
                alive as long as the builtin.
        """
        record = np.array([self.address, int(collective), arg, run.address if run else 0], np.int64)
        call = native.builtin(collective.label, _engine(kind), int(record.ctypes.data))
        # The call of a run lives no longer than the run.
        (self._fast_calls if run is None else run.owned).append(record)
        return cast("Callable[..., int]", call)

    def cache_run(
        self,
        run: Run,
        collective: Collective,
        count: int,
        out_count: int,
        dtype: DType,
        arg: int,
        in_place: bool,
        *,
        uneven: bool = False,
    ) -> None:
        """Enter a run into the table in which fast calls look for it, replacing an older entry if
        needed.

        For an ``uneven`` run, ``count`` is its size class and ``out_count`` is 0.
        """
        kind = int(collective) | (layout.UNEVEN if uneven else 0)
        key = _plan_key(kind, count, out_count, int(dtype), arg, int(in_place))
        places = [(key + probe) & (PLAN_SLOTS - 1) for probe in range(4)]
        if any(self._plans[p, layout.PLAN_RUN // 8] == run.address for p in places):
            return
        free = [p for p in places if self._plans[p, layout.PLAN_COLL // 8] == -1]
        row = self._plans[free[0] if free else places[0]]
        for place, value in (
            (layout.PLAN_COUNT, count),
            (layout.PLAN_OUT_COUNT, out_count),
            (layout.PLAN_DTYPE, int(dtype)),
            (layout.PLAN_ARG, arg),
            (layout.PLAN_INPLACE, int(in_place)),
            (layout.PLAN_RUN, run.address),
            (layout.PLAN_COLL, kind),
        ):
            row[place // 8] = value
        self._runs[run.address] = run

    def clear_runs(self) -> None:
        """Drop all cached runs; the next call of each kind is planned anew."""
        self._plans[:] = -1
        self._runs.clear()


def _plan_key(coll: int, count: int, out_count: int, dtype: int, arg: int, in_place: int) -> int:
    """Return the hash of ``kernels.calls.find_plan``, in 64-bit arithmetic."""
    key = (
        count * 0x9E3779B1
        + out_count * 0x85EBCA6B
        + coll * 0x27D4EB2F
        + dtype * 0x165667B1
        + arg * 0x2545F491
        + in_place
    )
    key = (key + (1 << 63)) % (1 << 64) - (1 << 63)
    return key ^ (key >> 15)


def words_at(address: int, count: int) -> Words:
    """Return a view of words of this process."""
    words: Any = (ctypes.c_int64 * count).from_address(address)
    return np.frombuffer(words, np.int64)
