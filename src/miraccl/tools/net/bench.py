"""``miraccl net bench``: latency and rate of messages between two hosts, every byte checked.

Three figures per size: half of a ping-pong (median of batches), messages one way in a row until the
server has the last one, and messages in both directions at once. All go through a communicator, so
they are what a program gets, over whichever transport MIRACCL_NET chooses.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from miraccl import clock
from miraccl.errors import MiracclError
from miraccl.tools.net.devices import format_table
from miraccl.tools.net.pair import HostPair

#: Messages whose rate is measured are repeated up to this often, and at least twice.
MAX_MESSAGES = 4096
PATTERN_PERIOD = 251  # prime: a shift by a power of two is seen
_TAIL = 2


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """Result of one size.

    Attributes:
        bytes: Size of a message.
        latency_us: Half of the round trip of a message and its answer of the same size, median.
        oneway_gbps: Rate from client to server in Gbit/s.
        both_gbps: Sum of the rates of both directions at once in Gbit/s.
        messages: Messages of the rate measurement.
        wrong: Bytes that arrived with another value.
    """

    transport: str
    bytes: int
    latency_us: float
    oneway_gbps: float
    both_gbps: float
    messages: int
    wrong: int

    @property
    def oneway_gbytes(self) -> float:
        """Rate one way in GB/s."""
        return self.oneway_gbps / 8

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "oneway_GBps": self.oneway_gbytes}


def pattern(nbytes: int, sender: int) -> np.ndarray:
    """Return the bytes that ``sender`` sends in messages of this size."""
    return ((np.arange(nbytes, dtype=np.int64) + 7 * sender) % PATTERN_PERIOD).astype(np.uint8)


class SizeBench:
    """Measurement of one size on one of the two ends.

    Args:
        seconds: Time for each of the three figures.
    """

    def __init__(self, pair: HostPair, nbytes: int, seconds: float) -> None:
        self.pair, self.comm, self.nbytes, self.seconds = pair, pair.comm, nbytes, seconds
        self.out = pattern(nbytes, pair.rank)
        self.into = np.zeros(nbytes, np.uint8)
        self.token = np.zeros(1, np.uint8)
        self.wrong = 0

    def run(self) -> BenchRow:
        for _ in range(3):
            self._ping_pong()
        once = self._timed(self._ping_pong, 1)
        messages = self._agree_count(once)
        batches = [self._timed(self._ping_pong, max(1, messages // 5)) for _ in range(5)]
        latency = statistics.median(batches) / 2
        oneway = self._timed(self._one_way, messages, whole=True)
        both = self._timed(self._send_and_receive, messages)
        self._check()
        # The client knows the time of all that crossed; both show the same row.
        values = {"latency": latency, "oneway": oneway, "both": both, "wrong": self.wrong}
        theirs = self.pair.exchange(values, f"row {self.nbytes}")
        client = theirs if self.pair.is_server else values
        bits = 8 * self.nbytes
        return BenchRow(
            transport=self.pair.choice.name,
            bytes=self.nbytes,
            latency_us=client["latency"] * 1e6,
            oneway_gbps=bits / client["oneway"] / 1e9,
            both_gbps=2 * bits / client["both"] / 1e9,
            messages=messages,
            wrong=values["wrong"] + theirs["wrong"],
        )

    def _agree_count(self, once: float) -> int:
        """Return the number of messages that fits into the time; the client decides."""
        mine = int(min(MAX_MESSAGES, max(_TAIL, self.seconds / max(once, 1e-7))))
        theirs = int(self.pair.exchange(mine, f"count {self.nbytes}"))
        return theirs if self.pair.is_server else mine

    def _timed(self, step: Callable[..., None], count: int, *, whole: bool = False) -> float:
        """Return the seconds per step; ``whole``: ``step`` takes the count itself."""
        self.comm.barrier()
        start = clock.perf_counter()
        if whole:
            step(count)
        else:
            for _ in range(count):
                step()
        return (clock.perf_counter() - start) / count

    def _ping_pong(self) -> None:
        if self.pair.is_server:
            self.comm.recv(self.into, self.pair.peer)
            self.comm.send(self.out, self.pair.peer)
        else:
            self.comm.send(self.out, self.pair.peer)
            self.comm.recv(self.into, self.pair.peer)

    def _one_way(self, count: int) -> None:
        """Send ``count`` messages to the server, and wait for its answer to the last one."""
        if self.pair.is_server:
            for _ in range(count):
                self.comm.recv(self.into, self.pair.peer)
            self.comm.send(self.token, self.pair.peer)
        else:
            for _ in range(count):
                self.comm.send(self.out, self.pair.peer)
            self.comm.recv(self.token, self.pair.peer)

    def _send_and_receive(self) -> None:
        self.comm.sendrecv(self.out, self.pair.peer, self.into, self.pair.peer)

    def _check(self) -> None:
        """Compare one more message of each direction with what was sent."""
        self.into[:] = 255
        self._send_and_receive()
        self.wrong = int(np.count_nonzero(self.into != pattern(self.nbytes, self.pair.peer)))


def measure(pair: HostPair, sizes: tuple[int, ...], seconds: float) -> Iterator[BenchRow]:
    """Measure all sizes; both ends yield the same rows.

    Raises:
        MiracclError: The two ends were given different sizes.
    """
    theirs = tuple(pair.exchange(list(sizes), "sizes"))
    if not pair.is_server and theirs != sizes:
        raise MiracclError(f"cannot measure {sizes}: the server measures {theirs}")
    for size in theirs:
        yield SizeBench(pair, size, seconds).run()


COLUMNS = ("bytes", "one way us", "Gbit/s", "GB/s", "both Gbit/s", "messages", "wrong")


def format_row(row: BenchRow) -> tuple[str, ...]:
    """Return the cells of a line of the table."""
    return (
        f"{row.bytes:>11}",
        f"{row.latency_us:>11.1f}",
        f"{row.oneway_gbps:>8.3f}",
        f"{row.oneway_gbytes:>7.3f}",
        f"{row.both_gbps:>11.3f}",
        f"{row.messages:>8}",
        f"{row.wrong:>5}",
    )


def render_peers(rows: list[dict[str, Any]]) -> str:
    """Return the table of other tools' results."""
    columns = ("tool", "bytes", "Gbit/s", "GB/s", "how")
    cells = [
        (
            row["tool"],
            row["bytes"] or "stream",
            f"{row['gbps']:.3f}" if row["gbps"] else "-",
            f"{row['gbps'] / 8:.3f}" if row["gbps"] else "-",
            row["how"],
        )
        for row in rows
    ]
    return format_table(columns, cells)
