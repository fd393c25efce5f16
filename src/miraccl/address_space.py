"""Check of the address space (``ulimit -v``) before libraries that do not report its lack.

OpenBLAS ends the process and llvmlite raises an import error about a missing file.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys

from miraccl.errors import SystemFailure

MIB = 1 << 20
#: MiB that a process maps for each: numpy 2.4 with OpenBLAS 0.3 on one thread, llvmlite 0.50 with
#: numba 0.68 and a compilation (Python 3.11, x86-64)
_NEEDS = {"numpy": 85, "llvmlite": 240}
_OPENBLAS_THREAD_MIB = 40  # buffer and stack of each further thread
_OPENBLAS_MAX_THREADS = 64


def require_address_space(*libraries: str, do: str) -> None:
    """Raise ``SystemFailure`` if the limit leaves too little to load ``libraries``.

    Args:
        libraries: ``numpy`` or ``llvmlite``; those loaded already need nothing more.
        do: what the caller wants, as in "cannot ``do``".
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    missing = [name for name in libraries if name not in sys.modules]
    if limit == resource.RLIM_INFINITY or not missing:
        return
    need = sum(_NEEDS[name] for name in missing)
    if "numpy" in missing:
        need += (_openblas_threads() - 1) * _OPENBLAS_THREAD_MIB
    try:
        mmap.mmap(-1, need * MIB, flags=mmap.MAP_PRIVATE, prot=0).close()  # reserves, touches none
    except OSError:
        subject = " and ".join(missing) + (" need" if len(missing) > 1 else " needs")
        raise SystemFailure(
            f"cannot {do}: {subject} {need} MiB of address space and this"
            f" process may have {limit // MIB} MiB in all (ulimit -v)",
            hint=f"raise the limit, for example with ulimit -v {(need + 200) * 1024}",
        ) from None


def _openblas_threads() -> int:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        text = os.environ.get(name, "")
        if text.isdecimal() and int(text):
            return min(int(text), _OPENBLAS_MAX_THREADS)
    return min(len(os.sched_getaffinity(0)), _OPENBLAS_MAX_THREADS)
