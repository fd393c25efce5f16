"""Sums of arrays that are mostly zero, beside the dense sum, Gloo and MPI; and aggregators.

    python bench/sparse.py one-host two-hosts coo --out sparse/MACHINE-DATE
    python bench/sparse.py networks --rate 1gbit                  # root: network namespaces
    python bench/sparse.py aggregators --hosts 4,8                # root: network namespaces
    python bench/sparse.py --device cuda --gpus 2                 # sparse_cuda.py

The array has ``--mib`` MiB of float32 in blocks of 256 elements, of which ``--density`` are not
zero on each rank (the test of OmniReduce: 64 Mi elements, 1 %). Subjects run in turns in the same
processes; a time is the median over ``--repeats`` of the slowest rank, and every sum is checked
against the dense one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import numpy as np
import sparse_cuda
from sparse_cuda import sparse_array

BLOCK = 256
ROOT = Path(__file__).resolve().parents[1]
PREFIX = "mcspar"  # of namespaces and links


# ---- on a rank


def slowest(comm: Any, seconds: float) -> float:
    return float(comm.all_reduce(np.array([seconds]), op=_miraccl().MAX)[0])


def _miraccl() -> Any:
    import miraccl

    return miraccl


def take_turns(
    comm: Any, subjects: dict[str, tuple[Callable[[], Any], Callable[[], Any]]], repeats: int
) -> dict[str, float]:
    """Return the median milliseconds of each subject, a pair of preparation and call."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(repeats + 1):
        for name, (prepare, call) in subjects.items():
            prepare()
            comm.barrier()
            start = time.perf_counter()
            call()
            took = slowest(comm, time.perf_counter() - start)
            if turn:
                times[name].append(took * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_sums(options: dict[str, Any]) -> dict[str, Any]:
    comm = _miraccl().init()
    count = (options["mib"] << 20) // 4
    rows = []
    for density in options["densities"]:
        original = sparse_array(comm.rank, count, density)
        x = comm.empty(count) if options.get("window") else np.empty(count, np.float32)

        def reset(x: np.ndarray = x, original: np.ndarray = original) -> None:
            x[:] = original

        subjects: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "dense": (reset, lambda x=x: comm.all_reduce(x)),  # type: ignore[misc]
            "sparse": (reset, lambda x=x: comm.all_reduce_sparse(x, block=BLOCK)),  # type: ignore[misc]
        }
        if options.get("mpi"):
            from mpi4py import MPI

            subjects["mpi4py"] = (
                reset,
                lambda x=x: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x),  # type: ignore[misc]
            )
        times = take_turns(comm, subjects, options["repeats"])
        reset()
        comm.all_reduce_sparse(x, block=BLOCK)
        plan = comm.last_plan
        want = original.copy()
        comm.all_reduce(want)
        right = bool(np.allclose(x, want, rtol=1e-5, atol=1e-5))
        rows.append({"density": density, **times, "plan": plan.reason, "right": right})
    comm.finalize()
    return {"rows": rows}


def measure_coo(options: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    comm = _miraccl().init()
    store = dist.FileStore(options["store"], comm.nranks)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.nranks)
    count = (options["mib"] << 20) // 4
    rng = np.random.default_rng(comm.rank + 1)
    rows = []
    for density in options["densities"]:
        picked = np.sort(rng.choice(count, int(count * density), replace=False))
        values = rng.standard_normal(len(picked)).astype(np.float32)
        tensor = torch.sparse_coo_tensor(
            torch.from_numpy(picked)[None], torch.from_numpy(values), (count,), is_coalesced=True
        )
        held: dict[str, Any] = {}

        def copy(held: dict[str, Any] = held, tensor: Any = tensor) -> None:
            held["gloo"] = tensor.clone()

        def gloo(held: dict[str, Any] = held) -> None:
            dist.all_reduce(held["gloo"])

        def own(held: dict[str, Any] = held, picked: Any = picked, values: Any = values) -> None:
            held["own"] = comm.all_reduce_coo(picked, values, count)

        times = take_turns(
            comm,
            {"gloo": (copy, gloo), "all_reduce_coo": (lambda: None, own)},
            options["repeats"],
        )
        total = held["gloo"].coalesce()
        right = bool(
            np.array_equal(total.indices().numpy()[0], held["own"][0])
            and np.allclose(total.values().numpy(), held["own"][1], rtol=1e-5)
        )
        rows.append({"density": density, **times, "right": right})
    dist.destroy_process_group()
    comm.finalize()
    return {"rows": rows}


