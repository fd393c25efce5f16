"""Where the words of a lane and of its jobs lie: for ``proxy.staging``, which makes them, and ``kernels.lane``, which works on them.

All are words of 8 bytes; offsets are in bytes.
"""

from __future__ import annotations

from typing import Final

# ---- a slot's words, which the stream and the lane share; streams write and wait for the lower half

SLOT_STRIDE: Final = 128
READY_OFFSET: Final = 0  # the number of the job whose piece is there
DONE_OFFSET: Final = 64  # 1 when it is answered

# ---- a lane

FLAGS: Final = 0  # address of slot 0's words
NSLOTS: Final = 8  # of all lanes
THREAD: Final = 16
NTHREADS: Final = 24
JOBS: Final = 32  # address of the table of jobs; row 0 is none
SLOT: Final = 40  # where the next piece comes
SEGMENT: Final = 48  # its number in the job
PYTHON_JOB: Final = 56  # the job whose piece Python runs, or 0
CODE: Final = 64  # what the call of that piece gave, 0 if it was not begun
STOP: Final = 72
DRAIN: Final = 80  # run nothing, but answer
ANNOUNCED: Final = 88  # jobs that were announced, and those of them that have ended
FINISHED: Final = 96
CAPTURED: Final = 104  # a graph may bring pieces at any time
DOORBELL: Final = 112  # futex: added to by whoever has news
TIME: Final = 120  # two words for the system's clock
THREAD_BYTES: Final = 192

# ---- a job

JOB_NSEGMENTS: Final = 0
JOB_STRIDE: Final = 8
JOB_CAPTURED: Final = 16
JOB_CALLS: Final = 24  # address of its calls, one a piece
JOB_BYTES: Final = 32

# ---- a call: ``function(a, b, 0, 0)`` gives 0, the code of an error, or NOT_BEGUN; function 0 is Python's part

CALL_FUNCTION: Final = 0
CALL_A: Final = 8
CALL_B: Final = 16
CALL_BYTES: Final = 24
NOT_BEGUN: Final = -1

# ---- what ``serve`` gives

IDLE: Final = 0  # no piece is there, or the lane is to stop
COMPLETED: Final = 1  # a piece was run and answered
NEEDS_PYTHON: Final = 2  # Python runs the piece
FAILED: Final = 3  # the call of the piece gave CODE

# ---- how a lane waits

SPIN_NS: Final = 2_000_000  # it looks without pause for so long after something happened
MIN_SLEEP_NS: Final = 50_000
MAX_SLEEP_NS: Final = 1_000_000
SLEEP_FRACTION: Final = 20  # a pause is this part of the time since something happened: what is looked for so late is late by 5% at most
IDLE_SLEEP_NS: Final = 1_000_000_000  # between looks where nothing can come unannounced
POLLS_PER_YIELD: Final = 32
