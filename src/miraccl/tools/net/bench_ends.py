"""The two ends of ``miraccl net bench``: this process is one of them, or starts both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from miraccl import clock
from miraccl.errors import SystemFailure
from miraccl.tools.launch import free_port, warm_up
from miraccl.tools.net import bench, external, pair
from miraccl.tools.spawn import RankContext, Ranks


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """Options of ``miraccl net bench``."""

    sizes: tuple[int, ...]
    seconds: float
    compare: tuple[str, ...]
    streams: int
    port: int | None
    wait: float
    net: str
    announce: pair.Announce = pair.announce_nothing


Show = Callable[[bench.BenchRow], None]
Result = tuple[list[bench.BenchRow], list[dict[str, Any]]]


def run(request: BenchRequest, end: str, quiet: bool, advance: Callable[[], None]) -> Result:
    """Measure as one end, or start both, and print the rows.

    Args:
        end: ``server``, ``both``, or the host and port of the server.
    """
    header = True

    def show(row: bench.BenchRow) -> None:
        nonlocal header
        if not quiet:
            if header:
                print(f"# messages between two hosts over {row.transport}")
                cells = zip(bench.COLUMNS, bench.format_row(row), strict=True)
                print("  ".join(f"{name:>{len(cell)}}" for name, cell in cells))
                header = False
            print("  ".join(bench.format_row(row)), flush=True)
        advance()

    rows, peers = _run_both(request, show) if end == "both" else run_end(request, end, show)
    if peers and not quiet:
        print(bench.render_peers(peers))
    return rows, peers


def run_end(request: BenchRequest, end: str, show: Show) -> Result:
    """Measure as the server, or as the client of the server ``end``."""
    if end == "server":
        port = request.port or pair.DEFAULT_PORT
        opened = pair.serve(
            "bench", port, timeout=request.wait, net=request.net, announce=request.announce
        )
    else:
        host, given = pair.parse_target(end)
        port = request.port or given
        opened = pair.join(
            "bench", host, port, timeout=request.wait, net=request.net, announce=request.announce
        )
    rows, peers = [], []
    with opened as two:
        for row in bench.measure(two, request.sizes, request.seconds):
            rows.append(row)
            show(row)
        tools = two.exchange(request.compare, "tools")
        for tool in request.compare if not two.is_server else tools:
            peers += external.compare(
                two,
                tool,
                sizes=request.sizes,
                streams=request.streams,
                seconds=4 * request.seconds,
                port=port + 1,
            )
    return rows, peers


def _run_both(request: BenchRequest, show: Show) -> Result:
    """Run both ends as processes of this host."""
    warm_up()
    port = request.port or free_port()
    request = replace(request, port=port, announce=pair.announce_nothing)
    with Ranks(_end_main, 2, (request,)) as ranks:
        rows: list[bench.BenchRow] = []
        while ranks.running:
            for _, row in ranks.poll(1.0):
                rows.append(row)
                show(row)
            if any(o.error for o in ranks.outcomes):
                ranks.wait(clock.monotonic() + 5.0)
                break
        failure = ranks.first_failure()
        if failure is not None:
            raise SystemFailure(f"cannot measure: {failure.describe()}")
        return rows, ranks.outcomes[pair.CLIENT].value or []


def _end_main(context: RankContext, request: BenchRequest) -> list[dict[str, Any]]:
    end = "server" if context.rank == pair.SERVER else f"127.0.0.1:{request.port}"
    emit = context.emit if context.rank == pair.CLIENT else lambda row: None
    return run_end(request, end, emit)[1]