def measure_aggregators(options: dict[str, Any]) -> dict[str, Any]:
    """Time the star and the best schedule without aggregators, and what the model chose."""
    comm = _miraccl().init()
    count = (options["mib"] << 20) // 4
    x = np.ones(count, np.float32)
    aggregation = comm._aggregation  # both sides of its choice
    from miraccl.ops import spec
    from miraccl.ops.prepare import prepare

    call = prepare(spec.ALL_REDUCE, comm._core.reader, (x, None, _miraccl().SUM))
    plan = comm._core.planner.make_run(call.request)
    chosen = aggregation.accepts(spec.ALL_REDUCE, call)
    form = aggregation._best_form(call.request)
    direct, through = (aggregation.lines()[number] for number in (0, form + 1))

    def reset() -> None:
        x[:] = 1

    times = take_turns(
        comm,
        {
            "without": (reset, lambda: comm._core.run_now(call, plan, "all_reduce")),
            "star": (reset, lambda: aggregation.run(call, "all_reduce")),
        },
        options["repeats"],
    )
    right = bool((x == comm.nranks).all())
    comm.finalize()
    predicted = {
        "star predicted": through.predict_us(x.nbytes) / 1e3,
        "without predicted": direct.predict_us(x.nbytes) / 1e3,
    }
    errors = {
        f"{name} error %": 100 * (predicted[f"{name} predicted"] / times[name] - 1)
        for name in ("without", "star")
    }
    algo = comm._core.planner.choice_of(plan.address).algo
    row = {**times, **predicted, **errors, "algo": algo, "chosen": bool(chosen), "right": right}
    return {"rows": [row]}


MEASUREMENTS = {"sums": measure_sums, "coo": measure_coo, "aggregators": measure_aggregators}


def run_as_rank(name: str, options: dict[str, Any]) -> None:
    found = MEASUREMENTS[name](options)
    if os.environ["MIRACCL_RANK"] == "0":
        Path(options["result"]).write_text(json.dumps(found))


# ---- start of ranks


def start(
    name: str,
    options: dict[str, Any],
    environments: list[dict[str, str]],
    wrap: Callable[[int, list[str]], list[str]] = lambda rank, command: command,
    aggregators: int = 0,
) -> dict[str, Any]:
    """Run one measurement in a process per environment; the last are aggregators."""
    with tempfile.TemporaryDirectory() as folder:
        options = {**options, "result": f"{folder}/result.json", "store": f"{folder}/store"}
        command = [sys.executable, __file__, "--rank-of", name, "--options", json.dumps(options)]
        processes = []
        nranks = len(environments) - aggregators
        for rank, environment in enumerate(environments):
            own = command if rank < nranks else [sys.executable, "-m", "miraccl", "aggregator"]
            processes.append(
                subprocess.Popen(
                    wrap(rank, own),
                    env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
                )
            )
        try:
            for process in processes:
                if process.wait(options.get("limit", 600)):
                    raise SystemExit(f"a rank of {name} ended with status {process.returncode}")
        finally:
            for process in processes:
                process.kill()
        result: dict[str, Any] = json.loads(Path(options["result"]).read_text())
        return result


