"""``miraccl schedule``: show, verify, draw and simulate the schedules of algorithms."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from miraccl.errors import InvalidUsage, MiracclError, ScheduleError
from miraccl.tools.completion import complete_algorithms, complete_files
from miraccl.tools.options import (
    File,
    Finite,
    Numbers,
    OutputFile,
    Size,
    Sizes,
    SuggestingChoice,
    SuggestingGroup,
    read_bytes,
    write_json,
    write_text,
)
from miraccl.types import Collective

_COLLECTIVES = tuple(c.label for c in Collective if c is not Collective.SEND_RECV)


@click.group(cls=SuggestingGroup, short_help="Show, prove, draw and simulate algorithms.")
def schedule() -> None:
    """Show, prove, draw and simulate the steps of an algorithm.

    A schedule lists, for every channel and rank, the primitives in program order and the chunks
    they act on; it is what runs. ALGO is the name of an algorithm, or a file with a schedule in the
    text form that `show` prints.

    \b
    Examples:
      miraccl schedule list
      miraccl schedule show ring --collective all_reduce --ranks 3
      miraccl schedule verify two_shot --collective all_reduce --ranks 1-33
      miraccl schedule draw ring --collective all_gather --ranks 4 --out ring.svg
      miraccl schedule simulate ring --ranks 8 --bandwidth 360
    """


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select a schedule."""
    for decorate in (
        click.option(
            "--root",
            type=click.IntRange(0),
            default=0,
            show_default=True,
            help="Root of rooted collectives.",
        ),
        click.option(
            "-c",
            "--collective",
            type=SuggestingChoice(_COLLECTIVES),
            default="all_reduce",
            show_default=True,
            help="Operation.",
        ),
        click.option(
            "--load",
            "plugin",
            metavar="FILE",
            shell_complete=complete_files(".py"),
            help="Python file to run first, which registers algorithms.",
        ),
        click.argument("algo", shell_complete=complete_algorithms),
    ):
        function = decorate(function)
    return function


def _ranks_option(most: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "-r",
        "--ranks",
        type=click.IntRange(1, most),
        default=4,
        show_default=True,
        help="Number of ranks.",
    )


@schedule.command("list")
@click.option(
    "--json",
    "json_target",
    type=OutputFile(),
    metavar="FILE",
    help="Write a list of JSON objects; - is standard output.",
)
def list_command(json_target: str | None) -> None:
    """List the algorithms and the collectives they implement.

    \b
    Examples:
      miraccl schedule list
      miraccl schedule list --json - | jq -r '.[] | select(.collectives[] == "broadcast") | .name'
    """
    from miraccl.schedule import catalog

    records = []
    for name in catalog.names():
        algorithm = catalog.get(name)
        collectives = sorted(c.label for c in algorithm.collectives)
        records.append(
            {"name": name, "collectives": collectives, "description": algorithm.description}
        )
    if json_target:
        write_json(json_target, records)
        return
    width = max(len(str(r["name"])) for r in records)
    for record in records:
        print(f"{record['name']:<{width}}  {record['description']}")
        print(f"{'':<{width}}  {', '.join(record['collectives'])}")


@schedule.command(short_help="Print the steps of an algorithm, rank by rank.")
@_options
@_ranks_option(1024)
@click.option("--rank", type=click.IntRange(0), help="Only this rank.")
def show(
    algo: str, collective: str, ranks: int, root: int, plugin: str | None, rank: int | None
) -> None:
    """Print the steps of ALGO, rank by rank; without --rank in the text form that the commands
    here
    read again.

    \b
    Examples:
      miraccl schedule show ring --collective all_reduce --ranks 3 --rank 0
      miraccl schedule show ring --ranks 3 > mine.txt; miraccl schedule verify mine.txt
    """
    from miraccl.schedule.text import dump, format_step

    built = _build(algo, collective, ranks, root, plugin)
    if rank is not None and rank >= built.nranks:
        raise InvalidUsage(
            f"cannot show --rank {rank}: the schedule has ranks 0..{built.nranks - 1}"
        )
    print(f"# {_format_counts(built)}")
    if rank is None:
        print(dump(built), end="")
        return
    for number, channel in enumerate(built.channels):
        print(f"channel {number} rank {rank}")
        print("\n".join(f"  {i:>3} {format_step(step)}" for i, step in enumerate(channel[rank])))


