"""Progress of first-use work, shown on standard error.

On a terminal: a bar that is redrawn and erased at the end. Otherwise one line.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from miraccl import clock

_WIDTH = 20  # characters of the bar
_INTERVAL_S = 0.1
_ERASE = "\r\033[K"  # ECMA-48: carriage return, erase to the end of the line


@contextlib.contextmanager
def show(work: str, expected_s: float) -> Iterator[None]:
    """Show ``work`` and the time it takes until the block ends.

    Args:
        work: What is done, such as ``compiling the engine``.
        expected_s: Seconds that it takes on two idle cores.
    """
    if not _on_terminal():
        _write(f"miraccl: {work} (once per machine, about {expected_s:.0f} s)\n")
        yield
        return
    start, ended = clock.perf_counter(), clock.event()

    def redraw() -> None:
        while True:
            _write(_ERASE + bar(work, clock.perf_counter() - start, expected_s))
            if ended.wait(_INTERVAL_S):
                return

    drawing = clock.thread(redraw, name="miraccl-progress")
    drawing.start()
    try:
        yield
    finally:
        ended.set()
        drawing.join()
        _write(_ERASE)


def bar(work: str, elapsed_s: float, expected_s: float) -> str:
    """Return the line for a moment. The bar stays below full until the work has ended."""
    done = min(elapsed_s / expected_s, 1.0)
    filled = min(int(done * _WIDTH), _WIDTH - 1)
    rest = expected_s - elapsed_s
    when = f"about {rest:.0f} s left" if rest >= 0.5 else f"{elapsed_s:.0f} s, nearly done"
    if elapsed_s > 1.5 * expected_s:
        when = f"{elapsed_s:.0f} s, longer than usual: the machine is busy"
    line = f"[{'#' * filled}{'.' * (_WIDTH - filled)}]"
    return f"miraccl: first use on this machine {line} {work}, {when}"


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # no standard error, or a closed one
        return False


def _write(text: str) -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
