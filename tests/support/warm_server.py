"""Process from which ``warm_python.py`` forks interpreters.

Started as ``python -m tests.support.warm_server SOCKET MODULE...``. A request is a connection with
a command line, an environment, a working directory and the three standard streams. Its supervisor,
a fork of this process, forks the interpreter, reports its pid and exit status, and kills it if the
connection is closed early.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from typing import Any, NoReturn

from miraccl.tools import launch
from miraccl.tools.processes import die_with_parent

ALWAYS = (
    "miraccl.tools.perf.cli",
    "miraccl.tools.perf.device_ranks",
    "miraccl.runtime.multinode.communicator",
)
MAX_REQUEST_BYTES = 128 << 10  # a request is one packet


def _reap(*_: Any) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _serve(listener: socket.socket) -> dict[str, Any]:
    """Accept requests; returns in interpreters only, with their request."""
    signal.signal(signal.SIGCHLD, _reap)
    server_pid = os.getpid()
    while True:
        connection = listener.accept()[0]
        if os.fork():
            connection.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(server_pid)
        listener.close()
        body, streams, *_ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
        if len(streams) < 3:
            os._exit(1)
        supervisor = os.getpid()
        if pid := os.fork():
            for fd in streams:
                os.close(fd)
            _supervise(connection, pid)
        die_with_parent(supervisor)
        connection.close()
        os.setsid()
        for target, fd in enumerate(streams):
            os.dup2(fd, target)
            os.close(fd)
        request: dict[str, Any] = json.loads(body)
        return request


def _supervise(connection: socket.socket, pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    with contextlib.suppress(OSError):
        connection.sendall(b"%d" % pid)
    watched: list[Any] = [pidfd, connection]
    if pidfd not in select.select(watched, [], [])[0]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(b"%d" % status)
    os._exit(0)


def _run_program(request: dict[str, Any]) -> None:
    """Run a program as ``python [-u] [-m] NAME WORDS...`` does."""
    ours = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    sys.executable = request["executable"]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=request["unbuffered"])  # type: ignore[union-attr]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    name, words = request["name"], request["words"]
    theirs = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = os.getcwd() if request["module"] else os.path.dirname(os.path.abspath(name))
    sys.path[:] = [first, *theirs, *(path for path in sys.path[1:] if path not in ours)]
    sys.argv[:] = [name, *words]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if request["module"]:
        vars(runpy)["_run_module_as_main"](name)
        return
    with open(name, "rb") as file:
        code = compile(file.read(), name, "exec")
    vars(main).update(__file__=name, __builtins__=__builtins__)
    exec(code, vars(main))


def _run(request: dict[str, Any]) -> NoReturn:
    """Run a program and exit as Python does, without tearing down the interpreter."""
    status: Any = 0
    try:
        _run_program(request)
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    # No teardown of modules: it would take longer than most programs.
    threading.__dict__["_shutdown"]()
    atexit.__dict__["_run_exitfuncs"]()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit((status or 0) & 0xFF)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    launch.warm_up()
    for module in (*ALWAYS, *sys.argv[2:]):
        importlib.import_module(module)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(sys.argv[1])
        server.listen(64)
        gc.freeze()
        print("ready", flush=True)
        program = _serve(server)
    _run(program)
