"""The page docs/measurements.md from bench/results.

Result files are ``bench/results/BENCHMARK/MACHINE-DATE.md``, with the raw data in ``.json`` beside
them. The page shows the newest run of each benchmark and machine. ``experiments/`` has before/after
comparisons, which the design pages cite.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
_STEM = re.compile(r"(?P<machine>.+)-(?P<date>\d{4}-\d\d-\d\d)")
_GPUS = (2, 4, 8)
_SIZES = {1 << 30: "Gi", 1 << 20: "Mi", 1 << 10: "Ki"}
_OPS = ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A section of the page.

    ``show``: ``all`` of the result file, its introduction and ``tables``, or the ``intro`` only.
    """

    folder: str
    title: str
    script: str
    text: str
    show: str = "all"


BENCHMARKS = (
    Benchmark(
        folder="gpu_hosts",
        title="Several hosts",
        script="bench/gpu_hosts.py",
        text="GPUs of one machine as two simulated hosts, beside NCCL over sockets.",
    ),
    Benchmark(
        folder="gpu_windows",
        title="Windows and copy engines",
        script="miraccl perf all_gather --window",
        text='Buffers from `comm.empty(..., device="cuda")`.',
        show="tables",
    ),
    Benchmark(
        folder="call_overhead",
        title="Host time of a call",
        script="bench/call_overhead.py",
        text="Time of the calling thread, by kind of call and of array.",
    ),
    Benchmark(
        folder="gpu_triton",
        title="Triton",
        script="bench/gpu_triton.py",
        text="The one-shot kernel in Triton and in CUDA C++, in one run.",
    ),
    Benchmark(
        folder="training",
        title="Training",
        script="bench/training.py",
        text="DDP and FSDP2, with losses and weights compared bit by bit.",
    ),
    Benchmark(
        folder="training_host",
        title="Training bound by the host",
        script="bench/training.py --model mlp",
        text="DDP of 64 small layers in buckets of 0.3 MB, whose step the host's calls decide.",
    ),
    Benchmark(
        folder="torch_calls",
        title="PyTorch calls",
        script="bench/torch_calls.py",
        text="Small calls of `torch.distributed`, beside Gloo and NCCL.",
    ),
    Benchmark(
        folder="torch_messages",
        title="PyTorch messages",
        script="bench/torch_calls.py --only send,isend",
        text="Point-to-point calls of `torch.distributed` on CPU memory, beside Gloo.",
    ),
    Benchmark(
        folder="peers",
        title="CPU ranks and MPI",
        script="bench/peers.py",
        text="Every operation and size, beside Open MPI, MPICH and Intel MPI.",
    ),
    Benchmark(
        folder="peers_persistent",
        title="Persistent operations",
        script="bench/peers.py",
        text="Prepared once, called often (`all_reduce_init` and the others).",
    ),
    Benchmark(
        folder="peers_window",
        title="Window memory on CPUs",
        script="bench/peers.py",
        text="Buffers from `comm.empty`.",
    ),
    Benchmark(
        folder="uneven_counts",
        title="Uneven collectives",
        script="bench/uneven_counts.py",
        text="Counts that change with every call, as in mixture-of-experts layers.",
    ),
    Benchmark(
        folder="transfers",
        title="One-sided transfers",
        script="bench/transfers.py",
        text="Writes, reads, block lists and notifications, beside NIXL and Mooncake.",
    ),
    Benchmark(
        folder="transfers_cuda",
        title="One-sided transfers of GPU memory",
        script="bench/transfers.py --device cuda",
        text="Two processes on one GPU: blocks by one kernel, staged, and one copy per block.",
    ),
    Benchmark(
        folder="nccl_plugin",
        title="NCCL over the exported network plugin",
        script="bench/nccl_plugin.py",
        text="Two ranks on one GPU, beside NCCL's own sockets.",
    ),
    Benchmark(
        folder="tcp_hosts",
        title="Two hosts over TCP",
        script="bench/tcp_hosts.py",
        text="Messages and collectives of two ranks over TCP, beside MPI, UCX and Gloo.",
    ),
    Benchmark(
        folder="tcp_hosts_2x2",
        title="Two hosts with two ranks each over TCP",
        script="bench/tcp_hosts.py --ranks 4",
        text="The same of four ranks on two cores; peers that cannot yield their core take slices.",
    ),
    Benchmark(
        folder="tcp_rails",
        title="Several interfaces over TCP",
        script="bench/tcp_rails.py",
        text="Messages of 16 MiB between namespaces with four interfaces, beside iperf3.",
    ),
    Benchmark(
        folder="sparse",
        title="Sparse sums",
        script="bench/sparse.py",
        text="Arrays that are mostly zero, beside the dense sum; rows by index beside Gloo.",
    ),
    Benchmark(
        folder="sparse_networks",
        title="Aggregators and sparse sums over links of 1 Gbit/s",
        script="bench/sparse.py aggregators networks",
        text="Hosts as namespaces: a star of an aggregator beside the best schedule without one.",
    ),
    Benchmark(
        folder="fabric",
        title="Simulated fabric",
        script="bench/fabric.py",
        text="Published cases of receiver-driven transport on fat trees, in virtual time.",
    ),
    Benchmark(
        folder="fabric_datagrams",
        title="The datagram machine on the simulated fabric",
        script="bench/fabric.py --part datagrams",
        text="Incast, a long path with loss, and the tail of messages, in virtual time.",
    ),
    Benchmark(
        folder="udp_paths",
        title="UDP between namespaces",
        script="bench/udp_paths.py",
        text="Several paths with loss, slow and dying paths, incast; beside iperf3 over TCP.",
    ),
    Benchmark(
        folder="verbs_guest",
        title="Verbs in a guest",
        script="bench/verbs_guest.py",
        text="Ratios to perftest on Soft-RoCE, in the same boot of a guest with one processor.",
    ),
    Benchmark(
        folder="udp_cpu",
        title="Processor time of UDP",
        script="bench/udp_paths.py --rows loopback cpu",
        text="Over loopback, and between namespaces without a limit of the rate; beside TCP.",
    ),
    Benchmark(
        folder="udp_loss",
        title="UDP on one path with loss",
        script="bench/udp_paths.py --rows one tail",
        text="Medians of three rounds, in turns with iperf3 over TCP.",
    ),
    Benchmark(
        folder="udp_four",
        title="UDP on four paths",
        script="bench/udp_paths.py --rows four",
        text="Beside UDP on one of them, iperf3 bound to each path or over ECMP, and MPTCP.",
    ),
    Benchmark(
        folder="gpu_links",
        title="Links between GPUs",
        script="bench/gpu_links.py",
        text="Bandwidth of loads, stores, bulk copies and copy engines.",
        show="intro",
    ),
    Benchmark(
        folder="gpu_litmus",
        title="Order of stores",
        script="bench/gpu_litmus.py",
        text="Litmus test of the memory model that packet kernels rely on.",
        show="intro",
    ),
    Benchmark(
        folder="gpu_clock",
        title="Clock of the GPU",
        script="bench/gpu_clock.py",
        text="Jumps of `%globaltimer`, which deadlines in kernels rely on.",
        show="intro",
    ),
)


