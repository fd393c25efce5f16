"""``miraccl net watch``: paths of the running jobs of this user on this host.

Two documents of a process (``runtime.net_status``) give the rates between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from miraccl import clock
from miraccl.errors import InvalidUsage, MiracclError
from miraccl.runtime import net_status
from miraccl.tools.net.devices import format_table

Key = tuple[int, str, int, str, int]
"""Process, communicator, peer, transport and number of a path."""


@dataclass(frozen=True, kw_only=True)
class WatchRow:
    """One path at one time; rates in Gbit/s, shares since the last row."""

    pid: int
    communicator: str
    rank: int
    peer: int
    transport: str
    path: int
    local: str
    remote: str
    state: str
    sent_gbps: float
    received_gbps: float
    rtt_us: float
    min_rtt_us: float
    lost: int
    resent_bytes: int
    resent_share: float
    window_bytes: int
    controller: str

    @property
    def key(self) -> Key:
        return self.pid, self.communicator, self.peer, self.transport, self.path

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_processes(pids: Sequence[int] = ()) -> dict[int, dict[str, Any]]:
    """Return the documents of this user's processes, or of ``pids``, by process.

    Raises:
        InvalidUsage: One of ``pids`` has no network paths, or is not of this user and host.
    """
    found: dict[int, dict[str, Any]] = {}
    for pid, path in net_status.find_processes():
        if pids and pid not in pids:
            continue
        try:
            document = net_status.read_status(path)
        except MiracclError:  # stopped, or it has ended
            continue
        if document is not None:
            found[pid] = document
    for pid in pids:
        if pid not in found:
            raise InvalidUsage(
                f"cannot watch process {pid}: it has no connections between hosts, or is not "
                "yours and on this host"
            )
    return found


def rows_between(
    before: Mapping[int, dict[str, Any]], after: Mapping[int, dict[str, Any]]
) -> list[WatchRow]:
    """Return a row for every path of ``after``; rates are 0 for a path that was not in
    ``before``.
    """
    old = {key: (time, path) for key, time, path, _, _ in _paths(before)}
    rows = []
    for key, time, path, communicator, rank in _paths(after):
        then, was = old.get(key, (time, path))
        elapsed = max(time - then, 1e-9) if time > then else 0.0

        def rate(name: str, was: Any = was, path: Any = path, elapsed: float = elapsed) -> float:
            return 8e-9 * max(0, path[name] - was[name]) / elapsed if elapsed else 0.0

        sent = max(0, path["sent_bytes"] - was["sent_bytes"])
        resent = max(0, path["resent_bytes"] - was["resent_bytes"])
        rows.append(
            WatchRow(
                pid=key[0],
                communicator=communicator,
                rank=rank,
                peer=path["peer"],
                transport=path["transport"],
                path=path["path"],
                local=path["local"],
                remote=path["remote"],
                state=path["state"],
                sent_gbps=rate("sent_bytes"),
                received_gbps=rate("received_bytes"),
                rtt_us=path["rtt_us"],
                min_rtt_us=path["min_rtt_us"],
                lost=path["lost"],
                resent_bytes=path["resent_bytes"],
                resent_share=resent / sent if sent else 0.0,
                window_bytes=path["window_bytes"],
                controller=path["controller"],
            )
        )
    return rows


def _paths(
    documents: Mapping[int, dict[str, Any]],
) -> Iterator[tuple[Key, float, dict[str, Any], str, int]]:
    for pid, document in documents.items():
        for number, communicator in enumerate(document["communicators"]):
            name = str(communicator["name"])
            for path in communicator["paths"]:
                key = (pid, f"{number} {name}", path["peer"], path["transport"], path["path"])
                yield key, document["time"], path, name, communicator["rank"]


def watch(
    pids: Sequence[int], interval: float, count: int
) -> Iterator[tuple[float, list[WatchRow]]]:
    """Yield (seconds since the start, rows) every ``interval`` seconds, ``count`` times or, with
    0, until no process is left.
    """
    start = clock.monotonic()
    before = read_processes(pids)
    if not before:
        raise InvalidUsage("cannot watch: no process of yours on this host has network connections")
    done = 0
    while before and (count == 0 or done < count):
        clock.sleep(interval)
        after = read_processes([pid for pid in pids if _alive(pid)])
        yield clock.monotonic() - start, rows_between(before, after)
        before, done = after, done + 1


def _alive(pid: int) -> bool:
    return any(pid == number for number, _ in net_status.find_processes())


COLUMNS = (
    "pid",
    "comm",
    "rank",
    "peer",
    "path",
    "local",
    "remote",
    "state",
    "sent Gbit/s",
    "recv Gbit/s",
    "RTT us",
    "min",
    "lost",
    "resent",
    "window",
    "control",
)


def render(rows: Sequence[WatchRow]) -> str:
    """Return the table of one time."""
    cells = [
        (
            row.pid,
            row.communicator,
            row.rank,
            row.peer,
            f"{row.transport} {row.path}",
            row.local,
            row.remote,
            row.state,
            f"{row.sent_gbps:.3f}",
            f"{row.received_gbps:.3f}",
            f"{row.rtt_us:.0f}",
            f"{row.min_rtt_us:.0f}",
            row.lost,
            f"{100 * row.resent_share:.2f} %",
            f"{row.window_bytes >> 10} KiB" if row.window_bytes else "",
            row.controller,
        )
        for row in rows
    ]
    return format_table(COLUMNS, cells)
