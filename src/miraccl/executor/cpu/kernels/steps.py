"""The primitives of ``schedule.ir.Op`` on bytes: what one step of a program does in one round.

A round moves at most ``RUN_ROUND_BYTES`` of every chunk.  A step on several chunks sends one message in which chunk ``i`` begins
at ``i * RUN_ROUND_BYTES``.  Chunk ``i`` of scratch has the length of part ``i % parts`` of a block.  A step that has nothing to move
in a round sends and expects no message; both ends see that alike.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout as at
from miraccl.executor.cpu.kernels.messages import (
    acquire,
    can_post_address,
    connection,
    consume,
    copy_bytes,
    local_payload,
    post,
    post_address,
    post_slot,
    read_remote,
    receive,
    take,
    want,
    write_remote,
)
from miraccl.executor.cpu.kernels.slots import post_line, slot
from miraccl.executor.cpu.kernels.waiting import fail
from miraccl.native.intrinsics import call4, inline, load, memcpy, store
from miraccl.schedule.ir import Buffer, Op

SEND, RECV, COPY, RECV_REDUCE, RECV_COPY_SEND, RECV_REDUCE_SEND = (
    int(op) for op in (Op.SEND, Op.RECV, Op.COPY, Op.RECV_REDUCE, Op.RECV_COPY_SEND, Op.RECV_REDUCE_SEND)
)
RECV_REDUCE_COPY, RECV_REDUCE_COPY_SEND, RECV_REDUCE_ALL, PUT, GET = (
    int(op) for op in (Op.RECV_REDUCE_COPY, Op.RECV_REDUCE_COPY_SEND, Op.RECV_REDUCE_ALL, Op.PUT, Op.GET)
)
REDUCE_FROM_PEERS, SIGNAL, WAIT, BARRIER = (int(op) for op in (Op.REDUCE_FROM_PEERS, Op.SIGNAL, Op.WAIT, Op.BARRIER))
INPUT, OUTPUT, SCRATCH = int(Buffer.INPUT), int(Buffer.OUTPUT), int(Buffer.SCRATCH)


@inline
def extent(run: int, buffer: int, index: int, rnd: int) -> tuple[int, int]:
    """(offset from the start of the buffer, bytes) of one chunk's piece of a round."""
    piece = load(run + at.RUN_ROUND_BYTES)
    parts = load(run + at.RUN_PARTS)
    if buffer == SCRATCH:
        size = load(run + at.RUN_SCRATCH_CHUNK)
        left = min(size, load(run + at.RUN_SCRATCH_BLOCK) - index % parts * size) - rnd * piece
        return index * size + rnd * piece, max(0, min(piece, left))
    table = load(run + (at.RUN_IN_BLOCKS if buffer == INPUT else at.RUN_OUT_BLOCKS))
    block, part = index, 0
    if parts != 1:
        block = index // parts
        part = index - block * parts
    entry = table + block * 24
    chunk = load(entry + 16)
    low = part * chunk + rnd * piece
    high = min(min(part * chunk + chunk, load(entry + 8)), low + piece)
    return load(entry) + low, max(0, high - low)


@inline
def base(run: int, buffer: int) -> int:
    return load(run + (at.RUN_IN if buffer == INPUT else at.RUN_OUT if buffer == OUTPUT else at.RUN_SCRATCH))


@inline
def span(run: int, buffer: int, index: int, chunks: int, rnd: int) -> int:
    """Bytes of the message that carries these chunks' pieces, the gaps between them included."""
    last = 0
    for i in range(chunks):
        _, size = extent(run, buffer, index + i, rnd)
        if size > 0:
            last = i * load(run + at.RUN_ROUND_BYTES) + size
    return last