def runs(folder: str) -> dict[str, list[Path]]:
    """Result files of a benchmark by machine, oldest first."""
    found: dict[str, list[Path]] = {}
    for path in sorted((RESULTS / folder).glob("*.md"), key=lambda path: path.stem[-10:]):
        if not (match := _STEM.fullmatch(path.stem)):
            raise SystemExit(f"{path.relative_to(ROOT)}: the name is not MACHINE-YYYY-MM-DD.md")
        found.setdefault(match["machine"], []).append(path)
    return found


def newest(folder: str) -> list[Path]:
    """The newest result file of each machine."""
    return [paths[-1] for _, paths in sorted(runs(folder).items())]


def superseded() -> list[Path]:
    """Result files that a newer run of the same benchmark and machine replaces."""
    folders = ["gpu_final", *(benchmark.folder for benchmark in BENCHMARKS)]
    return [path for folder in folders for paths in runs(folder).values() for path in paths[:-1]]


def load_gpu_tables() -> dict[int, dict[str, Any]]:
    """The newest ``gpu_final`` records by number of GPUs."""
    tables = {}
    for path in newest("gpu_final"):
        record = json.loads(path.with_suffix(".json").read_text("utf-8"))
        tables[record["rows"][0]["ranks"]] = record | {"path": path}
    return {n: tables[n] for n in _GPUS if n in tables}


