"""Messages of collectives inside a host that nobody will take, because ranks did not agree on counts, or not all called.

The next collective that is messages between the two tells of them, as their tag is another one than what is waited for.  Where none
follows, they are found when all ranks have come to the end, and nothing is launched any more: what lies then in the ring of a lane behind
the packets that this rank has taken was sent for nobody.  A header goes by the first lane, so it alone is looked at.  Plain sends are no error
here, as they are none on CPU memory: their tag is 0.  A few small copies for each peer: too many for ``synchronize``.
"""

from __future__ import annotations

import struct

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.source import Framing
from miraccl.runtime.gpu.flight_recorder import MemoryRegions, RecorderSnapshot

_COUNT = struct.Struct("<Q")
_ROW = struct.Struct("<IIII")
#: regions in the first packets of a message a thread has stored its header (``frame`` of source/p2p.cuh), and what it is there: tag, flags
_TAG_OFFSETS = {Framing.LINE: 7 * _ROW.size, Framing.PAIR: 0}


def message_tag(packets: bytes, frame: Framing, row: int) -> int | None:
    """The tag of the message whose first packets lie at ``row`` of a lane, two of them; None if it has not come."""
    flag = row // layout.FIFO_ROWS + 1 & 0xFFFFFFFF
    first, second = (
        _ROW.unpack_from(packets, _TAG_OFFSETS[frame] + number * layout.ROW_BYTES)
        for number in range(2)
    )
    if frame is Framing.LINE:
        return first[2] if first[3] == flag else None
    return second[0] if {first[1], first[3], second[1], second[3]} == {flag} else None


def find_unmatched(
    gpu: Gpu, regions: MemoryRegions, frame: Framing, snapshot: RecorderSnapshot
) -> tuple[int, int] | None:
    """A peer whose message nobody has taken, and the signature of its collective, 0 if the peer does not say any more. All GPUs have ended
    their work, and no wait has failed."""
    lanes = layout.message_warp_queues(len(regions.inboxes))
    for peer, inbox in enumerate(regions.inboxes):
        if peer == regions.rank:
            continue
        (row,) = _COUNT.unpack(
            gpu.read(
                regions.own + layout.ROWS_RECEIVED_OFFSET + peer * lanes * layout.WORD_STRIDE,
                _COUNT.size,
            )
        )
        ring = (
            inbox
            + layout.ROW_FIFOS_OFFSET
            + (peer - (peer > regions.rank)) * lanes * layout.FIFO_ROWS * layout.ROW_BYTES
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
