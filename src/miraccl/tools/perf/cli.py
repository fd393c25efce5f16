"""``miraccl perf``: the command line; starts ranks, or runs as a rank of a launcher."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from miraccl.errors import InvalidUsage
from miraccl.tools import launch
from miraccl.tools.completion import complete_algorithms, complete_files, complete_words
from miraccl.tools.options import File, Finite, OutputFile, Size, Sizes, SuggestingChoice
from miraccl.tools.perf import devices
from miraccl.tools.perf.report import display, finish
from miraccl.tools.perf.request import DEFAULT_RANKS, DEFAULT_SIZES, PerfRequest, check
from miraccl.tools.perf.spec import ITEMSIZES, OPERATIONS, REDOPS

SPARSE = "all_reduce_sparse"


class PerfCommand(click.Command):
    """The command ``perf``; operations between two processes have options of their own."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args and args[0] in ("write", "read", "writev"):
            from miraccl.tools.perf.transfers import transfers

            return transfers.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=PerfCommand, short_help="Measure a collective or a transfer.")
@click.argument("op", type=SuggestingChoice((*OPERATIONS, SPARSE)), metavar="OP")
@click.option(
    "-r",
    "--ranks",
    type=click.IntRange(1, 512),
    help=(
        "Ranks to start on this host.  [default: those of the launcher, one per GPU of --devices,"
        f" or {DEFAULT_RANKS}]"
    ),
)
@click.option(
    "-s", "--sizes", type=Sizes(), help=f"Sizes in bytes, with K, M, G.  [default: {DEFAULT_SIZES}]"
)
@click.option(
    "-b", "--min-bytes", type=Size(), help="Smallest size of a range, instead of --sizes."
)
@click.option("-e", "--max-bytes", type=Size(), help="Largest size of a range.")
@click.option(
    "-f", "--factor", type=Finite(1.01), help="Factor between sizes of a range.  [default: 2]"
)
@click.option(
    "-d",
    "--dtype",
    type=SuggestingChoice(tuple(ITEMSIZES)),
    metavar="NAME",
    default="float32",
    show_default=True,
    help=f"One of {', '.join(ITEMSIZES)}.",
)
@click.option(
    "-o",
    "--redop",
    type=click.Choice(REDOPS),
    metavar="NAME",
    help=f"One of {', '.join(REDOPS)}.  [default: sum]",
)
@click.option(
    "--root",
    type=click.IntRange(0),
    help="Root of broadcast, reduce, gather and scatter.  [default: 0]",
)
@click.option(
    "-n",
    "--iters",
    type=click.IntRange(1),
    help="Calls per batch.  [default: 20 ms of calls, at most 5000; GPUs: 5 to 200]",
)
@click.option(
    "-w",
    "--warmup",
    type=click.IntRange(0),
    help="Untimed calls.  [default: 3, or 1 above 4M; GPUs: 2]",
)
@click.option(
    "--batches",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Batches; the time is their median.",
)
@click.option(
    "--fresh",
    is_flag=True,
    help="CPU memory: every rank rewrites its input before each call; calls are timed one by one.",
)
@click.option("--no-check", is_flag=True, help="Do not check results.")
@click.option(
    "--algo",
    metavar="NAME",
    shell_complete=complete_algorithms,
    help="Algorithm for all sizes, one of `miraccl schedule list`.",
)
@click.option(
    "--proto",
    metavar="NAME",
    shell_complete=complete_words(("simple", "ll", "ll128")),
    help="Protocol for all sizes: simple, ll or, on GPUs, ll128.",
)
@click.option(
    "--deterministic", is_flag=True, help="Results independent of size, algorithm and layout."
)
@click.option(
    "--window",
    is_flag=True,
    help="Allocate buffers with comm.empty(), in memory shared by the ranks.",
)
@click.option(
    "--persistent",
    is_flag=True,
    help="CPU memory: time persistent operations, such as all_reduce_init().",
)
@click.option(
    "--hosts",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of virtual hosts for the started ranks.",
)
@click.option(
    "--devices",
    type=devices.DevicesType(),
    default="cpu",
    show_default=True,
    metavar="WHERE",
    shell_complete=complete_words(("cpu", "cuda")),
    help=(
        "Devices of the data: cpu, cuda for all GPUs, cuda:0,1 for some; one rank per GPU, or"
        " --ranks in turn."
    ),
)
@click.option(
    "--graph", is_flag=True, help="GPUs: time a CUDA graph of operations instead of single calls."
)
@click.option(
    "--threads",
    is_flag=True,
    help="GPUs: one process with a thread per GPU instead of a process per GPU.",
)
@click.option(
    "--sms",
    type=click.IntRange(-1),
    help="GPUs: multiprocessors for kernels; -1: as many as fit, 0: copy engines if possible.",
)
@click.option(
    "--bind/--no-bind",
    default=None,
    help=(
        "Bind each rank to a core, if there are enough.  [default: only with --compare gloo or mpi]"
    ),
)
@click.option(
    "--explain",
    is_flag=True,
    help="Print all candidates of each size with predicted times and the reason; GPUs: the plan.",
)
@click.option(
    "--compare",
    type=click.Choice(("gloo", "mpi", "nccl")),
    help="Measure this library alternating with miraccl, and print the ratio.",
)
@click.option(
    "--peer-python",
    metavar="PATH",
    shell_complete=complete_files(),
    help="Python that has the library of --compare.  [default: this one]",
)
@click.option(
    "--json",
    "json_target",
    type=OutputFile(),
    metavar="FILE",
    help="Write the rows as JSON; - is standard output and replaces the table.",
)
@click.option(
    "--plot",
    "plot_target",
    type=OutputFile(),
    metavar="FILE",
    help="Draw time and busbw over size, as .svg, .png or .pdf.",
)
@click.option(
    "--against",
    type=File(".json"),
    multiple=True,
    metavar="FILE",
    help="Draw the rows of an earlier --json as well; may be repeated.",
)
@click.option(
    "--bound",
    metavar="GB/S|FILE",
    shell_complete=complete_files(".xml"),
    help=(
        "Draw this bound on busbw, or that of a topology file.  [default: with --devices that of"
        " the links of the GPUs]"
    ),
)
@click.option(
    "--timeout",
    type=Finite(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Limit of the whole run in seconds.",
)
@click.option(
    "--density",
    metavar="LIST",
    help="all_reduce_sparse: shares of blocks that are not zero.  [default: 0,0.01,0.1,0.5,0.99,1]",
)
@click.option(
    "--block",
    type=click.IntRange(1),
    help="all_reduce_sparse: elements of a block.  [default: 256]",
)
def perf(op: str, **options: Any) -> None:
    """Measure OP over sizes and print the table of nccl-tests; every element of every result is
    checked.

    OP is all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, gather, scatter,
    barrier (which has no size), sendrecv (every rank sends to the next one and receives from the
    previous one) or all_reduce_sparse (the sparse sum beside the dense one, over densities).
    One-sided transfers, write, read and writev, have options of their own:
    `miraccl perf write --help`.

    Time is the median over batches of the slowest rank's mean: on CPUs by the clock around the
    calls of a batch, on GPUs between two CUDA events around them. algbw is size/time, busbw the
    bandwidth a link must carry for it, as in PERFORMANCE.md of nccl-tests. The exit status is 1 if
    any element is wrong.

    \b
    Examples:
      miraccl perf all_reduce --ranks 4 --sizes 8,1K,256K,4M,16M
      miraccl perf all_gather -r 3 -b 1K -e 64M -f 4 --dtype bfloat16
      miraccl perf all_reduce -r 2 --algo ring --explain
      miraccl perf all_reduce -r 4 --compare gloo --json result.json --plot busbw.svg
      miraccl perf all_reduce -r 4 --plot busbw.svg --against old.json --bound 12
      miraccl perf all_reduce_sparse -r 2 --density 0.01 --block 256 --plot sparse.svg
      torchrun --nproc-per-node 4 --no-python miraccl perf all_reduce
      miraccl perf all_reduce --devices cuda:0,1 --sizes 256K,4M,16M --graph --compare nccl
    """
    if op == SPARSE:
        from miraccl.tools.perf import sparse

        sparse.run(options)
    for name in ("density", "block"):
        if options.pop(name) is not None:
            raise InvalidUsage(f"cannot use --{name} with {op}: it is for {SPARSE}")
    request = check(op, options)
    if request.joins_launcher:
        _run_joined(request)
    else:
        _run_own(request)


def _cpu_job(request: PerfRequest) -> Any:
    from miraccl.tools.perf.measure import MeasureOptions
    from miraccl.tools.perf.orchestrator import PerfJob

    o = request.options
    return PerfJob(
        cases=request.cases,
        options=MeasureOptions(
            iters=o["iters"],
            warmup=o["warmup"],
            batches=o["batches"],
            check=not o["no_check"],
            fresh=o["fresh"],
            bind=request.binds,
        ),
        init=_init_options(o),
        window=o["window"],
        persistent=o["persistent"],
        explain=o["explain"],
        alternating=bool(o["compare"]),
        hosts=o["hosts"],
    )


def _init_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of ``miraccl.init``."""
    return {name: options[name] for name in ("algo", "proto", "deterministic") if options[name]}


def _device_job(request: PerfRequest) -> Any:
    from miraccl.bootstrap.launch import detect_launch
    from miraccl.tools.perf import device_nccl
    from miraccl.tools.perf.device_measure import Cell
    from miraccl.tools.perf.device_ranks import DevicePerfJob, check_memory, check_peer
    from miraccl.tools.perf.measure import MeasureOptions

    o = request.options
    here = detect_launch(os.environ).local_nranks if request.joins_launcher else request.nranks
    if request.peer:
        check_peer(request.ordinals, here or request.nranks)
    job = DevicePerfJob(
        cells=tuple(Cell(case=case, graph=o["graph"]) for case in request.cases),
        options=MeasureOptions(
            iters=o["iters"],
            warmup=o["warmup"],
            batches=o["batches"],
            check=not o["no_check"],
            bind=bool(o["bind"]),
        ),
        ordinals=request.ordinals,
        init=_init_options(o),
        libraries=("miraccl", request.peer) if request.peer else ("miraccl",),
        sms=o["sms"],
        window=o["window"],
        explain=o["explain"],
        threads=o["threads"],
        hosts=o["hosts"],
    )
    check_memory(job, here or 1, request.gpu_bytes)
    if request.peer:
        (device_nccl.load_torch if request.joins_launcher else device_nccl.check_torch)()
    return job


# ---------------------------------------------------------------------- own ranks


def _run_own(request: PerfRequest) -> None:
    from miraccl.tools.perf import orchestrator, peers

    if request.ordinals:
        _run_own_gpus(request)
        return
    o = request.options
    python = peers.find_python(request.peer, o["peer_python"]) if request.peer else ""
    if request.peer == "mpi":
        peers.find_launcher(python)
    launch.warm_up()
    job = _cpu_job(request)
    arrived: list[Any] = []
    # Forks, so it must come before any thread.
    groups: list[Any] = [orchestrator.OwnGroup(job, request.nranks, arrived.append)]
    try:
        with display(request) as show:
            if request.peer:
                groups.append(peers.PeerGroup(request.peer, python, job, request.nranks))
            for _ in orchestrator.run_alternating(groups, o["timeout"]):
                while arrived and (not request.peer or arrived[0].number < groups[1].done):
                    line = arrived.pop(0)
                    show(
                        orchestrator.join_peer_times(line, groups[1].times, request.peer)
                        if request.peer
                        else line
                    )
    finally:
        for group in groups:
            group.stop()
    finish(request)


def _run_own_gpus(request: PerfRequest) -> None:
    from miraccl.tools.perf.device_ranks import run_cells

    with (
        run_cells(_device_job(request), request.nranks, request.options["timeout"]) as lines,
        display(request) as show,
    ):
        for line in lines:
            show(line)
    finish(request)


# ---------------------------------------------------------------------- ranks of a launcher


def _run_joined(request: PerfRequest) -> None:
    """Run as one rank of a launcher's job; rank 0 prints."""
    import miraccl
    from miraccl.tools.perf.engine_miraccl import MiracclEngine
    from miraccl.tools.perf.orchestrator import run_cases

    if request.ordinals:
        _end_joined(request, _run_joined_gpu(request))
        return
    job = _cpu_job(request)
    with miraccl.init(**job.init) as comm:
        engine = MiracclEngine(comm, window=job.window, persistent=job.persistent)
        if comm.rank == 0:
            with display(request) as show:
                run_cases(job, engine, _no_alternation, show)
        else:
            run_cases(job, engine, _no_alternation, lambda line: request.rows.extend(line.rows))
        rank = comm.rank
    _end_joined(request, rank)


def _run_joined_gpu(request: PerfRequest) -> int:
    from miraccl.bootstrap.launch import detect_launch
    from miraccl.tools.perf.device_ranks import run_rank

    job = _device_job(request)
    if detect_launch(os.environ).rank:
        return run_rank(
            job, os.environ, _no_alternation, lambda line: request.rows.extend(line.rows)
        )
    with display(request) as show:
        return run_rank(job, os.environ, _no_alternation, show)


def _end_joined(request: PerfRequest, rank: int) -> None:
    if rank == 0:
        finish(request)
    elif any(row.wrong for row in request.rows):
        sys.exit(1)


def _no_alternation() -> None:
    """Do nothing: there is no peer to alternate with."""
