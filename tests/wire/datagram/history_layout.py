"""Memory of a compiled random history: the world, its two sides and their links."""

from __future__ import annotations

NSTREAMS, MAX_FRAMES, MAX_NPATHS = 4, 6, 3
#: Largest frame; the memory of each has guard bytes on both sides.
FRAME_BYTES, GUARD_BYTES = 100_000, 64
#: Packets under way at most; more are lost.
NPACKETS, PACKET_BYTES = 4096, 9088
NEVENTS = 2 * NPACKETS

# ---- world

DRAW, TIME, HEAP_COUNT, NFREE, FAULT, FAULT_ARGUMENT = 0, 8, 16, 24, 32, 40
NFRAMES, NPATHS = 48, 56
#: Protection of packets in all histories, -1: drawn for each.
PROTECTION = 144
#: Counts over all histories.
HISTORIES, FRAMES, PACKETS, REJECTED, LOST, EVENTS = 64, 72, 80, 88, 96, 104
COUNTS = {
    "histories": HISTORIES,
    "frames": FRAMES,
    "packets": PACKETS,
    "rejected": REJECTED,
    "lost": LOST,
    "events": EVENTS,
}
HEAP, FREE, BUFFERS, CONTROLLERS = 112, 120, 128, 136  # addresses; number of controllers
SIDES = 192

# ---- side

FLOW, LINK, PORT, ENGINE, LOG, LANDING, SOURCE = 0, 8, 16, 24, 32, 40, 48  # addresses
LINK_TEMPLATE, FLOW_TEMPLATES = 56, 64  # the latter: one address per controller
#: Contexts of libcrypto, and the key of AEGIS.
OFFSET, WAKE_AT, SEAL, OPEN, AEGIS_KEY = 72, 80, 88, 96, 104
#: Counts by stream.
SUBMITTED, COMPLETED, ACKED, ARRIVED = 120, 152, 184, 216
#: Frames by stream and number: index of the frame.
STREAM_FRAMES = 248
SIDE_LINKS = STREAM_FRAMES + 8 * NSTREAMS * MAX_FRAMES
RATE, LATENCY, QUEUE, LOSS, JITTER, DUPLICATE, CORRUPT, UP, FREE_AT, MTU = range(0, 80, 8)
LINK_BYTES = 80
SIDE_BYTES = SIDE_LINKS + LINK_BYTES * MAX_NPATHS
#: Frames: side, stream, length.
WORLD_FRAMES = SIDES + 2 * SIDE_BYTES
FRAME_SIDE, FRAME_STREAM, FRAME_LENGTH, FRAME_ENTRY = 0, 8, 16, 24
WORLD_BYTES = WORLD_FRAMES + FRAME_ENTRY * MAX_FRAMES
FRAME_STRIDE = 1 << 17

# ---- violations

VIOLATIONS = (
    "",
    "a corrupted packet was accepted",
    "an authentic packet was refused",
    "a packet names memory that was released, or bytes outside its frame",
    "bytes are sent that were not granted",
    "a frame was acknowledged before it was complete",
    "a frame arrived that was not sent",
    "a frame arrived with other bytes or another length",
    "a flow rejects or aborts what its peer has sent",
    "the account of packets in flight is wrong",
    "too many packets are remembered",
    "a set of ranges is too large, unsorted or outside its frame",
    "bytes arrived beyond the grant",
    "bytes were written outside a frame",
    "the history does not end",
    "a frame is missing at the end",
    "one call sends without end",
)
(
    ACCEPTED,
    REFUSED,
    RELEASED,
    UNGRANTED,
    ACKED_EARLY,
    UNSENT,
    CHANGED,
    PROTOCOL,
    ACCOUNT,
    REMEMBERED_TOO_MANY,
    RANGES,
    BEYOND_GRANT,
    OUTSIDE,
    ENDLESS,
    MISSING,
    ENDLESS_SENDING,
) = range(1, len(VIOLATIONS))
