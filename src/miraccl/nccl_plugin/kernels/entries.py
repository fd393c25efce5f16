"""Kernel source: the entries of NCCL's plugin table that move data.

NCCL's proxy threads call them without the interpreter's lock. A request is one message of a FIFO
(``transport.fifo``), which the progress engine moves: isend posts a descriptor with the address of
the data, irecv a clear-to-send, and test compares counters. None of them waits.

C integers of 32 bits arrive with undefined upper halves.
"""

from __future__ import annotations

from typing import Any

from miraccl.native.intrinsics import (
    exchange,
    inline,
    libc_write,
    load,
    load32,
    load_acquire,
    memcpy,
    store,
    store32,
    store_release,
)
from miraccl.nccl_plugin.kernels import comm_layout as layout
from miraccl.transport.fifo import (
    INLINE_BYTES,
    LINE_BYTES,
    NSLOTS,
    WORD_ADDRESS,
    WORD_BYTES,
    WORD_CTS_ADDRESS,
    WORD_CTS_BYTES,
    WORD_FLAG,
    WORD_INLINE,
    WORD_MODE,
    WORD_NBYTES,
    WORD_SIGNATURE,
    Mode,
)
from miraccl.wire.stream import MAX_MESSAGE_BYTES

INLINE, SLOT, ADDRESS, LANDED = (
    int(Mode.INLINE),
    int(Mode.SLOT),
    int(Mode.ADDRESS),
    int(Mode.LANDED),
)
OK, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE = 0, 3, 4, 5
PTR_HOST = 1


@inline
def signed32(value: int) -> int:
    return (value << 32) >> 32


@inline
def wake(comm: int) -> None:
    """Wake the progress engine if it sleeps; the exchange is the full fence."""
    if exchange(load(comm + layout.ASLEEP), 0) != 0:
        libc_write(load(comm + layout.DOORBELL), comm + layout.ONE, 8)


@inline
def request_of(comm: int, message: int) -> int:
    return comm + layout.REQUESTS + message % layout.NREQUESTS * layout.REQUEST_BYTES


@inline
def open_request(comm: int, message: int, is_recv: int, address: int, nbytes: int) -> int:
    entry = request_of(comm, message)
    store(entry + layout.REQUEST_COMM, comm)
    store(entry + layout.REQUEST_MESSAGE, message)
    store(entry + layout.REQUEST_IS_RECV, is_recv)
    store(entry + layout.REQUEST_ADDRESS, address)
    store(entry + layout.REQUEST_BYTES_POSTED, nbytes)
    store(entry + layout.REQUEST_SIZE, nbytes)
    store(comm + layout.POSTED, message + 1)
    return entry


@inline
def post_send(comm: int, data: int, nbytes: int, tag: int, request: int) -> int:
    """Post one message, or set the request to NULL if eight are on their way."""
    store(request, 0)
    fault = load_acquire(comm + layout.FAULT)
    if fault != 0:
        return fault
    if nbytes < 0 or nbytes > MAX_MESSAGE_BYTES:
        return INVALID_ARGUMENT
    message = load(comm + layout.POSTED)
    if message - load_acquire(load(comm + layout.TAIL)) >= NSLOTS:
        return OK
    line = load(comm + layout.DESCRIPTORS) + message % NSLOTS * LINE_BYTES
    store(line + WORD_SIGNATURE * WORD_BYTES, tag)
    store(line + WORD_NBYTES * WORD_BYTES, nbytes)
    if nbytes <= INLINE_BYTES:
        store(line + WORD_MODE * WORD_BYTES, INLINE)
        memcpy(line + WORD_INLINE * WORD_BYTES, data, nbytes)
    else:
        store(line + WORD_MODE * WORD_BYTES, ADDRESS)
        store(line + WORD_ADDRESS * WORD_BYTES, data)
    store(request, open_request(comm, message, 0, data, nbytes))
    store_release(line + WORD_FLAG * WORD_BYTES, message + 1)
    wake(comm)
    return OK


@inline
def post_recv(comm: int, data: int, nbytes: int, request: int) -> int:
    """Post one receive buffer, or set the request to NULL if eight are open."""
    store(request, 0)
    fault = load_acquire(comm + layout.FAULT)
    if fault != 0:
        return fault
    if nbytes < 0:
        return INVALID_ARGUMENT
    message = load(comm + layout.POSTED)
    if message - load(comm + layout.CONSUMED) >= NSLOTS:
        return OK
    store(request, open_request(comm, message, 1, data, nbytes))
    if nbytes > load(comm + layout.SLOT_BYTES):  # smaller messages pass through a slot
        line = load(comm + layout.CTS) + message % NSLOTS * LINE_BYTES
        store(line + WORD_CTS_ADDRESS * WORD_BYTES, data)
        store(line + WORD_CTS_BYTES * WORD_BYTES, nbytes)
        store_release(line + WORD_FLAG * WORD_BYTES, message + 1)
        wake(comm)
    return OK


