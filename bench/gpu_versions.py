"""Versions of miraccl compared on one GPU: microseconds of an operation in a CUDA graph.

    python bench/gpu_versions.py --source before=/tmp/before/src --source now=src --ops
    gather,sendrecv

Needs a GPU and PyTorch. The ranks are threads of one process on one GPU, each with some of its
multiprocessors (``--sms``), so their kernels run at the same time, unlike those of separate
processes. There is no link between them: the figures show the cost of the kernels and its change.
Each version has a process of its own, and they alternate; the figure of a round is the median of
``--replays`` of rank 0's graph.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import add_output_option, describe_machine, heading, markdown_table, save, show_us
from gpu_ranks import ROOT, need_gpus

OPS = ("sendrecv", "gather", "all_to_all_v", "all_reduce", "broadcast")
SIZES = (16, 4 << 10, 64 << 10, 512 << 10, 4 << 20, 64 << 20)
SMALL = 1 << 20  # bytes up to which a graph has many operations


# ---- one version: the ranks


def share_modules() -> None:
    """Share loaded kernels between ranks.

    Older versions load a kernel once per rank; loading waits for the peer's kernel, which waits for
    this rank.
    """
    try:
        from miraccl.executor.cuda.gpu import Gpu
    except ImportError:  # it was in the driver's file
        from miraccl.executor.cuda.driver import Gpu  # type: ignore[attr-defined, no-redef]

    known: dict[tuple[bytes, str], Any] = {}
    lock, own = threading.Lock(), Gpu.load

    def load(self: Any, cubin: bytes, entry: str) -> Any:
        key = cubin, entry
        if key not in known:
            with lock:
                if key not in known:
                    known[key] = own(self, cubin, entry)
        return known[key]

    patched: Any = Gpu
    patched.load = load


def operation(comm: Any, op: str, x: Any, y: Any) -> Callable[[], Any]:
    right, left = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
    counts = [len(x) // comm.nranks] * comm.nranks
    whole = x.new_empty(len(x) * comm.nranks) if comm.rank == 0 else None
    return {
        "sendrecv": lambda: comm.sendrecv(x, right, y, left),
        "gather": lambda: comm.gather(x, 0, whole),
        "all_to_all_v": lambda: comm.all_to_all_v(x, counts, counts, y),
        "all_reduce": lambda: comm.all_reduce(x, out=y),
        "broadcast": lambda: comm.broadcast(x, 0),
    }[op]


class Ranks:
    """All ranks of one process."""

    def __init__(self, options: argparse.Namespace) -> None:
        import miraccl

        self.options, self.unique_id = options, miraccl.get_unique_id()
        self.gate = threading.Barrier(options.ranks)
        self.times: dict[str, float] = {}

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._guarded, args=(rank,))
            for rank in range(self.options.ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _guarded(self, rank: int) -> None:
        try:
            self._rank(rank)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # the others wait for this one

    def _rank(self, rank: int) -> None:
        import torch

        import miraccl

        torch.cuda.set_device(0)
        comm = miraccl.Communicator(self.options.ranks, self.unique_id, rank, timeout=60.0)
        with torch.cuda.stream(torch.cuda.Stream()):
            for op in self.options.ops:
                for size in self.options.sizes:
                    count = max(comm.nranks, size // 4)
                    x, y = (
                        torch.full((count,), 1.0 + rank, device="cuda"),
                        torch.zeros(count, device="cuda"),
                    )
                    time = self._time(
                        torch, comm, operation(comm, op, x, y), 20 if size <= SMALL else 5
                    )
                    if rank == 0:
                        self.times[f"{op} {size}"] = time
        comm.finalize()

    def _time(self, torch: Any, comm: Any, run: Callable[[], Any], inner: int) -> float:
        stream, gate = torch.cuda.current_stream(), self.gate
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(
            2
        ):  # what is made once is made now, by one rank before the other waits for it on the GPU
            gate.wait()
            run()
            gate.wait()
            comm.synchronize()
        gate.wait()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(inner):
            run()
        graph.capture_end()
        times = []
        for _ in range(self.options.replays + 1):
            gate.wait()
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / inner)
        gate.wait()
        return median(times[1:])


# ---- all versions, in turns


def times_of(source: str, words: list[str], sms: int) -> dict[str, float]:
    """Measure one round of the version whose package is in the folder ``source``."""
    environ = {**os.environ, "PYTHONPATH": str(Path(source).resolve()), "MIRACCL_SMS": str(sms)}
    command = [sys.executable, __file__, "--worker", *words]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        sys.exit(f"the ranks of {source} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source",
        action="append",
        metavar="NAME=FOLDER",
        help="a version: a folder with the package (now=src)",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--ops", type=lambda text: text.split(","), default=list(OPS), help=",".join(OPS)
    )
    parser.add_argument(
        "--sizes",
        type=lambda text: [int(word) for word in text.split(",")],
        default=list(SIZES),
        help="bytes",
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--replays", type=int, default=25)
    parser.add_argument("--sms", type=int, default=40, help="multiprocessors of a rank")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    add_output_option(parser)
    options = parser.parse_args()
    if unknown := set(options.ops) - set(OPS):
        parser.error(f"--ops: {sorted(unknown)[0]!r} is none of {', '.join(OPS)}")
    if options.worker:
        share_modules()
        ranks = Ranks(options)
        ranks.run()
        print(json.dumps(ranks.times))
        return
    sources = dict(word.split("=", 1) for word in options.source or [f"now={ROOT / 'src'}"])
    machine = {**describe_machine(), "gpu": need_gpus().names}
    words = [
        "--ranks",
        str(options.ranks),
        "--ops",
        ",".join(options.ops),
        "--sizes",
        ",".join(map(str, options.sizes)),
    ]
    words += ["--replays", str(options.replays)]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for number in range(options.rounds):
        for name, source in sources.items():
            rounds[name].append(times_of(source, words, options.sms))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    rows = []
    for case in rounds[next(iter(sources))][0]:
        seen = {name: [times[case] for times in rounds[name]] for name in sources}
        rows.append(
            [
                *case.split(),
                *(f"{show_us(median(times))} ({show_us(min(times))})" for times in seen.values()),
            ]
        )
    title = (
        f"{options.ranks} ranks on one GPU, threads of one process, {options.sms} multiprocessors"
        " each"
    )
    text = (
        f"{machine['gpu']}. Microseconds in a CUDA graph, float32, median of"
        f" {options.rounds} rounds (least)."
    )
    table = markdown_table(["operation", "bytes", *sources], rows)
    save(
        options.out,
        {"machine": machine, "rounds": rounds},
        f"{heading(title, machine)}\n{text}\n\n{table}",
    )


if __name__ == "__main__":
    main()
