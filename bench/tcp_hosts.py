"""Messages and collectives between two hosts over TCP, beside UCX, MPI libraries and Gloo.

The two hosts are network namespaces of this machine, joined by one veth pair, each with a host
name, a /dev/shm and System V memory of its own, so that no library finds shared memory between
them: the bytes of each ping-pong are counted on the interface. Needs root and iproute2. All
libraries are alive at once and take turns within every round; they block in a system call in
between. A cell is the median over rounds; results are checked once per cell.

    python bench/tcp_hosts.py --ranks 2 --rounds 5 --peer mpich=mpi:/venvs/mpich/bin/python \
        --peer gloo=gloo:/venvs/torch/bin/python --out bench/results/tcp_hosts/MACHINE-DATE
    python bench/tcp_hosts.py --ops pingpong --ucx --mtu 1500
    python bench/tcp_hosts.py --peer thread=undriven:python

A peer is NAME=LIBRARY:PYTHON; ``mpi`` runs the ``mpirun`` beside that Python or on PATH.
Operations: ``pingpong`` (half of a round trip between rank 0 and the first rank of the other host)
and the collectives of the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__" and "--worker" not in sys.argv:
    import common

OPS = ("pingpong", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SIZES = "8,64,512,4096,32768,262144,2097152,16777216,67108864"
BATCH_S, MOST_CALLS = 0.05, 500
START_S, CELL_S = 40.0, 120.0
UCX_LINE = re.compile(r"^Final:\s+\d+\s+([\d.]+)", re.MULTILINE)


# ---- ranks: the same program for all libraries


class Buffers:
    """Input and output of one operation; ``size`` is that of the larger of both, in bytes."""

    def __init__(
        self, op: str, size: int, rank: int, nranks: int, empty: Callable[..., Any]
    ) -> None:
        count = max(1, size // 4)
        block = -(-count // nranks)
        shapes = {
            "all_gather": (block, block * nranks),
            "reduce_scatter": (block * nranks, block),
            "all_to_all": (block * nranks, block * nranks),
        }
        n_in, n_out = shapes.get(op, (count, count))
        self.x, self.y = empty(n_in), empty(n_out)
        self.rank, self.nranks, self.op, self.block = rank, nranks, op, block
        self.fill()

    def fill(self) -> None:
        x = np.asarray(self.x)
        x[:] = (np.arange(len(x)) % 64 + self.rank).astype(np.float32)
        np.asarray(self.y)[:] = -1

    def check(self) -> None:
        """Compare the output with what NumPy computes."""
        ranks, y = range(self.nranks), np.asarray(self.y)
        inputs = [(np.arange(len(np.asarray(self.x))) % 64 + r).astype(np.float32) for r in ranks]
        mine = slice(self.rank * self.block, (self.rank + 1) * self.block)
        wanted = {
            "all_reduce": lambda: sum(inputs),
            "all_gather": lambda: np.concatenate(inputs),
            "reduce_scatter": lambda: sum(inputs)[mine],
            "all_to_all": lambda: np.concatenate([x[mine] for x in inputs]),
            "broadcast": lambda: inputs[0],
        }[self.op]()
        got = np.asarray(self.x) if self.op == "broadcast" else y
        if not np.array_equal(got, wanted):
            raise AssertionError(f"{self.op} of {len(got)} elements is wrong on rank {self.rank}")


class MiracclRank:
    def __init__(self) -> None:
        import miraccl

        self.comm = miraccl.init(timeout=CELL_S)
        self.rank, self.nranks = self.comm.rank, self.comm.nranks
        self.barrier = self.comm.barrier

    def empty(self, count: int) -> Any:
        return np.zeros(count, np.float32)

    def call(self, b: Buffers) -> Callable[[], Any]:
        comm, x, y = self.comm, b.x, b.y
        return {
            "all_reduce": lambda: comm.all_reduce(x, y),
            "all_gather": lambda: comm.all_gather(x, y),
            "reduce_scatter": lambda: comm.reduce_scatter(x, y),
            "all_to_all": lambda: comm.all_to_all(x, y),
            "broadcast": lambda: comm.broadcast(x, 0),
            "pingpong": lambda: self._ping(x, y),
        }[b.op]

    def _ping(self, x: Any, y: Any) -> None:
        other = self.nranks // 2
        if self.rank == 0:
            self.comm.send(x, other)
            self.comm.recv(y, other)
        elif self.rank == other:
            self.comm.recv(y, 0)
            self.comm.send(x, 0)


class UndrivenRank(MiracclRank):
    """miraccl whose links only the engine's thread advances."""

    def __init__(self) -> None:
        from miraccl.runtime import fabric

        vars(fabric)["drive_network"] = lambda *_: None
        super().__init__()


