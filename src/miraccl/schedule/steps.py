"""Constructors of steps and references for algorithm authors.

``inp(3)`` is chunk 3 of the input, ``out(4, 2)`` are chunks 4 and 5 of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial

from miraccl.schedule.ir import Buffer, Op, Ref, Schedule, Step
from miraccl.types import Collective


# References are shared: schedules of many ranks name the same chunks tens of thousands of times.
@lru_cache(maxsize=1 << 16)
def _ref(buffer: Buffer, index: int, chunks: int = 1) -> Ref:
    return Ref(buffer, index, chunks)


inp: Callable[..., Ref] = partial(_ref, Buffer.INPUT)
out: Callable[..., Ref] = partial(_ref, Buffer.OUTPUT)
scratch: Callable[..., Ref] = partial(_ref, Buffer.SCRATCH)


def send(src: Ref, to: int) -> Step:
    return Step(op=Op.SEND, src=src, send_peer=to)


def recv(dst: Ref, frm: int) -> Step:
    return Step(op=Op.RECV, dst=dst, recv_peer=frm)


def copy(src: Ref, dst: Ref) -> Step:
    return Step(op=Op.COPY, src=src, dst=dst)


def recv_reduce(dst: Ref, frm: int) -> Step:
    return Step(op=Op.RECV_REDUCE, dst=dst, recv_peer=frm)


def recv_copy_send(dst: Ref, frm: int, to: int) -> Step:
    return Step(op=Op.RECV_COPY_SEND, dst=dst, recv_peer=frm, send_peer=to)


def recv_reduce_send(src: Ref, frm: int, to: int) -> Step:
    return Step(op=Op.RECV_REDUCE_SEND, src=src, recv_peer=frm, send_peer=to)


def recv_reduce_copy(src: Ref, dst: Ref, frm: int) -> Step:
    return Step(op=Op.RECV_REDUCE_COPY, src=src, dst=dst, recv_peer=frm)


def recv_reduce_copy_send(src: Ref, dst: Ref, frm: int, to: int) -> Step:
    return Step(op=Op.RECV_REDUCE_COPY_SEND, src=src, dst=dst, recv_peer=frm, send_peer=to)


def recv_reduce_all(src: Ref | None, dst: Ref, peers: Iterable[int]) -> Step:
    """Fold one message per peer in the order of ``peers``; the rank itself stands for ``src``.

    An aggregator has no ``src``.
    """
    return Step(op=Op.RECV_REDUCE_ALL, src=src, dst=dst, peers=tuple(peers))


def put(src: Ref, dst: Ref, to: int) -> Step:
    """Copy ``src`` to ``dst`` on rank ``to``."""
    return Step(op=Op.PUT, src=src, dst=dst, send_peer=to)


def get(src: Ref, dst: Ref, frm: int) -> Step:
    """Copy ``src`` of rank ``frm`` to ``dst``."""
    return Step(op=Op.GET, src=src, dst=dst, recv_peer=frm)


def reduce_from_peers(src: Ref, dst: Ref, peers: Iterable[int]) -> Step:
    return Step(op=Op.REDUCE_FROM_PEERS, src=src, dst=dst, peers=tuple(peers))


def signal(peers: Iterable[int]) -> Step:
    return Step(op=Op.SIGNAL, peers=tuple(peers))


def wait(peers: Iterable[int]) -> Step:
    return Step(op=Op.WAIT, peers=tuple(peers))


def barrier() -> Step:
    return Step(op=Op.BARRIER)


def peers_after(rank: int, nranks: int) -> list[int]:
    """Return all other ranks in ring order, starting with ``rank + 1``."""
    # Not in rank order: otherwise all ranks would address rank 0 first.
    return [(rank + distance) % nranks for distance in range(1, nranks)]


def sent_table(step: Step) -> int | None:
    """Return the table of the rows that a sending step's message carries."""
    ref = step.src if step.op is Op.SEND else step.dst
    return ref.table if ref is not None else None


def one_channel(
    name: str,
    collective: Collective,
    ranks: Iterable[Iterable[Step]],
    *,
    parts: int = 1,
    root: int = 0,
    scratch_chunks: int = 0,
) -> Schedule:
    """Return a single-channel schedule from the steps of each rank."""
    channel = tuple(tuple(steps) for steps in ranks)
    return Schedule(
        name=name,
        collective=collective,
        nranks=len(channel),
        parts=parts,
        channels=(channel,),
        root=root,
        scratch_chunks=scratch_chunks,
    )
