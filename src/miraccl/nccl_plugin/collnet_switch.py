"""CollNet's functions over software switches: communicators of ``MIRACCL_SWITCH``.

A group of ranks that NCCL connects becomes a communicator with an aggregator on each switch.
``iallreduce``, ``ireducescatter`` and ``iallgather`` are its operations in the background; ``test``
asks whether one has ended. Data are in host memory.

``listen`` opens a rendezvous; the handle of rank 0 is its address and secret, which travel through
NCCL's own bootstrap: who can read the handle can join the group. The switch itself admits by
MIRACCL_SECRET.

``iflush`` has nothing to do: host memory is coherent with the processor that NCCL's proxy runs on,
and no device has written it.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from miraccl import params
from miraccl.bootstrap.hub import HubServer, create_hub
from miraccl.bootstrap.join import connect
from miraccl.errors import InvalidUsage
from miraccl.native import nccl_collnet_abi, nccl_net_abi
from miraccl.native.nccl_collnet_abi import DataType, NcclRedOp, Part
from miraccl.native.nccl_net_abi import HANDLE_BYTES, PTR_HOST
from miraccl.nccl_plugin.callbacks import store_word
from miraccl.nccl_plugin.collnet_handle import decode_handle, encode_handle
from miraccl.runtime.options import Options
from miraccl.runtime.rendezvous import start_deadline
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.runtime.work import Work
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.transport.fifo import memory_at
from miraccl.types import DType, RedOp

if TYPE_CHECKING:
    from miraccl.bootstrap.unique_id import UniqueId

DEVICE_NAME = b"miraccl-switch"
SPEED_MBPS, MAX_COMMUNICATORS, MAX_COLL_BYTES = 10_000, 1 << 10, 1 << 40
_OPERATORS = {
    NcclRedOp.SUM: RedOp.SUM,
    NcclRedOp.PROD: RedOp.PROD,
    NcclRedOp.MAX: RedOp.MAX,
    NcclRedOp.MIN: RedOp.MIN,
    NcclRedOp.AVG: RedOp.AVG,
}
Bytes = NDArray[np.uint8]


def element_type(code: int) -> DType | None:
    """Return the type of an ``ncclDataType_t``, None for one that is unknown."""
    return DType[DataType(code).name] if code in set(DataType) else None


@dataclass(kw_only=True)
class _SwitchRequest:
    """An operation in the background; ``finish`` runs when it has ended."""

    work: Work | None
    nbytes: int
    finish: Callable[[], None] = lambda: None


class SwitchGroups:
    """Listening objects, groups and requests by number, as NCCL holds them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._listening: dict[int, tuple[UniqueId, HubServer]] = {}
        self._groups: dict[int, Any] = {}
        self._requests: dict[int, _SwitchRequest] = {}

    def listen(self) -> tuple[bytes, int]:
        """Return a handle and the number of the listening object."""
        ident, hub = create_hub()
        number = next(self._numbers)
        self._listening[number] = ident, hub
        return encode_handle(ident), number

    def close_listen(self, listening: int) -> None:
        if found := self._listening.pop(listening, None):
            found[1].close()

    def connect(self, handles: list[bytes], rank: int, listening: int) -> int:
        """Return the number of a group; blocks until all ranks and switches are there."""
        from miraccl.api.communicator import Communicator  # imports this package's users

        deadline, opts = start_deadline(), Options.create()
        hub = self._listening.pop(listening)[1] if rank == 0 else None
        session = connect(decode_handle(handles[0]), rank, len(handles), deadline, hub=hub)
        comm = Communicator.from_session(session, opts, setup=SetupPhases(session, deadline))
        if comm.nranks > 1:
            try:
                comm.use_switch(params.SWITCH.read(), "always")
            except BaseException as error:
                comm.abort(f"CollNet: {error}")
                raise
        number = next(self._numbers)
        self._groups[number] = comm
        return number

    def close(self, group: int) -> None:
        if comm := self._groups.pop(group, None):
            comm.finalize()

    def _keep(
        self, work: Work | None, nbytes: int, finish: Callable[[], None] = lambda: None
    ) -> int:
        number = next(self._numbers)
        with self._lock:
            self._requests[number] = _SwitchRequest(work=work, nbytes=nbytes, finish=finish)
        return number

    def all_reduce(self, group: int, send: int, recv: int, count: int, dtype: int, op: int) -> int:
        """Begin an all-reduce; return the number of the request."""
        kind = _require_type(dtype)
        source, target = (_array(address, count, kind) for address in (send, recv))
        work = self._groups[group].all_reduce(
            source, out=target, op=_OPERATORS[NcclRedOp(op)], async_op=True
        )
        return self._keep(work, target.nbytes)

    def all_gather(
        self, group: int, send: int, parts: tuple[Part, ...], per_rank: int, window: range
    ) -> int:
        """Begin an all-gather of ``window``, a range of bytes of the whole result."""
        comm = self._groups[group]
        counts = block_shares(per_rank, window, comm.nranks)
        source = _array(send, counts[comm.rank], DType.UINT8)
        target, store = _gathered(parts, len(window), before=False)
        if len(set(counts)) == 1:
            work = comm.all_gather(source, target, async_op=True)
        else:
            work = comm.all_gather_v(source, counts, target, async_op=True)
        return self._keep(work, len(window), store)

    def reduce_scatter(
        self,
        group: int,
        parts: tuple[Part, ...],
        recv: int,
        per_rank: int,
        window: range,
        dtype: int,
        op: int,
    ) -> int:
        """Begin a reduce-scatter of ``window``, a range of bytes of the whole input."""
        comm, kind = self._groups[group], _require_type(dtype)
        shares = block_shares(per_rank, window, comm.nranks)
        if any(share % kind.itemsize for share in shares):
            raise InvalidUsage("cannot reduce: the window ends inside an element")
        counts = [share // kind.itemsize for share in shares]
        source = _gathered(parts, len(window), before=True)[0].view(NUMPY_DTYPE[kind])
        target = _array(recv, counts[comm.rank], kind)
        reduction = _OPERATORS[NcclRedOp(op)]
        if len(set(counts)) == 1:
            work = comm.reduce_scatter(source, target, op=reduction, async_op=True)
        else:
            work = comm.reduce_scatter_v(source, counts, target, op=reduction, async_op=True)
        return self._keep(work, target.nbytes)

    def flush(self) -> int:
        """Return a request that has ended: nothing is to be flushed."""
        return self._keep(None, 0)

    def test(self, number: int) -> int | None:
        """Return the bytes of a request that has ended, else None. Raises its error."""
        request = self._requests[number]
        if request.work is not None and not request.work.done():
            return None
        del self._requests[number]
        if request.work is not None:
            request.work.wait()
        request.finish()
        return request.nbytes


class SwitchFunctions:
    """Functions of CollNet's table, which take C arguments and raise errors."""

    def __init__(self) -> None:
        self._groups = SwitchGroups()
        self._name = ctypes.create_string_buffer(DEVICE_NAME)

    def function(self, entry: str, version: int) -> Callable[..., None]:
        """Return the function of an entry in a version of the interface."""
        groups = self._groups
        match entry:
            case "init":
                return _store_context if version >= 11 else _nothing
            case "devices":
                return lambda count: store_word(count, 1, 4)
            case "getProperties":
                return lambda dev, address: self._properties(version, address)
            case "listen":
                return self._listen
            case "connect":
                return self._connect
            case "reduceSupport":
                return lambda dtype, op, supported: store_word(
                    supported, supports(_int(dtype), _int(op)), 4
                )
            case "regMr":
                return lambda comm, data, size, kind, mhandle: _register(kind, mhandle)
            case "iallreduce":
                return lambda *args: self._all_reduce(version, *args)
            case "iallgather":
                return lambda *args: self._all_gather(version, *args)
            case "ireducescatter":
                return lambda *args: self._reduce_scatter(version, *args)
            case "iflush":
                return lambda comm, data, size, mhandle, request: store_word(
                    request, groups.flush()
                )
            case "test":
                return self._test
            case "closeColl":
                return groups.close
            case "closeListen":
                return groups.close_listen
        return _nothing  # deregMr, finalize

    def _properties(self, version: int, address: int) -> None:
        kind = nccl_net_abi.PROPERTIES[version]
        ctypes.memset(address, 0, ctypes.sizeof(kind))
        properties: Any = kind.from_address(address)
        properties.name = ctypes.cast(self._name, ctypes.c_char_p)
        properties.ptrSupport = PTR_HOST
        properties.speed = SPEED_MBPS
        properties.port = 1
        properties.maxComms = MAX_COMMUNICATORS
        properties.maxRecvs = 1
        fields = {name for name, *_ in kind._fields_}
        for name in fields & {"maxP2pBytes", "maxCollBytes"}:
            setattr(properties, name, MAX_COLL_BYTES)
        if "maxMultiRequestSize" in fields:
            properties.maxMultiRequestSize = 1

    def _listen(self, *args: int) -> None:
        handle, listening = args[-2:]  # newer versions pass a context first
        data, number = self._groups.listen()
        memory_at(handle, HANDLE_BYTES)[:] = data
        store_word(listening, number)

    def _connect(self, handles: int, nranks: int, rank: int, listening: int, comm: int) -> None:
        addresses = memory_at(handles, 8 * _int(nranks)).cast("Q")
        found = [bytes(memory_at(address, HANDLE_BYTES)) for address in addresses]
        store_word(comm, self._groups.connect(found, _int(rank), listening))

    def _all_reduce(self, version: int, *args: int) -> None:
        comm, send, recv, count, dtype, op, _, _, request = args
        count = count if version >= 9 else _int(count)
        numbers = (comm, send, recv, count, _int(dtype), _int(op))
        store_word(request, self._groups.all_reduce(*numbers))

    def _all_gather(self, version: int, *args: int) -> None:
        comm, send, nparts, parts, per_rank, offset, nbytes, _, request = args
        where = nccl_collnet_abi.decode_parts(version, parts, _int(nparts))
        window = range(offset, offset + nbytes)
        store_word(request, self._groups.all_gather(comm, send, where, per_rank, window))

    def _reduce_scatter(self, version: int, *args: int) -> None:
        comm, nparts, parts, recv, per_rank, offset, nbytes, dtype, op, _, request = args
        where = nccl_collnet_abi.decode_parts(version, parts, _int(nparts))
        window = range(offset, offset + nbytes)
        number = self._groups.reduce_scatter(
            comm, where, recv, per_rank, window, _int(dtype), _int(op)
        )
        store_word(request, number)

    def _test(self, request: int, done: int, size: int) -> None:
        nbytes = self._groups.test(request)
        store_word(done, nbytes is not None, 4)
        if size and nbytes is not None:
            store_word(size, nbytes & 0xFFFFFFFF, 4)


def _int(value: int) -> int:
    """Return a C int that came in a register of 64 bits, whose upper half has no meaning."""
    return ctypes.c_int32(value).value


def _nothing(*_: int) -> None:
    pass


def _store_context(context: int, *_: int) -> None:
    store_word(context, 1)


def _register(kind: int, mhandle: int) -> None:
    if _int(kind) != PTR_HOST:
        raise InvalidUsage(f"cannot register memory of kind {_int(kind)}: allowed is host memory")
    store_word(mhandle, 1)


def supports(dtype: int, op: int) -> bool:
    """Return True if aggregators reduce a type with an operation."""
    return element_type(dtype) is not None and op in set(_OPERATORS)


def block_shares(per_rank: int, window: range, nranks: int) -> list[int]:
    """Return the bytes of each rank's block of ``per_rank`` bytes that lie in ``window``."""
    starts = [rank * per_rank for rank in range(nranks)]
    return [max(0, min(s + per_rank, window.stop) - max(s, window.start)) for s in starts]


def _require_type(code: int) -> DType:
    kind = element_type(code)
    if kind is None:
        raise InvalidUsage(f"cannot reduce elements of type {code}: the type is unknown")
    return kind


def _array(address: int, count: int, kind: DType) -> NDArray[Any]:
    """Return the memory of ``count`` elements as an array."""
    dtype = NUMPY_DTYPE[kind]
    if not count:
        return np.empty(0, dtype)
    return np.frombuffer(memory_at(address, count * dtype.itemsize), dtype)


def _gathered(
    parts: tuple[Part, ...], nbytes: int, *, before: bool
) -> tuple[Bytes, Callable[[], None]]:
    """Return the bytes of parts in one array, and a function that stores them back.

    ``before``: the parts hold the input.
    """
    if sum(part.nbytes for part in parts) < nbytes:
        raise InvalidUsage(f"cannot use parts of less than the {nbytes} bytes of the window")
    arrays = [_array(part.address, part.nbytes, DType.UINT8) for part in parts]
    if len(arrays) == 1:
        return arrays[0][:nbytes], lambda: None
    whole = np.concatenate(arrays)[:nbytes] if before else np.empty(nbytes, np.uint8)

    def store() -> None:
        start = 0
        for array in arrays:
            length = min(len(array), nbytes - start)
            array[:length] = whole[start : start + length]
            start += length

    return whole, store