@inline
def consume(comm: int) -> int:
    """Take every message that has arrived for a posted buffer, in order."""
    while load(comm + layout.CONSUMED) < load(comm + layout.POSTED):
        message = load(comm + layout.CONSUMED)
        line = load(comm + layout.DESCRIPTORS) + message % NSLOTS * LINE_BYTES
        flag = load_acquire(line + WORD_FLAG * WORD_BYTES)
        if flag != message + 1 and flag != -(message + 1):
            return OK
        entry = request_of(comm, message)
        nbytes = load(line + WORD_NBYTES * WORD_BYTES)
        if nbytes > load(entry + layout.REQUEST_BYTES_POSTED):
            store(comm + layout.FAULT, INVALID_USAGE)
            return INVALID_USAGE
        if flag < 0:  # announced: the payload waits for the clear-to-send
            return OK
        mode = load(line + WORD_MODE * WORD_BYTES)
        data = load(entry + layout.REQUEST_ADDRESS)
        if mode == SLOT:
            slot = load(comm + layout.SLOTS) + message % NSLOTS * load(comm + layout.SLOT_BYTES)
            memcpy(data, slot, nbytes)
        elif mode == INLINE:
            memcpy(data, line + WORD_INLINE * WORD_BYTES, nbytes)
        elif mode != LANDED:
            store(comm + layout.FAULT, INTERNAL_ERROR)
            return INTERNAL_ERROR
        store(entry + layout.REQUEST_SIZE, nbytes)
        store(comm + layout.CONSUMED, message + 1)
        store_release(load(comm + layout.TAIL), message + 1)
        wake(comm)
    return OK


# --- entries of the tables; "8" are versions 6 to 8, "9" is version 9, "10" are 10 and later


def isend8(comm: int, data: int, size: int, tag: int, mhandle: int, request: int) -> int:
    return post_send(comm, data, signed32(size), signed32(tag), request)


def isend9(comm: int, data: int, size: int, tag: int, mhandle: int, request: int) -> int:
    return post_send(comm, data, size, signed32(tag), request)


def isend10(
    comm: int, data: int, size: int, tag: int, mhandle: int, phandle: int, request: int
) -> int:
    return post_send(comm, data, size, signed32(tag), request)


def irecv8(comm: int, n: int, data: int, sizes: int, tags: int, mhandles: int, request: int) -> int:
    if signed32(n) != 1:  # maxRecvs is 1
        return INVALID_ARGUMENT
    return post_recv(comm, load(data), load32(sizes), request)


def irecv9(comm: int, n: int, data: int, sizes: int, tags: int, mhandles: int, request: int) -> int:
    if signed32(n) != 1:
        return INVALID_ARGUMENT
    return post_recv(comm, load(data), load(sizes), request)


def irecv10(
    comm: int,
    n: int,
    data: int,
    sizes: int,
    tags: int,
    mhandles: int,
    phandles: int,
    request: int,
) -> int:
    if signed32(n) != 1:
        return INVALID_ARGUMENT
    return post_recv(comm, load(data), load(sizes), request)


def iflush(comm: int, n: int, data: int, sizes: int, mhandles: int, request: int) -> int:
    """Data land in host memory, so there is nothing to flush."""
    store(request, 0)
    return OK


def test(request: int, done: int, sizes: int) -> int:
    """Report whether a request has finished, and its size."""
    comm = load(request + layout.REQUEST_COMM)
    message = load(request + layout.REQUEST_MESSAGE)
    store32(done, 0)
    if load(request + layout.REQUEST_IS_RECV) != 0:
        result = consume(comm)
        if result != OK:
            return result
        finished = load(comm + layout.CONSUMED) > message
    else:
        finished = load_acquire(load(comm + layout.TAIL)) > message
    if not finished:
        return load_acquire(comm + layout.FAULT)
    store32(done, 1)
    if sizes != 0:
        store32(sizes, load(request + layout.REQUEST_SIZE))
    return OK


def register(comm: int, data: int, size: int, kind: int, mhandle: int) -> int:
    """Accept host memory: TCP and UDP need no registration."""
    store(mhandle, comm)
    return OK if signed32(kind) == PTR_HOST else INTERNAL_ERROR


def deregister(comm: int, mhandle: int) -> int:
    return OK


def accepted(a: int, b: int) -> int:
    """Entry of hints that have no effect here."""
    return OK


EXPORTS: dict[str, Any] = {
    "isend8": isend8,
    "isend9": isend9,
    "isend10": isend10,
    "irecv8": irecv8,
    "irecv9": irecv9,
    "irecv10": irecv10,
    "iflush": iflush,
    "test": test,
    "register": register,
    "deregister": deregister,
    "accepted": accepted,
}
