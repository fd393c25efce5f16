"""Constants of the cost model for this machine: cached, or measured by two child processes."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from miraccl import clock, native, trace
from miraccl.executor.cpu.context import ENGINE, fold_kernel
from miraccl.native import cache, progress
from miraccl.planning.cost_model import CpuConstants
from miraccl.types import DType, RedOp

CACHE_FILE = "cpu-constants-7.json"
FAILURE_FILE = "cpu-constants-7.failed"  # time of the last measurement that failed
MEASURING_VARIABLE = "MIRACCL_MEASURING"  # set in the measuring processes: their parent's pid
EXPECTED_S = 4.0  # two idle cores of an AMD EPYC 9004, 2.6 GHz
LIMIT_S = 8.0
MEASURED_FOLD = (DType.FLOAT32, RedOp.SUM)  # reduction whose bandwidth is measured
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
        return _cached() or _recent_failure() or _measure()


def prepare() -> CpuConstants:
    """Compile the engine and load the constants: seconds on the first use of a machine, local."""
    constants = load_constants()
    native.library(ENGINE)
    return constants


def _recent_failure() -> CpuConstants | None:
    """Return what a failed measurement found, None if it is time to measure again."""
    failed, _, constants = (
        (cache.read(FAILURE_FILE) or b"").decode(errors="replace").partition("\n")
    )
    try:
        # The clock starts anew with the machine; then the time of a failure is ahead, or long ago.
        if 0 <= clock.monotonic() - float(failed) < RETRY_AFTER_S:
            return CpuConstants.from_json(constants)
    except (ValueError, TypeError):
        pass
    return None


def _measure() -> CpuConstants:
    found = CpuConstants()
    try:
        with _measuring_process() as process:
            # Both need the engine and this reduction. The child starts with the reduction, so that
            # two cores compile; a lock in the cache makes each wait for what the other compiles.
            # Compiling may take longer than LIMIT_S on a slow machine: the limit begins after it.
            native.library(ENGINE)
            fold_kernel(*MEASURED_FOLD)
            with progress.show("measuring this machine", EXPECTED_S):
                output, reason = _output_of(process)
        if output:
            found = CpuConstants.from_json(output[-1])
        else:
            reason = reason or "no output"
    except (OSError, ValueError) as error:
        reason = str(error)
    if not reason:
        return found
    cache.write(FAILURE_FILE, f"{clock.monotonic()!r}\n{found.to_json()}".encode())
    trace.logger("tuning").warning(
        "cannot measure this machine: %s; %s, and the next process after %.0f minutes tries again",
        reason,
        "defaults are used" if found == CpuConstants() else "defaults are used for the rest",
        RETRY_AFTER_S / 60,
    )
    return found


@contextlib.contextmanager
def _measuring_process() -> Iterator[subprocess.Popen[str]]:
    """Start ``miraccl.api.measure``; neither it nor its children are left when the block ends."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MIRACCL_", "NCCL_"))
    }
    if "MIRACCL_CACHE_DIR" in os.environ:
        environ["MIRACCL_CACHE_DIR"] = os.environ["MIRACCL_CACHE_DIR"]
    environ[MEASURING_VARIABLE] = str(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-m", "miraccl.api.measure"],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group that can be killed as a whole
    ) as process:
        try:
            yield process
        finally:  # also at a KeyboardInterrupt, and for a second rank whose first one died
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def _output_of(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    """Return the complete lines of the measuring process, and the reason if it did not end well."""
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        reason = f"not finished after {LIMIT_S:.0f} s, as on a busy machine"
    else:
        reason = ""
        if process.returncode:
            reason = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    return [line for line in output.splitlines(keepends=True) if line.endswith("\n")], reason
