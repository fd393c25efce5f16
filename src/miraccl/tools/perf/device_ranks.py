"""Ranks of a measurement on GPUs: processes or threads, with NCCL in the same or in other
processes.

The parent never initialises CUDA because it forks. NCCL shares process, stream and buffers with
miraccl and alternates with it batch by batch. PyTorch has one rank per process, so if miraccl's
ranks are threads, NCCL runs in separate processes and the orchestrator alternates the groups.

A rank that fails aborts its communicator, so that the kernels of the other ranks end. Every wait
has a deadline.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from miraccl import clock
from miraccl.errors import InvalidUsage, MiracclError
from miraccl.tools.perf.device_array import Arena, padded_bytes
from miraccl.tools.perf.device_measure import Bench, Cell, CellFailed, measure_cell
from miraccl.tools.perf.device_miraccl import LaunchInfo, MiracclDevice
from miraccl.tools.perf.measure import MeasureOptions
from miraccl.tools.perf.orchestrator import (
    OwnGroup,
    RankGroup,
    ResultLine,
    RunFailed,
    join_peer_times,
    run_alternating,
)
from miraccl.tools.spawn import RankContext

_THREAD_PAUSES = 5  # threads of one process enqueue one after another
_WARM_UP_US = 300_000.0


@dataclass(frozen=True, kw_only=True)
class DevicePerfJob:
    """Work of each rank.

    - ``ordinals``: GPUs, assigned in turn.
    - ``init``: options of the communicator.
    - ``libraries``: the first is measured, the second one is its peer.
    - ``keep_going``: report a cell that cannot run and continue with the next one.
    """

    cells: tuple[Cell, ...]
    options: MeasureOptions
    ordinals: tuple[int, ...]
    init: dict[str, Any] = field(default_factory=dict)
    libraries: tuple[str, ...] = ("miraccl",)
    sms: int | None = None
    window: bool = False
    explain: bool = False
    threads: bool = False
    alternating: bool = False
    keep_going: bool = False
    hosts: int = 1

    def environ(self) -> dict[str, str]:
        """Return environment variables for the ranks."""
        from miraccl.tools.perf.device_nccl import ENVIRON

        return ENVIRON | ({"MIRACCL_SMS": str(self.sms)} if self.sms is not None else {})


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """Properties found by a rank at its start.

    - ``device``: name of the GPU.
    - ``memory_bytes``: GPU memory used by each library.
    - ``start_s``: seconds to create miraccl's communicator.
    - ``versions``: versions of torch, NCCL and CUDA.
    """

    device: str
    memory_bytes: dict[str, int]
    start_s: float
    versions: dict[str, str]


# ---------------------------------------------------------------------- one rank


def run_rank(
    job: DevicePerfJob,
    environ: Mapping[str, str],
    wait_for_turn: Callable[[], None],
    report: Callable[[ResultLine], None],
    report_info: Callable[[DeviceInfo], None] = lambda info: None,
) -> int:
    """Run all cells on one rank; return the rank.

    ``report`` is called on every rank with the same line.
    """
    from miraccl.bootstrap.launch import detect_launch, join_launch

    place = detect_launch(environ)
    session = join_launch(place)
    local = session.rank if place.local_rank is None else place.local_rank
    with open_bench(job, session, job.ordinals[local % len(job.ordinals)]) as (bench, info):
        bench.wait_for_turn = wait_for_turn
        report_info(info)
        if job.options.bind:
            _bind_to_core(bench)
        _warm_up(bench)
        for number, cell in enumerate(job.cells):
            report(_measure(bench, job, number, cell))
    session.close()  # not after a failure: peers must see that this rank is lost
    return int(session.rank)


def _measure(bench: Bench, job: DevicePerfJob, number: int, cell: Cell) -> ResultLine:
    try:
        rows, chosen = measure_cell(bench, cell)
    except (InvalidUsage, CellFailed) as error:
        if not job.keep_going:
            raise
        return ResultLine(number=number, out_of_place=None, in_place=None, failure=str(error))
    found = {row.in_place: row for row in rows}
    explanation = (explain(chosen),) if job.explain and rows and chosen.algo else ()
    return ResultLine(
        number=number,
        out_of_place=found.get(False),
        in_place=found.get(True),
        explanation=explanation,
    )


def explain(chosen: LaunchInfo) -> dict[str, Any]:
    """Return the launch of the last form as a plain dictionary."""
    names = ("algo", "proto", "blocks", "threads", "unroll", "reason")
    return {**{name: getattr(chosen, name) for name in names}, "chosen": True}


def _bind_to_core(bench: Bench) -> None:
    """Bind the calling thread to one core, if there is a core for every rank."""
    cores = sorted(os.sched_getaffinity(0))
    if all(bench.gather(bench.session.nranks <= len(cores))):
        os.sched_setaffinity(0, {cores[bench.rank]})


def _warm_up(bench: Bench) -> None:
    """Keep the GPU busy until its clocks have risen."""
    bench.barrier()
    elapsed = 0.0
    while elapsed < _WARM_UP_US:
        elapsed += max(1000.0, bench.gpu.time_us(lambda: bench.gpu.pause(50)))
    bench.barrier()


def arena_bytes(job: DevicePerfJob) -> int:
    """Return the bytes of buffers that the largest case needs, for all libraries."""
    largest = 0
    for cell in job.cells:
        case = cell.case
        largest = max(
            largest,
            padded_bytes(case.input_count * case.itemsize)
            + padded_bytes(case.output_count * case.itemsize),
        )
    return max(512, largest) * len(job.libraries)


@contextlib.contextmanager
def open_bench(
    job: DevicePerfJob, session: Any, ordinal: int
) -> Iterator[tuple[Bench, DeviceInfo]]:
    """Open GPU, libraries and buffers of this rank; yield the bench and its properties.

    After a failure waiting kernels are aborted, and the process frees the rest on exit.
    """
    from miraccl.executor.cuda.gpu import Gpu
    from miraccl.tools.perf.gpu_buffers import GpuBuffers

    os.environ.update(job.environ())
    torch_stream, versions = None, {}
    if "nccl" in job.libraries:
        from miraccl.tools.perf import device_nccl

        torch = device_nccl.load_torch()
        torch_stream = device_nccl.TorchStream(torch, ordinal)
        versions = {
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "cuda": str(torch.version.cuda),
        }
    gpu = Gpu(ordinal)
    gpu_buffers = GpuBuffers(gpu, torch_stream.stream_handle if torch_stream else None)
    nbytes = arena_bytes(job)
    arena = (
        torch_stream.arena(nbytes) if torch_stream else Arena(gpu.allocate(nbytes), nbytes, ordinal)
    )
    with contextlib.ExitStack() as stack:
        libraries: list[Any] = []
        memory, start_s = {}, 0.0
        for name in job.libraries:
            free, before = gpu_buffers.free_bytes(), clock.perf_counter()
            if name == "miraccl":
                libraries.append(_open_miraccl(job, session, ordinal, gpu_buffers, arena, stack))
                start_s = clock.perf_counter() - before
            elif torch_stream is not None:
                libraries.append(device_nccl.NcclDevice(session, torch_stream, arena))
                stack.push(
                    lambda kind, error, trace, library=libraries[-1]: (
                        None if error else library.close()
                    )
                )
            libraries[-1].align()
            gpu_buffers.wait()
            memory[name] = max(0, free - gpu_buffers.free_bytes())
            session.barrier("perf opened")
        info = DeviceInfo(
            device=_gpu_name(gpu, ordinal), memory_bytes=memory, start_s=start_s, versions=versions
        )
        bench = Bench(
            gpu=gpu_buffers,
            arena=arena,
            session=session,
            libraries=libraries,
            options=job.options,
            device=info.device,
            pauses=_THREAD_PAUSES if job.threads else 1,
        )
        yield bench, info
    # All results are reported; the process frees what cannot be freed here.
    with contextlib.suppress(MiracclError):
        gpu.make_current()
        gpu_buffers.close()
        if torch_stream is None:
            gpu.free(arena.address)
        gpu.close()


def _open_miraccl(
    job: DevicePerfJob,
    session: Any,
    ordinal: int,
    gpu_buffers: Any,
    arena: Arena,
    stack: contextlib.ExitStack,
) -> MiracclDevice:
    """Create the communicator that ``Communicator`` opens for the first array on a GPU."""
    from miraccl.api.communicator import Communicator
    from miraccl.runtime.multinode.communicator import make_device_communicator
    from miraccl.runtime.options import Options as Choices

    options = Choices.create(**job.init)

    def open_cpu(part: Any, stages: Any) -> Communicator:
        return Communicator.from_session(part, options, setup=stages)

    comm = make_device_communicator(session, ordinal, options, open_cpu=open_cpu)

    def leave(kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            comm.close()
        else:
            comm.abort()  # no close(): it would wait for the GPU and delay the error

    stack.push(leave)
    return MiracclDevice(comm, gpu_buffers.stream, arena, gpu_buffers.capture, window=job.window)


def _gpu_name(gpu: Any, ordinal: int) -> str:
    from miraccl.executor.cuda.driver import check

    device = check(gpu.cuda.cuDeviceGet(ordinal), "cuDeviceGet")
    name: bytes = check(gpu.cuda.cuDeviceGetName(256, device), "cuDeviceGetName")
    return name.split(b"\0")[0].decode(errors="replace").strip()


# ---------------------------------------------------------------------- main functions


def process_main(context: RankContext, job: DevicePerfJob) -> None:
    """Main function of a forked rank."""
    os.dup2(2, 1)  # standard output is the parent's table

    def turn() -> None:
        if job.alternating:
            context.emit("ready")
            context.receive()

    first = context.rank == 0
    run_rank(
        job,
        os.environ,
        turn,
        context.emit if first else _ignore,
        context.emit if first else _ignore,
    )


def threads_main(context: RankContext, job: DevicePerfJob, nranks: int, timeout: float) -> None:
    """Main function of a process whose threads are the ranks; the first failing thread ends it."""
    os.dup2(2, 1)
    ended: clock.Queue[BaseException | None] = clock.simple_queue()

    def hand_over() -> None:
        context.emit("ready")
        context.receive()

    gate = threading.Barrier(nranks, hand_over)

    def turn() -> None:
        if job.alternating:
            gate.wait(timeout)

    def rank_thread(rank: int) -> None:
        numbers = {"MIRACCL_RANK": str(rank), "MIRACCL_LOCAL_RANK": str(rank)}
        try:
            run_rank(
                job,
                {**os.environ, **numbers},
                turn,
                context.emit if not rank else _ignore,
                context.emit if not rank else _ignore,
            )
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    for rank in range(nranks):
        clock.thread(target=rank_thread, args=(rank,), name=f"rank {rank}", daemon=True).start()
    for _ in range(nranks):
        error = ended.get(timeout=timeout)
        if error is not None:
            raise error


def _ignore(message: Any) -> None:
    """Ignore messages that equal those of rank 0."""


# ---------------------------------------------------------------------- groups


class _NcclGroup(OwnGroup):
    """NCCL in separate processes; ``times`` by case as in ``peers.PeerGroup``."""

    def __init__(self, job: DevicePerfJob, nranks: int) -> None:
        self.times: dict[tuple[int, bool], float] = {}
        self.host_times: dict[tuple[int, bool], float | None] = {}
        self.done = 0
        super().__init__(job, nranks, self._record_line, "nccl", main=process_main)

    def _record_line(self, line: ResultLine | DeviceInfo) -> None:
        if isinstance(line, DeviceInfo):
            return
        for row in line.rows:
            if row.wrong:
                raise RunFailed(f"nccl computed {row.wrong} wrong values in case {line.number}")
            self.times[line.number, row.in_place] = row.time_us
            self.host_times[line.number, row.in_place] = row.host_us
        self.done = line.number + 1


@contextlib.contextmanager
def run_cells(
    job: DevicePerfJob,
    nranks: int,
    timeout: float,
    on_info: Callable[[DeviceInfo], None] = lambda info: None,
    line_timeout: float | None = None,
) -> Iterator[Iterator[ResultLine]]:
    """Start ranks on this host and yield an iterator over their lines; the ranks end with the
    block.

    Ranks are forked at once. ``timeout`` limits the whole run, ``line_timeout`` the time between
    two lines, in seconds. The iterator raises ``RunFailed`` after the lines that arrived before the
    failure.
    """
    _preload_modules()
    arrived: list[ResultLine] = []
    groups: list[RankGroup] = []
    nccl: _NcclGroup | None = None

    def take(message: Any) -> None:
        if isinstance(message, DeviceInfo):
            on_info(message)
        else:
            arrived.append(message)

    def complete() -> Iterator[ResultLine]:
        while arrived and (nccl is None or arrived[0].number < nccl.done):
            line = arrived.pop(0)
            yield line if nccl is None else _join_nccl_times(line, nccl)

    def lines() -> Iterator[ResultLine]:
        try:
            for _ in run_alternating(groups, timeout, line_timeout):
                yield from complete()
        except RunFailed:
            yield from complete()
            raise

    try:
        separate_nccl = job.threads and "nccl" in job.libraries  # PyTorch has one rank per process
        if separate_nccl:
            job = replace(job, libraries=("miraccl",), alternating=True)
        if job.threads:
            groups.append(
                OwnGroup(job, nranks, take, main=threads_main, processes=1, args=(nranks, timeout))
            )
        else:
            groups.append(OwnGroup(job, nranks, take, main=process_main))
        if separate_nccl:
            nccl = _NcclGroup(replace(job, libraries=("nccl",), threads=False), nranks)
            groups.append(nccl)
        yield lines()
    finally:
        for group in groups:
            group.stop()


def _join_nccl_times(line: ResultLine, nccl: _NcclGroup) -> ResultLine:
    line = join_peer_times(line, nccl.times, "nccl")

    def with_host(row: Any) -> Any:
        # None without the peer, or if it is measured in the same process.
        if row is None or row.peer_time_us is None:
            return None if row is None else replace(row, peer="")
        return replace(row, peer_host_us=nccl.host_times.get((line.number, row.in_place)))

    return replace(
        line, out_of_place=with_host(line.out_of_place), in_place=with_host(line.in_place)
    )


def _preload_modules() -> None:
    """Import everything that forked ranks need; nothing here initialises CUDA."""
    import miraccl.api.communicator
    import miraccl.runtime.multinode.communicator
    import miraccl.tools.perf.gpu_buffers  # noqa: F401
    from miraccl.schedule import catalog

    catalog.names()


def check_peer(ordinals: Sequence[int], nranks: int) -> None:
    """Raise ``InvalidUsage`` if ranks of this host would share GPUs, which NCCL rejects."""
    if nranks > len(ordinals):
        gpus = f"{len(ordinals)} GPU{'s' * (len(ordinals) != 1)}"
        text = (
            f"cannot compare with nccl: {nranks} ranks would share {gpus}, which NCCL does not"
            " support"
        )
        raise InvalidUsage(text, hint="use as many GPUs as ranks, or no --compare")


def check_memory(job: DevicePerfJob, nranks: int, gpu_bytes: int) -> None:
    """Raise ``InvalidUsage`` for buffers that do not fit into a GPU of ``gpu_bytes``.

    - ``nranks``: ranks of this host, as far as they are known.
    """
    sharing = -(-nranks // len(job.ordinals))
    needed = sharing * arena_bytes(job)
    if needed > gpu_bytes:
        ranks = f" of {sharing} ranks" if sharing > 1 else ""
        raise InvalidUsage(
            f"cannot measure these --sizes: the buffers{ranks} need {needed} bytes of a GPU with"
            f" {gpu_bytes}",
            hint="use smaller sizes",
        )
