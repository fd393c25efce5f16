"""Offsets of the words of a staging thread and of its jobs: bytes; words of 8 bytes.

``proxy.staging`` makes the records, ``kernels.staging`` works on them.
"""

from __future__ import annotations

from typing import Final

# ---- a slot's words, shared by a stream and a thread; streams use the lower 32 bits

SLOT_STRIDE: Final = 128
READY_OFFSET: Final = 0  # number of the job whose segment is ready
DONE_OFFSET: Final = 64  # 1 when the segment is complete

# ---- a thread

FLAGS: Final = 0  # address of slot 0's words
NSLOTS: Final = 8  # of all threads
THREAD: Final = 16  # index of this thread
NTHREADS: Final = 24
JOBS: Final = 32  # address of the table of jobs; row 0 is unused
SLOT: Final = 40  # slot of the next segment
SEGMENT: Final = 48  # its number in the job
PYTHON_JOB: Final = 56  # the job whose segment Python runs, or 0
CODE: Final = 64  # result of that segment's call, 0 if it was not begun
STOP: Final = 72
DRAIN: Final = 80  # complete segments without running them
ANNOUNCED: Final = 88  # jobs that were announced
FINISHED: Final = 96  # those of them that have ended
CAPTURED: Final = 104  # 1: a graph may bring segments at any time
DOORBELL: Final = 112  # futex, incremented for every notification
TIME: Final = 120  # struct timespec
THREAD_BYTES: Final = 192

# ---- a job

JOB_NSEGMENTS: Final = 0
JOB_STRIDE: Final = 8
JOB_CAPTURED: Final = 16
JOB_CALLS: Final = 24  # address of its calls, one per segment
JOB_BYTES: Final = 32

# ---- a call: ``function(a, b, 0, 0)`` returns 0, an error code or NOT_BEGUN; function 0: Python

CALL_FUNCTION: Final = 0
CALL_A: Final = 8
CALL_B: Final = 16
CALL_BYTES: Final = 24
NOT_BEGUN: Final = -1

# ---- results of ``serve``

IDLE: Final = 0  # no segment is ready, or the thread stops
COMPLETED: Final = 1  # a segment was run and completed
NEEDS_PYTHON: Final = 2  # Python runs the segment
FAILED: Final = 3  # the segment's call returned CODE

# ---- waiting

SPIN_NS: Final = 2_000_000  # time without a sleep after the last segment
MIN_SLEEP_NS: Final = 50_000
MAX_SLEEP_NS: Final = 1_000_000
SLEEP_FRACTION: Final = 20  # a sleep lasts 1/20 of the idle time: it delays a segment by 5% at most
IDLE_SLEEP_NS: Final = 1_000_000_000  # where nothing can come unannounced
POLLS_PER_YIELD: Final = 32