def rank_environments(nranks: int, port: int, address: str = "127.0.0.1") -> list[dict[str, str]]:
    return [
        {
            "MIRACCL_RANK": str(rank),
            "MIRACCL_NRANKS": str(nranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "MIRACCL_SECRET": "bench",
        }
        for rank in range(nranks)
    ]


def shell(*words: str) -> None:
    subprocess.run(words, check=True)


@contextmanager
def namespaces(rates: list[str]) -> Iterator[list[str]]:
    """Make a network namespace per rate behind one bridge; yield their addresses."""
    bridge = f"{PREFIX}br"
    names = [f"{PREFIX}{number}" for number in range(len(rates))]
    try:
        shell("ip", "link", "add", bridge, "type", "bridge")
        shell("ip", "link", "set", bridge, "up")
        for number, (name, rate) in enumerate(zip(names, rates, strict=True)):
            outside = f"{PREFIX}v{number}"
            shell("ip", "netns", "add", name)
            shell("ip", "link", "add", outside, "type", "veth", "peer", "eth0", "netns", name)
            shell("ip", "link", "set", outside, "master", bridge, "up")
            shell("ip", "-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            shell("ip", "-n", name, "link", "set", "eth0", "up")
            shell("ip", "-n", name, "link", "set", "lo", "up")
            for where, device in ((["-n", name], "eth0"), ([], outside)):
                shell(
                    *("tc", *where, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate),
                    *("burst", "256k", "latency", "50ms"),
                )
        yield [f"10.77.0.{number + 1}" for number in range(len(rates))]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
        subprocess.run(["ip", "link", "del", bridge], check=False)


def in_namespace(rank: int, command: list[str]) -> list[str]:
    return ["ip", "netns", "exec", f"{PREFIX}{rank}", *command]


def on_hosts(
    name: str, options: dict[str, Any], rates: list[str], aggregators: int = 0
) -> dict[str, Any]:
    """Run a measurement on one rank per namespace."""
    with namespaces(rates) as addresses:
        environments = rank_environments(len(rates), 29700, addresses[0])
        for number, environment in enumerate(environments):
            environment["MIRACCL_HOSTID"] = f"host{number}"
            environment["MIRACCL_SOCKET_IFNAME"] = "eth0"
            if aggregators:
                environment["MIRACCL_AGGREGATORS"] = str(aggregators)
        return start(name, options, environments, in_namespace, aggregators)


def times_rate(rate: str, factor: int) -> str:
    digits = rate.rstrip("abcdefghijklmnopqrstuvwxyz")
    return f"{int(digits) * factor}{rate[len(digits) :]}"


# ---- table


def table(title: str, rows: list[dict[str, Any]]) -> str:
    lines = [f"### {title}", ""]
    names = list(rows[0])
    lines += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = [f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def with_ratio(rows: list[dict[str, Any]], base: str, own: str) -> list[dict[str, Any]]:
    return [{**row, "ratio": row[base] / row[own]} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help="one-host two-hosts coo networks aggregators")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--options", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--gpus", type=int, default=1, help="ranks of --device cuda")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--density", default="0.01,0.1,1.0")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hosts", default="4", help="numbers of hosts of aggregators")
    parser.add_argument("--aggregator-mib", type=int, default=16)
    parser.add_argument("--sparse-density", default="0.01", help="densities of networks and coo")
    parser.add_argument("--rate", default="1gbit", help="link of a host, for tc")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks of coo")
    parser.add_argument("--mpi", action="store_true", help="one-host: mpi4py beside it, by mpirun")
    common.add_output_option(parser)
    args = parser.parse_args()
    if args.rank_of:
        run_as_rank(args.rank_of, json.loads(args.options))
        return
    densities = [float(text) for text in args.density.split(",")]
    options = {"mib": args.mib, "densities": densities, "repeats": args.repeats, "mpi": args.mpi}
    machine = common.describe_machine()
    record: dict[str, Any] = {"machine": machine, "options": options}
    text = [common.heading("Sparse sums and aggregators", machine)]
    sparse = {**options, "densities": [float(text) for text in args.sparse_density.split(",")]}

    def add_rows(title: str, unit: str, rows: list[dict[str, Any]]) -> None:
        record[title] = rows
        text.append(table(f"{title} ({unit})", rows))
        if args.out:  # a later part may take too long
            common.save(args.out, record, "\n".join(text))

    if args.device == "cuda":
        for density in sparse["densities"]:
            rows = sparse_cuda.measure_kernels(args.mib, args.repeats, density)
            add_rows(f"rows on a GPU, {args.mib} MiB, density {density:.0%}", "us", rows)
        if args.gpus > 1:
            shares = [float(text) for text in sparse_cuda.DENSITIES.split(",")]
            got = sparse_cuda.measure_ranks(args.mib, args.repeats, shares, args.gpus)
            add_rows(f"{args.gpus} {got['gpu']}, {args.mib} MiB", "us", got["rows"])

    def add(title: str, found: dict[str, Any], base: str, own: str) -> None:
        add_rows(title, "ms", with_ratio(found["rows"], base, own))

    for what in args.what:
        if what == "one-host":
            for window in (False, True):
                memory = "window" if window else "private"
                found = start("sums", {**options, "window": window}, rank_environments(2, 29610))
                add(f"2 ranks of one host, {memory} memory", found, "dense", "sparse")
        elif what == "two-hosts":
            environments = rank_environments(2, 29620)
            for number, environment in enumerate(environments):
                environment["MIRACCL_HOSTID"] = f"host{number}"
            add(
                "2 hosts over loopback TCP", start("sums", options, environments), "dense", "sparse"
            )
        elif what == "coo":
            for nranks in map(int, args.ranks.split(",")):
                found = start("coo", sparse, rank_environments(nranks, 29630))
                add(f"rows by index, {nranks} ranks", found, "gloo", "all_reduce_coo")
        elif what == "networks":
            found = on_hosts("sums", sparse, [args.rate] * 4)
            add(f"4 hosts of {args.rate}", found, "dense", "sparse")
        elif what == "aggregators":
            sizes = {**options, "mib": args.aggregator_mib}
            for hosts in map(int, args.hosts.split(",")):
                for factor in (hosts, 1):
                    rates = [args.rate] * hosts + [times_rate(args.rate, factor)]
                    found = on_hosts("aggregators", sizes, rates, aggregators=1)
                    name = f"{hosts} hosts of {args.rate}, aggregator {factor} x"
                    add(name, found, "without", "star")
        else:
            parser.error(f"cannot measure {what!r}")
    common.save(args.out, record, "\n".join(text))


if __name__ == "__main__":
    main()
