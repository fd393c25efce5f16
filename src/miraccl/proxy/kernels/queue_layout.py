"""Memory layout of unreliable queue pairs (UD and UC) that carry the packets of datagram flows.

Everything is an int64 unless it is a structure of ``native.verbs_abi``; offsets are in bytes.
"""

from __future__ import annotations

#: Table of devices: their number, then a record each.
TABLE_COUNT, TABLE_FIRST = 0, 64
MAX_DEVICES = 8

# ---- device: completion queues of its queue pairs

DEVICE_SEND_CQ, DEVICE_RECV_CQ, DEVICE_CHANNEL = 0, 8, 16
DEVICE_POLL, DEVICE_NOTIFY, DEVICE_GET_EVENT, DEVICE_ACK_EVENTS = 24, 32, 40, 48
DEVICE_WORDS = 56  # two words that ibv_get_cq_event writes
DEVICE_FAILED = 72  # completions with an error, and refused requests
DEVICE_DRIVEN_WORDS = 80  # as DEVICE_WORDS, of an executor
DEVICE_WC = 128  # struct ibv_wc of one poll
WC_BYTES, MAX_WC = 48, 16
DEVICE_BYTES = DEVICE_WC + WC_BYTES * MAX_WC

# ---- queue pair: rings of registered packet buffers, and its work requests

PAIR_QP, PAIR_DEVICE, PAIR_POST_SEND, PAIR_POST_RECV = 0, 8, 16, 24
PAIR_KEY = 32  # lkey of both rings
PAIR_SLOT_BYTES = 40  # of a send buffer: the largest packet
PAIR_SEND_BUFFER, PAIR_SEND_SLOTS = 48, 56
PAIR_SENT, PAIR_DONE = 64, 72  # packets posted, and known to be complete
PAIR_RECV_BUFFER, PAIR_RECV_BYTES = 80, 88  # bytes of a receive buffer
PAIR_HEADER = 96  # bytes before a received packet: the global route header of UD
PAIR_STATUS = 104  # first ibv_wc_status or errno since the queue pair was made ready
PAIR_RECV_WR, PAIR_RECV_SGE, PAIR_BAD = 112, 144, 160
PAIR_CHAIN = 168  # send requests that are written and not posted
PAIR_POSTS = 176  # calls of ibv_post_send
PAIR_SEND_WR = 192  # NCHAIN struct ibv_send_wr, then their struct ibv_sge
NCHAIN, SEND_WR_BYTES, SGE_BYTES = 32, 128, 16
PAIR_SEND_SGE = PAIR_SEND_WR + NCHAIN * SEND_WR_BYTES
PAIR_BYTES = PAIR_SEND_SGE + NCHAIN * SGE_BYTES

#: Bytes of an address in PATH_ADDRESS: ah, queue pair number, Q_Key, as in ibv_send_wr.
ADDRESS_BYTES = 16
WR_ADDRESS = 40
#: One request in so many reports its completion.
SIGNAL_EVERY = 16
#: A work request's number is that of its buffer above the queue pair's address.
SLOT_SHIFT = 48
PAIR_MASK = (1 << SLOT_SHIFT) - 1


def table_bytes(ndevices: int) -> int:
    """Size of a table of devices."""
    return TABLE_FIRST + DEVICE_BYTES * ndevices
