"""Rank programs of the GPU fast-path tests; CPU tensors stand for tensors of an emulated GPU."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import miraccl
from miraccl import native
from miraccl.errors import CollectiveMismatch, CommunicatorClosed, InvalidUsage
from miraccl.executor.cuda import driver, fast_call_layout, launch
from miraccl.ops.device_arrays import is_gpu_array
from miraccl.ops.dlpack import KDLCUDA
from miraccl.runtime import dispatch
from miraccl.runtime.gpu import persistent
from miraccl.types import RedOp
from tests.gpu import emulated_ranks
from tests.gpu.emulated_cuda import EmulatedCuda
from tests.gpu.fake_cuda import FakeArray, context_of

DL_CPU, NO_DEVICE = 1, -1


class Direct:
    """``cuLaunchKernelEx`` as a C function that passes launches to the emulated driver."""

    def __init__(self, cuda: EmulatedCuda) -> None:
        self._cuda, self.refused = cuda, 0
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._launched)
        entry = native.library("miraccl.fastpath.cuda.call").address(native.PREFIX + "launch")
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        vars(launch)["direct_launch"] = lambda gpu: (address, native.builtin("launch", entry))

    def _launched(self, config: int, function: int, parameters: int, extra: int | None) -> int:
        said = launch._LaunchConfig.from_address(config)
        kernel = self._cuda.modules[function]
        code = self._cuda.cuLaunchKernel(
            kernel, said.grid[0], 1, 1, said.block[0], 1, 1, 0, said.stream or 0, parameters, 0
        )[0]
        self.refused += code != 0
        return int(code)


class Rank(emulated_ranks.EmulatedRank):
    """A communicator whose GPU side treats CPU tensors as GPU tensors."""

    def __init__(self, world: Any, timeout: float) -> None:
        super().__init__(world, timeout)
        if hasattr(
            torch._C, "_cuda_getCurrentRawStream"
        ):  # of a build for CUDA, which asks the real driver
            del torch._C._cuda_getCurrentRawStream
        self._direct = Direct(self.cuda)
        vars(driver)["pointer_attribute"] = lambda kind, address: None  # of no GPU, as tensors
        vars(dispatch).update(is_gpu_array=on_gpu, device_ordinal=lambda x: 0)
        vars(persistent).update(is_gpu_array=on_gpu)
        self.right, self.left = (self.rank + 1) % self.nranks, (self.rank - 1) % self.nranks
        self.adopt(self.comm)

    def adopt(self, comm: Any) -> None:
        comm.barrier(stream=0)
        comm._device._fast_path._write(fast_call_layout.STATE_DEVICE, DL_CPU)
        comm._device.gpu.ordinal = NO_DEVICE

    def took_fast_path(self) -> bool:
        """Return True if the last operation took the fast path."""
        return self.comm._device._fast_path.last is not None  # type: ignore[union-attr]

    def tensor(self, rank: int, count: int, dtype: Any = torch.float32) -> Any:
        return (torch.arange(count) % 50 + 3 * rank).to(dtype)

    def same(self, got: Any, want: Any, what: Any = "") -> None:
        self.synchronize()
        assert torch.equal(got, want), f"{what}: {got} is not {want}"


def on_gpu(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) or is_gpu_array(thing)


def started() -> contextlib.AbstractContextManager[Rank]:
    rank: Any = emulated_ranks.rank(60.0, Rank)
    return rank  # type: ignore[no-any-return]


class StreamOrder:
    """Stream and event functions of the emulated driver as C functions.

    ``changes`` lists pairs (awaited stream, waiting stream).
    """

    EVENT = 77

    def __init__(self, cuda: Any, fast_path: Any) -> None:
        self._cuda, self._event = cuda, cuda.cuEventCreate(0)[1]
        self.changes: list[tuple[int, int]] = []
        self._recorded = -1
        self._functions = (
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint32))(
                self._captures
            ),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)(self._record),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)(
                self._wait
            ),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))(self._ask_context),
        )
        captures, record, wait, context = (
            ctypes.cast(function, ctypes.c_void_p).value for function in self._functions
        )
        fast_path.set_driver_functions(0, captures)
        fast_path.enable_stream_switches(self.EVENT, (record, wait, context), context_of(cuda.home))

    def _captures(self, stream: int, status: Any) -> int:
        status[0] = self._cuda.cuStreamIsCapturing(stream)[1]
        return 0

    def _ask_context(self, place: Any) -> int:
        place[0] = self._cuda.current or 0
        return 0

    def _record(self, event: int, stream: int) -> int:
        assert event == self.EVENT
        self._recorded = stream
        return int(self._cuda.cuEventRecord(self._event, stream)[0])

    def _wait(self, stream: int, event: int, flags: int) -> int:
        assert (event, flags) == (self.EVENT, 0)
        assert self._cuda.current == context_of(self._cuda.home)
        self.changes.append((self._recorded, stream))
        self._cuda.cuStreamWaitEvent(stream, self._event, 0)
        return 0


def streams() -> None:
    """Check that a call in another stream takes the fast path after the previous stream, unless
    captured.
    """
    with started() as me:
        comm, n, rank, cuda = me.comm, me.nranks, me.rank, me.cuda
        order = StreamOrder(cuda, comm._device._fast_path)  # type: ignore[union-attr]
        x = me.tensor(rank, 1001)
        total = torch.stack([me.tensor(r, 1001) for r in range(n)]).sum(0)
        one, other = (cuda.make_stream() for _ in range(2))
        out = torch.zeros_like(x)
        comm.all_reduce(x, out, stream=one)
        comm.all_reduce(out, stream=one)
        order.changes.clear()
        for turn in range(6):
            out.zero_()
            stream = (other, one)[turn % 2]
            comm.all_reduce(x, out, stream=stream)
            assert me.took_fast_path(), turn
            comm.all_reduce(out, stream=stream)  # in the same stream nothing waits
            me.same(out, total * n, turn)
        assert order.changes == [(one, other), (other, one)] * 3
        cuda.cuStreamBeginCapture(other, 0)
        comm.all_reduce(x, out, stream=other)
        assert not me.took_fast_path()
        graph = cuda.cuStreamEndCapture(other)[1]
        comm.all_reduce(x, out, stream=one)  # after what ran last, which was in this stream
        assert not me.took_fast_path()
        assert len(order.changes) == 6
        comm.all_reduce(x, out, stream=other)
        assert me.took_fast_path()
        assert order.changes[6:] == [(one, other)]
        comm.all_reduce(x, out, stream=one)
        me.synchronize()
        out.zero_()
        cuda.cuGraphLaunch(graph, one)
        me.same(out, total)
        with miraccl.group():  # Python's, where streams change
            comm.send(x, me.right, stream=other)
            comm.recv(out, me.left, stream=other)
        me.same(out, me.tensor(me.left, 1001))
        comm.all_reduce(x, out, stream=0)
        comm.all_reduce(x, out, stream=one)
        before, chosen = len(order.changes), cuda.set_current(7)  # whose default stream 0 is now
        for stream in (0, 0, one):
            comm.all_reduce(x, out, stream=stream)
            assert cuda.current == chosen
        assert order.changes[before:] == [(one, 0), (0, one)]
        assert not me._direct.refused
        cuda.cuCtxSetCurrent(context_of(rank))
        me.same(out, total)
        for _ in range(2):
            with miraccl.group():
                comm.send(x, me.right, stream=0)
                comm.recv(out, me.left, stream=0)
                cuda.cuCtxSetCurrent(chosen)
            assert cuda.current == chosen
            cuda.cuCtxSetCurrent(context_of(rank))
        assert not me._direct.refused
        me.same(out, me.tensor(me.left, 1001))


def collectives() -> None:
    """Run each call twice and compare; the second takes the fast path."""
    with started() as me:
        comm, n, rank = me.comm, me.nranks, me.rank
        for count, dtype in ((12, torch.float32), (1001, torch.int32)):
            inputs = torch.stack([me.tensor(r, count, dtype) for r in range(n)])
            mine, total, whole = inputs[rank], inputs.sum(0).to(dtype), inputs.view(-1)
            for turn in range(2):
                for root in range(n):
                    x, out = mine.clone(), torch.zeros_like(mine)
                    assert comm.reduce(x, root, out) is (out if rank == root else x)
                    assert me.took_fast_path() == (turn == 1)
                    me.same(out, total if rank == root else torch.zeros_like(out), (root, turn))
                    me.same(x, mine)
                    assert comm.reduce(x, root, op=RedOp.MAX) is x
                    assert me.took_fast_path() == (turn == 1)
                    me.same(x, inputs.max(0).values if rank == root else mine, (root, turn))
                    x = mine.clone()
                    assert comm.broadcast(x, root) is x
                    assert me.took_fast_path() == (turn == 1)
                    me.same(x, inputs[root], (root, turn))
                x, out = mine.clone(), torch.zeros_like(whole)
                assert comm.all_reduce(x) is x
                assert me.took_fast_path() == (turn == 1)
                me.same(x, total)
                assert comm.all_gather(mine, out) is out
                assert me.took_fast_path() == (turn == 1)
                me.same(out, whole)
                everything = torch.zeros_like(whole)
                share = everything[rank * count : (rank + 1) * count]
                share.copy_(mine)
                assert comm.all_gather(share, everything) is everything
                assert me.took_fast_path()  # in place it is the same launch
                me.same(everything, whole)
        plan = comm.last_plan
        comm.all_reduce(me.data(rank, 5))  # in CPU memory, through the same doors
        assert comm.last_plan is not plan
        comm.all_gather(mine, out)
        assert comm.last_plan is plan


def new_counts() -> None:
    """Change counts with every call: only the first call of a shape runs in Python."""
    with started() as me:
        comm, n, rank = me.comm, me.nranks, me.rank
        rng = np.random.default_rng(5)
        for turn in range(12):
            table = rng.integers(1, 3000 if turn % 3 else 40, (n, n))
            sends, receives, counts = (
                table[rank].tolist(),
                table[:, rank].tolist(),
                table[0].tolist(),
            )
            blocks = [
                [me.tensor(10 * a + b + turn, int(table[a, b])) for b in range(n)] for a in range(n)
            ]
            x, out = torch.cat(blocks[rank]), torch.zeros(sum(receives))
            assert comm.all_to_all_v(x, sends, receives, out) is out
            assert me.took_fast_path() == (turn > 0)
            me.same(out, torch.cat([blocks[a][rank] for a in range(n)]))
            plan: Any = comm.last_plan
            assert (
                f"{2 * n} messages, up to {plan.blocks * plan.threads // 32} warps" == plan.reason
            )
            parts, out, root = (
                [me.tensor(r + turn, c) for r, c in enumerate(counts)],
                torch.zeros(sum(counts)),
                turn % n,
            )
            assert comm.all_gather_v(parts[rank], counts, out) is out
            assert me.took_fast_path()  # of the shape of all_to_all_v
            me.same(out, torch.cat(parts))
            whole, share = torch.cat(parts), torch.zeros(counts[rank])
            comm.scatter_v(whole if rank == root else None, counts, root, share)
            assert me.took_fast_path() or turn < n
            me.same(share, parts[rank])
            with miraccl.group():
                comm.send(blocks[rank][0], (rank + 1) % n)
                comm.recv(got := torch.zeros(int(table[rank - 1, 0])), (rank - 1) % n)
            assert me.took_fast_path() or turn == 0
            me.same(got, blocks[rank - 1][0])


def moves() -> None:
    """Run gather, scatter and the collectives with counts twice each."""
    with started() as me:
        comm, n, rank = me.comm, me.nranks, me.rank
        counts = [200 * r for r in range(n)]
        first = sum(counts[:rank])
        for turn in range(2):
            mine, part = me.tensor(rank + turn, 300), me.tensor(rank + turn, counts[rank])
            alike, parts = (
                torch.cat([me.tensor(r + turn, count) for r, count in enumerate(c)])
                for c in ([300] * n, counts)
            )
            for root in range(n):
                chief, out = rank == root, torch.zeros(300 * n)
                assert comm.gather(mine, root, out) is (out if chief else None)
                assert me.took_fast_path() == (turn == 1)
                me.same(out, alike if chief else torch.zeros_like(out))
                out = torch.zeros(sum(counts))
                assert comm.gather_v(part, counts, root, out) is (out if chief else None)
                assert (
                    me.took_fast_path() or turn == 0 or counts[rank] == 0
                )  # who has nothing to send launches nothing
                me.same(out, parts if chief else torch.zeros_like(out))
                out = torch.zeros(300)
                assert comm.scatter(alike if chief else None, root, out) is out
                assert me.took_fast_path() == (turn == 1)
                me.same(out, mine)
                out = torch.zeros(counts[rank])
                assert comm.scatter_v(parts if chief else None, counts, root, out) is out
                assert me.took_fast_path() or turn == 0 or counts[rank] == 0
                me.same(out, part)
            out = torch.zeros(sum(counts))
            assert comm.all_gather_v(part, counts, out) is out
            assert me.took_fast_path() or turn == 0
            me.same(out, parts)
            out.zero_()
            own = out[first : first + counts[rank]]
            own.copy_(part)
            assert comm.all_gather_v(own, counts, out) is out  # in place
            assert me.took_fast_path() or turn == 0
            me.same(out, parts)
            out = torch.zeros(n * counts[rank])
            assert comm.all_to_all_v(parts, counts, (counts[rank],) * n, out) is out
            assert me.took_fast_path() or turn == 0
            me.same(out, parts[first : first + counts[rank]].repeat(n))
            for sizes in ([100] * n, [50 * (r + 1) for r in range(n)], counts):
                inputs = torch.stack([me.tensor(r + turn, sum(sizes)) for r in range(n)])
                begin = sum(sizes[:rank])
                want = inputs.sum(0)[begin : begin + sizes[rank]]
                out = torch.zeros(sizes[rank])
                assert comm.reduce_scatter_v(inputs[rank], sizes, out) is out
                assert me.took_fast_path() == (turn == 1)
                me.same(out, want, sizes)
                own = inputs[rank][begin : begin + sizes[rank]]
                assert (
                    comm.reduce_scatter_v(inputs[rank], sizes, own) is own
                )  # in place it is the same launches
                assert me.took_fast_path()
                me.same(own, want, sizes)


class Array(FakeArray):
    """An array in the emulated GPU's memory with the attributes of a CuPy array."""

    def __init__(self, cuda: Any, array: Any) -> None:
        super().__init__(cuda, array)
        self._attributes = types.SimpleNamespace(ptr=self.memory.address, device_id=0)

    data = property(lambda self: self._attributes)
    size = property(lambda self: self.array.size)
    dtype = property(lambda self: self.array.dtype)
    _c_contiguous = True


