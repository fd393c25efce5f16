"""Server of ``miraccl aggregator --listen``: starts an aggregator for each request.

An aggregator is a process of its own, so the communicators that share the switch share its
processors by the scheduler and its link by TCP, and the end of one does not touch the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from miraccl.bootstrap.switch import SwitchListener, SwitchRequest
from miraccl.errors import SystemFailure
from miraccl.tools.processes import die_with_parent

_COMMAND = [sys.executable, "-m", "miraccl", "aggregator"]
#: Variables of a job that must not reach an aggregator of another one.
_OWN_JOB = ("MASTER_ADDR", "MASTER_PORT", "MIRACCL_SWITCH", "MIRACCL_LOCAL_RANK")


class _Ended(Exception):
    """A signal ends the switch."""


@dataclass(kw_only=True)
class Switch:
    """A software switch.

    Attributes:
        most: Aggregators at a time; further requests are refused.
        served: Requests that were granted.
    """

    listener: SwitchListener
    most: int
    report: Callable[[str], None] = lambda text: None
    served: int = 0
    _running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _ended: bool = False

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM; aggregators end with the switch."""
        old = {n: signal.signal(n, self._end) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            while True:
                request = self.listener.accept(self._refuse, self._poll)
                self._poll()
                if request is not None:
                    self._start(request)
        except _Ended:
            pass
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            self.listener.close()
            for process in self._running.values():
                process.terminate()
            for process in self._running.values():
                process.wait()

    def _end(self, number: int, frame: Any) -> None:
        self._ended = True

    def _poll(self) -> None:
        for number, process in list(self._running.items()):
            if (status := process.poll()) is not None:
                del self._running[number]
                self.report(f"aggregator {number} ended with status {status}")
        if self._ended:
            raise _Ended

    def _refuse(self, request: SwitchRequest) -> str:
        self._running = {n: p for n, p in self._running.items() if p.poll() is None}
        if len(self._running) >= self.most:
            return f"it serves {len(self._running)} communicators, the most that it may"
        return ""

    def _start(self, request: SwitchRequest) -> None:
        environ = {name: text for name, text in os.environ.items() if name not in _OWN_JOB}
        environ |= {
            "MIRACCL_UNIQUE_ID": request.unique_id,
            "MIRACCL_RANK": str(request.rank),
            "MIRACCL_NRANKS": str(request.nranks),
            "MIRACCL_AGGREGATORS": str(request.aggregators),
        }
        parent = os.getpid()
        try:
            process = subprocess.Popen(
                _COMMAND, env=environ, preexec_fn=lambda: die_with_parent(parent)
            )
        except OSError as error:
            raise SystemFailure(f"cannot start an aggregator: {error.strerror}") from None
        self.served += 1
        self._running[self.served - 1] = process
        ranks = request.nranks - request.aggregators
        self.report(f"aggregator {self.served - 1} (process {process.pid}) adds for {ranks} ranks")