@schedule.command(short_help="Prove that an algorithm computes its collective.")
@_options
@click.option(
    "-r",
    "--ranks",
    default="4",
    show_default=True,
    metavar="N|FROM-TO",
    help="Number of ranks, or a range of them.",
)
@click.option(
    "--in-place", is_flag=True, help="Input and output overlap as the collective defines."
)
@click.option(
    "--fifo-depth",
    type=click.IntRange(1),
    help="Messages that a FIFO holds.  [default: that of the executors]",
)
@click.option(
    "--json",
    "json_target",
    type=OutputFile(),
    metavar="FILE",
    help="Write a list of JSON objects, one per number of ranks; - is standard output.",
)
def verify(
    algo: str,
    collective: str,
    ranks: str,
    root: int,
    plugin: str | None,
    in_place: bool,
    fifo_depth: int | None,
    json_target: str | None,
) -> None:
    """Prove that ALGO computes its collective: every contribution exactly once, no deadlock, no
    overlapping write; and that it adds in rank order, if it is registered as rank_ordered.

    The exit status is 1 if the schedule is wrong for any number of ranks; the message names
    channel, rank, step and chunk.

    \b
    Examples:
      miraccl schedule verify my_algo --load my_algo.py --collective all_gather --ranks 2-16
      miraccl schedule verify mine.txt
      miraccl schedule verify ring --ranks 2-64 --json - | jq '.[] | select(.right | not)'
    """
    from miraccl.schedule import catalog
    from miraccl.schedule import verify as proof

    def builds() -> Iterator[tuple[Any, bool]]:
        """Yield each schedule, and True if its additions must be in rank order."""
        if _is_file(algo, plugin):
            yield _read(algo), False
            return
        kind = Collective[collective.upper()]
        _load(plugin)
        algorithm, numbers = catalog.get(algo), _parse_ranks(ranks)
        if kind.rooted and root >= numbers.stop - 1:
            raise InvalidUsage(f"cannot use --root {root}: the ranks are 0..{numbers.stop - 2}")
        for n in numbers:
            if algorithm.supports(kind, n):
                yield (
                    algorithm.build(kind, n, min(root, n - 1)),
                    algorithm.rank_ordered and kind.reduces,
                )

    records: list[dict[str, Any]] = []
    for built, ordered in builds():
        error = ""
        try:
            proof.verify(
                built,
                in_place=in_place,
                fifo_depth=fifo_depth or proof.FIFO_DEPTH,
                rank_ordered=ordered,
            )
        except ScheduleError as caught:
            error = str(caught)
        steps, messages = _counts(built)
        records.append(
            {
                "name": built.name,
                "collective": built.collective.label,
                "ranks": built.nranks,
                "root": built.root,
                "in_place": in_place,
                "right": not error,
                "rank_ordered": ordered and not error,
                "most_steps": steps,
                "messages": messages,
                "error": error,
            }
        )
        if json_target != "-":
            print(_format_proof(records[-1]))
    if json_target:
        write_json(json_target, records)
    wrong = any(not record["right"] for record in records)
    proved = any(record["right"] for record in records)
    if wrong:
        sys.exit(1)
    if not proved:
        raise InvalidUsage(f"cannot verify {algo}: it has no {collective} over {ranks} ranks")


@schedule.command(short_help="Draw the messages of an algorithm over time, as SVG or HTML.")
@_options
@_ranks_option(256)
@click.option(
    "--out",
    default="-",
    type=OutputFile(),
    metavar="FILE",
    help="SVG or, with the suffix .html, a page; - is standard output.  [default: -]",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(("svg", "html")),
    help="Format.  [default: by the suffix of --out, else svg]",
)
@click.option(
    "--fold/--no-fold",
    default=None,
    help="Draw ranks and times that look alike once.  [default: from 9 ranks]",
)
def draw(
    algo: str,
    collective: str,
    ranks: int,
    root: int,
    plugin: str | None,
    out: str,
    kind: str | None,
    fold: bool | None,
) -> None:
    """Draw the messages of ALGO over time: one row per rank, one box per step, an arrow per
    message.

    The HTML page shows the messages of the step under the pointer.

    \b
    Examples:
      miraccl schedule draw ring --ranks 4 --out ring.svg
      miraccl schedule draw double_binary_tree --ranks 64 --out tree.html
    """
    from miraccl.tools.schedule_draw import draw_svg
    from miraccl.tools.schedule_page import draw_html

    built = _build(algo, collective, ranks, root, plugin)
    is_page = kind == "html" or (kind is None and out.endswith((".html", ".htm")))
    write_text(out, (draw_html if is_page else draw_svg)(built, fold=fold))


