"""Ranks of the tests of GPU communicators on an emulated driver: all public calls, with running
kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging.handlers
import os
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl.api.communicator import Communicator
from miraccl.errors import CommunicatorClosed, InvalidUsage
from miraccl.executor.cuda.driver import ordinal_at
from miraccl.executor.cuda.gpu import Gpu
from miraccl.ops.dlpack import DLTensor
from miraccl.runtime.core_access import mark_collective
from miraccl.runtime.gpu.communicator import DeviceCommunicator
from miraccl.runtime.gpu.launch_order import LaunchOrders
from miraccl.runtime.gpu.stream_order import MAX_KEPT_STREAMS
from miraccl.runtime.gpu.work import DeviceWork
from miraccl.runtime.options import Options
from miraccl.types import Collective, PreMulSum, RedOp
from tests.gpu.emulated_cuda import EmulatedCuda
from tests.gpu.fake_cuda import FakeArray, context_of, place, seen
from tests.gpu.fake_ranks import session
from tests.runtime.test_life import in_threads


class EmulatedRank:
    """Communicator on an emulated GPU."""

    def __init__(self, world: Any, timeout: float, shares: bool = False) -> None:
        """Create the communicator; ``shares``: all ranks use GPU 0, else each has its own."""
        self.cuda = EmulatedCuda(home=0 if shares else world.rank).install()
        self.comm = Communicator.from_session(world, Options.create(timeout=timeout))
        self.rank, self.nranks = world.rank, world.nranks

    def put(self, values: Any, dtype: str = "float32", offset: int = 0) -> Any:
        """Return a GPU array that starts ``offset`` elements into its allocation."""
        array = np.asarray(values, dtype)
        if not offset:
            return FakeArray(self.cuda, array)
        whole = place(self.cuda, np.concatenate([np.zeros(offset, dtype), array]))
        return ArraySlice(whole.slice(offset, array.size), array.dtype)

    def zeros(self, count: int, dtype: str = "float32") -> Any:
        return self.put(np.full(count, 77), dtype)

    def data(self, rank: int, count: int, dtype: str = "float32") -> Any:
        return (np.arange(count) % 100 + 10 * rank).astype(dtype)

    def synchronize(self) -> None:
        assert self.comm._device is not None
        self.comm._device.synchronize()


class ArraySlice:
    """Array at an offset in an allocation."""

    def __init__(self, memory: Any, dtype: Any, **said: Any) -> None:
        self.array = seen(memory)
        interface = {
            "shape": (memory.count,),
            "typestr": dtype.str,
            "data": (memory.address, False),
            "version": 3,
        }
        self.__cuda_array_interface__ = interface | said

    __cuda_array_interface__: Any = None  # the class is asked first


class FreedArray:
    """Array whose memory was freed; ``said`` replaces entries of its interface."""

    def __init__(self, array: FakeArray, address: int | None = 0, **said: Any) -> None:
        self.__cuda_array_interface__ = (
            array.__cuda_array_interface__ | {"data": (address, False)} | said
        )

    __cuda_array_interface__: Any = None


class DlpackOnlyArray:
    """Array that offers only DLPack, as of dlpack.h before 1.0; records the requested streams."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.array = memory, seen(memory)
        self.streams: list[int] = []
        self.capsules: list[Any] = []
        self._shape = (ctypes.c_int64 * 1)(memory.count)
        bits = 8 * memory.dtype.itemsize
        self._tensor = DLTensor(
            memory.address,
            2,
            0,
            1,
            2,
            bits,
            1,
            ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64)),
            None,
            0,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, ordinal_at(self.memory.address) or 0

    def __dlpack__(self, *, stream: int) -> Any:
        self.streams.append(stream)
        new: Any = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        self.capsules.append(new(ctypes.addressof(self._tensor), b"dltensor", None))
        return self.capsules[-1]

    def held(self) -> int:
        """Return the number of capsules that are still referenced."""
        *counts, alone = [sys.getrefcount(thing) for thing in [*self.capsules, [self.capsules]]]
        return sum(count > alone + 1 for count in counts)  # one for ``capsules``


class Immutable(DlpackOnlyArray):
    """Immutable array, like JAX's."""

    __module__ = "jaxlib.pretended"


@contextlib.contextmanager
def rank(timeout: float = 120.0, make: Any = EmulatedRank) -> Iterator[EmulatedRank]:
    with session() as world:
        me = make(world, timeout)
        yield me
        me.comm.finalize()


class CtaPolicyRank(EmulatedRank):
    """Rank whose communicator uses few multiprocessors for large operations."""

    def __init__(self, world: Any, timeout: float) -> None:
        super().__init__(world, timeout)
        self.comm = Communicator.from_session(
            world, Options.create(timeout=timeout, cta_policy="efficiency")
        )


def cta_policy() -> None:
    """The CTA policy applies to the GPU side of a communicator and of its splits."""
    with rank(make=CtaPolicyRank) as me:
        part = me.comm.split(0)
        for comm in (me.comm, part):
            assert comm is not None
            comm.barrier(stream=0)
            assert isinstance(comm._device, DeviceCommunicator)
            assert comm._device.ctas.efficiency
        assert part is not None
        part.finalize()


def same(got: Any, want: Any, what: str = "") -> None:
    np.testing.assert_array_equal(got.array, want, err_msg=what)


def by_copy_engines() -> None:
    """Collectives without multiprocessors: through small staging memory, into windows, then kernels
    again.
    """
    from miraccl.executor.cuda import staged_copies

    staged_copies.STAGING_BYTES = 256 << 10
    with rank() as me:
        comm, count = me.comm, 100_003
        everybody = np.concatenate([me.data(r, count) for r in range(me.nranks)])
        for turn in range(2):
            out = me.zeros(count * me.nranks)
            comm.all_gather(me.put(me.data(me.rank, count)), out, stream=0)
            assert comm._device is not None
            assert getattr(comm._device.last_plan, "proto", "") == "copy"
            me.synchronize()
            same(out, everybody)
            mine = me.put(
                np.concatenate([me.data(me.rank * 10 + r, count) for r in range(me.nranks)])
            )
            comm.all_to_all(mine, out, stream=0)
            me.synchronize()
            same(out, np.concatenate([me.data(r * 10 + me.rank, count) for r in range(me.nranks)]))
            root = me.nranks - 1 - turn
            x = me.put(me.data(me.rank, 300_001, "float64"), "float64")
            comm.broadcast(x, root, stream=0)
            me.synchronize()
            same(x, me.data(root, 300_001, "float64"))
            total = me.put(me.data(me.rank, 1000))
            comm.all_reduce(total, stream=0)
            me.synchronize()
            same(total, sum(me.data(r, 1000) for r in range(me.nranks)))
        window = comm.empty(count * me.nranks, "float32", device="cuda")
        comm.all_gather(me.put(me.data(me.rank, count)), window, stream=0)
        me.synchronize()
        inside = seen(window.miraccl_view)
        np.testing.assert_array_equal(inside, everybody)
        inside[:] = me.data(me.rank, inside.size)
        comm.barrier(stream=0)
        comm.broadcast(window, 1, stream=0)
        me.synchronize()
        np.testing.assert_array_equal(inside, me.data(1, inside.size))
        assert comm._device is not None
        gpu, stream = comm._device.gpu, comm._device.gpu.make_stream()
        x = me.put(me.data(me.rank, count))
        graphs = [
            gpu.capture(stream, lambda captured: comm.all_gather(x, window, stream=captured))
            for _ in range(2)
        ]
        replays: list[Callable[[], Any]] = [
            partial(gpu.launch_graph, graph, stream) for graph in graphs
        ]
        for run in (*replays, lambda: comm.all_gather(x, window, stream=0)):
            inside[:] = 0
            comm.barrier(stream=0)
            me.synchronize()
            run()
            me.synchronize()
            np.testing.assert_array_equal(inside, everybody)
        assert isinstance(comm._device, DeviceCommunicator)
        assert len(comm._device._engines._sides) == 1  # a capture that has ended leaves it free


