"""Constants of the cost model for this machine: cached, or measured by two child processes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

from miraccl import native, trace
from miraccl.executor.cpu.context import ENGINE
from miraccl.native import cache
from miraccl.planning.cost_model import CpuConstants

CACHE_FILE = "cpu-constants-3.json"
MEASURING_VARIABLE = "MIRACCL_MEASURING"  # set in the measuring processes
LIMIT_S = 30.0


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
        return _cached() or _measure()


def prepare() -> CpuConstants:
    """Compile the engine and load the constants: seconds on the first use of a machine, local."""
    constants = load_constants()
    native.library(ENGINE)
    return constants


def _measure() -> CpuConstants:
    # Compiled here: on the first use of a machine that may take longer than the limit of the child.
    native.library(ENGINE)
    sys.stderr.write("miraccl: measuring this machine (once, about 2 s) ...\n")
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MIRACCL_", "NCCL_"))
    }
    if "MIRACCL_CACHE_DIR" in os.environ:
        environ["MIRACCL_CACHE_DIR"] = os.environ["MIRACCL_CACHE_DIR"]
    environ[MEASURING_VARIABLE] = "1"
    command = [sys.executable, "-m", "miraccl.runtime.measure"]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, timeout=LIMIT_S, check=True, text=True
        )
        return CpuConstants.from_json(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        trace.logger("tuning").warning("cannot measure this machine, using defaults: %s", error)
        return CpuConstants()
