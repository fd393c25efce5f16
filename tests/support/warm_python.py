"""A Python whose programs start in milliseconds, because they are forked from a process that has imported the packages already.

``warm_python()``, or ``warm_python(*TORCH)``, is the path of an executable that takes ``[-u] SCRIPT WORDS...`` and
``[-u] -m MODULE WORDS...``.  It is also the ``sys.executable`` of its programs, so that the ranks of a launcher that was started with it
are started with it, too.  Each program is a process of its own, leader of a session, with the environment, folder and streams that it
was given; whoever started the executable sees it end as the program does, and a signal to it reaches the program.

Not for tests of what an interpreter does at its start: imports have been made, in the order of the server.
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
_START_TIMEOUT_S = 100.0  # for the first compilation on a machine


@functools.cache
def warm_python(*modules: str) -> str:
    """The executable, for programs that need these modules besides those of a rank."""
    folder = Path(tempfile.mkdtemp(prefix="miraccl-warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    executable, meeting = folder / "python", folder / "socket"
    words = [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).with_name("warm_client.py")),
        sys.executable,
        str(executable),
        str(meeting),
    ]
    executable.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    executable.chmod(0o700)
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm_server", str(meeting), *modules],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
        },  # which OpenMP reads when it is loaded
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
        raise RuntimeError("the server of warm interpreters does not start")
    return str(executable)