def all_reduce_times(record: dict[str, Any], dtype: str = "bfloat16") -> dict[int, Any]:
    """Row of each size: in a CUDA graph where there is one, else called on a stream."""
    rows: dict[int, Any] = {}
    for row in record["rows"]:
        if (row["op"], row["dtype"]) == ("all_reduce", dtype):
            rows.setdefault(row["bytes"], row)  # those of graphs come first
    return rows


def size_text(nbytes: int) -> str:
    """``4 Mi`` for 4194304."""
    for unit, suffix in _SIZES.items():
        if nbytes % unit == 0:
            return f"{nbytes // unit} {suffix}"
    return str(nbytes)


def _time(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.1f}"


def _ratio(ratio: float) -> str:
    return f"**{ratio:.2f}**" if round(ratio, 2) < 1 else f"{ratio:.2f}"


def _link(path: Path) -> str:
    target = f"../{path.relative_to(ROOT)}"
    return f"[`{path.relative_to(RESULTS)}`]({target})"


def _geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def gpu_section() -> str:
    """``gpu_final``: every operation beside NCCL."""
    tables = load_gpu_tables()
    parts = [
        "## GPUs and NCCL",
        "Script: `bench/gpu_final.py`. Plain, unregistered arrays; medians of the slowest rank, "
        "both libraries in turns in the same run; NVLink multicast is off for both; CUDA "
        "graphs up to 16 MiB, a stream above; every element checked. Ratio: time of NCCL divided "
        "by that of miraccl; below 1 (bold) miraccl is slower.",
        _gpu_machines(tables),
        "### all_reduce, bfloat16",
        "![Time of all_reduce on 8 GPUs over message size](images/all_reduce_gpu.svg)",
        _all_reduce_table(tables),
        "### Other operations",
        "Geometric mean and minimum of the ratios over all sizes, float32 and bfloat16.",
        _other_operations(tables),
        "### Called one by one",
        "Without a CUDA graph, `all_reduce` from 16 B to 16 MiB: geometric mean of the ratios.",
        _called(tables),
    ]
    return "\n\n".join(parts)


