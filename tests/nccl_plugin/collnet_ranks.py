"""Rank function of the test of CollNet over a software switch, as NCCL's proxy would call it."""

from __future__ import annotations

from typing import Any

import numpy as np

import miraccl
from miraccl import clock, nccl_plugin
from miraccl.native.nccl_collnet_abi import DataType, NcclRedOp, Part
from miraccl.native.nccl_collnet_plugin import CollNetPlugin


def collectives(versions: tuple[int, ...]) -> list[str]:
    """Run all operations of the tables of some versions; return the devices' names."""
    with miraccl.init() as comm:  # stands for NCCL's bootstrap
        return [_run_all(comm, version) for version in versions]


def _run_all(comm: Any, version: int) -> str:
    n, rank = comm.nranks, comm.rank
    plugin = CollNetPlugin(nccl_plugin.export(set_environment=False).path, version)
    (device,) = plugin.devices()
    assert plugin.reduce_support(DataType.BFLOAT16, NcclRedOp.AVG)
    assert not plugin.reduce_support(12, NcclRedOp.SUM)  # type: ignore[arg-type]
    handle, listening = plugin.listen(0)
    handles = comm.all_gather(np.frombuffer(handle, np.uint8)).reshape(n, -1)
    group = plugin.connect([row.tobytes() for row in handles], rank, listening)
    if rank:
        plugin.close_listen(listening)
    x = np.arange(1001, dtype=np.float32) + rank
    y = np.empty_like(x)
    mr = [plugin.register(group, a.ctypes.data, a.nbytes) for a in (x, y)]
    base = n * np.arange(1001) + sum(range(n))
    for op, want in ((NcclRedOp.SUM, base), (NcclRedOp.MAX, np.arange(1001) + n - 1)):
        request = plugin.iallreduce(
            group, x.ctypes.data, y.ctypes.data, len(x), DataType.FLOAT32, op, *mr
        )
        assert _wait(plugin, request) == x.nbytes
        assert np.array_equal(y, want.astype(np.float32))
    _scatter(plugin, group, n, rank)
    _gather(plugin, group, n, rank)
    assert _wait(plugin, plugin.iflush(group, y.ctypes.data, 4, mr[1])) == 0
    for handle_of in mr:
        plugin.deregister(group, handle_of)
    plugin.close(group)
    return device.name


def _wait(plugin: CollNetPlugin, request: int | None) -> int:
    assert request
    while (nbytes := plugin.test(request)) is None:
        clock.sleep(0.0005)
    return nbytes


def _windows(plugin: CollNetPlugin, whole: int) -> list[tuple[int, int]]:
    """Return (offset, bytes): all at once, and two windows that cut blocks."""
    return [(0, whole), (0, whole // 2 + 4), (whole // 2 + 4, whole - whole // 2 - 4)]


def _share(per_rank: int, window: tuple[int, int], rank: int) -> tuple[int, int]:
    """Return (first, end) of a rank's block, in its bytes, that lie in a window."""
    first, end = window[0] - rank * per_rank, sum(window) - rank * per_rank
    return max(0, min(per_rank, first)), max(0, min(per_rank, end))


def _parts(plugin: CollNetPlugin, memory: Any) -> list[Part]:
    """Return one part, or two for versions that have several."""
    address, half = memory.ctypes.data, len(memory) // 2
    if plugin.version < 9:
        return [Part(mhandle=1, address=address, nbytes=len(memory))]
    return [
        Part(mhandle=1, address=address, nbytes=half),
        Part(mhandle=1, address=address + half, nbytes=len(memory) - half),
    ]


def _scatter(plugin: CollNetPlugin, group: int, n: int, rank: int) -> None:
    per_rank = 4 * 300
    x = (np.arange(300 * n) % 7 + rank).astype(np.int32)
    total = n * (np.arange(300 * n) % 7) + sum(range(n))
    got = np.zeros(300, np.int32)
    for window in _windows(plugin, x.nbytes):
        got[:] = 0
        low, high = _share(per_rank, window, rank)
        source = x.view(np.uint8)[window[0] : sum(window)].copy()
        request = plugin.ireducescatter(
            group,
            _parts(plugin, source),
            got.ctypes.data + low,
            per_rank,
            window,
            DataType.INT32,
            NcclRedOp.SUM,
            1,
        )
        assert _wait(plugin, request) == high - low
        want = total[300 * rank : 300 * rank + 300][low // 4 : high // 4]
        assert np.array_equal(got[low // 4 : high // 4], want), (window, rank)
        assert np.count_nonzero(got) == np.count_nonzero(want)


def _gather(plugin: CollNetPlugin, group: int, n: int, rank: int) -> None:
    per_rank = 1200
    own = np.full(per_rank, rank + 1, np.uint8)
    want = np.repeat(np.arange(1, n + 1, dtype=np.uint8), per_rank)
    for window in _windows(plugin, per_rank * n):
        low, _ = _share(per_rank, window, rank)
        into = np.zeros(window[1], np.uint8)
        request = plugin.iallgather(
            group, own.ctypes.data + low, _parts(plugin, into), per_rank, window, 1
        )
        assert _wait(plugin, request) == window[1]
        assert np.array_equal(into, want[window[0] : sum(window)]), (window, rank)
