"""Layout of the compiled fabric's state: records of int64 words, offsets in bytes.

The last constant of a group is the size of the record.
"""

from __future__ import annotations

# World: one record at the start of the memory.
(
    NOW,
    ORDER,
    EXECUTED,
    UNTIL,
    UNFINISHED,
    FAILED,
    SEED,
    DRAWN,
    HEAP,
    HEAP_SIZE,
    HEAP_CAPACITY,
    WHEEL,
    WHEEL_COUNT,
    OCCUPIED,
    NODES,
    NODE_FREE,
    PORTS,
    FLOWS,
    HOSTS,
    NHOSTS,
    ROUTES,
    GROUPS,
    SALTS,
    PACKETS,
    FREE,
    CHANGES,
    PACKET_BYTES,
    HEADER_BYTES,
    PAYLOAD_BYTES,
    ENTROPIES,
    BALANCE,
    CONTROL,
    TIMEOUT,
    WINDOW,
    WORLD_SIZE,
) = (8 * i for i in range(35))

# Event of the heap: time, order of scheduling, type and argument.
EVENT_TIME, EVENT_ORDER, EVENT_WHAT, EVENT_SIZE = (8 * i for i in range(4))
#: Nanoseconds of the wheel; a power of two, and beyond the usual timeout.
SLOTS = 1 << 18
SLOT_FIRST, SLOT_LAST, SLOT_SIZE = (8 * i for i in range(3))
#: Bits used of a word of the map of occupied slots: shifts stay positive.
BITS = 32
NODE_NEXT, NODE_WHAT, NODE_SIZE = (8 * i for i in range(3))
WAKE, ARRIVE, START, TIMER, PULL_DUE, CHANGE = range(6)
#: ``EVENT_WHAT`` is argument * 8 + type.
TYPES = 8

(
    PACKET_NEXT,
    PACKET_PREVIOUS,
    PACKET_NODE,
    PACKET_TARGET,
    PACKET_FLOW,
    PACKET_ENTROPY,
    PACKET_SIZE_NOW,
    PACKET_CONTROL,
    PACKET_TRIMMED,
    PACKET_MARKED,
    PACKET_KIND,
    PACKET_SEQUENCE,
    PACKET_WANTED,
    PACKET_ECHO,
    PACKET_SIZE,
) = (8 * i for i in range(15))
DATA, ACK, NACK, PULL, REQUEST, COMPLETE = range(6)

(
    PORT_TARGET,
    PORT_RATE,
    PORT_LATENCY,
    PORT_QUEUE,
    PORT_MARK_ABOVE,
    PORT_TRIMMING,
    PORT_LOSS,
    PORT_UP,
    PORT_HOST,
    PORT_CONTROL_FIRST,
    PORT_CONTROL_LAST,
    PORT_CONTROL_BYTES,
    PORT_DATA_FIRST,
    PORT_DATA_LAST,
    PORT_DATA_BYTES,
    PORT_BUSY_UNTIL,
    PORT_WAKE_PENDING,
    PORT_DROPPED,
    PORT_LOST,
    PORT_TRIMMED,
    PORT_MARKED,
    PORT_LAST_LOSS,
    PORT_SIZE,
) = (8 * i for i in range(23))

(
    HOST_PORT,
    HOST_READY_FIRST,
    HOST_READY_LAST,
    HOST_READY_COUNT,
    HOST_ACTIVE_FIRST,
    HOST_ACTIVE_LAST,
    HOST_RESEND_FIRST,
    HOST_RESEND_LAST,
    HOST_PACING,
    HOST_NEXT_PULL,
    HOST_PULLS,
    HOST_PULL_INTERVAL,
    HOST_SIZE,
) = (8 * i for i in range(13))

(
    FLOW_SOURCE,
    FLOW_TARGET,
    FLOW_NBYTES,
    FLOW_COUNT,
    FLOW_STATES,
    FLOW_FINISHED,
    FLOW_SENT,
    FLOW_RESENT,
    FLOW_UNSOLICITED,
    FLOW_NEXT,
    FLOW_OLDEST,
    FLOW_ACKNOWLEDGED,
    FLOW_IN_FLIGHT,
    FLOW_RESEND_HEAD,
    FLOW_RESEND_TAIL,
    FLOW_RESEND_COUNT,
    FLOW_CREDIT,
    FLOW_PULLS,
    FLOW_NACKS,
    FLOW_SHARING,
    FLOW_IDLE,
    FLOW_LAST_SENT,
    FLOW_SEED,
    FLOW_DRAWS,
    FLOW_TURN,
    FLOW_OFFSET,
    FLOW_RECYCLED_FROM,
    FLOW_RECYCLED_TO,
    FLOW_FROZEN_UNTIL,
    FLOW_WINDOW,
    FLOW_ALPHA,
    FLOW_SLOW_START,
    FLOW_ROUND_START,
    FLOW_ROUND_ACKS,
    FLOW_ROUND_MARKS,
    FLOW_QUEUED,
    FLOW_READY_NEXT,
    FLOW_MISSING,
    FLOW_WANTED,
    FLOW_TRIMMED,
    FLOW_ISSUED,
    FLOW_RESEND_BACKLOG,
    FLOW_ENTROPY,
    FLOW_LISTED,
    FLOW_ACTIVE_NEXT,
    FLOW_RESEND_LISTED,
    FLOW_RESENDING_NEXT,
    FLOW_RECYCLED,
) = (8 * i for i in range(48))
RECYCLED = 8
FLOW_SIZE = FLOW_RECYCLED + 8 * RECYCLED

# State of a data packet of a flow: at its sender, at its receiver, and an entry of the queue of
# packets to resend.
STATE_STATUS, STATE_SENT_AT, STATE_RECEIVED, STATE_RESEND, STATE_SIZE = (8 * i for i in range(5))
NEW, IN_FLIGHT, RESEND, ACKNOWLEDGED = range(4)

CHANGE_LINK, CHANGE_UP, CHANGE_RATE, CHANGE_LOSS, CHANGE_SIZE = (8 * i for i in range(5))
#: Value of a change that keeps the old one.
KEEP = -1

SPRAY, RECYCLE = 0, 1
RECEIVER_CONTROL, SENDER_CONTROL = 0, 1
SECOND = 1_000_000_000
