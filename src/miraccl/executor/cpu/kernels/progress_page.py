"""Progress page: the current operation of a rank, its last ones, and the peer it waits for."""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.native.intrinsics import inline, load, load_acquire, store, store_release


@inline
def begin_operation(ctx: int, template: int, count: int) -> int:
    """Number the communicator's next operation and publish it on the progress page.

    Returns its signature: ``template`` with the sequence number.
    """
    ctrl = load(ctx + layout.CTX_CTRL)
    seq = load(ctx + layout.CTX_SEQ) + 1
    store(ctx + layout.CTX_SEQ, seq)
    sig = template | (seq & layout.SEQ_MASK)
    store(ctrl + layout.PROGRESS_SIG, sig)
    store(ctrl + layout.PROGRESS_COUNT, count)
    # An aborted operation is not run, and other ranks must not be compared with it.
    if load_acquire(ctrl + layout.CTRL_ABORT) == 0:
        entry = ctrl + layout.CTRL_HISTORY + (seq & (layout.HISTORY - 1)) * 16
        store(entry, sig)
        store(entry + 8, count)
    store_release(ctrl + layout.PROGRESS_STATE, layout.STATE_RUNNING)
    # After the state: this number with an idle state means that the operation has ended.
    store_release(ctrl + layout.PROGRESS_SEQ, seq)
    return sig


@inline
def publish_wait(ctx: int, peer: int) -> None:
    """Publish that this rank waits for ``peer`` in its current step."""
    ctrl = load(ctx + layout.CTX_CTRL)
    store(ctrl + layout.PROGRESS_PEER, peer)
    store(ctrl + layout.PROGRESS_STEP, load(ctx + layout.CTX_STEP))
    store_release(ctrl + layout.PROGRESS_STATE, layout.STATE_WAITING)
