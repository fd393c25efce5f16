"""A Python whose programs start in milliseconds, forked from a process with all packages imported.

``warm_python()``, or ``warm_python(*TORCH)``, returns the path of an executable that accepts ``[-u]
SCRIPT WORDS...`` and ``[-u] -m MODULE WORDS...``. It is also the ``sys.executable`` of its
programs, so a launcher started with it starts its ranks with it. Each program is a process and
session leader of its own, with the environment, working directory and streams of the executable;
the executable exits as the program does and forwards signals to it.

Not for tests of interpreter start-up: imports have been made, in the order of the server.
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "miraccl.torch",
)
_START_TIMEOUT_S = 100.0  # includes the first compilation on a machine


@functools.cache
def warm_python(*modules: str) -> str:
    """Return the executable for programs that need ``modules`` besides those of a rank."""
    folder = Path(tempfile.mkdtemp(prefix="miraccl-warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    executable, address = folder / "python", folder / "socket"
    words = [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).with_name("warm_client.py")),
        sys.executable,
        str(executable),
        str(address),
    ]
    executable.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    executable.chmod(0o700)
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm_server", str(address), *modules],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
        },  # read by OpenMP when it is loaded
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    atexit.register(server.wait, 10)
    atexit.register(server.kill)
    assert server.stdout is not None
    if (
        not select.select([server.stdout], [], [], _START_TIMEOUT_S)[0]
        or server.stdout.readline() != b"ready\n"
    ):
        server.kill()
        raise RuntimeError("the server of warm interpreters did not start")
    return str(executable)
