"""Output of ``miraccl perf``: table, explanations, progress, files, and the exit status."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from miraccl.errors import InvalidUsage
from miraccl.tools.options import write_json
from miraccl.tools.perf import devices, plot, table
from miraccl.tools.perf.request import PerfRequest


@contextlib.contextmanager
def display(request: PerfRequest) -> Iterator[Any]:
    """Print the header; yield a function that prints a line and advances the progress bar."""
    if not request.quiet:
        _print_header(request)
    with _progress(len(request.cases)) as advance:

        def show(line: Any) -> None:
            request.rows.extend(line.rows)
            with advance():
                if not request.quiet:
                    _print_line(request, line)

        yield show


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Show a progress bar on standard error if that is a terminal.

    Yields a context manager that hides the bar while lines are printed and then advances it.
    """
    if not sys.stderr.isatty():
        yield contextlib.nullcontext
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Rich would break lines at the width of the terminal if it printed them.
    progress = Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = progress.add_task("", total=total)

    @contextlib.contextmanager
    def advance() -> Iterator[None]:
        progress.stop()
        yield
        progress.advance(task)
        progress.start()

    try:
        progress.start()
        yield advance
    finally:
        progress.stop()


def _print_header(request: PerfRequest) -> None:
    machine = (
        f"{request.device} ({devices.describe(request.ordinals)})"
        if request.ordinals
        else _machine(request.joins_launcher)
    )
    ranks = f"{request.nranks} rank{'s' * (request.nranks != 1)} on {machine}"
    print(
        f"# miraccl {_version()} {request.op}, {ranks}, {request.cases[0].dtype},"
        f" {_method(request)}"
    )
    print("\n".join(table.header(request.peer, bool(request.ordinals))), flush=True)


def _method(request: PerfRequest) -> str:
    options = request.options
    iters = f"{options['iters']} calls" if options["iters"] else "about 20 ms of calls"
    if options["devices"].on_gpu:
        return _method_on_gpus(options)
    kinds = [name for name in ("fresh", "window", "persistent", "deterministic") if options[name]]
    if request.binds:
        kinds.append("bound to cores if there are enough")
    if options["hosts"] > 1:
        kinds.append(f"{options['hosts']} virtual hosts")
    return ", ".join([f"median of {options['batches']} batches of {iters}", *kinds])


def _method_on_gpus(options: dict[str, Any]) -> str:
    calls = f"{options['iters']} calls" if options["iters"] else "5 to 200 calls"
    kinds = [name for name in ("window",) if options[name]]
    if options["threads"]:
        kinds.append("ranks as threads")
    if options["sms"] is not None:
        kinds.append(
            f"at most {options['sms']} multiprocessors"
            if options["sms"] > 0
            else "copy engines"
            if not options["sms"]
            else ""
        )
    if options["hosts"] > 1:
        kinds.append(f"{options['hosts']} virtual hosts")
    mode = "in a CUDA graph" if options["graph"] else "on a stream"
    return ", ".join(
        filter(None, [f"median of {options['batches']} batches of {calls} {mode}", *kinds])
    )


def _version() -> str:
    import miraccl

    return miraccl.__version__


def _machine(joined: bool) -> str:
    """Describe the cores of this host; all of them if a launcher has bound this rank to some."""
    cores = (os.cpu_count() or 1) if joined else len(os.sched_getaffinity(0))
    return f"{cores} core{'s' * (cores != 1)}"


def _print_line(request: PerfRequest, line: Any) -> None:
    if line.rows:
        print(table.line(line.out_of_place, line.in_place, request.peer, bool(request.ordinals)))
    for candidate in line.explanation:
        mark = "*" if candidate["chosen"] else " "
        if "blocks" in candidate:
            shape = (
                f"{candidate['blocks']} blocks of {candidate['threads']} threads,"
                f" {candidate['unroll']} vectors per thread at a time"
            )
            print(
                f"#   {mark} {candidate['algo']}/{candidate['proto']:<12} {shape} "
                f" {candidate['reason']}".rstrip()
            )
            continue
        name = f"{candidate['algo']}/{candidate['proto']} x{candidate['channels']}"
        print(
            f"#   {mark} {name:<36} {table.format_us(candidate['predicted_us']):>9} us predicted "
            f" {candidate['reason']}"
        )
    sys.stdout.flush()


def finish(request: PerfRequest) -> None:
    o = request.options
    if not request.quiet:
        print("\n".join(table.footer(request.rows, request.peer)))
    if o["json_target"]:
        write_json(o["json_target"], [row.to_json() for row in request.rows])
    if o["plot_target"] and request.rows:
        plot.draw(request.rows, o["plot_target"], runs=request.runs, bound=request.bound)
    if any(row.wrong for row in request.rows):
        sys.exit(1)
    if not request.rows:
        memory = " on GPU memory" if request.ordinals else ""
        raise InvalidUsage(f"nothing was measured: {request.op} has no such form{memory}")
