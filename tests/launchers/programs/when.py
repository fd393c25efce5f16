"""Run a command once a file exists: ``when.py FILE COMMAND...``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

path, command = Path(sys.argv[1]), sys.argv[2:]
deadline = time.monotonic() + 60.0
while not path.exists():
    assert time.monotonic() < deadline, f"{path} was not created"
    time.sleep(0.05)
os.execv(command[0], command)