def of_many_shapes() -> None:
    """Copy engines cache a bounded number of launches and share events."""
    from miraccl.runtime.gpu import engines

    vars(engines)["MAX_LAUNCHES"] = 3
    with rank() as me:
        events, found = [0], []
        make, destroy = me.cuda.cuEventCreate, me.cuda.cuEventDestroy

        def made(*args: Any) -> Any:
            events[0] += 1
            return make(*args)

        def destroyed(*args: Any) -> Any:
            events[0] -= 1
            return destroy(*args)

        vars(me.cuda).update(cuEventCreate=made, cuEventDestroy=destroyed)
        for count in (10, 20, 30, 40, 50, 10):
            out = me.zeros(count * me.nranks)
            me.comm.all_gather(me.put(me.data(me.rank, count)), out, stream=0)
            me.synchronize()
            same(out, np.concatenate([me.data(r, count) for r in range(me.nranks)]))
            found.append(events[0])
        assert found == found[:1] * 6
        assert isinstance(me.comm._device, DeviceCommunicator)
        assert len(me.comm._device._engines.launches()) == 3


def point_to_point() -> int:
    """Sends, receives, groups in adverse orders, messages to the own rank and empty ones."""
    with rank() as me:
        comm, right, left = me.comm, (me.rank + 1) % me.nranks, (me.rank - 1) % me.nranks
        comm.barrier(stream=0)
        for count, dtype, offset in (
            (1, "float32", 0),
            (1000, "uint8", 3),
            (20_001, "float16", 1),
            (0, "int64", 0),
        ):
            x, out = me.put(me.data(me.rank, count, dtype), dtype, offset), me.zeros(count, dtype)
            assert comm.sendrecv(x, right, out, left) is out
            me.synchronize()
            same(out, me.data(left, count, dtype))
        big = [me.put(me.data(me.rank, 100_000 + i)) for i in range(2)]
        outs = [me.zeros(100_000 + i) for i in range(2)]
        own, mine = me.zeros(5), me.put([1, 2, 3, 4, 5])
        before = me.cuda.launches
        with miraccl.group():
            for x in big:
                comm.send(x, right)
            comm.send(mine, me.rank)
            for out in outs:
                assert comm.recv(out, left) is out
            comm.recv(own, me.rank)
        assert me.cuda.launches == before + 1
        me.synchronize()
        same(own, [1, 2, 3, 4, 5])
        for i, out in enumerate(outs):
            same(out, me.data(left, 100_000 + i))
        small = [me.put([i + 1000 * me.rank]) for i in range(150)]
        got = [me.zeros(1) for _ in small]
        for _ in range(2):
            with miraccl.group():
                for x, out in zip(small, got):
                    comm.sendrecv(x, right, out, left)
        me.synchronize()
        for i, out in enumerate(got):
            same(out, [i + 1000 * left])
        with pytest.raises(InvalidUsage, match="same group"):
            comm.send(mine, me.rank)
        return me.cuda.launches


def one_way() -> None:
    """Two of the ranks exchange messages in separate launches, then by a replayed graph."""
    with rank() as me:
        comm = me.comm
        comm.barrier(stream=0)
        x = me.put(me.data(me.rank, 300))
        if me.rank < 2:
            for _ in range(3):
                comm.send(x, 1) if me.rank == 0 else comm.recv(x, 0)
            stream = me.cuda.make_stream()
            me.cuda.begin_capture(stream)
            comm.send(x, 1, stream=stream) if me.rank == 0 else comm.recv(x, 0, stream=stream)
            graph = me.cuda.end_capture(stream)
            me.synchronize()
            for n in range(3):
                me.synchronize()
                if me.rank == 0:
                    x.array[:] = n
                me.cuda.streams[stream].replay(graph)
            me.synchronize()
            same(x, np.full(300, 2))
        comm.barrier(stream=0)
        me.synchronize()


def uneven() -> None:
    """Every uneven and rooted collective, in and out of place, with zero counts."""
    with rank() as me:
        comm, n = me.comm, me.nranks
        for counts in ([3, 0, 5, 7][:n], [4000, 1, 2, 3000][:n], [0] * n, [9] * n):
            total, mine = sum(counts), counts[me.rank]
            begin = sum(counts[: me.rank])
            every = np.concatenate([me.data(r, c) for r, c in enumerate(counts)])
            out = me.zeros(total)
            assert comm.all_gather_v(me.put(me.data(me.rank, mine)), counts, out) is out
            placed = me.zeros(total)
            placed.array[begin : begin + mine] = me.data(me.rank, mine)
            inner = ArraySlice(place_of(placed).slice(begin, mine), placed.array.dtype)
            comm.all_gather_v(inner, counts, placed)
            share = me.zeros(mine)
            comm.reduce_scatter_v(me.put(me.data(me.rank, total)), counts, share, RedOp.MAX)
            me.synchronize()
            same(out, every)
            same(placed, every)
            same(share, me.data(n - 1, total)[begin : begin + mine])
            for root in (0, n - 1):
                out = me.zeros(total)
                found = comm.gather_v(
                    me.put(me.data(me.rank, mine)), counts, root, out if me.rank == root else None
                )
                share = me.zeros(mine)
                comm.scatter_v(me.put(every) if me.rank == root else None, counts, root, share)
                me.synchronize()
                same(share, me.data(me.rank, mine))
                assert found is (out if me.rank == root else None)
                if me.rank == root:
                    same(out, every)
        sends = [10 * me.rank + r for r in range(n)]
        receives = [10 * r + me.rank for r in range(n)]
        out = me.zeros(sum(receives))
        comm.all_to_all_v(
            me.put(np.concatenate([np.full(c, 100 * me.rank + r) for r, c in enumerate(sends)])),
            sends,
            receives,
            out,
        )
        me.synchronize()
        same(out, np.concatenate([np.full(c, 100 * r + me.rank) for r, c in enumerate(receives)]))
        out, share = me.zeros(6 * n), me.zeros(4)
        comm.gather(me.put(me.data(me.rank, 6)), 1, out if me.rank == 1 else None)
        comm.scatter(me.put(np.arange(4 * n)) if me.rank == 0 else None, 0, share)
        me.synchronize()
        same(share, np.arange(4) + 4 * me.rank)
        if me.rank == 1:
            same(out, np.concatenate([me.data(r, 6) for r in range(n)]))
        out = me.zeros(2 * n)
        once: Any = iter([2] * n)
        with miraccl.group():
            comm.all_gather_v(
                me.put(me.data(me.rank, 2)), once, out
            )  # looked at when it is noted, and when it runs
        me.synchronize()
        same(out, np.concatenate([me.data(r, 2) for r in range(n)]))
        parts = [me.zeros(6) for _ in range(n)]
        for more in (
            False,
            True,
        ):  # the root has an array for each rank; a send and a receive of the same group
            with miraccl.group():
                if more:
                    comm.sendrecv(
                        me.put(me.data(me.rank, 3)),
                        (me.rank + 1) % n,
                        me.zeros(3),
                        (me.rank - 1) % n,
                    )
                if me.rank == 1:
                    comm.send(me.put(me.data(1, 6)), 1)
                    for peer, part in enumerate(parts):
                        comm.recv(part, peer)
                    mark_collective(comm, Collective.GATHER, 1, [6] * n, n + 1)
                else:
                    comm.gather(me.put(me.data(me.rank, 6)), 1)
            me.synchronize()
            for peer, part in enumerate(parts if me.rank == 1 else ()):
                same(part, me.data(peer, 6))


