"""Messages between two hosts with several interfaces over TCP, beside iperf3 over all of them.

The hosts are network namespaces joined by one switch per interface, each with a rate, a queue and
a loss (``tests.support.netlab``). miraccl: a communicator of two ranks that send and receive
messages of 16 MiB, one way and both ways at once. Peer: one iperf3 per interface, with 2 streams
each, one way and ``--bidir``. They run in turns; a figure is the payload that one host receives per
second, median of the rounds. Needs root, nftables and iperf3.

    sudo python bench/tcp_rails.py --rounds 3 --out bench/results/tcp_rails/MACHINE-DATE
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

if "--worker" not in sys.argv:
    import common

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support import netlab

PORT = 29400
START_S, RUN_S = 90.0, 120.0


def worker(path: str) -> None:
    """Run one rank: measure what the orchestrator asks for."""
    import miraccl

    with miraccl.init(timeout=RUN_S) as comm:
        other = 1 - comm.rank
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        lines = sock.makefile("r")
        sock.sendall(f"{comm.rank}\n".encode())
        for line in lines:
            way, nbytes, seconds = json.loads(line)
            x = (np.arange(nbytes) % 251 + comm.rank).astype(np.uint8)
            y = np.zeros(nbytes, np.uint8)

            def both(x: Any = x, y: Any = y) -> None:
                comm.sendrecv(x, other, y, other)

            def one(x: Any = x, y: Any = y) -> None:
                if comm.rank == 0:
                    comm.send(x, 1)
                else:
                    comm.recv(y, 0)

            call = both if way == "both ways" else one
            call()
            times: list[float] = []
            flag = np.zeros(1, np.float32)
            comm.barrier()
            start = time.perf_counter()
            while flag[0] == 0:
                before = time.perf_counter()
                call()
                times.append(time.perf_counter() - before)
                if len(times) % 4 == 0:
                    flag[0] = float(time.perf_counter() - start > seconds)
                    comm.broadcast(flag, 0)
            mean = (time.perf_counter() - start) / len(times)
            if way == "both ways" or comm.rank == 1:
                wanted = (np.arange(nbytes) % 251 + other).astype(np.uint8)
                assert np.array_equal(y, wanted), "wrong bytes arrived"
            sock.sendall(f"{json.dumps([mean, sorted(times)[len(times) // 2]])}\n".encode())


class Ranks:
    """Two ranks of miraccl, one in each host of a lab."""

    def __init__(self, lab: netlab.Lab) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tcp-rails-")
        path = os.path.join(self._folder.name, "turns")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(2)
        listener.settimeout(START_S)
        self.processes = []
        for rank in range(2):
            environ = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": lab.addresses(0)[0],
                "MASTER_PORT": str(PORT),
                "MIRACCL_HOSTID": f"host{rank}",
            }
            words = [sys.executable, os.path.abspath(__file__), "--worker", path]
            inside = ["ip", "netns", "exec", lab.host(rank)]
            self.processes.append(
                subprocess.Popen([*inside, *words], env={**os.environ, **environ})
            )
        self._ranks = []
        for _ in range(2):
            sock, _ = listener.accept()
            sock.settimeout(RUN_S)
            lines = sock.makefile("r")
            lines.readline()
            self._ranks.append((sock, lines))
        listener.close()

    def rate(self, way: str, nbytes: int, seconds: float) -> float:
        """Return Mbit/s that one host receives."""
        for sock, _ in self._ranks:
            sock.sendall(f"{json.dumps([way, nbytes, seconds])}\n".encode())
        times = [json.loads(lines.readline())[0] for _, lines in self._ranks]
        return float(nbytes * 8 / max(times) / 1e6)

    def close(self) -> None:
        for sock, _ in self._ranks:
            sock.shutdown(socket.SHUT_RDWR)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        self._folder.cleanup()


def iperf_rate(lab: netlab.Lab, way: str, seconds: float, streams: int) -> float:
    """Return Mbit/s that a host receives, over all paths at once, ``streams`` streams on each."""
    inside = ["ip", "netns", "exec"]
    servers, clients = [], []
    for path in range(lab.npaths):
        target = lab.addresses(0)[path]
        words = ["iperf3", "-s", "-1", "-p", str(5201 + path), "-B", target]
        servers.append(subprocess.Popen([*inside, lab.host(0), *words], stdout=subprocess.DEVNULL))
    time.sleep(0.3)
    for path in range(lab.npaths):
        target = lab.addresses(0)[path]
        words = ["iperf3", "-c", target, "-p", str(5201 + path), "-t", f"{seconds:.0f}", "-J"]
        words += ["-P", str(streams), *(["--bidir"] if way == "both ways" else [])]
        clients.append(
            subprocess.Popen([*inside, lab.host(1), *words], stdout=subprocess.PIPE, text=True)
        )
    results = [json.loads(client.communicate(timeout=seconds + 30)[0]) for client in clients]
    for server in servers:
        server.wait(10)
    ends = [r["end"] for r in results]
    rates = [sum(e["sum_received"]["bits_per_second"] for e in ends)]
    if way == "both ways":
        rates.append(sum(e["sum_received_bidir_reverse"]["bits_per_second"] for e in ends))
    return sum(rates) / len(rates) / 1e6


def idle_seconds() -> float:
    """Return the idle time of all cores since boot."""
    with open("/proc/stat") as file:
        return int(file.readline().split()[4]) / os.sysconf("SC_CLK_TCK")


def measure(args: argparse.Namespace, loss: float, slow: bool) -> list[dict[str, Any]]:
    rows = []
    with netlab.Lab(
        paths=args.paths, rate=args.rate, queue=args.queue, loss=loss, mtu=args.mtu
    ) as lab:
        if slow:
            lab.set_rate(0, args.rate / 10)
        ranks = Ranks(lab)
        try:
            for way in ("one way", "both ways"):
                found: dict[str, list[float]] = {"miraccl": [], "iperf3": []}
                idle, start = idle_seconds(), time.monotonic()
                for _ in range(args.rounds):
                    found["miraccl"].append(ranks.rate(way, args.bytes, args.seconds))
                    found["iperf3"].append(iperf_rate(lab, way, args.seconds, args.streams))
                share = (idle_seconds() - idle) / (time.monotonic() - start) / (os.cpu_count() or 1)
                rows.append(
                    {
                        "loss": loss, "slow": slow, "way": way, "idle": round(share, 2),
                        **{k: [round(x, 1) for x in v] for k, v in found.items()},
                    }
                )  # fmt: skip
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        finally:
            ranks.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paths", type=int, default=4)
    parser.add_argument("--rate", type=float, default=250e6, help="bits per second of a port")
    parser.add_argument("--queue", type=int, default=262144, help="bytes of a port's queue")
    parser.add_argument("--mtu", type=int, default=9000)
    parser.add_argument("--bytes", type=int, default=16 << 20)
    parser.add_argument("--streams", type=int, default=2, help="streams of iperf3 per interface")
    parser.add_argument("--loss", default="0,0.01", help="probabilities")
    parser.add_argument("--slow", action="store_true", help="also with one path at a tenth")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    common.add_output_option(parser)
    args = parser.parse_args()
    if reason := netlab.missing():
        parser.error(f"cannot make the network: {reason}")
    machine = common.describe_machine()
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    rows = [row for loss in args.loss.split(",") for row in measure(args, float(loss), False)]
    if args.slow:
        rows += measure(args, 0.0, True)
    table = []
    for row in rows:
        ours, theirs = common.median(row["miraccl"]), common.median(row["iperf3"])
        title = f"{row['loss']:.1%}" + (", one path at a tenth" if row["slow"] else "")
        cells = (f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}", f"{row['idle']:.0%}")
        table.append([title, row["way"], *cells])
    text = [
        common.heading("Two hosts with several interfaces over TCP", machine),
        f"{args.paths} interfaces of {args.rate / 1e6:.0f} Mbit/s, queues of {args.queue} bytes, "
        f"MTU {args.mtu}, {congestion}, RTT below 1 ms without a queue; messages of {args.bytes} "
        f"bytes; iperf3 with {args.streams} streams per interface. Mbit/s received by one host, "
        "median of the rounds.\n",
        common.markdown_table(
            ["loss", "direction", "miraccl", "iperf3", "ratio", "cores idle"], table
        ),
    ]
    record = {"machine": machine, "arguments": vars(args), "rows": rows}
    common.save(args.out, record, "\n".join(text))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(sys.argv[sys.argv.index("--worker") + 1])
    else:
        main()
