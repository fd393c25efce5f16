"""``miraccl perf``: options, and where the rows go."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click

from miraccl.errors import InvalidUsage
from miraccl.tools import launch
from miraccl.tools.options import Finite, OutputFile, Size, Sizes, write_json
from miraccl.tools.perf import devices, plot, table
from miraccl.tools.perf.spec import ITEMSIZES, OPERATIONS, REDOPS, REDUCING, ROOTED, Case, Row, build_case, size_range

DEFAULT_RANKS = 2
_DEFAULT_SIZES = "8,1K,16K,256K,1M,4M,16M"


@click.command(short_help="Measure a collective.")
@click.argument("op", type=click.Choice(OPERATIONS), metavar="OP")
@click.option(
    "-r",
    "--ranks",
    type=click.IntRange(1, 512),
    help=f"Own ranks on this host.  [default: those of the launcher, or one per GPU of --devices, or {DEFAULT_RANKS}]",
)
@click.option("-s", "--sizes", type=Sizes(), help=f"Sizes in bytes, with K, M, G.  [default: {_DEFAULT_SIZES}]")
@click.option("-b", "--min-bytes", type=Size(), help="Smallest size of a range, instead of --sizes.")
@click.option("-e", "--max-bytes", type=Size(), help="Largest size of a range.")
@click.option("-f", "--factor", type=Finite(1.01), default=2.0, show_default=True, help="Between sizes of a range.")
@click.option(
    "-d",
    "--dtype",
    type=click.Choice(tuple(ITEMSIZES)),
    metavar="NAME",
    default="float32",
    show_default=True,
    help=f"One of {', '.join(ITEMSIZES)}.",
)
@click.option("-o", "--redop", type=click.Choice(REDOPS), metavar="NAME", help=f"One of {', '.join(REDOPS)}.  [default: sum]")
@click.option("--root", type=click.IntRange(0), help="Root of broadcast, reduce, gather and scatter.  [default: 0]")
@click.option("-n", "--iters", type=click.IntRange(1), help="Calls in a batch; without it as many as take 20 ms, at most 5000.")
@click.option("-w", "--warmup", type=click.IntRange(0), help="Untimed calls; without it 3, or 1 above 4M.")
@click.option("--batches", type=click.IntRange(1), default=5, show_default=True, help="Batches; the time is the median of them.")
@click.option("--fresh", is_flag=True, help="CPU memory: every rank rewrites its input before each call, and each call is timed alone.")
@click.option("--no-check", is_flag=True, help="Do not check results.")
@click.option("--algo", help="Algorithm to use for everything, such as ring.")
@click.option("--proto", help="Protocol to use for everything: simple, ll or ll128.")
@click.option("--deterministic", is_flag=True, help="CPU memory: results that depend on neither size, algorithm nor layout.")
@click.option("--window", is_flag=True, help="Take buffers from comm.empty(), memory that the ranks share.")
@click.option("--persistent", is_flag=True, help="CPU memory: time operations that were prepared once, as all_reduce_init() does.")
@click.option(
    "--hosts",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Own ranks act as if on so many hosts.",
)
@click.option(
    "--devices",
    type=devices.DevicesType(),
    default="cpu",
    show_default=True,
    metavar="WHERE",
    help="Where the data is: cpu, cuda for all GPUs, cuda:0,1 for some; a rank for each, or --ranks take them in turn.",
)
@click.option("--graph", is_flag=True, help="GPUs: time operations inside a CUDA graph instead of one by one.")
@click.option(
    "--threads", is_flag=True, help="GPUs: one process drives all of them, with a thread for each, instead of a process for each."
)
@click.option("--sms", type=click.IntRange(-1), help="GPUs: multiprocessors that kernels may occupy; 0: copy engines, where possible.")
@click.option("--bind/--no-bind", default=None, help="Keep each own rank on a core, if there are enough.  [default: only with --compare]")
@click.option("--explain", is_flag=True, help="Print, for each size, all candidates with predicted times and the reason; GPUs: the plan.")
@click.option(
    "--compare", type=click.Choice(("gloo", "mpi", "nccl")), help="Measure this library too, in turns with miraccl, and print the ratio."
)
@click.option("--peer-python", metavar="PATH", help="Python that has the library of --compare; without it this one.")
@click.option(
    "--json", "json_target", type=OutputFile(), metavar="FILE", help="Write the rows as JSON; - is standard output, instead of the table."
)
@click.option("--plot", "plot_target", type=OutputFile(), metavar="FILE", help="Draw busbw over size, as .svg, .png or .pdf.")
@click.option("--timeout", type=Finite(0, min_open=True), default=600.0, show_default=True, help="Seconds for everything.")
def perf(op: str, **options: Any) -> None:
    """Measure OP over sizes and print the table of nccl-tests; every element of every result is checked.

    OP is all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, gather, scatter, barrier (which has no size) or
    sendrecv (every rank sends to the next one and receives from the one before).

    Time is the median over batches of the slowest rank's mean: on CPUs by the clock around the calls of a batch, on GPUs between two CUDA
    events around them. algbw is size/time, busbw what a link must carry for it, as in PERFORMANCE.md of nccl-tests. The exit status is 1
    if any element is wrong.

    \b
    Examples:
      miraccl perf all_reduce --ranks 4 --sizes 8,1K,256K,4M,16M
      miraccl perf all_gather -r 3 -b 1K -e 64M -f 4 --dtype bfloat16
      miraccl perf all_reduce -r 2 --algo ring --explain
      miraccl perf all_reduce -r 4 --compare gloo --json result.json --plot busbw.svg
      torchrun --nproc-per-node 4 --no-python miraccl perf all_reduce
      miraccl perf all_reduce --devices cuda:0,1 --sizes 256K,4M,16M --graph --compare nccl
    """
    request = _check(op, options)
    if request.joins_launcher:
        _run_joined(request)
    else:
        _run_own(request)


@dataclass(kw_only=True)
class _Request:
    """The options, checked; ``lines`` and ``rows`` collect results."""

    op: str
    options: dict[str, Any]
    nranks: int
    joins_launcher: bool
    cases: tuple[Case, ...]
    ordinals: tuple[int, ...] = ()
    device: str = ""
    rows: list[Row] = field(default_factory=list)

    @property
    def peer(self) -> str:
        return self.options["compare"] or ""

    @property
    def quiet(self) -> bool:
        return bool(self.options["json_target"] == "-")


def _check(op: str, options: dict[str, Any]) -> _Request:
    devices.check_options(options)
    if op == "barrier" and options["devices"].on_gpu:
        raise click.UsageError("barrier moves no data: leave --devices out")
    if options["plot_target"]:
        plot.check_target(options["plot_target"])
    if options["redop"] and op not in REDUCING:
        raise click.UsageError(f"--redop is for {', '.join(REDUCING)}; {op} reduces nothing")
    if op == "barrier" and any(options[name] is not None for name in ("sizes", "min_bytes", "max_bytes")):
        raise click.UsageError("a barrier has no size: leave --sizes, --min-bytes and --max-bytes out")
    if options["root"] is not None and op not in ROOTED:
        raise click.UsageError(f"--root is for {', '.join(ROOTED)}; {op} has none")
    joined = None if options["ranks"] else launch.detect_ranks()
    ordinals, device = _gpus(options["devices"])
    nranks = options["ranks"] or joined or len(ordinals) or DEFAULT_RANKS
    root = options["root"] or 0
    if root >= nranks:
        raise click.UsageError(f"--root {root} is not one of the {nranks} ranks 0..{nranks - 1}")
    if options["hosts"] > nranks or (joined and options["hosts"] > 1):
        raise click.UsageError(f"--hosts {options['hosts']} needs as many ranks, own ones: give --ranks")
    if joined and options["threads"]:
        raise click.UsageError("--threads starts ranks itself: leave the launcher out")
    if options["threads"] and options["hosts"] > 1:
        raise click.UsageError("--hosts needs a process for each rank: leave --threads out")
    if joined and options["compare"] in ("gloo", "mpi"):
        raise click.UsageError("--compare starts ranks itself: leave the launcher out and give --ranks")
    if options["peer_python"] and not options["compare"]:
        raise click.UsageError("--peer-python belongs to --compare")
    if options["persistent"] and op in ("sendrecv", "barrier"):
        raise click.UsageError(f"--persistent: {op} has no persistent form")
    if not options["devices"].on_gpu:
        _check_choice(op, nranks, options)
    cases = [
        build_case(op, size, nranks=nranks, dtype=options["dtype"], redop=options["redop"] or "sum", root=root) for size in _sizes(options)
    ]
    return _Request(
        op=op,
        options=options,
        nranks=nranks,
        joins_launcher=bool(joined),
        cases=tuple(dict.fromkeys(cases)),
        ordinals=ordinals,
        device=device,
    )


def _check_choice(op: str, nranks: int, options: dict[str, Any]) -> None:
    """What CPU ranks would refuse, or leave aside for want of such a schedule, after they have been started."""
    from miraccl.comm.planner import check_protocol
    from miraccl.schedule import catalog
    from miraccl.types import Collective

    check_protocol(options["proto"] or "")
    if not options["algo"]:
        return
    algorithm = catalog.get(options["algo"].lower())
    if op == "sendrecv":
        raise click.UsageError("--algo is for collectives; a sendrecv is a message")
    collective = Collective[op.upper()]
    if not algorithm.supports(collective, nranks):
        names = ", ".join(other.name for other in catalog.algorithms_for(collective, nranks))
        raise click.UsageError(f"--algo {algorithm.name} has no {op} over {nranks} ranks; these have: {names}")


def _gpus(wanted: devices.Devices) -> tuple[tuple[int, ...], str]:
    """The numbers of the GPUs that are meant and their names; nothing on CPUs. CUDA is asked in another process: this one may fork."""
    if not wanted.on_gpu:
        return (), ""
    from miraccl.tools import gpu_facts

    facts = gpu_facts.read_facts()
    ordinals = devices.resolve(wanted, facts)
    return ordinals, facts.of(ordinals).names


def _sizes(options: dict[str, Any]) -> list[int]:
    smallest, largest = options["min_bytes"], options["max_bytes"]
    if smallest is None and largest is None:
        sizes = list(options["sizes"] or Sizes().convert(_DEFAULT_SIZES, None, None))
    elif options["sizes"]:
        raise click.UsageError("give either --sizes or --min-bytes and --max-bytes")
    else:
        smallest = smallest if smallest is not None else min(8, largest)
        largest = largest if largest is not None else max(smallest, 16 << 20)
        if smallest < 1:
            raise click.UsageError("a size is at least 1 byte")
        sizes = size_range(smallest, largest, options["factor"])
        if not sizes:
            raise click.UsageError(f"no size lies between --min-bytes {smallest} and --max-bytes {largest}")
    if min(sizes) < 1:
        raise click.UsageError("a size is at least 1 byte")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if max(sizes) > memory:
        raise click.UsageError(f"a buffer of {max(sizes)} bytes is larger than the memory of this machine, {memory} bytes")
    return sizes


def _job(request: _Request) -> Any:
    from miraccl.tools.perf.conductor import Job
    from miraccl.tools.perf.measure import Options

    o = request.options
    return Job(
        cases=request.cases,
        options=Options(
            iters=o["iters"], warmup=o["warmup"], batches=o["batches"], check=not o["no_check"], fresh=o["fresh"], bind=_binds(o)
        ),
        init={name: o[name] for name in ("algo", "proto", "deterministic") if o[name]},
        window=o["window"],
        persistent=o["persistent"],
        explain=o["explain"],
        in_turns=bool(o["compare"]),
        hosts=o["hosts"],
    )


def _device_job(request: _Request) -> Any:
    from miraccl.bootstrap.launch import detect_launch
    from miraccl.tools.perf.device_measure import Cell
    from miraccl.tools.perf.device_ranks import DeviceJob, check_peer
    from miraccl.tools.perf.measure import Options

    o = request.options
    if request.peer:
        here = detect_launch(os.environ).local_nranks if request.joins_launcher else None
        check_peer(request.ordinals, here or request.nranks)
    return DeviceJob(
        cells=tuple(Cell(case=case, graph=o["graph"]) for case in request.cases),
        options=Options(iters=o["iters"], warmup=o["warmup"], batches=o["batches"], check=not o["no_check"], bind=bool(o["bind"])),
        ordinals=request.ordinals,
        init={name: o[name] for name in ("algo", "proto") if o[name]},
        libraries=("miraccl", request.peer) if request.peer else ("miraccl",),
        sms=o["sms"],
        window=o["window"],
        explain=o["explain"],
        threads=o["threads"],
        hosts=o["hosts"],
    )


def _binds(options: dict[str, Any]) -> bool:
    """Ranks that take turns sleep and wake up, after which a scheduler may leave two that poll on one core: bind both sides."""
    return bool(options["compare"]) if options["bind"] is None else bool(options["bind"])


# ---------------------------------------------------------------------- own ranks


def _run_own(request: _Request) -> None:
    from miraccl.tools.perf import conductor, peers

    if request.ordinals:
        _run_own_gpus(request)
        return
    o = request.options
    python = peers.find_python(request.peer, o["peer_python"]) if request.peer else ""
    launch.warm_up()
    job = _job(request)
    arrived: list[Any] = []
    groups: list[Any] = [conductor.OwnGroup(job, request.nranks, arrived.append)]  # forks: before any thread
    try:
        with _display(request) as show:
            if request.peer:
                groups.append(peers.PeerGroup(request.peer, python, job, request.nranks))
            for _ in conductor.run_in_turns(groups, o["timeout"]):
                while arrived and (not request.peer or arrived[0].number < groups[1].done):
                    line = arrived.pop(0)
                    show(conductor.join(line, groups[1].times, request.peer) if request.peer else line)
    finally:
        for group in groups:
            group.stop()
    _finish(request)


def _run_own_gpus(request: _Request) -> None:
    from miraccl.tools.perf.device_ranks import run_cells

    with run_cells(_device_job(request), request.nranks, request.options["timeout"]) as lines, _display(request) as show:
        for line in lines:
            show(line)
    _finish(request)


@contextlib.contextmanager
def _display(request: _Request) -> Iterator[Any]:
    """Print the header, then give a function that prints a line and moves the progress bar."""
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
    """A bar on standard error if that is a terminal. Gives a context in which it is away, for printing, and then one step further."""
    if not sys.stderr.isatty():
        yield contextlib.nullcontext
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Rich would break lines at the width of the terminal if it printed them.
    progress = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False)
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


def _print_header(request: _Request) -> None:
    where = f"{request.device} ({devices.describe(request.ordinals)})" if request.ordinals else _machine(request.joins_launcher)
    ranks = f"{request.nranks} rank{'s' * (request.nranks != 1)} on {where}"
    print(f"# miraccl {_version()} {request.op}, {ranks}, {request.cases[0].dtype}, {_how(request.options)}")
    print("\n".join(table.header(request.peer, bool(request.ordinals))), flush=True)


def _how(options: dict[str, Any]) -> str:
    iters = f"{options['iters']} calls" if options["iters"] else "about 20 ms of calls"
    if options["devices"].on_gpu:
        return _how_on_gpus(options)
    kinds = [name for name in ("fresh", "window", "persistent", "deterministic") if options[name]]
    if _binds(options):
        kinds.append("bound if cores suffice")
    if options["hosts"] > 1:
        kinds.append(f"as if on {options['hosts']} hosts")
    return ", ".join([f"median of {options['batches']} batches of {iters}", *kinds])


def _how_on_gpus(options: dict[str, Any]) -> str:
    calls = f"{options['iters']} calls" if options["iters"] else "5 to 200 calls"
    kinds = [name for name in ("window",) if options[name]]
    if options["threads"]:
        kinds.append("ranks are threads")
    if options["sms"] is not None:
        kinds.append(f"at most {options['sms']} multiprocessors" if options["sms"] > 0 else "copy engines" if not options["sms"] else "")
    if options["hosts"] > 1:
        kinds.append(f"as if on {options['hosts']} hosts")
    how = "in a CUDA graph" if options["graph"] else "on a stream"
    return ", ".join(filter(None, [f"median of {options['batches']} batches of {calls} {how}", *kinds]))


def _version() -> str:
    import miraccl

    return miraccl.__version__


def _machine(joined: bool) -> str:
    """A launcher binds its ranks one by one, so that the cores of this one say nothing about the others."""
    cores = (os.cpu_count() or 1) if joined else len(os.sched_getaffinity(0))
    return f"{cores} core{'s' * (cores != 1)}"


def _print_line(request: _Request, line: Any) -> None:
    if line.rows:
        print(table.line(line.out_of_place, line.in_place, request.peer, bool(request.ordinals)))
    for candidate in line.explanation:
        mark = "*" if candidate["chosen"] else " "
        if "blocks" in candidate:
            shape = f"{candidate['blocks']} blocks of {candidate['threads']} threads, {candidate['unroll']} vectors of a thread at a time"
            print(f"#   {mark} {candidate['algo']}/{candidate['proto']:<12} {shape}  {candidate['reason']}".rstrip())
            continue
        name = f"{candidate['algo']}/{candidate['proto']} x{candidate['channels']}"
        print(f"#   {mark} {name:<36} {table.format_us(candidate['predicted_us']):>9} us predicted  {candidate['reason']}")
    sys.stdout.flush()


def _finish(request: _Request) -> None:
    o = request.options
    if not request.quiet:
        print("\n".join(table.footer(request.rows, request.peer)))
    if o["json_target"]:
        write_json(o["json_target"], [row.to_json() for row in request.rows])
    if o["plot_target"]:
        plot.draw(request.rows, o["plot_target"])
    if any(row.wrong for row in request.rows):
        sys.exit(1)
    if not request.rows:
        where = " on GPU memory" if request.ordinals else ""
        raise InvalidUsage(f"nothing was measured: {request.op} has no such form{where}")


# ---------------------------------------------------------------------- ranks of torchrun, mpirun or srun


def _run_joined(request: _Request) -> None:
    """This process is one rank of a job that something else started; rank 0 prints."""
    import miraccl
    from miraccl.tools.perf.conductor import run_cases
    from miraccl.tools.perf.engine_miraccl import MiracclEngine

    if request.ordinals:
        _end_joined(request, _run_joined_gpu(request))
        return
    job = _job(request)
    with miraccl.init(**job.init) as comm:
        engine = MiracclEngine(comm, window=job.window, persistent=job.persistent)
        if comm.rank == 0:
            with _display(request) as show:
                run_cases(job, engine, _no_turns, show)
        else:
            run_cases(job, engine, _no_turns, lambda line: request.rows.extend(line.rows))
        rank = comm.rank
    _end_joined(request, rank)


def _run_joined_gpu(request: _Request) -> int:
    from miraccl.bootstrap.launch import detect_launch
    from miraccl.tools.perf.device_ranks import run_rank

    job = _device_job(request)
    if detect_launch(os.environ).rank:
        return run_rank(job, os.environ, _no_turns, lambda line: request.rows.extend(line.rows))
    with _display(request) as show:
        return run_rank(job, os.environ, _no_turns, show)


def _end_joined(request: _Request, rank: int) -> None:
    if rank == 0:
        _finish(request)
    elif any(row.wrong for row in request.rows):
        sys.exit(1)


def _no_turns() -> None:
    """Nobody to take turns with."""