class MpiRank:
    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.nranks = self.comm.rank, self.comm.size
        self.barrier = self.comm.Barrier

    def empty(self, count: int) -> Any:
        return np.zeros(count, np.float32)

    def call(self, b: Buffers) -> Callable[[], Any]:
        comm, x, y = self.comm, b.x, b.y
        return {
            "all_reduce": lambda: comm.Allreduce(x, y),
            "all_gather": lambda: comm.Allgather(x, y),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(x, y),
            "all_to_all": lambda: comm.Alltoall(x, y),
            "broadcast": lambda: comm.Bcast(x, 0),
            "pingpong": lambda: self._ping(x, y),
        }[b.op]

    def _ping(self, x: Any, y: Any) -> None:
        other = self.nranks // 2
        if self.rank == 0:
            self.comm.Send(x, other)
            self.comm.Recv(y, other)
        elif self.rank == other:
            self.comm.Recv(y, 0)
            self.comm.Send(x, 0)


class GlooRank:
    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.torch, self.dist = torch, dist
        self.rank, self.nranks = dist.get_rank(), dist.get_world_size()
        self.barrier = dist.barrier

    def empty(self, count: int) -> Any:
        return self.torch.zeros(count)

    def call(self, b: Buffers) -> Callable[[], Any]:
        dist, x, y = self.dist, b.x, b.y

        def all_reduce() -> None:
            y.copy_(x)
            dist.all_reduce(y)

        return {
            "all_reduce": all_reduce,
            "all_gather": lambda: dist.all_gather_into_tensor(y, x),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(y, x),
            "all_to_all": lambda: dist.all_to_all_single(y, x),
            "broadcast": lambda: dist.broadcast(x, 0),
            "pingpong": lambda: self._ping(x, y),
        }[b.op]

    def _ping(self, x: Any, y: Any) -> None:
        other = self.nranks // 2
        if self.rank == 0:
            self.dist.send(x, other)
            self.dist.recv(y, other)
        elif self.rank == other:
            self.dist.recv(y, 0)
            self.dist.send(x, 0)


def worker(library: str, path: str) -> None:
    """Run the cells that the orchestrator asks for."""
    kinds: dict[str, Any] = {
        "miraccl": MiracclRank,
        "undriven": UndrivenRank,
        "mpi": MpiRank,
        "gloo": GlooRank,
    }
    rank = kinds[library]()
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    lines = sock.makefile("r")
    sock.sendall(f"{rank.rank}\n".encode())
    cells: dict[tuple[str, int], tuple[Buffers, Callable[[], Any], int]] = {}
    for line in lines:
        op, size = json.loads(line)
        if (op, size) not in cells:
            cells.clear()
            cells[op, size] = first_time(rank, op, size)
        _, call, count = cells[op, size]
        rank.barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        seconds = (time.perf_counter() - start) / count
        sock.sendall(f"{json.dumps(seconds / 2 if op == 'pingpong' else seconds)}\n".encode())


def first_time(rank: Any, op: str, size: int) -> tuple[Buffers, Callable[[], Any], int]:
    """Check the operation, and choose how often a batch calls it, the same on all ranks."""
    buffers = Buffers(op, size, rank.rank, rank.nranks, rank.empty)
    call = rank.call(buffers)
    call()
    if op != "pingpong":
        buffers.check()
    for _ in range(3):
        call()
    rank.barrier()
    start = time.perf_counter()
    call()
    one = np.full(1, time.perf_counter() - start, np.float32)
    agreed = Buffers("all_reduce", 4, rank.rank, rank.nranks, rank.empty)
    np.asarray(agreed.x)[:] = one
    rank.call(agreed)()
    mean = float(np.asarray(agreed.y)[0]) / rank.nranks
    return buffers, call, int(min(MOST_CALLS, max(2, BATCH_S / mean)))


