"""``miraccl net``: the command line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from miraccl.tools.options import Finite, OutputFile, Sizes, SuggestingGroup, write_json

DEFAULT_SIZES = "256,4K,64K,1M,16M,100M"

json_option = click.option(
    "--json",
    "json_target",
    type=OutputFile(),
    metavar="FILE",
    help="Write the result as JSON; - is standard output.",
)
plot_option = click.option(
    "--plot", type=OutputFile(), metavar="FILE", help="Draw to an .svg, .png or .pdf file."
)
port_option = click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port at which the two ends meet.  [default: 29400]",
)
wait_option = click.option(
    "--wait",
    type=Finite(0.1),
    default=600.0,
    show_default=True,
    help="Seconds to wait for the other end.",
)
net_option = click.option(
    "--net", default="", metavar="NAME", help="Transport, as MIRACCL_NET.  [default: auto]"
)


@click.group(cls=SuggestingGroup, short_help="Show and measure the network.")
def net() -> None:
    """Show the interfaces of this host, measure the network to another, watch a running job.

    \b
    Examples:
      miraccl net devices
      miraccl net probe --listen                      # on one host
      miraccl net probe 10.0.0.1                      # on the other
      miraccl net bench --both --sizes 4K,1M
      miraccl net watch
    """


@net.command(short_help="Show interfaces, and what is wrong.")
@json_option
def devices(json_target: str | None) -> None:
    """Show the network devices of this host: state, speed, MTU, NUMA node, offloads, errors.

    Below the table: what costs speed or fails, and what to do. `used` says whether a rank would
    carry data over the device with the current settings. The exit status is 1 if ranks would end
    with an error, such as for settings that match no interface.
    """
    from dataclasses import asdict

    from miraccl.tools.net.devices import collect, render

    report = collect()
    if json_target:
        write_json(
            json_target,
            {
                "devices": [device.to_dict() for device in report.devices],
                "findings": [asdict(finding) for finding in report.findings],
            },
        )
    else:
        print(render(report))
    if any(finding.status == "missing" for finding in report.findings):
        sys.exit(1)


@net.command(short_help="Measure round trips, loss, paths and MTU to a host.")
@click.argument("target", required=False, metavar="HOST[:PORT]")
@click.option("--listen", is_flag=True, help="Be the other end: answer one probe.")
@port_option
@wait_option
@net_option
@click.option(
    "--count", type=click.IntRange(1), default=1000, show_default=True, help="Probes per address."
)
@click.option(
    "--rate", type=Finite(1.0), default=1000.0, show_default=True, help="Probes per second."
)
@click.option(
    "--flows",
    type=click.IntRange(1, 256),
    default=16,
    show_default=True,
    help="UDP flows per address, which may take different paths.",
)
@click.option(
    "--seconds",
    type=Finite(0.0),
    default=1.0,
    show_default=True,
    help="Time of the rate measurement in each direction; 0: none.",
)
@json_option
@plot_option
def probe(
    target: str | None,
    listen: bool,
    port: int | None,
    wait: float,
    net: str,
    count: int,
    rate: float,
    flows: int,
    seconds: float,
    json_target: str | None,
    plot: str | None,
) -> None:
    """Measure the network to HOST, on which `miraccl net probe --listen` runs.

    For every address of HOST: round trip (minimum, median, 99th percentile), loss in each
    direction, number of distinct paths over several flows, and path MTU; then the rate in both
    directions. Both ends need the same MIRACCL_SECRET, except on one host.
    """
    from miraccl.tools.net import pair as pairs
    from miraccl.tools.net import probe as probes

    if (target is None) is not listen:
        raise click.UsageError("give either HOST or --listen")
    _check_plot(plot)
    if listen:
        where = port or pairs.DEFAULT_PORT
        with pairs.serve("probe", where, timeout=wait, net=net, announce=_announce) as pair:
            result = probes.respond(pair, wait)
        if json_target:
            write_json(json_target, result)
        else:
            _print_probe(result)
        return
    host, given = pairs.parse_target(str(target))
    options = probes.ProbeOptions(count=count, rate=rate, flows=flows, seconds=seconds)
    with (
        pairs.join("probe", host, port or given, timeout=wait, net=net, announce=_announce) as pair,
        _progress("probing flows", None) as advance,
    ):
        result, reports = probes.run_probe(pair, options, advance)
    if json_target:
        write_json(json_target, result)
    else:
        _print_probe(result)
    if plot:
        from miraccl.tools.net.plot import draw_rtts

        draw_rtts({r.remote: r.samples for r in reports if r.samples}, plot)


def _print_probe(result: dict[str, Any]) -> None:
    from miraccl.tools.net.devices import format_table

    rows = [
        (
            item["local"],
            item["remote"],
            *([f"{x:.0f}" for x in item["rtt_us"]] or ["-"] * 3),
            f"{100 * item['loss_out']:.2f} %",
            f"{100 * item['loss_back']:.2f} %" if item["rtt_us"] else "-",
            f"{item['paths']} of {item['flows']} flows",
            item["mtu"] or "?",
        )
        for item in result["addresses"]
    ]
    columns = ("from", "to", "RTT us: min", "median", "p99", "loss", "back", "paths", "MTU")
    print(format_table(columns, rows))
    print(f"{result['transport']} ({result['reason']}), distinct paths: {result['paths']}")
    if silent := [item["remote"] for item in result["addresses"] if not item["rtt_us"]]:
        print(f"no answer over UDP from {', '.join(silent)}: a firewall may drop it, or no route")
        print("-> let UDP pass; MIRACCL_NET_PORT_RANGE=20000-20099 limits the ports")
    if result["to_gbps"]:
        print(f"rate: {result['to_gbps']:.3f} Gbit/s there, {result['from_gbps']:.3f} Gbit/s back")


@net.command(short_help="Measure latency and rate between two hosts.")
@click.option("--server", is_flag=True, help="Be the end that waits for a client.")
@click.option("--client", metavar="HOST[:PORT]", help="Be the end that connects to a server.")
@click.option("--both", is_flag=True, help="Run both ends on this host, over its loopback.")
@click.option(
    "--sizes",
    type=Sizes(),
    default=DEFAULT_SIZES,
    show_default=True,
    help="Sizes of messages; those of the server are measured.",
)
@click.option(
    "--seconds",
    type=Finite(0.001),
    default=0.5,
    show_default=True,
    help="Time for each of the three figures of a size.",
)
@click.option(
    "--compare",
    type=click.Choice(("iperf3", "ib_write_bw")),
    multiple=True,
    help="Run this program between the two ends as well; repeatable.",
)
@click.option(
    "--streams",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="Streams of iperf3.",
)
@port_option
@wait_option
@net_option
@json_option
@plot_option
def bench(
    server: bool,
    client: str | None,
    both: bool,
    sizes: tuple[int, ...],
    seconds: float,
    compare: tuple[str, ...],
    streams: int,
    port: int | None,
    wait: float,
    net: str,
    json_target: str | None,
    plot: str | None,
) -> None:
    """Measure messages between two hosts, like iperf3 and ib_write_bw, over any transport.

    Per size: half of a round trip, the rate from client to server, and the sum of both directions
    at once. Every size ends with a comparison of all bytes; the exit status is 1 if one is wrong.
    """
    from miraccl.tools.net import bench_ends

    if [server, client is not None, both].count(True) != 1:
        raise click.UsageError("give one of --server, --client HOST and --both")
    _check_plot(plot)
    request = bench_ends.BenchRequest(
        sizes=sizes,
        seconds=seconds,
        compare=compare,
        streams=streams,
        port=port,
        wait=wait,
        net=net,
        announce=_announce,
    )
    quiet = json_target == "-"
    with _progress("measuring", len(sizes)) as advance:
        rows, peers = bench_ends.run(
            request, "both" if both else "server" if server else str(client), quiet, advance
        )
    if json_target:
        write_json(json_target, {"rows": [row.to_dict() for row in rows], "peers": peers})
    if plot and rows:
        from miraccl.tools.net.plot import draw_bench

        draw_bench(rows, peers, plot)
    if any(row.wrong for row in rows):
        sys.exit(1)


@net.command(short_help="Watch the paths of running jobs.")
@click.argument("pids", type=click.IntRange(1), nargs=-1, metavar="[PID]...")
@click.option(
    "--interval", type=Finite(0.05), default=1.0, show_default=True, help="Seconds between lines."
)
@click.option(
    "--count", type=click.IntRange(0), default=0, help="Number of updates.  [default: to the end]"
)
@click.option(
    "--json",
    "json_target",
    type=OutputFile(),
    metavar="FILE",
    help="Write one JSON object per path and update, a line each; - is standard output.",
)
@plot_option
def watch(
    pids: tuple[int, ...], interval: float, count: int, json_target: str | None, plot: str | None
) -> None:
    """Show the network paths of your processes on this host: rate, round trip, loss, state.

    PID limits it to some processes. A path is a TCP stream or a pair of UDP ports; `lost` counts
    packets, `resent` is the share of bytes sent again since the last update.
    """
    import json

    from miraccl.tools.net import watch as watching

    _check_plot(plot)
    series: dict[str, list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        lines = stack.enter_context(click.open_file(json_target, "w")) if json_target else None
        for time, rows in watching.watch(pids, interval, count):
            if lines:
                for row in rows:
                    record = {"time": round(time, 3), **row.to_dict()}
                    print(json.dumps(record), file=lines, flush=True)
            else:
                if sys.stdout.isatty():
                    print("\x1b[H\x1b[2J", end="")
                print(watching.render(rows), flush=True)
            for row in rows:
                name = f"rank {row.rank} to {row.peer}, {row.transport} {row.path}"
                points = series.setdefault(name, [])
                points.append((time, row.sent_gbps + row.received_gbps))
    if plot:
        from miraccl.tools.net.plot import draw_watch

        draw_watch(series, plot)


def _announce(text: str) -> None:
    """Print a line that does not mix with results."""
    click.echo(text, err=True)


def _check_plot(target: str | None) -> None:
    if target:
        from miraccl.tools.perf.plot import check_target

        check_target(target)


@contextlib.contextmanager
def _progress(text: str, total: int | None) -> Iterator[Callable[[], None]]:
    """Show progress on standard error if that is a terminal; yield a function that advances it."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
