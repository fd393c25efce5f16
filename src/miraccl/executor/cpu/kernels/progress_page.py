"""What a rank shows those who wait for it: which operation it is at, the last ones, and whom it waits for itself."""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.native.intrinsics import inline, load, load_acquire, store, store_release


@inline
def begin_operation(ctx: int, template: int, count: int) -> int:
    """Number the communicator's next operation and put it on the board; returns its signature, ``template`` with the number."""
    ctrl = load(ctx + layout.CTX_CTRL)
    seq = load(ctx + layout.CTX_SEQ) + 1
    store(ctx + layout.CTX_SEQ, seq)
    sig = template | (seq & layout.SEQ_MASK)
    store(ctrl + layout.PROGRESS_SIG, sig)
    store(ctrl + layout.PROGRESS_COUNT, count)
    if (
        load_acquire(ctrl + layout.CTRL_ABORT) == 0
    ):  # else it is not run, and others are not compared with it
        entry = ctrl + layout.CTRL_HISTORY + (seq & (layout.HISTORY - 1)) * 16
        store(entry, sig)
        store(entry + 8, count)
    store_release(ctrl + layout.PROGRESS_STATE, layout.STATE_RUNNING)
    store_release(
        ctrl + layout.PROGRESS_SEQ, seq
    )  # after the state: with this number and idle, it has ended
    return sig


@inline
def publish_wait(ctx: int, peer: int) -> None:
    """Put on the board that this rank waits for ``peer``, in the step that it is at."""
    ctrl = load(ctx + layout.CTX_CTRL)
    store(ctrl + layout.PROGRESS_PEER, peer)
    store(ctrl + layout.PROGRESS_STEP, load(ctx + layout.CTX_STEP))
    store_release(ctrl + layout.PROGRESS_STATE, layout.STATE_WAITING)