# ---- orchestrator


class Hosts:
    """Two network namespaces with a veth pair between them; a context manager."""

    DEVICE = "net0"
    ADDRESSES = ("10.89.0.1", "10.89.0.2")

    def __init__(self, mtu: int) -> None:
        self.names = [f"mctcp{os.getpid()}-{i}" for i in range(2)]
        self._mtu = mtu
        self._folder = tempfile.TemporaryDirectory(prefix="tcp-hosts-")
        self.folder = self._folder.name

    def __enter__(self) -> Hosts:
        for name in self.names:
            ip("netns", "add", name)
        first, second = self.names
        pair = ["type", "veth", "peer", "name", self.DEVICE, "mtu", str(self._mtu)]
        mtu = ["mtu", str(self._mtu)]
        ip("-n", first, "link", "add", self.DEVICE, *mtu, *pair, "netns", second)
        for i, (name, address) in enumerate(zip(self.names, self.ADDRESSES, strict=True)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", self.DEVICE)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", self.DEVICE, "up")
            script = Path(self.folder, f"host{i}")
            # a host of its own: name, /dev/shm, System V memory and temporary files
            inside = (
                f'hostname {name}; mount -t tmpfs none /dev/shm; export TMPDIR=$(mktemp -d); "$@"'
            )
            script.write_text(
                f"#!/bin/sh\nexec ip netns exec {name} unshare --mount --uts --ipc "
                f"sh -c '{inside}' host \"$@\"\n"
            )
            script.chmod(0o700)
        # what mpirun calls instead of ssh: HOST WORD ...
        agent = Path(self.folder, "agent")
        agent.write_text(
            "#!/bin/sh\nwhile case $1 in -*) true;; *) false;; esac; do shift; done\n"
            "host=$1; shift\n"
            f"case $host in {self.ADDRESSES[0]}|{first}) i=0;; *) i=1;; esac\n"
            f'exec {self.folder}/host$i sh -c "$*"\n'
        )
        agent.chmod(0o700)
        # UCX wants a carrier, which the kernel reports up to a second later
        while not all(self._link(host)["operstate"] == "UP" for host in range(2)):
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)
        self._folder.cleanup()

    def inside(self, host: int) -> str:
        """Return the command that runs its arguments on a host."""
        return f"{self.folder}/host{host}"

    def agent(self) -> str:
        return f"{self.folder}/agent"

    def carried(self) -> int:
        """Return the bytes that the first host has sent."""
        return int(self._link(0)["stats64"]["tx"]["bytes"])

    def _link(self, host: int) -> dict[str, Any]:
        words = ["ip", "-n", self.names[host], "-s", "-j", "link", "show", "dev", self.DEVICE]
        found: list[dict[str, Any]] = json.loads(subprocess.check_output(words))
        return found[0]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Group:
    """The ranks of one library."""

    def __init__(self, name: str, library: str, python: str, nranks: int, hosts: Hosts) -> None:
        self.name, self._nranks, self._hosts = name, nranks, hosts
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tcp-hosts-"))
        self._path = os.path.join(folder, "turns")
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(self._path)
        listener.listen(nranks)
        listener.settimeout(START_S)
        self._output = open(os.path.join(folder, "output"), "w+")  # noqa: SIM115
        self._stack.callback(self._output.close)
        for host, command, environ in self._commands(library, python):
            process = subprocess.Popen(
                [hosts.inside(host), *command],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
                stdout=self._output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # prterun ends its whole process group if a rank fails
            )
            self._stack.callback(process.wait, 20)
            self._stack.callback(process.terminate)
        self._ranks = []
        for _ in range(nranks):
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                raise SystemExit(f"{name} does not start: {self._tail()}") from None
            self._stack.callback(sock.close)
            sock.settimeout(CELL_S)
            lines = sock.makefile("r")
            lines.readline()
            self._ranks.append((sock, lines))

    def _commands(
        self, library: str, python: str
    ) -> Iterator[tuple[int, list[str], dict[str, str]]]:
        words = [python, os.path.abspath(__file__), "--worker", library, self._path]
        per_host, first = self._nranks // 2, Hosts.ADDRESSES[0]
        if library in ("miraccl", "undriven"):
            run = [python, "-m", "miraccl", "run", "-n", str(per_host), "--nnodes", "2"]
            run += ["--master", f"{first}:29611", "--node-rank"]
            secret = {"MIRACCL_SECRET": os.urandom(16).hex()}
            for host in range(2):
                yield host, [*run, str(host), "--", *words], secret
        elif library == "gloo":
            for rank in range(self._nranks):
                environ = {
                    "MASTER_ADDR": first,
                    "MASTER_PORT": "29612",
                    "WORLD_SIZE": str(self._nranks),
                    "RANK": str(rank),
                    "GLOO_SOCKET_IFNAME": Hosts.DEVICE,
                }
                yield rank // per_host, words, environ
        else:
            yield 0, *mpi_command(python, self._nranks, self._hosts, words)

    def measure(self, op: str, size: int) -> float:
        """Return the time of the slowest rank in seconds (of rank 0 for a ping-pong)."""
        for sock, _ in self._ranks:
            sock.sendall(f"{json.dumps([op, size])}\n".encode())
        lines = [lines.readline() for _, lines in self._ranks]
        if not all(lines):
            raise SystemExit(f"{self.name} failed in {op} of {size} bytes: {self._tail()}")
        return max(map(float, lines))

    def _tail(self) -> str:
        self._output.flush()
        return Path(self._output.name).read_text()[-2000:]

    def close(self) -> None:
        self._stack.close()


