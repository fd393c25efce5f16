"""Kernel of ``gpu_triton.py``: one-shot all_reduce of float32 in Triton, protocol LL.

Source: NCCL ``src/device/prims_ll.h``.
"""

# ruff: noqa: N803 - names of constexpr parameters
import triton
import triton.language as tl


@triton.jit
def one_shot(
    x,
    out,
    peers,
    epochs,
    rank,
    n,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    epoch = tl.load(epochs + pid) + 1
    at = pid * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    own = tl.load(x + at, mask=there, other=0.0)
    words = own.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    packets = words | (epoch.to(tl.int64) << 32)
    half = (epoch & 1) * WORLD * n
    for peer in tl.static_range(WORLD):
        box = tl.load(peers + peer).to(tl.pointer_type(tl.int64))
        tl.store(box + half + rank * n + at, packets, mask=there & (rank != peer))
    box = tl.load(peers + rank).to(tl.pointer_type(tl.int64))
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for peer in tl.static_range(WORLD):
        from_peer = there & (rank != peer)
        got = tl.load(box + half + peer * n + at, mask=from_peer, other=0, volatile=True)
        while tl.sum((((got >> 32).to(tl.int32) != epoch) & from_peer).to(tl.int32)) > 0:
            got = tl.load(box + half + peer * n + at, mask=from_peer, other=0, volatile=True)
        theirs = got.to(tl.int32).to(tl.float32, bitcast=True)
        total += tl.where(from_peer, theirs, own)
    tl.store(out + at, total, mask=there)
    tl.store(epochs + pid, epoch)