def place_of(array: FakeArray) -> Any:
    return array.memory


def background() -> None:
    """async_op, groups of collectives, persistent operations."""
    with rank() as me:
        comm, n = me.comm, me.nranks
        total = n * (n + 1) / 2
        x = me.put(np.full(100, me.rank + 1))
        work = comm.all_reduce(x, async_op=True)
        assert isinstance(work, DeviceWork)
        assert work.wait() is x
        assert work.synchronize(30.0) is x
        assert work.done()
        assert work.exception() is None
        same(x, np.full(100, total))
        right, left = (me.rank + 1) % n, (me.rank - 1) % n
        a, b = me.put([me.rank]), me.zeros(1)
        works = [comm.send(a, right, async_op=True), comm.recv(b, left, async_op=True)]
        assert works[1].wait(30.0) is b
        works[0].synchronize(30.0)
        same(b, [left])
        y, out = me.put(np.full(7, me.rank + 1)), me.zeros(7 * n)
        z = me.put(np.full(3, me.rank))
        with miraccl.group():
            assert comm.all_reduce(y) is y
            assert comm.all_gather(y, out) is out
            assert comm.broadcast(z, n - 1) is z
            comm.send(a, right)
            comm.recv(b, left)
            with pytest.raises(InvalidUsage, match="group"):
                comm.all_reduce(y, async_op=True)
            cpu = np.ones(3, np.float32)
            comm.all_reduce(cpu)
        me.synchronize()
        same(y, np.full(7, total))
        same(out, np.full(7 * n, total))
        same(z, np.full(3, n - 1))
        assert (cpu == n).all()
        prepared = comm.all_reduce_init(x, out=(result := me.zeros(100)), op=RedOp.MAX)
        for value in (5, 6):
            x.array[:] = value + me.rank
            assert prepared() is result
            me.synchronize()
            same(result, np.full(100, value + n - 1))


def rejections() -> None:
    """Invalid arguments are rejected before anything is sent; the communicator stays usable."""
    with rank() as me:
        comm, x, host = me.comm, me.put(np.ones(4)), np.ones(4, np.float32)
        wrong_op: Any = "sum"
        comm.barrier(stream=0)
        before = me.cuda.launches

        def part(first: int) -> ArraySlice:
            return ArraySlice(place_of(x).slice(first, 2), x.array.dtype)

        def grouped(call: Callable[[], Any]) -> None:
            with miraccl.group():
                call()

        for call, words in (
            (lambda: comm.all_reduce(x, host), "out is in CPU memory"),
            (lambda: comm.all_reduce(host, x), "x is in CPU memory"),
            (lambda: comm.sendrecv(x, 0, host, 0), "out is in CPU memory"),
            (lambda: comm.sendrecv(x, 0, x, 0), "x and out must not overlap"),
            (lambda: comm.sendrecv(part(0), 0, part(1), 0), "x and out must not overlap"),
            (lambda: comm.sendrecv(part(1), 0, part(0), 0), "x and out must not overlap"),
            (
                lambda: grouped(lambda: comm.sendrecv(part(1), 0, part(0), 0)),
                "x and out must not overlap",
            ),
            (lambda: comm.all_reduce(part(0), part(1)), "overlap"),
            (
                lambda: (
                    comm.all_gather(part(1), x) if me.rank == 0 else comm.all_gather(part(0), x)
                ),
                "overlap",
            ),
            (
                lambda: (
                    comm.reduce_scatter(x, part(1))
                    if me.rank == 0
                    else comm.reduce_scatter(x, part(0))
                ),
                "overlap",
            ),
            (lambda: comm.all_reduce(host, stream=0), "streams are for GPU memory"),
            (lambda: comm.send(x, me.nranks), "dst is"),
            (lambda: comm.all_reduce(me.zeros(0), None, wrong_op), "all_reduce: op is 'sum'"),
            (lambda: comm.broadcast(x, me.nranks), "broadcast: root is"),
            (lambda: comm.gather(x, True), "gather: root is True"),
            (lambda: comm.empty(4, "complex64", device="cuda"), "cannot communicate dtype"),
            (
                lambda: comm.empty(1 << 62, device="cuda"),
                "cannot allocate 18446744073709551616 bytes",
            ),
            (lambda: comm.empty((1 << 40, 1 << 40), "int8", device="cuda"), "bytes for .* int8"),
            (
                lambda: comm.all_reduce(x, stream=-1),
                "stream is -1: pass a CUstream handle >= 0",
            ),
            (lambda: comm.send(x, 0, stream=True), "stream is True: pass"),
            (lambda: comm.barrier(stream=False), "stream is False: pass"),
            (lambda: comm.all_reduce(x, stream=-2, async_op=True), "stream is -2: pass"),
            (
                lambda: comm.all_reduce(x, op=PreMulSum(1e300)),
                "all_reduce: scalar 1e.300 of PreMulSum exceeds 3.4028235e.38",
            ),
            (
                lambda: comm.reduce_scatter_v(x, [2, 2], me.zeros(2), PreMulSum(-1e39)),
                "scalar -1e.39 of PreMulSum",
            ),
            (
                lambda: comm.all_reduce(me.zeros(0), op=PreMulSum(1e300)),
                "scalar 1e.300 of PreMulSum",
            ),
            (
                lambda: comm.all_reduce(me.put([1], "int64"), op=PreMulSum(1 << 63)),
                "of PreMulSum is not a value of int64",
            ),
            (lambda: comm.all_reduce(FreedArray(x)), "all_reduce: x has 4 elements, but no memory"),
            (
                lambda: comm.all_reduce(x, FreedArray(x)),
                "all_reduce: out has 4 elements, but no memory",
            ),
            (
                lambda: comm.sendrecv(x, 0, FreedArray(x), 0),
                "sendrecv: out has 4 elements, but no memory",
            ),
            (
                lambda: grouped(lambda: comm.broadcast(FreedArray(x))),
                "broadcast: x has 4 elements, but no memory",
            ),
            (
                lambda: comm.all_reduce(FreedArray(x, None)),
                "all_reduce: x has 4 elements, but no memory",
            ),
            (
                lambda: comm.all_reduce(FreedArray(x, data=None)),
                "data of __cuda_array_interface__ is None",
            ),
            (lambda: comm.all_gather_v(x, [1] * me.nranks, x), "x has 4 elements, but needs 1"),
            (
                lambda: comm.all_to_all_v(x, [4] + [0] * (me.nranks - 1), [0] * me.nranks, x),
                "" if me.rank else "to itself",
            ),
            (
                lambda: comm.scatter(None, (me.rank + 1) % me.nranks, None, stream=0),
                "streams are for GPU",
            ),
        ):
            with pytest.raises(InvalidUsage, match=words):
                call()
        assert me.cuda.launches == before
        comm.all_reduce(x)
        root: Any = np.int64(1)
        comm.broadcast(x, root)
        me.synchronize()
        same(x, np.full(4, me.nranks))
        assert comm.empty(4, bool, device="cuda").dtype is miraccl.DType.UINT8
        for count in (0, 1, 3, 5, 4):  # not all are whole words
            assert not seen(comm.empty(count, "int8", device="cuda").miraccl_view).any()


