"""Client behind ``warm_python.py``: starts the program in a warm process and forwards signals.

Exits with the status of the program. Command lines other than ``[-u] SCRIPT`` and ``[-u] -m
MODULE`` are passed to Python itself. Imports little, because every program starts one of these
processes.
"""

import os
import signal
import socket
import sys

_FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main() -> None:
    python, executable, path, *words = sys.argv[1:]
    given, options = list(words), set()
    while words and words[0] in ("-u", "-m"):
        options.add(words.pop(0))
        if "-m" in options:
            break
    if not words or words[0].startswith("-"):
        os.execv(python, [python, *given])
    import json

    request = {
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "executable": executable,
        "unbuffered": "-u" in options or bool(os.environ.get("PYTHONUNBUFFERED")),
        "module": "-m" in options,
        "name": words[0],
        "words": words[1:],
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        server.connect(path)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        pid = int(server.recv(64))
        for number in _FORWARDED:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        status = int(server.recv(64))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