def mpi_command(
    python: str, nranks: int, hosts: Hosts, words: list[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts MPI ranks on both hosts, and its environment."""
    beside = Path(python).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun"
    # mpirun of Intel MPI looks for its programs on PATH
    path = {"PATH": f"{Path(mpirun).parent}:{os.environ['PATH']}"}
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, env={**os.environ, **path}
    ).stdout
    per_host = nranks // 2
    if "Open MPI" in version:
        # by name: it would take both addresses for its own host
        targets = ",".join(f"{name}:{per_host}" for name in hosts.names)
        options = ["--allow-run-as-root", "--host", targets]
        options += ["--map-by", f"ppr:{per_host}:node:OVERSUBSCRIBE", "--bind-to", "none"]
        return [mpirun, *options, "-n", str(nranks), *words], {
            "OMPI_MCA_pml": "ob1",
            # as MPICH does by itself; without it 4 ranks on 2 cores take whole time slices
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_btl": "tcp,self,sm",
            "OMPI_MCA_btl_tcp_if_include": Hosts.DEVICE,
            "OMPI_MCA_oob_tcp_if_include": Hosts.DEVICE,
            "OMPI_MCA_plm_rsh_agent": hosts.agent(),
            "PRTE_MCA_plm_ssh_agent": hosts.agent(),  # from Open MPI 5 on
        }
    options = ["-launcher", "ssh", "-launcher-exec", hosts.agent(), "-ppn", str(per_host)]
    options += ["-hosts", ",".join(Hosts.ADDRESSES), "-n", str(nranks)]
    if "Intel" in version:
        return [mpirun, *options, *words], {
            **path,
            "I_MPI_FABRICS": "shm:ofi" if per_host > 1 else "ofi",
            "I_MPI_HYDRA_IFACE": Hosts.DEVICE,
            "FI_PROVIDER": "tcp",
            "FI_TCP_IFACE": Hosts.DEVICE,
        }
    return [mpirun, *options, "-iface", Hosts.DEVICE, *words], {
        "UCX_TLS": "tcp,self,sysv,posix",
        "UCX_NET_DEVICES": Hosts.DEVICE,
    }


def ucx_time(size: int, hosts: Hosts) -> float:
    """Return the one-way time of ``ucx_perftest -t tag_lat`` over TCP in seconds."""
    environ = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": Hosts.DEVICE}
    command = ["ucx_perftest", "-p", "13970"]
    server = subprocess.Popen(
        [hosts.inside(0), *command],
        env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        time.sleep(0.3)
        count = int(min(5000, max(5, 2e9 / (size + 50_000))))
        options = ["-t", "tag_lat", "-s", str(size), "-n", str(count), "-w", str(count // 5 + 1)]
        done = subprocess.run(
            [hosts.inside(1), *command, *options, Hosts.ADDRESSES[0]],
            env=environ, capture_output=True, text=True, timeout=CELL_S,
        )  # fmt: skip
        numbers = re.search(r"^Final:(.*)$", done.stdout, re.MULTILINE)
        if numbers is None:
            raise SystemExit(f"ucx_perftest failed: {done.stdout} {done.stderr}")
        return float(numbers[1].split()[2]) * 1e-6  # average of all
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=LIBRARY:PYTHON")
    parser.add_argument("--ucx", action="store_true", help="ucx_perftest beside the ping-pong")
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mtu", type=int, default=9000)
    common.add_output_option(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    machine = common.describe_machine()
    wanted = [("miraccl", "miraccl", sys.executable)]
    for text in args.peer:
        name, _, rest = text.partition("=")
        wanted.append((name, *rest.partition(":")[::2]))
    cells: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with Hosts(args.mtu) as hosts, contextlib.ExitStack() as stack:
        groups = []
        for words in wanted:
            groups.append(Group(*words, args.ranks, hosts))
            stack.callback(groups[-1].close)
        idle, started = idle_seconds(), time.monotonic()
        for op in args.ops.split(","):
            for size in (int(s) for s in args.sizes.split(",")):
                for _ in range(args.rounds):
                    for group in groups:
                        before = hosts.carried()
                        cells[op, size][group.name].append(1e6 * group.measure(op, size))
                        if op == "pingpong" and hosts.carried() - before < size:
                            raise SystemExit(f"{group.name} does not use the interface")
                    if args.ucx and op == "pingpong":
                        cells[op, size]["ucx"].append(1e6 * ucx_time(size, hosts))
                shown = {name: f"{common.median(v):.1f}" for name, v in cells[op, size].items()}
                print(op, size, shown, file=sys.stderr, flush=True)
        share = (idle_seconds() - idle) / (time.monotonic() - started) / machine["cores"]
    report(args, machine, cells, share)


def idle_seconds() -> float:
    """Return the idle time of all cores since boot."""
    with open("/proc/stat") as file:
        return int(file.readline().split()[4]) / os.sysconf("SC_CLK_TCK")


def report(
    args: argparse.Namespace,
    machine: dict[str, Any],
    cells: dict[tuple[str, int], dict[str, list[float]]],
    idle: float,
) -> None:
    names = list(dict.fromkeys(name for cell in cells.values() for name in cell))
    peers = [name for name in names if name != "miraccl"]
    parts = [common.heading("Two hosts over TCP", machine)]
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    parts.append(
        f"{args.ranks} ranks on two hosts (network namespaces, one veth pair of MTU {args.mtu}) "
        f"over TCP ({congestion}), {args.rounds} rounds, float32; cores idle {100 * idle:.0f} % of "
        "the time. Microseconds, median of the rounds; ratio: the best peer / miraccl.\n"
    )
    ratios: dict[str, list[float]] = defaultdict(list)
    for op in dict.fromkeys(op for op, _ in cells):
        rows = []
        for size in (size for name, size in cells if name == op):
            times = {name: common.median(v) for name, v in cells[op, size].items()}
            present = [p for p in peers if p in times]  # UCX has messages only
            ratio = min((times[p] for p in present), default=float("nan")) / times["miraccl"]
            group = "messages" if op == "pingpong" else "collectives"
            ratios[group].append(ratio)
            for peer in present:
                ratios[f"{group}, {peer}"].append(times[peer] / times["miraccl"])
            rows.append([size, *(common.show_us(times.get(n)) for n in names), f"{ratio:.2f}"])
        parts.append(f"\n## {op}\n\n" + common.markdown_table(["bytes", *names, "ratio"], rows))
    if peers:
        summary = [
            (name, f"{common.geometric_mean(v):.2f}", f"{min(v):.2f}") for name, v in ratios.items()
        ]
        parts.append("\n## Ratios\n\n" + common.markdown_table(["of", "mean", "least"], summary))
    rows = [
        {"op": op, "bytes": size, "library": name, "us": times}
        for (op, size), cell in cells.items()
        for name, times in cell.items()
    ]
    record = {"machine": machine, "ranks": args.ranks, "idle": idle, "rows": rows}
    common.save(args.out, record, "\n".join(parts))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(*sys.argv[sys.argv.index("--worker") + 1 :])
    else:
        main()