@inline
def fold2(ctx: int, run: int, dst: int, a: int, b: int, nbytes: int) -> None:
    """``dst = a (+) b``."""
    sources = load(ctx + at.CTX_SCRATCH) + 128
    store(sources, load(ctx + at.CTX_KEEP))
    store(sources + 8, a)
    store(sources + 16, b)
    call4(load(run + at.RUN_FOLD), dst, sources, 2, nbytes // load(run + at.RUN_ITEMSIZE))


@inline
def fold_message(ctx: int, run: int, conn: int, peer: int, dst: int, own: int, offset: int, nbytes: int) -> int:
    """``dst = own (+) message[offset:]``, wherever the message lies."""
    source = local_payload(ctx, conn)
    if source != 0:
        fold2(ctx, run, dst, own, source + offset, nbytes)
        return at.OK
    remote = load(post_line(conn) + at.POST_ADDR) + offset
    stage, step = load(ctx + at.CTX_STAGE), load(ctx + at.CTX_STAGE_BYTES)
    for start in range(0, nbytes, step):
        size = min(step, nbytes - start)
        if not read_remote(ctx, conn, stage, remote + start, size):
            return fail(ctx, at.ERR_CMA, peer, nbytes, 0)
        fold2(ctx, run, dst + start, own + start, stage, size)
    return at.OK


@inline
def send(ctx: int, run: int, peer: int, buffer: int, index: int, chunks: int, rnd: int, size: int) -> int:
    conn = connection(ctx, at.CTX_SEND, peer)
    code = acquire(ctx, conn, peer)
    if code != at.OK:
        return code
    sig = load(run + at.RUN_SIG)
    start = base(run, buffer)
    if chunks == 1:
        offset, _ = extent(run, buffer, index, rnd)
        if can_post_address(ctx, conn, start + offset, size, load(run + at.RUN_DIRECT)):
            post_address(ctx, conn, sig, start + offset, size)
        elif size <= at.INLINE_BYTES and load(run + at.RUN_LL) != 0:
            memcpy(post_line(conn) + at.POST_INLINE, start + offset, size)
            post(ctx, conn, sig, size, at.MODE_INLINE)
        else:
            memcpy(slot(conn), start + offset, size)
            post_slot(ctx, conn, sig, size)
        return at.OK
    piece = load(run + at.RUN_ROUND_BYTES)
    for i in range(chunks):
        offset, length = extent(run, buffer, index + i, rnd)
        memcpy(slot(conn) + i * piece, start + offset, length)
    post_slot(ctx, conn, sig, size)
    return at.OK


@inline
def forward(ctx: int, run: int, peer: int, buffer: int, index: int, chunks: int, rnd: int, size: int) -> int:
    """The second half of a *_COPY_SEND: send on what has just been written to dst."""
    return send(ctx, run, peer, buffer, index, chunks, rnd, size)


@inline
def expect(ctx: int, run: int, conn: int, peer: int, size: int) -> int:
    """Wait for a message of ``size`` bytes."""
    code = receive(ctx, conn, peer, load(run + at.RUN_SIG))
    if code != at.OK:
        return code
    got = load(post_line(conn) + at.POST_BYTES)
    if got != size:
        return fail(ctx, at.ERR_SIZE, peer, size, got)
    return at.OK


@inline
def unpack(ctx: int, run: int, conn: int, peer: int, buffer: int, index: int, chunks: int, rnd: int) -> int:
    """Copy the message to dst, chunk by chunk."""
    start = base(run, buffer)
    if chunks == 1:
        offset, size = extent(run, buffer, index, rnd)
        return take(ctx, conn, peer, start + offset, size)
    source = local_payload(ctx, conn)
    piece = load(run + at.RUN_ROUND_BYTES)
    for i in range(chunks):
        offset, size = extent(run, buffer, index + i, rnd)
        memcpy(start + offset, source + i * piece, size)
    return at.OK


@inline
def reduce_into(
    ctx: int, run: int, conn: int, peer: int, src_buf: int, src: int, dst_buf: int, dst: int, chunks: int, rnd: int
) -> int:
    """``dst = src (+) message``, chunk by chunk."""
    piece = load(run + at.RUN_ROUND_BYTES)
    for i in range(chunks):
        own, own_size = extent(run, src_buf, src + i, rnd)
        to, size = extent(run, dst_buf, dst + i, rnd)
        size = min(size, own_size)
        if size > 0:
            code = fold_message(ctx, run, conn, peer, base(run, dst_buf) + to, base(run, src_buf) + own, i * piece, size)
            if code != at.OK:
                return code
    return at.OK


@inline
def reduce_onward(ctx: int, run: int, step: int, conn: int, peer: int, rnd: int, size: int) -> int:
    """RECV_REDUCE_SEND: fold straight into the slot of the next rank."""
    to = load(step + at.STEP_SEND)
    out = connection(ctx, at.CTX_SEND, to)
    code = acquire(ctx, out, to)
    if code != at.OK:
        return code
    buffer, index, chunks = load(step + at.STEP_SRC_BUF), load(step + at.STEP_SRC), load(step + at.STEP_CHUNKS)
    piece = load(run + at.RUN_ROUND_BYTES)
    for i in range(chunks):
        own, length = extent(run, buffer, index + i, rnd)
        if length > 0:
            code = fold_message(ctx, run, conn, peer, slot(out) + i * piece, base(run, buffer) + own, i * piece, length)
            if code != at.OK:
                return code
    post_slot(ctx, out, load(run + at.RUN_SIG), size)
    return at.OK


@inline
def through_fifo(ctx: int, run: int, step: int, op: int, rnd: int) -> int:
    """All primitives that receive from one peer."""
    chunks = load(step + at.STEP_CHUNKS)
    src_buf, src = load(step + at.STEP_SRC_BUF), load(step + at.STEP_SRC)
    dst_buf, dst = load(step + at.STEP_DST_BUF), load(step + at.STEP_DST)
    size = span(run, src_buf, src, chunks, rnd) if op == RECV_REDUCE_SEND else span(run, dst_buf, dst, chunks, rnd)
    if size == 0:
        return at.OK
    peer = load(step + at.STEP_RECV)
    conn = connection(ctx, at.CTX_RECV, peer)
    lands = load(conn + at.CONN_KIND) == at.KIND_NET and chunks == 1 and (op == RECV or op == RECV_COPY_SEND)
    if lands and size > at.INLINE_BYTES and dst_buf != SCRATCH:
        offset, _ = extent(run, dst_buf, dst, rnd)
        want(ctx, conn, base(run, dst_buf) + offset, size)
    code = expect(ctx, run, conn, peer, size)
    if code == at.OK:
        if op == RECV or op == RECV_COPY_SEND:
            code = unpack(ctx, run, conn, peer, dst_buf, dst, chunks, rnd)
        elif op == RECV_REDUCE_SEND:
            code = reduce_onward(ctx, run, step, conn, peer, rnd, size)
        elif op == RECV_REDUCE:
            code = reduce_into(ctx, run, conn, peer, dst_buf, dst, dst_buf, dst, chunks, rnd)
        else:
            code = reduce_into(ctx, run, conn, peer, src_buf, src, dst_buf, dst, chunks, rnd)
    if code != at.OK:
        return code
    consume(ctx, conn)
    if op == RECV_COPY_SEND or op == RECV_REDUCE_COPY_SEND:
        return forward(ctx, run, load(step + at.STEP_SEND), dst_buf, dst, chunks, rnd, size)
    return at.OK


@inline
def fold_many(ctx: int, run: int, step: int, dst: int, own: int, nbytes: int, memory: bool) -> int:
    """Fold the payloads (or, with ``memory``, the addressed buffers) of all peers of a step in their order, block by block."""
    count = load(step + at.STEP_NPEERS)
    peers = load(step + at.STEP_PEERS)
    rank = load(ctx + at.CTX_RANK)
    sources = load(ctx + at.CTX_SCRATCH) + 128
    where = sources + 8 * (count + 1)
    remotes = 0
    store(sources, load(ctx + at.CTX_KEEP))
    for i in range(count):
        peer = load(peers + 8 * i)
        if peer == rank:
            store(where + 8 * i, own)
            continue
        conn = connection(ctx, at.CTX_RECV, peer)
        if memory:
            store(where + 8 * i, peer_address(ctx, run, step, peer))
            if load(conn + at.CONN_PEER_MODES) & 1 != 0:
                remotes += 1
        else:
            store(where + 8 * i, local_payload(ctx, conn))
            if load(where + 8 * i) == 0:
                remotes += 1
    item = load(run + at.RUN_ITEMSIZE)
    block = nbytes
    if remotes != 0:
        block = max(64, load(ctx + at.CTX_STAGE_BYTES) // remotes // 64 * 64)
    for start in range(0, nbytes, max(block, 1)):
        size = min(block, nbytes - start)
        stage = load(ctx + at.CTX_STAGE)
        for i in range(count):
            source = load(where + 8 * i)
            peer = load(peers + 8 * i)
            conn = connection(ctx, at.CTX_RECV, peer)
            remote = False
            if peer != rank:
                remote = (load(conn + at.CONN_PEER_MODES) & 1 != 0) if memory else source == 0
            if remote:
                far = source if memory else load(post_line(conn) + at.POST_ADDR)
                if not read_remote(ctx, conn, stage, far + start, size):
                    return fail(ctx, at.ERR_CMA, peer, nbytes, 0)
                store(sources + 8 * (i + 1), stage)
                stage += block
            else:
                store(sources + 8 * (i + 1), source + start)
        call4(load(run + at.RUN_FOLD), dst + start, sources, count, size // item)
    return at.OK


@inline
def reduce_all(ctx: int, run: int, step: int, rnd: int) -> int:
    """RECV_REDUCE_ALL."""
    src_buf, src = load(step + at.STEP_SRC_BUF), load(step + at.STEP_SRC)
    dst_buf, dst = load(step + at.STEP_DST_BUF), load(step + at.STEP_DST)
    to, size = extent(run, dst_buf, dst, rnd)
    if size == 0:
        return at.OK
    count, peers, rank = load(step + at.STEP_NPEERS), load(step + at.STEP_PEERS), load(ctx + at.CTX_RANK)
    for i in range(count):
        peer = load(peers + 8 * i)
        if peer != rank:
            code = expect(ctx, run, connection(ctx, at.CTX_RECV, peer), peer, size)
            if code != at.OK:
                return code
    own, _ = extent(run, src_buf, src, rnd)
    code = fold_many(ctx, run, step, base(run, dst_buf) + to, base(run, src_buf) + own, size, False)
    if code != at.OK:
        return code
    for i in range(count):
        peer = load(peers + 8 * i)
        if peer != rank:
            consume(ctx, connection(ctx, at.CTX_RECV, peer))
    return at.OK


# ---- memory that peers can address


@inline
def modes_of(ctx: int, address: int, nbytes: int) -> tuple[int, int]:
    """(0, offset in the window) or (1, address in private memory)."""
    window = load(ctx + at.CTX_WINDOW)
    if address >= window and address + nbytes <= load(ctx + at.CTX_WINDOW_END):
        return 0, address - window
    return 1, address


@inline
def signal(ctx: int, run: int, peer: int) -> int:
    """Tell a peer that all before is done, and where this rank's buffers lie."""
    conn = connection(ctx, at.CTX_SEND, peer)
    code = acquire(ctx, conn, peer)
    if code != at.OK:
        return code
    line = post_line(conn)
    in_mode, in_at = modes_of(ctx, load(run + at.RUN_IN), load(run + at.RUN_IN_BYTES))
    out_mode, out_at = modes_of(ctx, load(run + at.RUN_OUT), load(run + at.RUN_OUT_BYTES))
    store(line + at.POST_ADDR, in_at)
    store(line + at.POST_ADDR2, out_at)
    if load(conn + at.CONN_KIND) == at.KIND_NET:  # addresses mean nothing there
        post(ctx, conn, load(run + at.RUN_SIG), 0, at.MODE_INLINE)
    else:
        post(ctx, conn, load(run + at.RUN_SIG), in_mode | out_mode << 1, at.MODE_SIGNAL)
    return at.OK


@inline
def await_signal(ctx: int, run: int, peer: int) -> int:
    conn = connection(ctx, at.CTX_RECV, peer)
    code = receive(ctx, conn, peer, load(run + at.RUN_SIG))
    if code != at.OK:
        return code
    line = post_line(conn)
    modes = load(line + at.POST_BYTES)
    same = load(conn + at.CONN_PID) == load(ctx + at.CTX_PID)
    window = load(conn + at.CONN_WINDOW)
    store(conn + at.CONN_PEER_IN, load(line + at.POST_ADDR) + (window if modes & 1 == 0 else 0))
    store(conn + at.CONN_PEER_OUT, load(line + at.POST_ADDR2) + (window if modes & 2 == 0 else 0))
    store(conn + at.CONN_PEER_MODES, 0 if same else modes)
    store(conn + at.CONN_PEER_PRIVATE, modes)
    consume(ctx, conn)
    return at.OK


@inline
def peer_address(ctx: int, run: int, step: int, peer: int) -> int:
    """Where the peer's ``src`` buffer begins (of a step on the peers' memory), to which ``own``'s offset is added by the caller."""
    conn = connection(ctx, at.CTX_RECV, peer)
    if load(step + at.STEP_SRC_BUF) == INPUT:
        return load(conn + at.CONN_PEER_IN) + load(run + at.RUN_SIGNALS)
    return load(conn + at.CONN_PEER_OUT) + load(run + at.RUN_SIGNALS)


@inline
def reduce_from_peers(ctx: int, run: int, step: int, rnd: int) -> int:
    src_buf, src = load(step + at.STEP_SRC_BUF), load(step + at.STEP_SRC)
    dst_buf, dst = load(step + at.STEP_DST_BUF), load(step + at.STEP_DST)
    to, size = extent(run, dst_buf, dst, rnd)
    own, own_size = extent(run, src_buf, src, rnd)
    size = min(size, own_size)
    if size == 0:
        return at.OK
    store(run + at.RUN_SIGNALS, own)  # all ranks' buffers have the same blocks
    return fold_many(ctx, run, step, base(run, dst_buf) + to, base(run, src_buf) + own, size, True)


@inline
def put_or_get(ctx: int, run: int, step: int, op: int, rnd: int) -> int:
    src_buf, src = load(step + at.STEP_SRC_BUF), load(step + at.STEP_SRC)
    dst_buf, dst = load(step + at.STEP_DST_BUF), load(step + at.STEP_DST)
    for i in range(load(step + at.STEP_CHUNKS)):
        frm, from_size = extent(run, src_buf, src + i, rnd)
        to, size = extent(run, dst_buf, dst + i, rnd)
        size = min(size, from_size)
        if size == 0:
            continue
        peer = load(step + (at.STEP_SEND if op == PUT else at.STEP_RECV))
        conn = connection(ctx, at.CTX_RECV, peer)
        remote_buf = dst_buf if op == PUT else src_buf
        start = load(conn + (at.CONN_PEER_IN if remote_buf == INPUT else at.CONN_PEER_OUT))
        far = load(conn + at.CONN_PEER_MODES) & (1 if remote_buf == INPUT else 2) != 0
        here = base(run, src_buf) + frm if op == PUT else base(run, dst_buf) + to
        there = start + (to if op == PUT else frm)
        done = True
        if op == PUT:
            if far:
                done = write_remote(ctx, conn, there, here, size)
            else:
                memcpy(there, here, size)
        elif far:
            done = read_remote(ctx, conn, here, there, size)
        else:
            memcpy(here, there, size)
        if not done:
            return fail(ctx, at.ERR_CMA, peer, size, 0)
    return at.OK


@inline
def signals(ctx: int, run: int, step: int, op: int) -> int:
    peers, count, rank = load(step + at.STEP_PEERS), load(step + at.STEP_NPEERS), load(ctx + at.CTX_RANK)
    if op == SIGNAL or op == BARRIER:
        for i in range(count):
            peer = load(peers + 8 * i)
            if peer != rank:
                code = signal(ctx, run, peer)
                if code != at.OK:
                    return code
    if op == WAIT or op == BARRIER:
        for i in range(count):
            peer = load(peers + 8 * i)
            if peer != rank:
                code = await_signal(ctx, run, peer)
                if code != at.OK:
                    return code
    return at.OK


@inline
def all_in_windows(ctx: int, run: int) -> int:
    """Exchange with all ranks where the buffers lie: OK if they are window memory everywhere, ``NEED_PLAN`` if not, or an ERR_*."""
    peers, count = load(run + at.RUN_ASK), load(run + at.RUN_NASK)
    for i in range(count):
        code = signal(ctx, run, load(peers + 8 * i))
        if code != at.OK:
            return code
    in_mode, _ = modes_of(ctx, load(run + at.RUN_IN), load(run + at.RUN_IN_BYTES))
    out_mode, _ = modes_of(ctx, load(run + at.RUN_OUT), load(run + at.RUN_OUT_BYTES))
    private = in_mode | out_mode
    for i in range(count):
        peer = load(peers + 8 * i)
        code = await_signal(ctx, run, peer)
        if code != at.OK:
            return code
        private |= load(connection(ctx, at.CTX_RECV, peer) + at.CONN_PEER_PRIVATE)
    return at.NEED_PLAN if private != 0 else at.OK


@inline
def copy(ctx: int, run: int, step: int, rnd: int) -> None:
    src_buf, src = load(step + at.STEP_SRC_BUF), load(step + at.STEP_SRC)
    dst_buf, dst = load(step + at.STEP_DST_BUF), load(step + at.STEP_DST)
    for i in range(load(step + at.STEP_CHUNKS)):
        frm, from_size = extent(run, src_buf, src + i, rnd)
        to, size = extent(run, dst_buf, dst + i, rnd)
        frm += base(run, src_buf)
        to += base(run, dst_buf)
        if to != frm:
            copy_bytes(ctx, to, frm, min(size, from_size))


@inline
def do_step(ctx: int, run: int, step: int, rnd: int) -> int:
    op = load(step + at.STEP_OP)
    if op == SEND:
        buffer, index, chunks = load(step + at.STEP_SRC_BUF), load(step + at.STEP_SRC), load(step + at.STEP_CHUNKS)
        size = span(run, buffer, index, chunks, rnd)
        if size == 0:
            return at.OK
        return send(ctx, run, load(step + at.STEP_SEND), buffer, index, chunks, rnd, size)
    if op == RECV_REDUCE_ALL:
        return reduce_all(ctx, run, step, rnd)
    if op == COPY:
        copy(ctx, run, step, rnd)
        return at.OK
    if op < RECV_REDUCE_ALL:
        return through_fifo(ctx, run, step, op, rnd)
    if op == REDUCE_FROM_PEERS:
        return reduce_from_peers(ctx, run, step, rnd)
    if op == PUT or op == GET:
        return put_or_get(ctx, run, step, op, rnd)
    when = load(step + at.STEP_WHEN)
    if when == at.NEVER or (when == at.FIRST_ROUND and rnd != 0) or (when == at.LAST_ROUND and rnd != load(run + at.RUN_NROUNDS) - 1):
        return at.OK
    return signals(ctx, run, step, op)