@schedule.command(short_help="Run an algorithm on virtual links and a virtual clock.")
@_options
@click.option(
    "-r",
    "--ranks",
    type=click.IntRange(1, 256),
    help="Number of ranks.  [default: 4, or those of --topo]",
)
@click.option(
    "-s",
    "--sizes",
    type=Sizes(),
    default="8,1K,256K,4M,64M",
    show_default=True,
    help="Sizes in bytes, with K, M, G.",
)
@click.option(
    "--topo",
    "topo_file",
    type=File(".xml"),
    help="Topology file: simulate on the links of this machine, with its GPUs as ranks.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Number of such machines in the job.",
)
@click.option(
    "--gpus", type=Numbers(), metavar="0,2,...", help="Only the GPUs with these device numbers."
)
@click.option(
    "--bandwidth",
    type=Finite(0, min_open=True),
    help="Without --topo: GB/s of each rank to and from a switch.  [default: 100]",
)
@click.option(
    "--mesh", is_flag=True, help="Without --topo: a link between any two ranks instead of a switch."
)
@click.option(
    "--latency",
    type=Finite(0),
    help="us from the last byte sent until it is visible; nets add their own.  [default: 1]",
)
@click.option(
    "--memory",
    type=Finite(0, min_open=True),
    help="GB/s of a rank's memory; without it copies and additions take no time.",
)
@click.option(
    "--slot",
    type=Size(),
    default="512K",
    show_default=True,
    help="Bytes of a chunk that move in a round.",
)
@click.option(
    "--fifo-depth",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Messages that a FIFO holds.",
)
@click.option(
    "--trace",
    "trace_file",
    type=OutputFile(),
    metavar="FILE",
    help="Write the last size as a trace for Perfetto; - is stdout.",
)
@click.option(
    "--json",
    "json_target",
    type=OutputFile(),
    metavar="FILE",
    help="Write the rows as JSON; - is standard output.",
)
def simulate(
    algo: str, collective: str, ranks: int | None, root: int, plugin: str | None, **options: Any
) -> None:
    """Run ALGO on virtual links and a virtual clock, and print times as `miraccl perf` does.

    Concurrent transfers share the bandwidth of a link, FIFOs fill, ranks wait and rounds overlap.
    Nothing else takes time: the figures show the use of the links, not the overhead of a library.
    The schedule is proved correct first.

    \b
    Examples:
      miraccl schedule simulate ring --ranks 8 --sizes 1K,1M,64M --bandwidth 360
      miraccl schedule simulate two_shot --topo dgx-h100.xml --nodes 2
      miraccl schedule simulate my_algo --load my_algo.py --sizes 16M --trace run.json
    """
    from miraccl.schedule.verify import verify as prove
    from miraccl.tools import schedule_simulate as simulation

    if options["topo_file"]:
        if options["bandwidth"] or options["mesh"]:
            raise InvalidUsage(
                "cannot combine --topo with --bandwidth or --mesh: the links are those of the"
                " topology"
            )
        links = simulation.read_machine(
            options["topo_file"], options["nodes"], options["gpus"], options["latency"]
        )
        if ranks not in (None, links.nranks):
            raise InvalidUsage(
                f"cannot use --ranks {ranks}: the machine has {links.nranks} ranks; select them"
                " with --gpus and --nodes"
            )
        built = _build(algo, collective, links.nranks, root, plugin)
    else:
        if options["nodes"] > 1 or options["gpus"]:
            raise InvalidUsage("cannot use --nodes or --gpus without --topo")
        built = _build(algo, collective, ranks or 4, root, plugin)
        links = simulation.uniform_links(
            built.nranks, options["bandwidth"] or 100.0, options["latency"], direct=options["mesh"]
        )
    if options["trace_file"] == options["json_target"] == "-":
        raise InvalidUsage("cannot write both --trace and --json to standard output")
    if options["slot"] < 1:
        raise InvalidUsage("--slot must be at least 1 byte")
    if min(options["sizes"]) < 1:
        raise InvalidUsage("--sizes: a size must be at least 1 byte")
    prove(built, fifo_depth=options["fifo_depth"])
    memory = options["memory"] or math.inf
    depth = options["fifo_depth"]
    records, outcome = simulation.measure(
        built,
        links,
        options["sizes"],
        slot_bytes=options["slot"],
        fifo_depth=depth,
        memory_bandwidth=memory,
    )
    if options["trace_file"]:
        write_json(options["trace_file"], simulation.trace(built, outcome))
    if options["json_target"]:
        write_json(options["json_target"], records)
    elif options["trace_file"] != "-":
        print(simulation.table(built, links, records))


