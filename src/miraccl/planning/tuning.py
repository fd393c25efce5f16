"""Constants of the cost model for this machine: cached, or measured by two child processes."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys

from miraccl import clock, native, trace
from miraccl.executor.cpu.context import ENGINE, fold_kernel
from miraccl.native import cache, progress
from miraccl.planning.cost_model import CpuConstants
from miraccl.types import DType, RedOp

CACHE_FILE = "cpu-constants-5.json"
FAILURE_FILE = "cpu-constants-5.failed"  # time of the last measurement that failed
MEASURING_VARIABLE = "MIRACCL_MEASURING"  # set in the measuring processes: their parent's pid
EXPECTED_S = 4.0  # two idle cores of an AMD EPYC 9004, 2.6 GHz
LIMIT_S = 8.0
RETRY_AFTER_S = 600.0  # processes that start within this time of a failure use defaults


def _cached() -> CpuConstants | None:
    data = cache.read(CACHE_FILE)
    if data is None:
        return None
    try:
        return CpuConstants.from_json(data.decode())
    except (ValueError, TypeError):
        return None


@functools.cache
def load_constants() -> CpuConstants:
    """Return the constants of this machine; defaults if they cannot be measured.

    The first process of a machine measures them, concurrent ones wait for it.
    """
    found = _cached()
    if found is not None or os.environ.get(MEASURING_VARIABLE):
        return found or CpuConstants()
    with cache.lock("measure"):
        found = _cached()
        if found is None and _failed_recently():
            return CpuConstants()
        return found or _measure()


def prepare() -> CpuConstants:
    """Compile the engine and load the constants: seconds on the first use of a machine, local."""
    constants = load_constants()
    native.library(ENGINE)
    return constants


def _failed_recently() -> bool:
    """Return True if a measurement of this machine failed and is not to be repeated yet."""
    try:
        failed = float(cache.read(FAILURE_FILE) or b"nan")
    except ValueError:
        return False
    # The clock starts anew with the machine; then the time of a failure is ahead, or long ago.
    return 0 <= clock.monotonic() - failed < RETRY_AFTER_S


def _measure() -> CpuConstants:
    # Compiled here: on a slow machine that may take longer than the limit of the child, which needs
    # these two kernels.
    native.library(ENGINE)
    fold_kernel(DType.FLOAT32, RedOp.SUM)
    try:
        with progress.show("measuring this machine", EXPECTED_S):
            return CpuConstants.from_json(_run_measurement().strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        cache.write(FAILURE_FILE, repr(clock.monotonic()).encode())
        reason = (
            f"not finished after {LIMIT_S:.0f} s, as on a busy machine"
            if isinstance(error, subprocess.TimeoutExpired)
            else str(error)
        )
        trace.logger("tuning").warning(
            "cannot measure this machine: %s; defaults are used, and the next process after %.0f "
            "minutes tries again",
            reason,
            RETRY_AFTER_S / 60,
        )
        return CpuConstants()


def _run_measurement() -> str:
    """Run the measuring processes and return their output; none is left when this ends."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MIRACCL_", "NCCL_"))
    }
    if "MIRACCL_CACHE_DIR" in os.environ:
        environ["MIRACCL_CACHE_DIR"] = os.environ["MIRACCL_CACHE_DIR"]
    environ[MEASURING_VARIABLE] = str(os.getpid())
    command = [sys.executable, "-m", "miraccl.api.measure"]
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group that can be killed as a whole
    ) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        finally:  # also at a KeyboardInterrupt, and for a second rank whose first one died
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last = errors.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        raise OSError(last[0])
    return output
