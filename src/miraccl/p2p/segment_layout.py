"""Memory layouts that agents of one host share, and that compiled code and Python share.

Offsets and sizes are in bytes. Words are int64 in the byte order of the host.
"""

from __future__ import annotations

# ---- region table: one segment per agent; peers map it, and only its owner writes the entries

PAGE_BYTES = 4096
#: Page 0: wake-up word of threads that wait for notifications.
DOORBELL_FUTEX, DOORBELL_SLEEPERS = 0, 64
TABLE_ENTRIES = PAGE_BYTES
ENTRY_BYTES = 64
MAX_REGIONS = 4096
TABLE_BYTES = TABLE_ENTRIES + MAX_REGIONS * ENTRY_BYTES
#: An odd generation is live. It never decreases, so (slot, generation) names one registration.
ENTRY_GENERATION, ENTRY_ADDRESS, ENTRY_NBYTES, ENTRY_RIGHTS = 0, 8, 16, 24
#: First 8 bytes of SHA-256 of the key: rejects a wrong key without showing the right one.
ENTRY_KEY_CHECK = 32
#: Window memory: descriptor in the owner's process (-1: private memory), inode, offset.
ENTRY_FD, ENTRY_INODE, ENTRY_OFFSET = 40, 48, 56

# ---- pair segment: one per connection within a host; made by the target, written by the initiator

#: Accesses under way: the slot of the region plus 1, one line per accessing thread.
PAIR_ACCESSES, ACCESS_BYTES, MAX_ACCESSES = 0, 64, 16
#: Notification ring: byte counters, each on a line of its own.
PAIR_HEAD, PAIR_TAIL = 1024, 1088
#: On the line of the tail, for its writer: the head as last read, and the writer's core plus 1.
PAIR_SEEN, PAIR_CORE = PAIR_TAIL + 8, PAIR_TAIL + 16
PAIR_RING = PAGE_BYTES
RING_BYTES = 1 << 16
PAIR_BYTES = PAIR_RING + RING_BYTES
#: Header of a record in the ring: bytes of payload and kind, transfer number.
RECORD_BYTES = 16
MAX_RECORD = RING_BYTES // 4
#: Longest notification, in bytes.
MAX_NOTIFICATION = MAX_RECORD - 2048

# ---- inbox: words of the receiver of all rings

#: ``INBOX_RINGS``: address of a list of rings, replaced as a whole. ``INBOX_DRAINING``: a thread
#: takes records into the queue. ``INBOX_QUEUED``: notifications that the queue has got.
#: ``INBOX_NONE``, ``INBOX_TYPE``: the object None, and the type of notifications.
#: ``INBOX_STREAMS``: number of rings that streams fill. ``INBOX_CORE``: core of the last sender
#: within the host plus 1, 0 for none. ``INBOX_SCRATCH``: a timespec.
(
    INBOX_RINGS,
    INBOX_DOORBELL,
    INBOX_DRAINING,
    INBOX_QUEUED,
    INBOX_NONE,
    INBOX_TYPE,
    INBOX_STREAMS,
    INBOX_CORE,
    INBOX_SCRATCH,
) = range(0, 72, 8)
INBOX_BYTES = INBOX_SCRATCH + 16
#: Words of ``kernels.notify.post``: ring, doorbell of its reader, the type ``bytes``.
POST_PAIR, POST_DOORBELL, POST_BYTES_TYPE = 0, 8, 16
#: Polling of a receiver: with the GIL, for less time than two switches of threads take; then
#: without it, longer than a round trip and short for a core.
SOON_NS, SPIN_NS = 2_000, 50_000
#: A list of rings: their number; then for each the address of the pair, the objects of the peer's
#: name and identifier, and the words of the served stream that fills it (0: a peer does).
RINGS_ENTRIES, RING_ENTRY_BYTES = 8, 32
RING_NAME, RING_AGENT, RING_STREAM = 8, 16, 24

# ---- copy job: words that a transfer within a host is made of (``kernels.local``)

(
    JOB_METHOD,
    JOB_PID,
    JOB_ENTRY,
    JOB_GENERATION,
    JOB_ACCESS,
    JOB_REGION,
    JOB_EXTENTS,
    JOB_COUNT,
    JOB_INDEX,
    JOB_OFFSET,
    JOB_BASE,
    JOB_DONE,
    JOB_ERRNO,
    JOB_VECTORS,
    JOB_TOTAL,
    JOB_NVECTORS,
    JOB_CANCEL,
) = range(0, 136, 8)
JOB_BYTES = 136
#: Methods of a job; reads move remote memory to local memory.
WINDOW_WRITE, WINDOW_READ, PROCESS_WRITE, PROCESS_READ = range(4)
#: An extent: local address, offset in the remote region, bytes.
EXTENT_BYTES = 24
#: Results of a step.
STEP_MORE, STEP_DONE, STEP_STALE, STEP_FAILED = range(4)
#: Largest number of iovecs in one call of process_vm_readv (UIO_MAXIOV).
MAX_VECTORS = 1024
#: Bytes of one step; bounds what a cancelled transfer still moves.
STEP_BYTES = 1 << 20
#: Bytes that have moved when ``start`` returns; below 1 ms.
START_BYTES = 4 << 20
#: Bytes that a waiting thread moves between two looks at the deadline.
WAIT_BYTES = 16 << 20