def _gpu_machines(tables: dict[int, dict[str, Any]]) -> str:
    lines = [
        "| GPUs | Date | NCCL | PyTorch | CUDA | Memory of a GPU: miraccl, NCCL "
        "| Communicator ready after | All tables |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in tables.values():
        machine, memory = record["machine"], record["machine"]["device_memory_mib"]
        lines.append(
            f"| {machine['gpus']} | {machine['date'][:10]} | {machine['nccl']} "
            f"| {machine['torch']} | {machine['cuda']} "
            f"| {memory['miraccl']:.0f} MiB, {memory['nccl']:.0f} MiB "
            f"| {machine['start_s']:.2f} s | {_link(record['path'])} |"
        )
    return "\n".join(lines)


def _all_reduce_table(tables: dict[int, dict[str, Any]]) -> str:
    times = {n: all_reduce_times(record) for n, record in tables.items()}
    head = " | ".join(f"{n} GPUs: NCCL µs | miraccl µs | ratio" for n in times)
    lines = [f"| bytes | {head} |", "|---:|" + "---:|" * (3 * len(times))]
    for nbytes in sorted(set.intersection(*(set(rows) for rows in times.values()))):
        cells = [
            f"{_time(rows[nbytes]['nccl_us'])} | {_time(rows[nbytes]['time_us'])} "
            f"| {_ratio(rows[nbytes]['nccl_us'] / rows[nbytes]['time_us'])}"
            for rows in times.values()
        ]
        lines.append(f"| {size_text(nbytes)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _other_operations(tables: dict[int, dict[str, Any]]) -> str:
    head = " | ".join(f"{n} GPUs: mean | min" for n in tables)
    lines = [f"| | {head} | slower than NCCL at |", "|---|" + "---:|" * (2 * len(tables)) + "---|"]
    for op in _OPS:
        cells, slower = [], []
        for n, record in tables.items():
            rows = [row for row in record["rows"] if row["op"] == op]
            ratios = [row["ratio"] for row in rows]
            cells.append(f"{_geometric_mean(ratios):.2f} | {_ratio(min(ratios))}")
            slower += [
                f"{size_text(row['bytes'])}, {row['dtype']}, {n} GPUs ({row['ratio']:.3f})"
                for row in rows
                if row["ratio"] < 1
            ]
        lines.append(f"| {op} | {' | '.join(cells)} | {'; '.join(slower) or '–'} |")
    return "\n".join(lines)


def _called(tables: dict[int, dict[str, Any]]) -> str:
    lines = [
        "| | " + " | ".join(f"{n} GPUs" for n in tables) + " |",
        "|---|" + "---:|" * len(tables),
    ]
    for dtype in ("bfloat16", "float32"):
        cells = []
        for record in tables.values():
            ratios = [
                row["ratio"]
                for row in record["rows"]
                if (row["op"], row["dtype"], row["graph"]) == ("all_reduce", dtype, False)
                and row["bytes"] <= 16 << 20
            ]
            cells.append(f"{_geometric_mean(ratios):.2f}")
        lines.append(f"| {dtype} | {' | '.join(cells)} |")
    return "\n".join(lines)


def section(benchmark: Benchmark) -> str:
    """A benchmark with the newest run of each machine."""
    parts = [f"## {benchmark.title}", f"{benchmark.text} Script: `{benchmark.script}`."]
    for path in newest(benchmark.folder):
        match = _STEM.fullmatch(path.stem)
        assert match is not None
        machine = match["machine"].replace("-", ", ")
        parts.append(f"### {machine} ({match['date']})")
        parts.append(_body(path, benchmark.show))
        if benchmark.show != "all":
            parts.append(f"Full output: {_link(path)}.")
    return "\n\n".join(parts)


def _body(path: Path, show: str) -> str:
    """Return the result file without its title, headings three levels down."""
    text = path.read_text("utf-8").split("\n", 1)[1].strip()
    if show == "intro":
        return re.split(r"\n\s*\n(?=```|\||#|    )", text)[0]
    if show == "tables":
        blocks = re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        return "\n\n".join(
            block
            for block in blocks
            if not block.startswith("    ") and block.strip() and not block.startswith("With `")
        )
    return re.sub(r"^(#+) ", r"###\1 ", text, flags=re.MULTILINE)


def render() -> str:
    """The whole page."""
    head = """# Measurements

<!-- Generated by `make docs` from bench/results; do not edit. -->

The newest run of each benchmark and machine. The figures of two machines, or of a busy and an idle
one, cannot be compared: run the scripts on yours. `bench/README.md` lists them. A run is added with
`--out bench/results/BENCHMARK/MACHINE-DATE` and `make docs`.
"""
    sections = [gpu_section(), *(section(benchmark) for benchmark in BENCHMARKS)]
    return head + "\n" + "\n\n".join(sections) + "\n"
