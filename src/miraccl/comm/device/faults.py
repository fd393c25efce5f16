"""What ends waiting on a GPU, and how it is told: deadlines, mismatches, aborts, deaths.

Kernels look at two words in host memory while they wait: one ends the wait, the other takes what they found.  ``DeviceFaults`` owns these
words for a communicator of one host.  It hears of deaths and of other ranks' aborts from the control plane, tells other ranks of its own,
and raises everything as the same errors as on the CPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from miraccl.bootstrap import Event, Notice, PeerLost, Session
from miraccl.comm.device.messages import mismatch
from miraccl.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorAborted, MiracclError, PeerDied
from miraccl.executor.cuda import layout

NOTICE = "gpu_abort"
REPEAT_S = 0.002


class DeviceFaults:
    """``words`` are the host words of ``executor.cuda.layout``."""

    def __init__(self, session: Session, words: Any, timeout_s: float) -> None:
        self.session, self.rank = session, session.rank
        self._words, self._timeout = words, timeout_s
        self._fault: MiracclError | None = None
        self._told = False
        self._ended = threading.Event()
        self._releases: list[Callable[[], None]] = []
        self._releasing = False
        self._lock = threading.RLock()  # a signal handler may abort in the middle
        session.on_event(self._event)

    @property
    def broken(self) -> bool:
        return bool(self._words[layout.HOST_ABORT])

    def check(self, name: str = "") -> None:
        """Raise what was found so far, if anything."""
        with self._lock:
            error = self._found(name or None)
        if error is not None:
            self._told = True
            raise error

    def untold(self) -> MiracclError | None:
        """What kernels found and nobody was told."""
        found = self._words[layout.HOST_ERROR] and self._fault is None and not self._told
        return self._found(None) if found else None

    def _found(self, name: str | None) -> MiracclError | None:
        words, rank = self._words, self.rank
        error, peer = int(words[layout.HOST_ERROR]), int(words[layout.HOST_PEER])
        explains = error in (layout.ERROR_MISMATCH, layout.ERROR_SIZES)  # also why the peer has left or aborted since
        if self._fault is not None and not explains:
            return type(self._fault)(self._fault.message, rank=rank, peer=self._fault.peer, op=name)
        if error == layout.ERROR_TIMEOUT:
            what = layout.WHAT_TEXT.get(int(words[layout.HOST_WHAT]), "something")
            text = f"waited longer than {self._timeout:.3g} s for {what} from rank {peer}"
            hint = f"rank {peer} has not come to this operation, or is stuck before it on its stream"
            return CollectiveTimeout(text, rank=rank, peer=peer, op=name, hint=hint)
        if error == layout.ERROR_MISMATCH:
            launch = int(words[layout.HOST_WHAT])
            text = f"rank {peer} called another operation in the same place (number {launch} of this communicator on GPU memory)"
            hint = "collective, dtype, elements, operator, root and window must be the same on all ranks; results since then are void"
            return CollectiveMismatch(text, rank=rank, peer=peer, op=name, hint=hint)
        if error == layout.ERROR_SIZES:
            return mismatch(words, rank, name)
        if words[layout.HOST_ABORT]:
            return CommunicatorAborted("the communicator was aborted", rank=rank, op=name)
        return None

    # ---- ending waits

    def abort(self, reason: str) -> None:
        """End what waits on all ranks' GPUs. Any thread may call it. The others are told first: a program that it wakes may end at once."""
        text = f"rank {self.rank} aborted the communicator: {reason}"
        with contextlib.suppress(MiracclError):  # the control plane may be gone as well
            self.session.notify({NOTICE: reason})
        self._end(CommunicatorAborted(text, rank=self.rank, peer=self.rank), found_here=True)

    def settle(self, fault: MiracclError) -> None:
        """End what waits on this rank's GPU, because of ``fault``, which the others know. Any thread may call it."""
        self._end(fault)

    def _event(self, event: Event) -> None:
        """From the session's watcher: kernels that wait end within milliseconds."""
        if isinstance(event, PeerLost):
            self._end(PeerDied(f"rank {event.rank} died: {event.reason}", rank=self.rank, peer=event.rank))
        elif isinstance(event, Notice) and NOTICE in event.payload:
            text = f"rank {event.from_rank} aborted the communicator: {event.payload[NOTICE]}"
            self._end(CommunicatorAborted(text, rank=self.rank, peer=event.from_rank))

    def on_abort(self, release: Callable[[], None]) -> None:
        """``release`` lets go of streams that wait for words; it is called again and again once waits are to end."""
        self._releases.append(release)
        if self.broken:
            self._end(None)

    def _end(self, fault: MiracclError | None, *, found_here: bool = False) -> None:
        """End all waits, now and later. The first fault stays; what kernels have found says more than one that was ``found_here``.

        Waits end first: a program that has seen the fault and goes on to another operation must find that none runs any more, or others
        would take it for a mismatch.
        """
        with self._lock:
            if self._ended.is_set():
                return
            self._words[layout.HOST_ABORT] = 1
            if self._fault is None and not (found_here and self._words[layout.HOST_ERROR]):
                self._fault = fault
            if self._releases and not self._releasing:
                self._releasing = True
                threading.Thread(target=self._release, name="miraccl gpu release", daemon=True).start()

    def _release(self) -> None:
        """Streams reset the words that they wait for, so letting go once is not enough."""
        while not self._ended.wait(REPEAT_S):
            with contextlib.suppress(MiracclError):
                for release in list(self._releases):
                    release()

    def end(self) -> None:
        """The GPU has ended its work: from now on nothing is written to the words, whose memory may go."""
        with self._lock:
            self._ended.set()
