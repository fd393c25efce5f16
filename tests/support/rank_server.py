"""Process that forks test ranks for ``ranks.py``: pickled requests on stdin, outcomes on stdout."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import struct
import sys
import time
from typing import Any

from miraccl import native
from miraccl.tools import launch
from miraccl.tools.processes import die_with_parent
from miraccl.tools.spawn import RankContext, RankOutcome, Ranks

# modules and compiled code that ranks would otherwise load one by one
ALWAYS = (
    "miraccl.proxy.stream_engine",
    "miraccl.runtime.multinode.communicator",
    "miraccl.topo.detect",
    "numpy.random",
    "numpy.testing",
    "encodings.idna",
)
KERNELS = ("miraccl.proxy.kernels.progress_engine", "miraccl.executor.cpu.kernels.nogil.operations")
NOT_PRELOADED = "tests.interop."  # JAX and others start threads
_LENGTH = struct.Struct("<Q")


def _run_target(context: RankContext, module: str, function: str, args: tuple[Any, ...]) -> Any:
    target: Any = importlib.import_module(module)
    for name in function.split("."):
        target = getattr(target, name)
    return target(*args)


def _import(module: str) -> None:
    """Import a module once before ranks are forked, which is faster than importing it in each.

    Errors are ignored; the ranks import it again and report them.
    """
    if module not in sys.modules and not module.startswith(NOT_PRELOADED):
        with contextlib.suppress(Exception):
            importlib.import_module(module)
        gc.collect()
        gc.freeze()


def _serve(request: dict[str, Any]) -> list[RankOutcome]:
    nranks, arguments = request["nranks"], (request["module"], request["function"], request["args"])
    _import(request["module"])
    with (
        launch.local_job(nranks, request["env"]) as environ,
        Ranks(_run_target, nranks, arguments, environ=environ, capture=True) as ranks,
    ):
        ranks.wait(time.monotonic() + request["timeout"], grace=request["timeout"])
        return ranks.outcomes


def main() -> None:
    die_with_parent(os.getppid())
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep other output out of the pipe of outcomes
    launch.warm_up()
    for module in (*ALWAYS, *sys.argv[1:]):
        importlib.import_module(module)
    for kernel in KERNELS:
        native.library(kernel)
    gc.freeze()
    while header := stdin.read(_LENGTH.size):
        request = pickle.loads(stdin.read(_LENGTH.unpack(header)[0]))
        body = pickle.dumps(_serve(request))
        stdout.write(_LENGTH.pack(len(body)) + body)
        stdout.flush()


if __name__ == "__main__":
    main()
