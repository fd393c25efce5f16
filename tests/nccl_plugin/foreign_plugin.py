"""A network plugin of somebody else, of any version: messages within this process, and faults.

The plugin is a shared object of data whose tables are filled with Python callbacks. ``faults`` maps
an entry to what it does instead: ``None`` for a NULL pointer, a number to return, or a function of
the plugin and the entry's arguments.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miraccl.native import elf
from miraccl.native import nccl_net_abi as abi
from miraccl.transport.fifo import memory_at

Fault = int | Callable[..., int] | None
_SUCCESS, _INTERNAL = 0, 3
_numbers = itertools.count(1)


def put(address: int, value: int, nbytes: int = 8) -> None:
    """Store a number."""
    memory_at(address, nbytes)[:] = (value & (1 << 8 * nbytes) - 1).to_bytes(nbytes, "little")


def get(address: int, nbytes: int = 8) -> int:
    """Load a number."""
    return int.from_bytes(memory_at(address, nbytes), "little")


@dataclass
class Pipe:
    """One direction between two ranks."""

    sent: deque[tuple[int, int, int]] = field(default_factory=deque)  # request, address, bytes
    posted: deque[tuple[int, int, int]] = field(default_factory=deque)


class ForeignPlugin:
    """The plugin; keep it while its file is in use.

    Args:
        properties: Fields of the device that differ.
    """

    def __init__(
        self,
        folder: Path,
        version: int,
        *,
        faults: Mapping[str, Fault] | None = None,
        properties: Mapping[str, Any] | None = None,
        name: bytes | None = b"foreign",
    ) -> None:
        self.version, self.faults = version, dict(faults or {})
        self.properties = dict(properties or {})
        self._lock = threading.Lock()
        self._pipes: dict[int, Pipe] = {}
        self._waiting: dict[int, deque[int]] = {}
        self._finished: dict[int, int] = {}  # request -> bytes
        self.posted_receives: list[int] = []  # n of every irecv
        number = next(_numbers)
        self.path = str(folder / f"libnccl-net-foreign{number}.so")
        symbol = abi.symbol(version)
        image = elf.data_object({symbol: abi.table_bytes(version)}, f"libforeign{number}.so")
        Path(self.path).write_bytes(image)
        self._library = ctypes.CDLL(self.path)
        self._keep: list[Any] = [ctypes.create_string_buffer(name)] if name is not None else []
        table = ctypes.addressof(ctypes.c_char.in_dll(self._library, symbol))
        put(table, ctypes.addressof(self._keep[0]) if name is not None else 0)
        for index, entry in enumerate(abi.entries(version)):
            put(table + 8 * (1 + index), self._address(entry))

    def _address(self, entry: str) -> int:
        function: Callable[..., int] = getattr(self, f"_{entry}", lambda *_: _INTERNAL)
        if entry in self.faults:
            fault = self.faults[entry]
            if fault is None:
                return 0
            if isinstance(fault, int):
                code = fault

                def function(*_: int) -> int:
                    return code
            else:
                replacement = fault

                def function(*args: int) -> int:
                    return replacement(self, *args)

        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * self._count(entry))
        self._keep.append(kind(function))
        return ctypes.cast(self._keep[-1], ctypes.c_void_p).value or 0

    def _count(self, entry: str) -> int:
        """Return the number of arguments of an entry."""
        v = self.version
        return {
            "init": 5 if v >= 11 else 2 if v == 10 else 1,
            "devices": 1,
            "getProperties": 2,
            "listen": 4 if v >= 11 else 3,
            "connect": 3 + (v >= 7) + (v >= 10),
            "accept": 2 + (v >= 7),
            "regMr": 5,
            "deregMr": 2,
            "isend": 6 + (v >= 10),
            "irecv": 7 + (v >= 10),
            "iflush": 6,
            "test": 3,
        }.get(entry, 1)

    # --- entries

    def _init(self, *args: int) -> int:
        if self.version >= 11:
            put(args[0], 77)
        return _SUCCESS

    def _devices(self, count: int) -> int:
        put(count, 1, 4)
        return _SUCCESS

    def _getProperties(self, dev: int, address: int) -> int:  # noqa: N802
        record: Any = abi.PROPERTIES[self.version].from_address(address)
        values = {"name": b"wire0", "ptrSupport": abi.PTR_HOST, "speed": 100_000, "maxRecvs": 1}
        for key, value in (values | self.properties).items():
            setattr(record, key, value)
        return _SUCCESS

    def _listen(self, *args: int) -> int:
        handle, comm = args[-2:]
        number = next(_numbers)
        self._waiting[number] = deque()
        put(handle, number)
        put(comm, number)
        return _SUCCESS

    def _connect(self, *args: int) -> int:
        handle, comm = args[-3:-1] if self.version >= 7 else args[-2:]
        pipe = next(_numbers)
        self._pipes[pipe] = Pipe()
        self._waiting[get(handle)].append(pipe)
        put(comm, pipe)
        return _SUCCESS

    def _accept(self, listening: int, comm: int, *_: int) -> int:
        waiting = self._waiting[listening]
        put(comm, waiting.popleft() if waiting else 0)
        return _SUCCESS

    def _regMr(self, comm: int, data: int, size: int, kind: int, handle: int) -> int:  # noqa: N802
        put(handle, comm)
        return _SUCCESS

    def _deregMr(self, comm: int, handle: int) -> int:  # noqa: N802
        return _SUCCESS

    def _isend(self, comm: int, data: int, size: int, *rest: int) -> int:
        nbytes = size if self.version >= 9 else size & 0xFFFFFFFF
        with self._lock:
            request = next(_numbers)
            self._pipes[comm].sent.append((request, data, nbytes))
            self._match(self._pipes[comm])
        put(rest[-1], request)
        return _SUCCESS

    def _irecv(self, comm: int, n: int, data: int, sizes: int, *rest: int) -> int:
        self.posted_receives.append(n & 0xFFFFFFFF)
        with self._lock:
            request = next(_numbers)
            nbytes = get(sizes, 8 if self.version >= 9 else 4)
            self._pipes[comm].posted.append((request, get(data), nbytes))
            self._match(self._pipes[comm])
        put(rest[-1], request)
        return _SUCCESS

    def _match(self, pipe: Pipe) -> None:
        while pipe.sent and pipe.posted:
            send, source, nbytes = pipe.sent.popleft()
            recv, target, room = pipe.posted.popleft()
            assert nbytes <= room
            ctypes.memmove(target, source, nbytes)
            self._finished[send] = self._finished[recv] = nbytes

    def _test(self, request: int, done: int, size: int) -> int:
        nbytes = self._finished.pop(request, None)
        put(done, int(nbytes is not None), 4)
        if nbytes is not None:
            put(size, nbytes, 4)
        return _SUCCESS

    def _closeSend(self, comm: int) -> int:  # noqa: N802
        return _SUCCESS

    _closeRecv = _closeListen = _finalize = _closeSend  # noqa: N815
