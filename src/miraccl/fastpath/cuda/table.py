"""Fast calls of a communicator on GPU memory, and the table of launches that they find.

A call whose launch has been prepared needs only the addresses of its arrays and the current stream.
PyTorch tensors provide these to compiled code through ``__dlpack_c_exchange_api__`` (DLPack 1.3;
PyTorch from 2.10 on), CuPy arrays through their attributes, other arrays through their protocols
(``foreign``). All other calls take the slow path.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np

from miraccl import native
from miraccl.executor.cuda import fast_call_layout
from miraccl.executor.cuda.launch import KernelLaunch
from miraccl.executor.cuda.layout import ARGS, GROUP_SIZES, TYPE_SHIFT
from miraccl.executor.cuda.message_lowering import LoweredMessages, P2pMessage, WarpQueueRules
from miraccl.fastpath.cuda.foreign_types import (
    DL_DTYPES,
    STATE_CONSTANTS,
    ArrayProtocol,
    foreign_record,
)
from miraccl.fastpath.fast_calls import FastCall, FastCalls
from miraccl.native.capsules import pointer_of
from miraccl.native.hashing import mix
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import Collective, DType, RedOp

Retain = Callable[[list[Any], int], None]
#: Entry of ``fastpath.cuda.call`` that runs operations of a form of ``FastOp.fast_form``.
_ENTRIES = {
    "collective": "collective",
    "reduce": "collective",
    "rooted": "message_collective",
    "uneven": "message_collective",
    "uneven_reduce": "reductions",
    "send_recv": "message",
    "sendrecv": "pair",
}
_OPERATORS = tuple(RedOp(number) for number in range(fast_call_layout.NOPS))
_LAUNCH_WORDS = fast_call_layout.LAUNCH_BYTES // 8


class FastOp(Protocol):
    """An operation (``ops.spec.OpSpec``), as fast calls see it."""

    @property
    def name(self) -> str: ...
    @property
    def collective(self) -> Collective: ...
    @property
    def fast_form(self) -> Enum: ...
    @property
    def one_input(self) -> bool: ...
    @property
    def one_output(self) -> bool: ...
    @property
    def uneven(self) -> bool: ...
    @property
    def defaults_to_x(self) -> bool: ...
    @property
    def input_on_root(self) -> bool: ...
    @property
    def result_on_root(self) -> bool: ...
    @property
    def arguments(self) -> tuple[str, ...]: ...


def _words(op: FastOp, entry: str, nranks: int) -> tuple[int, ...]:
    """Return the words of an operation's record after ``FAST_COLLECTS``."""
    if entry == "message":
        return (int("src" in op.arguments),)
    if entry == "pair":
        return ()
    if entry == "reductions":
        return (int(Collective.REDUCE_SCATTER), int(Collective.REDUCE))
    if entry == "message_collective":
        rooted = fast_call_layout.ROOTED_IN if op.input_on_root else fast_call_layout.NOT_ROOTED
        rooted = fast_call_layout.ROOTED_OUT if op.result_on_root else rooted
        blocks = (int(not op.one_input), int(not op.one_output), int(not op.uneven))
        return (rooted, *blocks, int(op.collective))
    third = fast_call_layout.THIRD_OPERATOR if "op" in op.arguments else 0
    third |= fast_call_layout.THIRD_ROOT if "root" in op.arguments else 0
    return (
        int(op.collective),
        1 if op.one_input else nranks,
        1 if op.one_output else nranks,
        third,
        int(op.defaults_to_x),
    )


def _entry(name: str) -> int:
    """Return the address of a function of ``fastpath.cuda.call``."""
    return native.library("miraccl.fastpath.cuda.call").address(native.PREFIX + name)


def _builtin(name: str, entry: str, owner: int) -> Callable[..., Any]:
    return native.builtin(name, _entry(entry), owner)


@functools.cache
def group_builtins(
    groups: int,
) -> tuple[Callable[..., None], Callable[..., None], Callable[[], int]]:
    """Return (begin, end, is_compiled) of groups; ``groups`` is the address of their words."""
    return (
        _builtin("begin", "begin", groups),
        _builtin("end", "end", groups),
        _builtin("is_compiled", "is_compiled", groups),
    )