def rejected_when_prepared() -> None:
    """Persistent and grouped operations reject the same arguments as direct calls, on CPU memory
    and
    on GPUs.
    """
    with rank() as me:
        comm, n, mine = me.comm, me.nranks, np.ones(4, np.float32)
        comm.barrier(stream=0)
        wrong: list[tuple[str, tuple[Any, ...], str]] = [
            *(
                (name, (mine, root), f"{name}: root is")
                for name in ("broadcast", "reduce", "gather", "scatter")
                for root in (n, True, 1.0)
            ),
            *(
                ("all_reduce", (mine, None, op), "all_reduce: op is")
                for op in (7, "sum", RedOp.PREMUL_SUM)
            ),
            (
                "reduce_scatter",
                (mine, np.ones(4 // n, np.float32), None),
                "reduce_scatter: op is None",
            ),
            ("reduce", (mine, 0, None, sum), "reduce: op is"),
            (
                "all_reduce",
                (mine.astype("int32"), None, PreMulSum(0.5)),
                "scalar 0.5 of PreMulSum is not a value of int32",
            ),
            ("reduce", (mine, 0, None, PreMulSum(1e300)), "scalar 1e.300 of PreMulSum"),
            ("all_reduce", (mine, np.ones(5, np.float32)), "all_reduce: out has 5"),
            (
                "all_reduce",
                (mine, np.ones(4)),
                "all_reduce: x and out have different dtypes",
            ),
            ("all_gather", (mine, mine.copy()), "all_gather: out has 4"),
            ("reduce_scatter", (np.ones(5, np.float32),), "not divisible by"),
            ("all_to_all", (np.ones(5, np.float32),), "not divisible by"),
            ("all_to_all", (mine, np.ones(8, np.float32)), "all_to_all: out has 8"),
            ("reduce", (mine, me.rank, np.ones(3, np.float32)), "reduce: out has 3"),
            ("gather", (mine, me.rank, np.ones(3, np.float32)), "gather: out has 3"),
            ("scatter", (mine, me.rank, np.ones(3, np.float32)), "scatter: out has 3"),
        ]
        before = me.cuda.launches
        for name, args, words in wrong:
            there = [
                me.put(given, given.dtype.name) if isinstance(given, np.ndarray) else given
                for given in args
            ]
            for given in (args, there):
                with pytest.raises(InvalidUsage, match=words):
                    getattr(comm, f"{name}_init")(*given)
            with miraccl.group(), pytest.raises(InvalidUsage, match=words):
                getattr(comm, name)(*there)
        whole = me.put(np.ones(4 * n))
        part, never = (
            ArraySlice(place_of(whole).slice(1, 4), whole.array.dtype),
            Immutable(place_of(whole)),
        )
        for call, words in (
            (lambda: comm.all_gather_init(part, whole), "overlap"),
            (lambda: comm.all_to_all_init(whole, whole), "must not overlap"),
            (
                lambda: comm.all_reduce_init(never),
                "is read-only, but the result is written to it",
            ),
            (
                lambda: comm.broadcast_init(never, (me.rank + 1) % n),
                "is read-only, but the result is written to it",
            ),
            (
                lambda: comm.gather_init(part, me.rank, Immutable(place_of(me.zeros(4 * n)))),
                "is read-only, but the result is written to it",
            ),
            (
                lambda: comm.scatter_init(part, (me.rank + 1) % n),
                "must pass out, the array for their share",
            ),
        ):
            with pytest.raises(InvalidUsage, match=words):
                call()
        assert me.cuda.launches == before
        root: Any = np.int64(0)
        x = me.put([me.rank])
        for prepared in (
            comm.reduce_init(x, root, me.zeros(1)),
            comm.gather_init(x, root, me.zeros(n)),
            comm.broadcast_init(x, root),
        ):
            result = prepared()
            assert result is prepared.result
            me.synchronize()
            if me.rank == 0 and prepared.name != "broadcast":
                same(result, [n * (n - 1) / 2] if prepared.name == "reduce" else np.arange(n))
        same(x, [0])


def one_rank() -> None:
    """Operations of a communicator with a single rank."""
    with rank() as me:
        for dtype, factor in (("float32", 2.5), ("float16", 0.5), ("int32", 3)):
            x, out = me.put(me.data(1, 1001), dtype), me.zeros(1001, dtype)
            me.comm.all_reduce(x, out, op=PreMulSum(factor))
            me.synchronize()
            same(out, me.data(1, 1001).astype(dtype) * np.asarray(factor, dtype), dtype)
            me.comm.reduce_scatter(x, out, op=RedOp.AVG)
            me.comm.reduce(x, op=PreMulSum(factor))
            me.synchronize()
            same(out, me.data(1, 1001, dtype))
            same(x, me.data(1, 1001).astype(dtype) * np.asarray(factor, dtype), dtype)
        odd = (1 << 53) + 1  # no float64
        exact: dict[str, list[Any]] = {
            "int64": [odd, 1 - (1 << 63), 2.0**53, np.int64(odd)],
            "uint64": [odd, (1 << 64) - 1, np.uint64(odd), 3.0],
        }
        for dtype, factors in exact.items():
            x, out = me.put([1, 3, 5], dtype), me.zeros(3, dtype)
            for factor in factors:
                me.comm.all_reduce(x, out, op=PreMulSum(factor))
                me.synchronize()
                same(
                    out,
                    np.array([int(factor) * v % (1 << 64) for v in (1, 3, 5)], np.uint64).view(
                        dtype
                    ),
                    dtype,
                )
        x, out = me.put(np.ones(5)), me.zeros(5)
        for factor, want in (
            (np.inf, np.inf),
            (np.nan, np.nan),
            (3.4028235e38, np.finfo(np.float32).max),
        ):
            me.comm.all_reduce(x, out, op=PreMulSum(factor))
            me.synchronize()
            same(out, np.full(5, want))


def equal_operators() -> None:
    """Launches of one operator are not used for another of equal value; a scalar is read at the
    call.
    """
    with rank() as me:
        comm, n = me.comm, me.nranks
        for factor in (0.0, -0.0, 0, -0.0):
            op, x, out, share = (
                PreMulSum(factor),
                me.put([1, 2, 3, 4]),
                me.zeros(4),
                me.zeros(4 // n),
            )
            for result in (
                comm.all_reduce(x, out, op),
                comm.reduce_scatter(x, share, op),
                comm.reduce_scatter_v(x, [4 // n] * n, me.zeros(4 // n), op),
            ):
                me.synchronize()
                assert not result.array.any()
                assert (np.signbit(result.array) == np.signbit(factor)).all(), factor
        number: Any = np.array(2.0)
        changes, x, out = PreMulSum(number), me.put([1, 2, 3, 4]), me.zeros(4)
        for now in (2.0, 5.0):
            number[...] = now
            comm.all_reduce(x, out, changes)
            me.synchronize()
            same(out, 2.0 * n * np.arange(1, 5))
        share = me.zeros(4 // n)
        wrongs: list[Any] = [
            0,
            False,
            np.int64(0),
            0.0,
            1,
            True,
            RedOp.PREMUL_SUM,
            2.0,
            [RedOp.SUM],
            {},
            np.zeros(2),
        ]
        calls: list[Callable[[Any], Any]] = [
            lambda op: comm.all_reduce(x, op=op),
            lambda op: comm.reduce(x, 0, op=op),
            lambda op: comm.reduce_scatter(x, share, op),
            lambda op: comm.reduce_scatter_v(x, [4 // n] * n, share, op),
        ]
        for call in calls:
            for right in (RedOp.SUM, RedOp.PROD):
                call(right)
                me.synchronize()
            for wrong in wrongs:
                with pytest.raises(InvalidUsage, match="op is"):
                    call(wrong)


def alone_with_capsules() -> None:
    """A single rank copies asynchronously and in call order."""
    with rank() as me:
        gate = threading.Event()

        def wait() -> None:
            assert gate.wait(30)

        x, out, last = (DlpackOnlyArray(me.put(np.full(9, value)).memory) for value in (1, 2, 3))
        empty = DlpackOnlyArray(me.put([]).memory)
        me.comm.all_reduce(empty, empty)
        me.comm.all_reduce(x, x)
        assert not empty.held() + x.held()  # nothing is to be done
        other = me.cuda.make_stream()
        me.cuda.streams[0].put(wait)
        me.comm.all_reduce(x, out)
        me.comm.all_gather(out, last, stream=other)
        assert (x.held(), out.held(), last.held()) == (1, 2, 1)
        assert last.array[0] == 3
        gate.set()
        me.synchronize()
        same(last, np.ones(9))
        me.comm.reduce(x, out=last)
        me.synchronize()
        me.comm.reduce(x, out=last)
        assert (x.held(), out.held(), last.held()) == (1, 0, 1)


def on_another_gpu() -> None:
    """Arrays on another GPU are rejected before any launch, in every form of a call."""
    with rank() as me:
        comm, x, far = me.comm, me.put(np.ones(4)), me.put(np.ones(4))
        comm.barrier(stream=0)
        here, there = me.rank, me.rank + 1
        me.cuda.placed[far.memory.address] = there
        packed = DlpackOnlyArray(far.memory)
        before = me.cuda.launches
        for call, name in (
            (lambda: comm.all_reduce(far), "all_reduce: x"),
            (lambda: comm.all_reduce(packed), "all_reduce: x"),
            (lambda: comm.all_reduce(x, far), "all_reduce: out"),
            (lambda: comm.broadcast(far), "broadcast: x"),
            (lambda: comm.sendrecv(x, 0, far, 0), "sendrecv: out"),
            (lambda: comm.gather(far), "gather: x"),
            (lambda: comm.all_gather_v(far, [4] * me.nranks, x), "all_gather_v: x"),
            (lambda: comm.all_reduce(far, async_op=True), "all_reduce: x"),
            (lambda: comm.all_reduce_init(x, far), "all_reduce: out"),
        ):
            with pytest.raises(
                InvalidUsage,
                match=f"{name} is on GPU {there}, but this communicator uses GPU {here}",
            ):
                call()

        def grouped() -> None:
            with miraccl.group():
                comm.send(x, (me.rank + 1) % me.nranks)
                comm.all_gather(far, me.zeros(4 * me.nranks))

        with pytest.raises(InvalidUsage, match=f"all_gather: x is on GPU {there}"):
            grouped()
        with pytest.raises(
            InvalidUsage, match=f"'cuda:{there}', but this communicator uses GPU {here}"
        ):
            comm.empty(4, device=f"cuda:{there}")
        assert me.cuda.launches == before
        comm.all_reduce(x)
        me.synchronize()
        same(x, np.full(4, me.nranks))
        window = comm.empty(4, device="cuda")
        for thing, address in (
            (x, x.memory.address),
            (window, window.address),
        ):  # an address may get memory of another GPU
            comm.all_reduce(thing)
            me.cuda.placed[address] = there
            with pytest.raises(InvalidUsage, match=f"all_reduce: x is on GPU {there}"):
                comm.all_reduce(thing)
        me.synchronize()


def begins_on_the_second_gpu() -> int:
    """The first array's GPU is found through the driver."""
    with rank() as me:
        me.cuda.home = 1
        x = me.put(np.ones(4))
        assert (me.cuda.current is None) == (me.rank == 0)
        me.comm.all_reduce(x)
        me.synchronize()
        same(x, np.full(4, me.nranks))
        assert me.comm._device is not None
        return me.comm._device.gpu.ordinal


def in_the_order_of_the_machine(topology: str) -> tuple[tuple[int, ...], str]:
    """Run rings, chains from every root, and trees on GPUs in machine order; return that order."""
    os.environ["NCCL_TOPO_FILE"] = topology
    with session() as world:
        me = EmulatedRank.__new__(EmulatedRank)
        me.cuda = EmulatedCuda(home=world.rank).install()
        me.comm = Communicator.from_session(world, Options.create(timeout=60, algo="ring"))
        me.rank, me.nranks = world.rank, world.nranks
        first, count = me.put(np.ones(4)), 20_001
        me.comm.all_reduce(first)
        data = [
            np.random.default_rng(r).integers(-1000, 1000, count).astype(np.float32)
            for r in range(me.nranks)
        ]
        device: Any = me.comm._device
        for algo, rooted in (("ring", "chain"), ("double_binary_tree", "double_binary_tree")):
            device.planner.algo = algo
            device._drop_launches()
            total = me.put(data[me.rank])
            me.comm.all_reduce(total)
            assert device.last_plan.algo == algo
            me.synchronize()
            same(total, sum(data))
            device.planner.algo = rooted
            device._drop_launches()
            for root in range(me.nranks):
                x, y = me.put(data[me.rank]), me.put(data[me.rank])
                me.comm.broadcast(x, root)
                me.comm.reduce(y, root)
                me.synchronize()
                assert device.last_plan.algo == rooted
                same(x, data[root])
                same(y, sum(data) if me.rank == root else data[me.rank])
        me.comm.finalize()
        return device.ring.order, device.ring.reason


def explanations() -> None:
    """Explanations match what runs; the last plan is that of the last operation, in any memory."""
    with rank(make=partial(EmulatedRank, shares=True)) as me:
        comm, pairs = me.comm, [(0, 1), (0, 2), (1, 2)]
        assert comm.last_plan is None
        told: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        log = logging.getLogger("miraccl.init")
        log.addHandler(logging.handlers.QueueHandler(told))
        log.setLevel(logging.INFO)
        found: Any = comm.explain("reduce", 400_000, device="cuda")
        assert f": rank {comm.rank} on GPU 0: " in (line := told.get_nowait().getMessage())
        assert "ring 0 1 2 (ranks share a GPU); kernels take up to 2 multiprocessors" in line
        assert (found[0].algo, found[0].chosen, found[0].order) == ("chain", True, (0, 1, 2))
        assert found[0].order_reason == "ranks share a GPU"
        assert [pair for pair, _, _ in found[0].connections] == pairs
        assert all(kind and why for _, kind, why in found[0].connections)
        assert comm.explain("all_gather", 3 << 20, np.int32, device="cuda:0")[0].chosen
        x, cpu = me.put(np.ones(100_000)), np.ones(100, np.float32)
        comm.reduce(x)
        last: Any = comm.last_plan
        assert (last.algo, last.proto, last.blocks, last.reason) == (
            found[0].algo,
            found[0].proto,
            found[0].blocks,
            found[0].reason,
        )
        comm.all_reduce(cpu)
        on_cpu: Any = comm.last_plan
        assert on_cpu.algo == comm.explain("all_reduce", 400)[0].algo
        assert on_cpu.predicted_us > 0
        prepared, small = comm.broadcast_init(x), me.put(np.ones(4))
        for call, algo in (
            (prepared, "chain"),
            (lambda: comm.all_reduce(small), "one_shot"),
            (
                lambda: comm.sendrecv(
                    small, (me.rank + 1) % me.nranks, me.zeros(4), (me.rank - 1) % me.nranks
                ),
                "p2p",
            ),
            (lambda: comm.all_reduce(small, async_op=True), "one_shot"),
        ):
            comm.all_reduce(cpu)
            assert comm.last_plan is on_cpu
            call()
            last = comm.last_plan
            assert (last.algo, last.blocks > 0) == (algo, True)
        for device, words in (
            ("gpu", "explain: device is 'gpu'; allowed are cpu, cuda"),
            ("cuda:1", "uses GPU 0"),
        ):
            with pytest.raises(InvalidUsage, match=words):
                comm.explain("reduce", 4, device=device)
        with pytest.raises(InvalidUsage, match="unknown collective"):
            comm.explain("all", 4, device="cuda")
        me.synchronize()


def plans(settings: dict[str, str], options: dict[str, Any], count: int = 1000) -> dict[str, str]:
    """Return the plans of operations with these settings and options."""
    os.environ.update(settings)
    found: dict[str, str] = {}
    with session() as world:
        me = EmulatedRank.__new__(EmulatedRank)
        me.cuda = EmulatedCuda(home=world.rank).install()
        me.comm = Communicator.from_session(world, Options.create(timeout=60, **options))
        me.rank, me.nranks = world.rank, world.nranks
        x, wide = me.put(np.ones(count), "float32"), me.zeros(count * me.nranks)
        for name, call in (
            ("all_reduce", lambda: me.comm.all_reduce(x)),
            ("broadcast", lambda: me.comm.broadcast(x, 1)),
            ("reduce", lambda: me.comm.reduce(x, 1)),
            ("all_gather", lambda: me.comm.all_gather(x, wide)),
            ("all_to_all", lambda: me.comm.all_to_all(wide, me.zeros(count * me.nranks))),
        ):
            try:
                call()
            except InvalidUsage as error:
                found[name] = str(error)
                continue
            plan: Any = me.comm._device.last_plan  # type: ignore[union-attr]
            found[name] = f"{plan.algo} {plan.proto}"
        me.synchronize()
        me.comm.finalize()
    return found


def only_dlpack() -> None:
    """Arrays of other libraries; immutable ones need a separate result array."""
    with rank() as me:
        comm, n = me.comm, me.nranks
        x = DlpackOnlyArray(me.put(np.full(9, me.rank + 1)).memory)
        comm.all_reduce(x)
        stream = me.cuda.make_stream()
        comm.broadcast(x, 0, stream=stream)
        assert x.streams == [1, stream]
        constant, out = Immutable(me.put(np.full(9, me.rank + 1)).memory), me.zeros(9)
        with pytest.raises(InvalidUsage, match=r"is read-only.*pass a writable"):
            comm.all_reduce(constant)
        with pytest.raises(InvalidUsage, match="is read-only, but the result"):
            comm.recv(constant, (me.rank + 1) % n)
        comm.all_reduce(constant, out)
        comm.sendrecv(constant, (me.rank + 1) % n, x, (me.rank - 1) % n)
        me.synchronize()
        same(out, np.full(9, n * (n + 1) / 2))
        same(x, np.full(9, (me.rank - 1) % n + 1))


def communicators_in_threads() -> list[int]:
    """Return the waits that large operations of three communicators add to their streams, one of
    them
    created in another thread.
    """
    with session() as world:
        options = Options.create(timeout=60)
        me, shared = EmulatedRank(world, options.timeout), LaunchOrders()
        whole = Communicator.from_session(
            world.subgroup(range(world.nranks), "first"), options, launch_orders=lambda: shared
        )
        part = whole.split(0)
        assert part is not None
        comms = [whole, part]

        def beside() -> None:
            comms.append(
                Communicator.from_session(
                    world.subgroup(range(world.nranks), "third"),
                    options,
                    launch_orders=lambda: shared,
                )
            )
            for comm, x, stream in zip(comms, arrays, streams, strict=True):
                comm.all_reduce(x, stream=stream)

        streams = [me.cuda.make_stream() for _ in range(3)]
        arrays = [me.put(np.ones(150_000)) for _ in range(3)]
        whole.all_reduce(arrays[0], stream=streams[0])
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        waits, wait = [0], EmulatedCuda.cuStreamWaitEvent

        def counted(cuda: Any, *args: Any) -> Any:
            waits[0] += 1
            return wait(cuda, *args)

        vars_of: Any = EmulatedCuda
        vars_of.cuStreamWaitEvent = counted
        found = []
        for turn in (0, 0, 1, 2, 2, 1, 0):
            before = waits[0]
            comms[turn].all_reduce(arrays[turn], stream=streams[turn])
            found.append(waits[0] - before)
        for turn in (2, 1, 0):
            comms[turn].synchronize()
            comms[turn].finalize()
        return found


def after_a_capture() -> None:
    """An operation waits for earlier work even if a capture in between is never replayed."""
    with rank() as me:
        part = me.comm.split(0)
        assert part is not None
        first, second, third = (me.cuda.make_stream() for _ in range(3))
        x, large = me.put(np.ones(9)), me.put(np.ones(150_000))
        part.barrier(stream=first)
        order, waits = me.comm._require_gpu(me.rank).gpu.order_streams, []

        def ordered(gpu: Any, before: int, after: int) -> None:
            waits.append((before, after))
            order(before, after)

        vars_of: Any = Gpu
        vars_of.order_streams = ordered

        def capture(array: Any) -> None:
            me.cuda.begin_capture(second)
            for _ in range(2):
                me.comm.all_reduce(array, stream=second)
            me.cuda.end_capture(second)

        for following in (second, third, first):
            me.comm.all_reduce(x, stream=first)
            waits.clear()
            capture(x)
            assert not waits
            me.comm.all_reduce(x, stream=following)
            assert waits == [(first, following)] * (following != first)
        me.comm.all_reduce(large, stream=first)
        waits.clear()
        capture(large)
        part.all_reduce(large, stream=third)  # fills the GPU, as the other one did
        assert waits == [(first, third)] * 2  # its own barrier, the other communicator's sum
        me.synchronize()
        part.synchronize()
        part.finalize()


class OwnStream:
    """Stream that is destroyed with its object, like CuPy's."""

    def __init__(self, cuda: EmulatedCuda) -> None:
        self._cuda, self.ptr = cuda, cuda.make_stream()

    def __del__(self) -> None:
        self._cuda.cuStreamDestroy(self.ptr)


def in_streams_that_end() -> None:
    """The last operation's stream stays alive until another stream has been ordered after it."""
    with rank() as me:
        comm, n, current = me.comm, me.nranks, types.SimpleNamespace(stream=None)
        comm.barrier(stream=0)
        x, others = me.put(np.full(9, me.rank + 1)), len(me.cuda.streams)
        for _ in range(2 * MAX_KEPT_STREAMS):
            comm.all_reduce(x, op=RedOp.MAX, stream=OwnStream(me.cuda))
        assert len(me.cuda.streams) <= others + MAX_KEPT_STREAMS + 1
        for name in ("torch", "cupy"):
            sys.modules.pop(name, None)
        cuda = types.SimpleNamespace(get_current_stream=lambda ordinal: current.stream)
        vars(sys)["modules"]["cupy"] = types.SimpleNamespace(cuda=cuda, ndarray=OwnStream)
        for _ in range(2 * MAX_KEPT_STREAMS):
            current.stream = OwnStream(me.cuda)
            comm.all_reduce(x, op=RedOp.MAX)
        current.stream = None
        comm.all_reduce(x, stream=0)
        me.synchronize()
        same(x, np.full(9, n * n))
        assert len(me.cuda.streams) <= others + MAX_KEPT_STREAMS + 1
        del sys.modules["cupy"]


class CupyArray(FakeArray):
    """CuPy array."""

    def __init__(self, cuda: EmulatedCuda, array: np.ndarray) -> None:
        super().__init__(cuda, array)
        self.device = types.SimpleNamespace(id=cuda.home)


def beside_torch() -> None:
    """With PyTorch loaded, CuPy arrays use CuPy's current stream and other arrays use PyTorch's."""
    with rank() as me:
        comm, n, peer = me.comm, me.nranks, 1 - me.rank
        torchs, cupys = me.cuda.make_stream(), me.cuda.make_stream()
        current = types.SimpleNamespace(
            get_current_stream=lambda _: types.SimpleNamespace(ptr=int(cupys))
        )
        torch: Any = types.SimpleNamespace(
            Tensor=OwnStream,
            _C=types.SimpleNamespace(_cuda_getCurrentRawStream=lambda _: int(torchs)),
        )
        vars(sys)["modules"] |= {
            "torch": torch,
            "cupy": types.SimpleNamespace(cuda=current, ndarray=CupyArray),
        }
        x, other, out = (
            kind(me.cuda, np.full(9, me.rank + 1, np.float32))
            for kind in (CupyArray, FakeArray, CupyArray)
        )
        prepared = comm.all_reduce_init(x, op=RedOp.MAX)
        device: Any = comm._device

        def group() -> None:
            with miraccl.group():
                comm.send(x, peer)
                comm.recv(out, peer)

        calls: list[Callable[[], Any]] = [
            lambda: comm.all_reduce(x, op=RedOp.MAX),
            lambda: comm.all_reduce(x, op=RedOp.MAX),  # possibly a fast call
            lambda: comm.sendrecv(x, peer, out, peer),
            prepared,
            group,
        ]
        for call in calls:
            comm.all_reduce(other, op=RedOp.MAX)
            assert device.stream == int(torchs)
            call()
            assert device.stream == int(cupys)
        orders: list[tuple[int, int]] = []
        waits: list[int] = []
        order, wait = device.gpu.order_streams, device.gpu.wait_event

        def note_order(before: int, after: int) -> None:
            orders.append((before, after))
            order(before, after)

        def note_wait(stream: int, event: Any) -> None:
            waits.append(stream)
            wait(stream, event)

        device.gpu.order_streams, device.gpu.wait_event = note_order, note_wait
        for array, stream in ((x, int(cupys)), (other, int(torchs))):
            orders.clear()
            work = comm.all_reduce(array, op=RedOp.MAX, async_op=True)
            assert orders[0] == (stream, device.stream)
            assert work.wait() is array
            assert waits.pop() == stream
        comm.all_reduce(x, op=RedOp.MAX, stream=int(torchs))
        assert device.stream == int(torchs)
        del sys.modules["torch"], sys.modules["cupy"]
        me.synchronize()
        same(x, np.full(9, n))
        same(out, np.full(9, n))


def from_other_threads() -> None:
    """Threads without a CUDA context run and await persistent operations; one with another GPU
    current
    finalizes.
    """
    with rank() as me:
        comm, x, failed = me.comm, me.put(np.full(9, me.rank + 1)), []
        out, right, left = me.zeros(9), (me.rank + 1) % me.nranks, (me.rank - 1) % me.nranks
        calls: list[Callable[[], Any]] = [
            lambda: comm.all_reduce(x, out),
            lambda: comm.sendrecv(x, right, out, left),
            lambda: comm.barrier(stream=0),
            comm.all_reduce_init(x, out),
            lambda: comm.all_reduce(x, out, async_op=True).wait(),
            comm.all_reduce(x, out, async_op=True).wait,
        ]

        def go(call: Callable[[], Any]) -> None:
            try:
                call()
            except Exception as error:
                failed.append(error)

        for call in calls:
            call()
            thread = threading.Thread(target=go, args=(call,))
            thread.start()
            thread.join()
        assert not failed
        me.synchronize()
        same(out, np.full(9, me.nranks * (me.nranks + 1) / 2))
        _with_another_gpu_current(me)
    assert me.cuda.current == context_of(7)


def as_threads(nranks: int) -> None:
    """Ranks as threads of one process, each with its own GPU; half of them have no context yet."""
    cuda = EmulatedCuda().install()

    def work(comm: Communicator) -> None:
        me = EmulatedRank.__new__(EmulatedRank)
        me.cuda, me.comm, me.rank, me.nranks = cuda, comm, comm.rank, comm.nranks
        n, right, left, cuda.home = (
            me.nranks,
            (me.rank + 1) % nranks,
            (me.rank - 1) % nranks,
            me.rank,
        )
        if me.rank % 2:
            cuda.set_current(me.rank)
        stream, count = cuda.make_stream(), 1000
        everybody = np.concatenate([me.data(r, count) for r in range(n)])
        window = comm.empty(count * n, "float32", device=f"cuda:{me.rank}")
        part = comm.split(0)
        assert part is not None
        for each in (comm, part):
            x, out, total = (
                me.put(me.data(me.rank, count)),
                me.zeros(count),
                sum(me.data(r, count) for r in range(n)),
            )
            each.all_reduce(x, out)
            each.all_reduce(x, out, stream=stream)
            work = each.all_gather(x, window, async_op=True)
            work.wait()
            comm.synchronize()
            same(out, total)
            np.testing.assert_array_equal(seen(window.miraccl_view), everybody)
            wide = me.zeros(count * n)
            each.all_gather(x, wide)
            each.sendrecv(x, right, out, left)
            each.barrier(stream=0)
            each.synchronize()
            same(wide, everybody)
            same(out, me.data(left, count))
            assert isinstance(each._device, DeviceCommunicator)
            assert each._device.symmetric.kinds == [
                "self" if r == me.rank else "process" for r in range(n)
            ]
        part.finalize()
        assert cuda.current == context_of(me.rank)

    in_threads(nranks, work)
    assert not [module for module in cuda.modules.values() if module.loaded]
    assert cuda.retained.total() == nranks // 2  # those that the program has chosen


def _with_another_gpu_current(me: EmulatedRank) -> None:
    """Call from a thread with another current GPU; its choice is preserved."""
    comm, n, right, left = me.comm, me.nranks, (me.rank + 1) % me.nranks, (me.rank - 1) % me.nranks
    x, out, wide, total = (
        me.put(np.full(9, me.rank + 1)),
        me.zeros(9),
        me.zeros(9 * n),
        np.full(9, n * (n + 1) / 2),
    )
    beside, legacy, found, chosen = (
        me.cuda.make_stream(),
        me.cuda.streams.legacy[context_of(me.rank)],
        [],
        me.cuda.set_current(7),
    )

    def in_group() -> None:
        with miraccl.group():
            comm.send(x, right)
            comm.recv(out, left, stream=beside)

    def in_background() -> None:
        time.sleep(0.05 * (me.rank == 0))
        comm.all_reduce(x, out, async_op=True).wait()
        legacy.put(lambda: found.append(out.array.copy()))
        legacy.synchronize()
        np.testing.assert_array_equal(found.pop(), total)

    prepared = comm.all_reduce_init(x, out)
    calls: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(x, out),
        lambda: comm.all_reduce(x, out, stream=beside),
        prepared,
        lambda: comm.gather(x, 0, wide),
        lambda: comm.sendrecv(x, right, out, left),
        lambda: comm.barrier(stream=0),
        lambda: comm.empty(4, device=f"cuda:{me.rank}"),
        lambda: comm.explain("reduce", 99, device=f"cuda:{me.rank}"),
        in_group,
        lambda: comm.all_reduce(
            ArraySlice(place_of(x), x.array.dtype, stream=beside), out
        ),  # which a producer has in another stream
        in_background,
        comm.synchronize,
    ]
    for number, call in enumerate(calls):
        call()
        assert me.cuda.current == chosen, number
    same(out, total)


def forks() -> list[str]:
    """A forked child without GPU and pinned memory gets an error; the parent continues."""
    with rank() as me:
        comm, x, out = me.comm, me.put(np.ones(4)), me.zeros(4)
        prepared, window = comm.all_reduce_init(x, out), comm.empty(4, device="cuda")
        comm.all_reduce(x)
        me.synchronize()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            del me.comm._device._host  # type: ignore[union-attr]
            with open(writer, "w") as told:
                for call in (
                    lambda: comm.all_reduce(x),
                    prepared,
                    lambda: comm.send(window, 1 - me.rank),
                    lambda: comm.barrier(stream=0),
                    lambda: comm.empty(4, device="cuda"),
                    comm.synchronize,
                ):
                    try:
                        call()
                    except Exception as error:
                        print(f"{type(error).__name__}: {error}", file=told)
            os._exit(0)
        os.close(writer)
        with open(reader) as told:
            lines = told.read().splitlines()
        assert os.waitpid(pid, 0)[1] == 0
        assert prepared() is out
        me.synchronize()
        same(out, np.full(4, me.nranks**2))
    with pytest.raises(CommunicatorClosed, match="finalized"):
        comm.synchronize()
    return lines


def ordered() -> list[float]:
    """A large deterministic reduce, whose result is 0 only in the order of the ranks."""
    with session() as world:
        me = EmulatedRank.__new__(EmulatedRank)
        me.cuda = EmulatedCuda(home=world.rank).install()
        me.comm = Communicator.from_session(world, Options.create(timeout=60, deterministic=True))
        me.rank, me.nranks = world.rank, world.nranks
        found = []
        for count in (1000, 40_000):
            x = me.put(np.full(count, [1.0, 1e8, -1e8][me.rank]))
            me.comm.reduce(x, 0, stream=0)
            me.synchronize()
            found.append(float(x.array[0]))
        me.comm.finalize()
        return found