def _is_file(algo: str, plugin: str | None) -> bool:
    """Return True if ``algo`` is a file in the text form and not a registered name.

    Registered names have neither a dot nor a slash.
    """
    from miraccl.schedule import catalog

    return (
        "." in algo
        or "/" in algo
        or (not plugin and algo not in catalog.names() and Path(algo).is_file())
    )


def _build(algo: str, collective: str, ranks: int, root: int, plugin: str | None) -> Any:
    """Build the schedule that the options select."""
    from miraccl.schedule import catalog

    if _is_file(algo, plugin):
        return _read(algo)
    _load(plugin)
    return catalog.get(algo).build(Collective[collective.upper()], ranks, root)


def _read(path: str) -> Any:
    """Read a schedule file; reject options that contradict its collective, ranks or root."""
    from miraccl.schedule.text import parse

    context = click.get_current_context()
    if context.params["plugin"]:
        raise InvalidUsage(
            "cannot combine --load with a schedule file: --load is for algorithms that a Python"
            " file registers"
        )
    try:
        built = parse(read_bytes(path, "schedule").decode())
    except UnicodeDecodeError:
        raise InvalidUsage(f"cannot read the schedule {path}: not a text file") from None
    for name, own in (
        ("collective", built.collective.label),
        ("ranks", built.nranks),
        ("root", built.root),
    ):
        given = context.params[name]
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE and str(given) != str(
            own
        ):
            raise InvalidUsage(
                f"cannot use --{name} {given}: the schedule in {path} has {name} {own}; omit the"
                " option"
            )
    return built


def _load(plugin: str | None) -> None:
    """Run the user's Python file, which registers algorithms."""
    if not plugin:
        return
    import runpy
    import traceback

    if not Path(plugin).is_file():
        raise InvalidUsage(f"cannot load {plugin}: no such file")
    try:
        runpy.run_path(plugin, run_name="miraccl_plugin")
    except MiracclError:
        raise
    except Exception as error:
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == plugin
        ]
        line = f", line {frames[-1].lineno}" if frames else ""
        raise InvalidUsage(f"cannot load {plugin}{line}: {type(error).__name__}: {error}") from None


def _parse_ranks(text: str) -> range:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise InvalidUsage(
            f"cannot use --ranks {text!r}: expected a number such as 4 or a range such as 1-33"
        )
    low, high = int(first), int(last or first)
    if not 1 <= low <= high <= 1024:
        raise InvalidUsage(f"cannot use --ranks {text}: allowed are 1 to 1024, in ascending order")
    return range(low, high + 1)


def _counts(built: Any) -> tuple[int, int]:
    """Return the steps of the busiest rank and the total number of messages."""
    per_rank = [
        sum(len(channel[rank]) for channel in built.channels) for rank in range(built.nranks)
    ]
    messages = sum(
        step.op.sends for channel in built.channels for steps in channel for step in steps
    )
    return max(per_rank), messages


def _format_counts(built: Any) -> str:
    steps, messages = _counts(built)
    return f"at most {steps} steps per rank, {messages} messages"


def _format_proof(record: dict[str, Any]) -> str:
    """Format the result of a proof as one line."""
    name = f"{record['name']} {record['collective']} over {record['ranks']} ranks"
    if not record["right"]:
        return f"{name}: WRONG: {record['error']}"
    ordered = "adds in rank order, " if record["rank_ordered"] else ""
    return (
        f"{name}: right, {ordered}at most {record['most_steps']} steps per rank,"
        f" {record['messages']} messages"
    )