class CudaFastPath:
    """Fast calls of one communicator, and their launches.

    Args:
        abort: Address of a 32-bit word; not 0: all calls take the slow path.
        order: Address of a word that equals ``own`` while no other communicator used the whole GPU
            last.
        groups: Address of the words of groups.
        hand_over: Called with a group that Python must handle while messages of it are collected
            here.
        retain: Keeps objects alive until the GPU has completed the current work of a stream.
    """

    def __init__(
        self,
        rank: int,
        nranks: int,
        ordinal: int,
        *,
        abort: int,
        order: int,
        own: int,
        groups: int,
        hand_over: Callable[[Any], None],
        retain: Retain,
    ) -> None:
        assert nranks <= fast_call_layout.MAX_RANKS
        self._nranks = nranks
        memory = np.zeros(fast_call_layout.STATE_BYTES // 8, np.int64)
        self._address = int(memory.ctypes.data)
        self._state = memory.data  # memoryview: element access is much faster than with NumPy
        fail, release = self._raise, self.release
        self._keep_alive: list[Any] = [hand_over, ordinal, fail, release]
        self._retain = retain
        self.retained: list[Any] = []
        self._collected_owners: list[Any] = []
        self._foreign_types: dict[
            type, Any
        ] = {}  # never removed: another type might get the address
        self._launches: dict[
            int, tuple[KernelLaunch, Any]
        ] = {}  # launches of the table and their messages, by record
        self._collected_arrays: list[Any] = []
        self._no_cpu_plan = np.zeros(1, np.int64)
        self._undetected = {"torch": self._detect_torch, "cupy": self._detect_cupy}
        for where, value in (
            (fast_call_layout.STATE_ABORT, abort),
            (fast_call_layout.STATE_DEVICE, ordinal << 32 | fast_call_layout.DL_CUDA),
            (fast_call_layout.STATE_STREAM, -1),
            (fast_call_layout.STATE_ORDER, order),
            (fast_call_layout.STATE_OWN, own),
            (fast_call_layout.STATE_NONE, id(None)),
            (fast_call_layout.STATE_FALSE, id(False)),
            (fast_call_layout.STATE_INT_TYPE, id(int)),
            (fast_call_layout.STATE_LIST_TYPE, id(list)),
            (fast_call_layout.STATE_TUPLE_TYPE, id(tuple)),
            (fast_call_layout.STATE_RANK, rank),
            (fast_call_layout.STATE_NRANKS, nranks),
            (fast_call_layout.STATE_GROUPS, groups),
            (fast_call_layout.STATE_CPU_PLAN, int(self._no_cpu_plan.ctypes.data)),
            (fast_call_layout.STATE_CLOSED, 1),
            (fast_call_layout.STATE_COLLECTED_ARRAYS, id(self._collected_arrays)),
            (fast_call_layout.STATE_HAND_OVER, id(hand_over)),
            (fast_call_layout.STATE_ORDINAL, id(ordinal)),
            (fast_call_layout.STATE_RAISE, id(fail)),
            (fast_call_layout.STATE_RELEASE, id(release)),
            (fast_call_layout.STATE_VIEW_FOREIGN, _entry("view_foreign")),
            (fast_call_layout.STATE_RETAINED, id(self.retained)),
            (fast_call_layout.STATE_COLLECTED_OWNERS, id(self._collected_owners)),
            *STATE_CONSTANTS,
            *(
                (fast_call_layout.STATE_NAMES + 8 * number, id(name))
                for number, name in enumerate(fast_call_layout.NAMES)
            ),
            *(
                (fast_call_layout.STATE_OPS + 8 * number, id(op))
                for number, op in enumerate(_OPERATORS)
            ),
            *(
                (fast_call_layout.STATE_DTYPES + 8 * number, dtype)
                for number, dtype in enumerate(DL_DTYPES.values())
            ),
        ):
            self._write(where, value)

    def _write(self, where: int, value: int) -> None:
        self._state[where // 8] = value

    @property
    def stream(self) -> int:
        """Stream handle of the last operation; -1 before the first."""
        return int(self._state[fast_call_layout.STATE_STREAM // 8])

    @stream.setter
    def stream(self, number: int) -> None:
        if number not in (-1, 0):
            self._write(fast_call_layout.STATE_OTHER_STREAMS, 1)
        self._write(fast_call_layout.STATE_STREAM, number)

    @property
    def only_default_stream(self) -> bool:
        """True if all operations were in the legacy default stream, so no graph can replay any."""
        return not self._state[fast_call_layout.STATE_OTHER_STREAMS // 8]

    @property
    def captured(self) -> bool:
        """True if the stream was being captured at its last operation on the slow path."""
        return bool(self._state[fast_call_layout.STATE_CAPTURED // 8])

    @captured.setter
    def captured(self, is_so: bool) -> None:
        self._write(fast_call_layout.STATE_CAPTURED, int(is_so))

    def fast_call(
        self, op: FastOp, fallback: FastCall | None = None, *, collects: bool = False
    ) -> FastCall:
        """Return the builtin of an operation (arguments: ``fastpath.cuda.call``).

        ``fallback``: handles the calls that the builtin does not. ``collects``: collect sends and
        receives while a group is open.
        """
        entry = _ENTRIES[op.fast_form.value]
        words = _words(op, entry, self._nranks)
        handed = (0, 0) if fallback is None else native.entry_of(fallback)
        record = np.zeros(fast_call_layout.FAST_WORDS, np.int64)
        record[: 4 + len(words)] = (self._address, *handed, int(collects), *words)
        self._keep_alive.append((record, fallback))
        return _builtin(op.name, entry, int(record.ctypes.data))

    def fast_calls(
        self, ops: Iterable[FastOp], fallback: FastCalls | None = None, *, collects: bool = False
    ) -> FastCalls:
        """Return the builtins of all operations; a barrier has none of its own."""
        found = {
            op.name: self.fast_call(
                op, None if fallback is None else fallback.entry(op.name), collects=collects
            )
            for op in ops
            if op.collective is not Collective.BARRIER
        }
        if fallback is not None:
            found["barrier"] = fallback.barrier
        return FastCalls(**found)

    # ---- array types and streams

    def detect_array_types(self) -> None:
        """Enable reading of tensors and arrays of the libraries imported by now."""
        for name in [name for name in self._undetected if name in sys.modules]:
            if self._undetected[name](sys.modules[name]):
                del self._undetected[name]

    def _detect_torch(self, torch: Any) -> bool:
        """Enable PyTorch tensors; False while PyTorch is not fully imported."""
        kind = getattr(torch, "Tensor", None)
        capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
        if type(capsule).__name__ == "PyCapsule":
            table = pointer_of(capsule, b"dlpack_exchange_api")
            if (
                ctypes.c_uint32.from_address(table + fast_call_layout.API_MAJOR).value
                == fast_call_layout.DL_MAJOR
            ):
                self._write(
                    fast_call_layout.STATE_VIEW,
                    ctypes.c_int64.from_address(table + fast_call_layout.API_VIEW).value,
                )
                if not self._state[fast_call_layout.STATE_QUERY_STREAM // 8]:
                    self._write(
                        fast_call_layout.STATE_CURRENT,
                        ctypes.c_int64.from_address(table + fast_call_layout.API_CURRENT).value,
                    )
                self._write(fast_call_layout.STATE_TYPE, id(kind))
        return kind is not None

    def _detect_cupy(self, cupy: Any) -> bool:
        """Enable CuPy arrays; False while CuPy is not fully imported."""
        kind = getattr(cupy, "ndarray", None)
        if kind is not None and all(
            hasattr(kind, name)
            for name in fast_call_layout.NAMES[: fast_call_layout.NAMES.index("ptr")]
        ):
            for number, (code, dtype) in enumerate(NUMPY_DTYPE.items()):
                self._write(fast_call_layout.STATE_ARRAY_DTYPES + 16 * number, id(dtype))
                self._write(fast_call_layout.STATE_ARRAY_DTYPES + 16 * number + 8, DL_DTYPES[code])
            self._write(fast_call_layout.STATE_ARRAY_TYPE, id(kind))
        return kind is not None

    def add_foreign_types(self, kinds: dict[type, ArrayProtocol]) -> None:
        """Enable reading of further types, as many as fit; ``kinds`` only grows between calls."""
        if len(kinds) == len(self._foreign_types):
            return
        for kind, how in list(kinds.items()):  # a copy: other threads may add types during the loop
            if (
                kind not in self._foreign_types
                and len(self._foreign_types) < fast_call_layout.MAX_FOREIGN_TYPES
            ):
                row = (
                    fast_call_layout.STATE_FOREIGN_TYPES
                    + len(self._foreign_types) * fast_call_layout.FOREIGN_BYTES
                )
                words, self._foreign_types[kind] = foreign_record(kind, how)
                for offset, word in words.items():
                    self._write(row + offset, word)

    def set_driver_functions(self, pointer_attribute: int, is_capturing: int) -> None:
        """Set the addresses of cuPointerGetAttribute and cuStreamIsCapturing."""
        self._write(fast_call_layout.STATE_POINTER_ATTRIBUTE, pointer_attribute)
        self._write(fast_call_layout.STATE_IS_CAPTURING, is_capturing)

    def enable_stream_switches(self, event: int, functions: Sequence[int], context: int) -> None:
        """Handle calls in a stream other than the previous one, which waits for that by ``event``.

        ``functions``: addresses of cuEventRecord, cuStreamWaitEvent and cuCtxGetCurrent;
        ``context``: context that must be current.
        """
        for where, value in zip(
            (
                fast_call_layout.STATE_EVENT_RECORD,
                fast_call_layout.STATE_STREAM_WAIT,
                fast_call_layout.STATE_GET_CONTEXT,
            ),
            functions,
            strict=True,
        ):
            self._write(where, value)
        self._write(fast_call_layout.STATE_CONTEXT, context)
        self._write(fast_call_layout.STATE_EVENT, event)

    def set_stream_query(self, ask: Callable[[int], int]) -> None:
        """Set the function that returns the current stream if array types do not provide it."""
        self._keep_alive.append(ask)
        self._write(fast_call_layout.STATE_QUERY_STREAM, id(ask))

    def set_cupy_stream_query(self, ask: Callable[[int], int]) -> None:
        """Set the function that returns CuPy's current stream."""
        self._keep_alive.append(ask)
        self._write(fast_call_layout.STATE_QUERY_CUPY_STREAM, id(ask))

    def set_cpu_plan_word(self, word: int) -> None:
        """Set the address of a word that each fast call resets to 0."""
        self._write(fast_call_layout.STATE_CPU_PLAN, word)

    def close(self) -> None:
        """Handle no more calls; the words passed to the constructor may be freed."""
        self._write(fast_call_layout.STATE_ABORT, self._address + fast_call_layout.STATE_CLOSED)
        self._drop(list(self._launches))

    def release(self) -> None:
        """Hand the retained owners to ``retain``, which releases them when the GPU has finished."""
        if self.retained:
            self._retain(
                self.retained.copy(), int(self._state[fast_call_layout.STATE_RETAINED_STREAM // 8])
            )
            self.retained.clear()
            self._write(fast_call_layout.STATE_RETAINED_BYTES, 0)

    # ---- groups

    def mark_collective(self, signature: int, count: int) -> bool:
        """Launch the collected messages as a collective; False, without effect, if they are not
        ``count``.
        """
        if self._state[fast_call_layout.STATE_COLLECTED // 8] != count:
            return False
        self._write(fast_call_layout.STATE_COLLECTED_SIGNATURE, signature)
        return True

    def pop_collected(self) -> tuple[int, list[tuple[Any, int, bool]], int]:
        """Return and clear the collected messages.

        Returns:
            (stream, [(array, peer, is received)], signature of the collective or 0).
        """
        arrays, words = (
            self._collected_arrays.copy(),
            self._state[
                fast_call_layout.STATE_COLLECTED_MESSAGES // 8 :: fast_call_layout.MESSAGE_BYTES
                // 8
            ],
        )
        self._collected_arrays.clear()
        self._collected_owners.clear()
        self._write(fast_call_layout.STATE_COLLECTED, 0)
        self._write(fast_call_layout.STATE_COLLECTED_BYTES, 0)
        kinds = [word & (1 << 32) - 1 for word in words[: len(arrays)]]
        stream, signature = (
            int(self._state[word // 8])
            for word in (
                fast_call_layout.STATE_COLLECTED_STREAM,
                fast_call_layout.STATE_COLLECTED_SIGNATURE,
            )
        )
        self._write(fast_call_layout.STATE_COLLECTED_SIGNATURE, 0)
        return (
            stream,
            [(x, kind >> 1, bool(kind & 1)) for x, kind in zip(arrays, kinds, strict=True)],
            signature,
        )

    # ---- the table

    def add_collective(
        self,
        collective: Collective,
        dtype: DType,
        count: int,
        op: Any,
        root: int,
        launch: KernelLaunch,
        saturates_gpu: bool,
    ) -> None:
        """Enter a launch for blocks of ``count`` elements; ``saturates_gpu``: it may use the whole
        GPU.
        """
        if dtype not in DL_DTYPES:
            return
        if collective.reduces and not isinstance(op, RedOp):  # PREMUL_SUM with its own scalar
            return
        third = fast_call_layout.pack_op_root(int(op), root) if collective.reduces else root
        self._insert(
            fast_call_layout.launch_key(int(collective), third, DL_DTYPES[dtype]),
            count,
            launch,
            saturates_gpu,
            None,
        )

    def add_messages(
        self,
        messages: Sequence[P2pMessage],
        positions: Sequence[int],
        launch: KernelLaunch,
        saturates_gpu: bool,
        signature: int = 0,
    ) -> None:
        """Enter a launch for messages of these sizes.

        ``positions``: locations of the messages' addresses in the argument; ``signature``: of the
        message collective, or 0.
        """
        dtypes = [DType(message.code) for message in messages]
        if len(messages) > fast_call_layout.MAX_MESSAGES or any(
            dtype not in DL_DTYPES for dtype in dtypes
        ):
            return
        record, hashed = (
            np.zeros((len(messages), fast_call_layout.MESSAGE_BYTES // 8), np.int64),
            signature,
        )
        for row, message, dtype, position in zip(record, messages, dtypes, positions, strict=True):
            kind = fast_call_layout.message_kind(
                int(message.receives), message.peer, DL_DTYPES[dtype]
            )
            count = message.nbytes // dtype.itemsize
            hashed = mix(mix(hashed, kind), count)
            row[:] = (kind, count, position)
        self._insert(
            fast_call_layout.MESSAGES_KEY | hashed,
            len(messages),
            launch,
            saturates_gpu,
            record,
            signature,
        )

    def has_template(self, messages: Sequence[P2pMessage], signature: int = 0) -> bool:
        """Return True if there is a template for messages like these, or there can be none."""
        kinds = _message_kinds(messages)
        if len(messages) > fast_call_layout.MAX_MESSAGES or not all(kinds):
            return True
        key = _template_key(kinds, signature)
        for row in self._candidates(key, len(messages)):
            if int(self._state[row + fast_call_layout.LAUNCH_KEY // 8]) == key and self._record_at(
                row
            ):
                shape = self._launches[self._record_at(row)][1]
                rows = shape[fast_call_layout.TEMPLATE_BYTES // 8 :][
                    : len(kinds) * fast_call_layout.TEMPLATE_MESSAGE_BYTES // 8
                ].reshape(len(kinds), -1)
                if rows[:, fast_call_layout.TEMPLATE_MESSAGE_KIND // 8].tolist() == kinds and bool(
                    shape[fast_call_layout.TEMPLATE_SIGNATURE // 8]
                ) == bool(signature):
                    return True
        return False

    def add_template(
        self,
        messages: Sequence[P2pMessage],
        lowered: LoweredMessages,
        rank: int,
        rules: WarpQueueRules,
        argument: int,
        launch: KernelLaunch,
        signature: int = 0,
    ) -> None:
        """Enter a launch for messages like these of any size, plain or of a collective of any
        signature.

        ``argument``: address of the launch's argument, lowered as ``lowered``; the launch is used
        for nothing else.
        """
        if not messages:
            return
        queue_of = {
            number: queue for queue, numbers in enumerate(lowered.queues) for number in numbers
        }
        partners: dict[int, int] = {}
        heads = []
        for queue, numbers in enumerate(lowered.queues):
            offset = lowered.queue_offset(queue)
            heads.append(
                (argument + offset, int.from_bytes(lowered.args[offset : offset + 2], "little"), 0)
            )
            if messages[numbers[0]].peer == rank:
                partners |= dict(zip(numbers[::2], numbers[1::2])) | dict(
                    zip(numbers[1::2], numbers[::2])
                )
        rows = [
            (
                kind,
                argument + lowered.positions[number],
                message.code << TYPE_SHIFT,
                queue_of[number],
                partners.get(number, -1),
            )
            for number, (message, kind) in enumerate(
                zip(messages, _message_kinds(messages), strict=True)
            )
        ]
        group, first = GROUP_SIZES[rules.frame.value]
        signature_address = argument + ARGS["signature"].offset if signature else 0
        head = (
            len(heads),
            group,
            first,
            rules.max_warp_queues,
            rules.max_copy_warp_queues,
            rules.multiprocessors,
            rules.bulk_min_bytes,
            signature_address,
        )
        shape = np.array([*head, *(word for row in (*rows, *heads) for word in row)], np.int64)
        self._insert(
            _template_key(_message_kinds(messages), signature), len(messages), launch, False, shape
        )

    def _candidates(self, key: int, count: int) -> list[int]:
        """Return the word indices of the table entries in which a launch may be."""
        hashed = mix(mix(0, key), count)
        return [
            (
                fast_call_layout.STATE_TABLE
                + fast_call_layout.table_index(hashed, probe) * fast_call_layout.LAUNCH_BYTES
            )
            // 8
            for probe in range(fast_call_layout.PROBES)
        ]

    def _insert(
        self,
        key: int,
        count: int,
        launch: KernelLaunch,
        saturates_gpu: bool,
        messages: Any,
        signature: int = 0,
    ) -> None:
        """Insert a launch; it replaces an older one if all its candidate entries are occupied."""
        if not launch.record:
            return
        rows = self._candidates(key, count)
        row = next((row for row in rows if not self._record_at(row)), rows[0])
        self._launches.pop(self._record_at(row), None)
        self._launches[launch.record] = launch, messages
        words = (
            key,
            count,
            launch.record,
            int(saturates_gpu),
            0 if messages is None else int(messages.ctypes.data),
            signature,
        )
        for number, word in enumerate(words):
            self._state[row + number] = word

    def _record_at(self, row: int) -> int:
        """Return the record of the table entry at a word index; 0 if the entry is free."""
        return int(self._state[row + fast_call_layout.LAUNCH_RECORD // 8])

    def remove_collectives(self) -> None:
        self._drop([block for block, (_, messages) in self._launches.items() if messages is None])

    def remove_messages(self) -> None:
        self._drop(
            [block for block, (_, messages) in self._launches.items() if messages is not None]
        )

    def _drop(self, blocks: Sequence[int]) -> None:
        """Remove the launches with these records."""
        gone = set(blocks)
        for row in range(
            fast_call_layout.STATE_TABLE // 8, fast_call_layout.STATE_BYTES // 8, _LAUNCH_WORDS
        ):
            if self._record_at(row) in gone:
                for number in range(_LAUNCH_WORDS):
                    self._state[row + number] = 0
        for block in gone:
            del self._launches[block]
        self.clear_last()

    @property
    def last(self) -> KernelLaunch | None:
        """Launch of the last operation, if it was a fast call."""
        found = self._launches.get(int(self._state[fast_call_layout.STATE_LAST_RECORD // 8]))
        return None if found is None else found[0]

    def _raise(self, code: int) -> None:
        """Raise the error of a launch that failed after others of its call; called by compiled
        code.
        """
        assert self.last is not None
        self.last.check(code)

    def clear_last(self) -> None:
        """Note that the last operation took the slow path."""
        self._write(fast_call_layout.STATE_LAST_RECORD, 0)


def _message_kinds(messages: Sequence[P2pMessage]) -> list[int]:
    """Return the kinds of messages; 0 for a type that fast calls do not know."""
    return [
        fast_call_layout.message_kind(int(m.receives), m.peer, DL_DTYPES[DType(m.code)])
        if DType(m.code) in DL_DTYPES
        else 0
        for m in messages
    ]


def _template_key(kinds: Sequence[int], signature: int) -> int:
    return fast_call_layout.TEMPLATE_KEY | functools.reduce(mix, kinds, int(signature != 0))
