"""What people need not install is not imported."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
before = set(sys.modules)  # packages may import themselves when Python starts (.pth files), as cuda-bindings does
import numpy as np
import miraccl
with miraccl.init() as comm:
    comm.all_reduce(np.ones(3))
print(*sorted({"torch", "ray", "mpi4py", "jax", "jaxlib", "cupy", "cuda"} & (set(sys.modules) - before)))
"""


def test_a_communicator_imports_no_library_of_others() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""
