"""Detection of unmatched messages inside a host at finalize.

A message of a collective is unmatched if ranks disagreed on counts, or not all called it. The next
message collective between the two ranks detects it by its tag. Without a next one, the check at
finalize does, when nothing is launched any longer: packets behind those that this rank has received
in a queue's ring were sent without a receiver. The first queue carries the headers, so only that
one is read. Plain sends (tag 0) are not an error here, as on CPU memory. The check takes a few
small copies per peer, too many for ``synchronize``.
"""

from __future__ import annotations

import struct

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.source import Framing
from miraccl.runtime.gpu.flight_recorder import RecorderSnapshot, RegionAddresses

_COUNT = struct.Struct("<Q")
_ROW = struct.Struct("<IIII")
#: offset of a message's header (tag and flags) in its first packets (``frame`` of source/p2p.cuh)
_TAG_OFFSETS = {Framing.LINE: 7 * _ROW.size, Framing.PAIR: 0}


def message_tag(packets: bytes, frame: Framing, row: int) -> int | None:
    """Return the tag of the message whose first two packets are at ``row``; None if not arrived."""
    flag = row // layout.FIFO_ROWS + 1 & 0xFFFFFFFF
    first, second = (
        _ROW.unpack_from(packets, _TAG_OFFSETS[frame] + number * layout.ROW_BYTES)
        for number in range(2)
    )
    if frame is Framing.LINE:
        return first[2] if first[3] == flag else None
    return second[0] if {first[1], first[3], second[1], second[3]} == {flag} else None


def find_unmatched(
    gpu: Gpu, regions: RegionAddresses, frame: Framing, snapshot: RecorderSnapshot
) -> tuple[int, int] | None:
    """Return (peer, signature) of an unmatched message, or None; signature 0 if it is unknown.

    All GPUs have finished their work, and no wait has failed.
    """
    nqueues = layout.message_warp_queues(len(regions.inboxes))
    for peer, inbox in enumerate(regions.inboxes):
        if peer == regions.rank:
            continue
        (row,) = _COUNT.unpack(
            gpu.read(
                regions.own + layout.ROWS_RECEIVED_OFFSET + peer * nqueues * layout.WORD_STRIDE,
                _COUNT.size,
            )
        )
        ring = (
            inbox
            + layout.ROW_FIFOS_OFFSET
            + (peer - (peer > regions.rank)) * nqueues * layout.FIFO_ROWS * layout.ROW_BYTES
        )
        both = (
            gpu.read(ring + (row + i) % layout.FIFO_ROWS * layout.ROW_BYTES, layout.ROW_BYTES)
            for i in range(2)
        )
        if tag := message_tag(b"".join(both), frame, row):
            return peer, next(
                (
                    record.signature
                    for record in snapshot.peers[peer].message_ops.values()
                    if record.tag == tag
                ),
                0,
            )
    return None
