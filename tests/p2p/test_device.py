"""The kernel over extents on the emulator, its tables, and transfers with the kernel emulated."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import miraccl
from miraccl.p2p import device
from miraccl.p2p.arrays import Memory
from tests.gpu.emulator import compiled, machine_library, needs_compiler


def emulated_scatter() -> Any:
    """Return the function ``emulate`` of the kernel."""
    from importlib import resources

    text = resources.files("miraccl.executor.cuda").joinpath("source/scatter.cuh").read_text()
    defines = f"#define THREADS {device.THREADS}\n#define GROUP {device.GROUP}\n"
    text = f'{defines}#include "machine.h"\n{text}'
    whole = f'{text}\n#define ENTRY scatter\n#include "launch.h"\n'
    key = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return ctypes.CDLL(str(compiled(f"scatter-{key}", whole, str(machine_library())))).emulate


def launch(table: Any, blocks: int) -> None:
    words = (ctypes.c_uint64 * 2)(table.ctypes.data, len(table))
    args = (ctypes.c_void_p * 1)(ctypes.addressof(words))
    grid = (ctypes.c_uint32 * 1)(blocks)
    emulated_scatter()(args, grid, 1, device.THREADS)


@needs_compiler
@pytest.mark.parametrize("align", [16, 4, 1])
def test_the_kernel_copies_every_extent(align: int) -> None:
    rng = np.random.default_rng(align)
    source = rng.integers(0, 256, 1 << 18, np.uint8)
    target, expected = np.zeros(1 << 18, np.uint8), np.zeros(1 << 18, np.uint8)
    rows = []
    for block in range(24):
        nbytes = int(rng.integers(0, 8192 // align)) * align
        src = int(rng.integers(0, ((1 << 18) - 8192) // align)) * align
        dst = block * 8192
        expected[dst : dst + nbytes] = source[src : src + nbytes]
        rows.append((source.ctypes.data + src, target.ctypes.data + dst, nbytes))
    launch(np.array(rows, np.int64), blocks=5)
    assert (target == expected).all()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 5 * device.PIECE_BYTES)
        ),
        max_size=8,
    )
)
def test_cutting_keeps_every_byte_in_order(rows: list[tuple[int, int, int]]) -> None:
    table = np.array(rows, np.int64).reshape(-1, 3)
    pieces = device.cut(table)
    assert not len(pieces) or pieces[:, 2].max() <= device.PIECE_BYTES
    found = iter(pieces.tolist())
    for src, dst, nbytes in rows:
        done = 0
        while done < nbytes:
            piece = next(found)
            if piece[2] == 0:
                continue
            assert piece[:2] == [src + done, dst + done]
            done += piece[2]
        assert done == nbytes


class EmulatedCopier:
    """Copier whose GPU memory is memory of this process, and whose kernel is the emulator's."""

    def __init__(self) -> None:
        self.gpu = self
        self.running = True
        self._kept: dict[int, Any] = {}

    @contextlib.contextmanager
    def device_guard(self) -> Iterator[None]:
        yield

    def export(self, address: int) -> bytes:
        return address.to_bytes(8, "little")

    def map(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def upload(self, table: Any) -> int:
        self._kept[table.ctypes.data] = table
        return int(table.ctypes.data)

    def make_event(self) -> Any:
        return object()

    def prepare(self, table: int, count: int) -> tuple[int, int]:
        return table, device.launch_blocks(count, 3)

    def start(self, prepared: tuple[int, int], event: Any) -> None:
        table, blocks = prepared
        if len(self._kept[table]):
            launch(self._kept[table], blocks)

    def start_engine(self, target: int, source: int, nbytes: int, event: Any) -> None:
        ctypes.memmove(target, source, nbytes)

    def poll(self, event: Any, times: int) -> bool:
        return self.running

    def run(self, table: Any) -> None:
        launch(np.ascontiguousarray(table), blocks=2)

    def host_words(self, nbytes: int) -> tuple[Any, int, int]:
        words = np.zeros(nbytes, np.uint8)
        self._kept[words.ctypes.data] = words
        return words, words.ctypes.data, words.ctypes.data

    def free_host(self, address: int) -> None:
        self._kept.pop(address, None)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> EmulatedCopier:
    made = EmulatedCopier()
    monkeypatch.setattr(device, "copier", lambda ordinal: made)
    return made


def on_gpu(array: Any) -> Memory:
    return Memory(
        address=array.ctypes.data,
        nbytes=array.nbytes,
        shape=array.shape,
        dtype="uint8",
        writable=True,
        device=0,
        owner=array,
    )


def agents() -> tuple[miraccl.Agent, miraccl.Agent]:
    return (
        miraccl.Agent("target", secret="s", timeout=10),
        miraccl.Agent("initiator", secret="s", timeout=10),
    )


@needs_compiler
def test_gpu_to_gpu(emulated: EmulatedCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    target, initiator = agents()
    there, here = np.zeros((8, 64), np.uint8), np.arange(512, dtype=np.uint8).reshape(8, 64)
    registration = target.register_memory(on_gpu(there), block_nbytes=64)
    peer = initiator.connect(target.address)
    monkeypatch.setattr(type(peer), "_local", lambda self, local, name, writes: on_gpu(local))
    transfer = peer.writev(
        here, registration.advertise(), src_blocks=[1, 2, 3], dst_blocks=[6, 0, 1], notify=b"n"
    )
    transfer.wait()
    assert transfer.explain().method == "kernel"
    assert (there[[6, 0, 1]] == here[1:4]).all()
    note = target.wait_notification(5)
    assert note is not None
    assert note.data == b"n"
    back = np.zeros_like(here)
    peer.read(back, registration.advertise()).wait()
    assert (back == there).all()
    # The kernel holds the memory until it has ended.
    emulated.running = False
    running = peer.write(here, registration.advertise())
    with pytest.raises(miraccl.TransferTimeout, match="still accesses"):
        registration.deregister(0.01)
    emulated.running = True
    running.wait()
    registration.deregister(5)
    with pytest.raises(miraccl.StaleDescriptor):
        peer.write(here, registration.describe()).wait()
    for agent in (initiator, target):
        agent.close()


def test_one_large_extent_uses_the_copy_engine(
    emulated: EmulatedCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "ENGINE_BYTES", 4096)
    target, initiator = agents()
    there = np.zeros((64, 128), np.uint8)
    here = np.arange(8192, dtype=np.uint16).astype(np.uint8).reshape(64, 128)
    blob = target.register_memory(on_gpu(there), block_nbytes=128).advertise()
    peer = initiator.connect(target.address)
    monkeypatch.setattr(type(peer), "_local", lambda self, local, name, writes: on_gpu(local))
    plan = peer.explain_write(here, blob)
    assert (plan.method, plan.calls) == ("engine", 1)
    assert "needs no multiprocessor" in plan.reason
    peer.write(here, blob).wait()
    assert (there == here).all()
    scattered = peer.explain_write(here, blob, src_blocks=range(0, 64, 2), dst_blocks=range(32))
    assert scattered.method == "kernel"
    for agent in (initiator, target):
        agent.close()


def test_blocks_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [device.launch_blocks(n, 132) for n in (0, 1, 9, 1024)] == [1, 1, 3, 132]
    monkeypatch.setenv("MIRACCL_SMS", "8")
    assert [device.launch_blocks(n, 132) for n in (0, 4, 1024)] == [1, 1, 8]


def test_no_multiprocessor_for_one_extent(
    emulated: EmulatedCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIRACCL_SMS", "0")
    target, initiator = agents()
    there, here = np.zeros(256, np.uint8), np.arange(256, dtype=np.uint8)
    blob = target.register_memory(on_gpu(there)).advertise()
    peer = initiator.connect(target.address)
    monkeypatch.setattr(type(peer), "_local", lambda self, local, name, writes: on_gpu(local))
    assert peer.explain_write(here, blob).method == "engine"
    peer.write(here, blob).wait()
    assert (there == here).all()
    for agent in (initiator, target):
        agent.close()


@needs_compiler
@pytest.mark.parametrize("trust", ["job", "target"])
def test_staged(emulated: EmulatedCopier, monkeypatch: pytest.MonkeyPatch, trust: str) -> None:
    monkeypatch.setenv("MIRACCL_P2P_TRUST", trust)
    target, initiator = agents()
    there, here = np.zeros((8, 64), np.uint8), np.arange(512, dtype=np.uint8).reshape(8, 64)
    blob = target.register(there).advertise()
    peer = initiator.connect(target.address)
    monkeypatch.setattr(type(peer), "_local", lambda self, local, name, writes: on_gpu(local))
    transfer = peer.writev(here, blob, src_blocks=[1, 2, 7], dst_blocks=[6, 0, 1])
    transfer.wait()
    assert (there[[6, 0, 1]] == here[[1, 2, 7]]).all()
    back = np.zeros_like(here)
    reading = peer.readv(back, blob, src_blocks=[6, 0], dst_blocks=[3, 4], notify=b"read")
    reading.wait()
    plan = reading.explain()
    plan.verify()
    assert plan.method == "staged"
    assert f"then {'tcp' if trust == 'target' else 'process'}" in plan.reason
    assert (back[[3, 4]] == there[[6, 0]]).all()
    note = target.wait_notification(5)
    assert note is not None
    assert note.data == b"read"
    for agent in (initiator, target):
        agent.close()


def test_gpu_memory_that_cannot_be_reached(emulated: EmulatedCopier) -> None:
    target, initiator = agents()
    registration = target.register_memory(on_gpu(np.zeros(64, np.uint8)))
    peer = initiator.connect(target.address)
    with pytest.raises(miraccl.InvalidUsage, match="is on a GPU, and local is not"):
        peer.write(np.zeros(64, np.uint8), registration.advertise())
    for agent in (initiator, target):
        agent.close()