def arrays() -> None:
    """Mix CuPy arrays and tensors: one fast path learns what the other has done."""
    with started() as me:
        comm, n, rank = me.comm, me.nranks, me.rank
        streams = types.SimpleNamespace(
            get_current_stream=lambda ordinal: types.SimpleNamespace(ptr=0)
        )
        sys.modules["cupy"] = types.SimpleNamespace(ndarray=Array, cuda=streams)  # type: ignore[assignment]
        everybody = [me.data(r, 500) for r in range(n)]
        for turn in range(2):
            x, out = Array(me.cuda, everybody[rank]), Array(me.cuda, np.zeros(500, np.float32))
            assert comm.all_reduce(x, out) is out
            assert me.took_fast_path() == (turn == 1)
            me.same(torch.from_numpy(out.array), torch.from_numpy(sum(everybody)))
            summed = torch.from_numpy(everybody[rank].copy())
            assert comm.all_reduce(summed) is summed
            assert me.took_fast_path()
            me.same(summed, torch.from_numpy(sum(everybody)))
            assert comm.sendrecv(x, me.right, out, me.left) is out
            assert me.took_fast_path() == (turn == 1)
            me.same(torch.from_numpy(out.array), torch.from_numpy(everybody[me.left]))
            got = torch.zeros(500)
            with miraccl.group():
                comm.send(x, me.left)
                comm.recv(got, me.right)
            assert me.took_fast_path()  # between two ranks this is what sendrecv has made known
            me.same(got, torch.from_numpy(everybody[me.right]))


