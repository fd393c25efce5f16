"""Layout of a connection of the plugin in memory: one direction of a FIFO pair, and its requests.

NCCL holds the address of a connection as ``sendComm`` or ``recvComm``, and that of a request as
``request``. All words are int64.
"""

from __future__ import annotations

from typing import Final

FAULT: Final = 0  # a Result once the connection is lost or misused, else 0
POSTED: Final = 8  # requests so far; request m carries message m
CONSUMED: Final = 16  # messages received so far
DESCRIPTORS: Final = 24
TAIL: Final = 32
CTS: Final = 40
SLOTS: Final = 48
SLOT_BYTES: Final = 56
DOORBELL: Final = 64  # eventfd of the proxy
ASLEEP: Final = 72  # address of the word that is 1 while the proxy sleeps
ONE: Final = 80  # the constant 1, written to the eventfd
REQUESTS: Final = 128

NREQUESTS: Final = 64
"""A request is reused after as many others; NCCL keeps at most 32 open (``NCCL_NET_MAX_REQUESTS``).
"""
REQUEST_BYTES: Final = 64
REQUEST_COMM: Final = 0
REQUEST_MESSAGE: Final = 8
REQUEST_IS_RECV: Final = 16
REQUEST_ADDRESS: Final = 24
REQUEST_BYTES_POSTED: Final = 32  # size of the message, or of the receive buffer
REQUEST_SIZE: Final = 40  # bytes that were sent or received

COMM_BYTES: Final = REQUESTS + NREQUESTS * REQUEST_BYTES
