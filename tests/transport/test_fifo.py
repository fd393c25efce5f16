"""The layout of a FIFO: its numbers are part of the contract with compiled executors."""

from __future__ import annotations

import itertools

import pytest

from miraccl.executor.cpu.kernels import layout
from miraccl.transport import fifo
from miraccl.transport.base import Endpoint, Fifo, FifoPair
from miraccl.transport.ends import RecvEnd, SendEnd
from miraccl.transport.fifo import (
    FifoMemory,
    Mode,
    PlainAtomics,
    PrivateMemory,
    memory_at,
    native_atomics,
)
from miraccl.transport.registry import SHM, TCP


def test_numbers_of_the_layout():
    """Changing one of these breaks every executor that was compiled before."""
    assert (fifo.NSLOTS, fifo.LINE_BYTES, fifo.INLINE_BYTES) == (8, 64, 32)
    assert (fifo.DESC_OFFSET, fifo.CTS_OFFSET, fifo.TAIL_OFFSET, fifo.SLOTS_OFFSET) == (
        0,
        512,
        1024,
        4096,
    )
    assert (
        fifo.WORD_FLAG,
        fifo.WORD_SIGNATURE,
        fifo.WORD_NBYTES,
        fifo.WORD_MODE,
        fifo.WORD_ADDRESS,
    ) == (0, 1, 2, 3, 4)
    assert [mode.name for mode in sorted(Mode)] == [
        "SLOT",
        "INLINE",
        "WINDOW",
        "ADDRESS",
        "LANDED",
        "OVERSIZE",
        "SIGNAL",
        "MOVED",
    ]


def test_compiled_code_uses_the_same_numbers():
    assert (layout.NSLOTS, layout.LINE, layout.INLINE_BYTES) == (
        fifo.NSLOTS,
        fifo.LINE_BYTES,
        fifo.INLINE_BYTES,
    )
    words = (
        layout.DESC_FLAG,
        layout.DESC_SIG,
        layout.DESC_BYTES,
        layout.DESC_MODE,
        layout.DESC_ADDR,
    )
    assert words == tuple(
        8 * w
        for w in (
            fifo.WORD_FLAG,
            fifo.WORD_SIGNATURE,
            fifo.WORD_NBYTES,
            fifo.WORD_MODE,
            fifo.WORD_ADDRESS,
        )
    )
    assert layout.DESC_INLINE == 8 * fifo.WORD_INLINE
    for mode in Mode:
        assert getattr(layout, f"MODE_{mode.name}") == mode


def test_parts_of_a_fifo_do_not_overlap():
    memory = FifoMemory(8192)
    end = Fifo.from_address(memory.address, 8192, capabilities=SHM.capabilities)
    parts = sorted(
        [
            (end.descriptors, 512),
            (end.cts, 512),
            (end.tail, 128),
            *((end.slots + i * 8192, 8192) for i in range(8)),
        ],
    )
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(parts))
    assert parts[-1][0] + parts[-1][1] == memory.address + fifo.fifo_bytes(8192)
    assert end.slots % fifo.PAGE_BYTES == 0


@pytest.mark.parametrize("slot_bytes", [0, 100, 4095, 6000, -4096])
def test_slots_are_whole_pages(slot_bytes):
    with pytest.raises(ValueError, match="allowed are multiples of 4096"):
        FifoMemory(slot_bytes)


@pytest.mark.parametrize(
    ("address", "nbytes"), [(0, 1), (100, 8), (1 << 47, 1), ((1 << 47) - 1, 2), (8192, -1)]
)
def test_memory_outside_user_space_is_refused(address, nbytes):
    with pytest.raises(ValueError, match="not in user space"):
        memory_at(address, nbytes)
    assert len(memory_at(address, 0)) == 0


@pytest.mark.parametrize("make", [PlainAtomics, native_atomics])
def test_atomics(make):
    atomics, memory = make(), PrivateMemory(64)
    for value in (1, -1, (1 << 63) - 1, -(1 << 63)):
        atomics.store_release(memory.address + 8, value)
        assert atomics.load_acquire(memory.address + 8) == value
        assert fifo.read_words(memory.address, 0, 3) == [0, value, 0]
    assert atomics.exchange(memory.address + 8, 5) == -(1 << 63)
    assert atomics.load_acquire(memory.address + 8) == 5


def test_flags_of_a_ring_are_a_live_view():
    memory = PrivateMemory(1024)
    flags = fifo.flags_view(memory.address)
    for i in range(8):
        native_atomics().store_release(memory.address + 64 * i, i + 1)
    assert flags.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_ends_talk_through_one_piece_of_memory():
    """The smallest transport: sender and receiver share the FIFO."""
    atomics, memory = PlainAtomics(), FifoMemory(4096)
    end = Fifo.from_address(memory.address, 4096, capabilities=SHM.capabilities)
    send, recv = SendEnd(end, atomics), RecvEnd(end, atomics)
    assert recv.peek() is None
    for i in range(fifo.NSLOTS):
        assert send.post(bytes([i]) * (i * 500), signature=i)
    assert not send.post(b"")
    for i in range(fifo.NSLOTS):
        message = recv.peek()
        assert message is not None
        assert (message.number, message.signature, message.payload) == (
            i,
            i,
            memory_at(message_place(end, i, i * 500), i * 500),
        )
        recv.consume()
    assert send.released == send.posted
    with pytest.raises(ValueError, match="cannot post 4097 bytes"):
        send.post(b"x" * 4097)
    with pytest.raises(ValueError, match="cannot post 1 bytes"):
        send.post(b"x", mode=Mode.LANDED)
    recv.clear_to_send(1, 1)  # means nothing here
    assert recv.peek() is None


def message_place(end: Fifo, i: int, nbytes: int) -> int:
    return end.descriptors + 64 * i + 32 if nbytes <= 32 else end.slots + 4096 * i


def test_pair_keeps_its_memory_alive_and_records_are_checked():
    memory = FifoMemory(4096)
    end = Fifo.from_address(memory.address, 4096, capabilities=TCP.capabilities)
    assert FifoPair(send=end, recv=end, memory=memory).memory is memory
    with pytest.raises(ValueError, match="rank"):
        Endpoint(rank=-1, hostid="", pid=0)