class Tensor:
    """A tensor that only supports DLPack, and counts its capsules."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.streams = tensor, list[int]()

    def __dlpack_device__(self) -> tuple[int, int]:
        return KDLCUDA[0], NO_DEVICE

    def __dlpack__(self, *, stream: int, max_version: Any) -> Any:
        self.streams.append(stream)
        return self.tensor.view(-1).__dlpack__(max_version=max_version)


def protocols() -> None:
    """Check arrays with ``__cuda_array_interface__`` or DLPack only."""
    with started() as me:
        comm, rank = me.comm, me.rank
        ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)(
            lambda out, kind, address: answer(out, 0)
        )
        captures = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)(
            lambda stream, out: answer(out, 0)
        )

        def answer(out: int, value: int) -> int:
            ctypes.c_int32.from_address(out).value = value
            return 0

        side: Any = comm._device
        side._fast_path.set_driver_functions(
            *(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (ask, captures))
        )
        side.gpu.owner = lambda address: NO_DEVICE
        everybody = [me.data(r, 500) for r in range(me.nranks)]
        want = torch.from_numpy(sum(everybody))
        for turn in range(40):
            x, out = (
                FakeArray(me.cuda, everybody[rank]),
                FakeArray(me.cuda, np.zeros(500, np.float32)),
            )
            assert comm.all_reduce(x, out) is out
            assert me.took_fast_path() == (turn > 0)
            me.same(torch.from_numpy(out.array), want)
            tensor = Tensor(torch.from_numpy(everybody[rank].copy()))
            assert comm.all_reduce(tensor) is tensor
            assert me.took_fast_path() == (turn > 0)
            me.same(tensor.tensor, want)
            assert tensor.streams == [1]
            got = Tensor(torch.zeros(500))
            assert comm.sendrecv(x, me.right, got, me.left) is got
            assert me.took_fast_path() == (turn > 0)
            me.same(got.tensor, torch.from_numpy(everybody[me.left]))
            assert len(side._fast_path.retained) < fast_call_layout.MAX_RETAINED
        assert side._paths.keep_alive._waiting


def messages() -> None:
    """Run sends, receives and groups of them twice; the second time on the fast path."""
    with started() as me:
        comm, rank, n = me.comm, me.rank, me.nranks
        for turn in range(3):
            x, out = me.tensor(rank + turn, 5000), torch.zeros(5000)
            assert comm.sendrecv(x, me.right, out, me.left) is out
            assert me.took_fast_path() == (turn > 0)
            me.same(out, me.tensor(me.left + turn, 5000), turn)
            if rank == 0:
                assert comm.send(x, 1) is None
            elif rank == 1:
                assert comm.recv(out, 0) is out
                me.same(out, me.tensor(turn, 5000), turn)
            assert me.took_fast_path() == (turn > 0)
            ins, outs = (
                [torch.zeros(700 + c, dtype=torch.int64) for c in counts]
                for counts in ([rank] * n, range(n))
            )
            small, little = me.tensor(rank, 3), torch.zeros(3)
            before = me.cuda.launches
            with miraccl.group():
                for r in range(n):
                    ins[r] += me.tensor(10 * rank + r, 700 + rank, torch.int64)
                    assert comm.send(ins[r], r) is None
                    assert comm.recv(outs[r], r) is outs[r]
                with miraccl.group():
                    comm.sendrecv(small, me.left, little, me.right)
                assert me.cuda.launches == before
            assert me.cuda.launches == before + 1
            assert me.took_fast_path() == (turn > 0)
            for r in range(n):
                me.same(outs[r], me.tensor(10 * r + rank, 700 + r, torch.int64), (turn, r))
            me.same(little, me.tensor(me.right, 3))


def groups_of_all_kinds() -> None:
    """Run groups with collectives, foreign arrays, other streams, two communicators and
    exceptions.
    """
    with started() as me:
        comm, rank, n = me.comm, me.rank, me.nranks
        second = comm.split(0)
        assert second is not None
        me.adopt(second)
        stream = me.cuda.make_stream()
        x, out = me.tensor(rank, 40), torch.zeros(40)

        def exchange(comm: Any = comm, **more: Any) -> None:
            comm.send(x, me.right, **more)
            comm.recv(out, me.left, **more)

        def grouped(*calls: Callable[[], Any]) -> None:
            with miraccl.group():
                for call in calls:
                    call()

        def expect() -> None:
            me.same(out, me.tensor(me.left, 40))
            out.zero_()

        with miraccl.group():
            exchange()
        expect()
        for _ in range(2):
            other, summed = me.zeros(40), x.clone()
            with miraccl.group():
                exchange()
                comm.send(me.put(me.tensor(rank, 40).numpy()), me.left)  # not PyTorch's
                comm.all_reduce(summed)
                comm.recv(other, me.right)
            expect()
            assert (other.array == me.tensor(me.right, 40).numpy()).all()
            me.same(summed, sum(me.tensor(r, 40) for r in range(n)))
            copied = x.clone()
            alive = weakref.ref(copied)
            with miraccl.group():
                comm.send(copied, me.right)
                comm.recv(out, me.left, stream=stream)
                del copied
                held = alive()
                assert held is not None
            expect()
            del held
            assert alive() is None
            with miraccl.group():
                exchange(stream=stream)
            expect()
            with miraccl.group():
                exchange()
            expect()
            twice = torch.zeros(40)
            with miraccl.group():
                exchange()
                second.sendrecv(x, me.left, twice, me.right)
            expect()
            me.same(twice, me.tensor(me.right, 40))
            before = me.cuda.launches
            with contextlib.suppress(ZeroDivisionError), miraccl.group():
                exchange()
                raise ZeroDivisionError("nothing of the group is sent")
            for wrong, words in (
                (lambda: comm.send(x, n), "dst is"),
                (lambda: comm.send(x[::2], 0), "not contiguous"),
                (lambda: comm.send(x.to(torch.complex64), 0), "has dtype"),
                (lambda: comm.sendrecv(x[:20], 0, x[19:39], 0), "must not overlap"),
            ):
                with pytest.raises(InvalidUsage, match=words):
                    grouped(exchange, wrong)
            with pytest.raises(InvalidUsage, match="to itself: 1 sends and 0 receives"):
                grouped(lambda: comm.send(x, rank), lambda: exchange(second))
            assert me.cuda.launches == before
            with miraccl.group():
                exchange()
            assert me.took_fast_path()
            expect()
        second.finalize()


def unlike() -> str:
    """Send messages that do not match, after equal ones on every rank."""
    with started() as me:
        x, y = torch.zeros(100_000), torch.zeros(60)
        for _ in range(2):
            for one in (x, y):
                me.comm.send(one, 1) if me.rank == 0 else me.comm.recv(one, 0)
        me.synchronize()
        assert me.took_fast_path()
        me.comm.send(x, 1) if me.rank == 0 else me.comm.recv(y, 0)
        assert me.took_fast_path()
        with pytest.raises(CollectiveMismatch) as caught:
            me.synchronize()
        with pytest.raises(CollectiveMismatch):
            me.comm.send(x, 1)
        return str(caught.value)


def after_the_end() -> None:
    """Check that a closed communicator raises although its host memory is gone."""
    with started() as me:
        x, out = torch.zeros(10), torch.zeros(10)
        for _ in range(2):
            me.comm.all_reduce(x)
            me.comm.sendrecv(x, me.right, out, me.left)
        me.comm.finalize()
        for call in (
            lambda: me.comm.all_reduce(x),
            lambda: me.comm.send(x, me.right),
            lambda: me.comm.reduce(x),
        ):
            with pytest.raises(CommunicatorClosed):
                call()
        with pytest.raises(CommunicatorClosed), miraccl.group():
            me.comm.send(x, me.right)
