"""UDP between network namespaces: one and four paths with loss, slow, dying paths, incast.

Hosts are namespaces joined by switches with a rate, a queue and a loss (``tests.support.netlab``);
RTT is below a millisecond without a queue. The peers are iperf3 over TCP with cubic and bbr on the
same paths, in turns within one run. ``possible`` is rate x (1 - loss) x payload share of a packet.
CPU is processor time of both processes. Needs root, nftables and iperf3.

    sudo python bench/udp_paths.py --rows one four --seconds 3 --rounds 3 \\
        --out bench/results/udp_paths/MACHINE-DATE
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import mptcp
from common import describe_machine, heading, markdown_table
from tests.support import netlab

from miraccl.proxy.compiled_thread import SPIN_NS
from miraccl.proxy.datagram_engine import DatagramEngine
from miraccl.proxy.stream_engine import ProgressEngine
from miraccl.transport.base import DatagramOptions, Endpoint
from miraccl.transport.datagram import MAX_MTU, DatagramTransport
from miraccl.transport.ends import RecvEnd, SendEnd
from miraccl.transport.fifo import NSLOTS, PrivateMemory, native_atomics
from miraccl.transport.socket import SocketOptions, SocketTransport

TIMEOUT_S = 60.0
MESSAGE = 1 << 20
#: Ethernet header, which tbf counts.
ETHERNET_BYTES = 14
#: Time for which all paths are dead.
OUTAGE_S = 10.0
#: UDP on one path of a lab that has several.
ONE_OF_SEVERAL = "udp, one of the paths"
#: Ticks per second of /proc.
TICKS = os.sysconf("SC_CLK_TCK")


class Rank:
    """One process of a row: rank 0 receives from all others."""

    def __init__(self, rank: int, nranks: int, spec: dict[str, Any], pipe: Connection) -> None:
        self.rank, self.pipe, self.nranks = rank, pipe, nranks
        self.news = threading.Event()
        udp = spec["net"] == "udp"
        self.engine: Any = (DatagramEngine if udp else ProgressEngine)(
            rank=rank,
            wake=lambda _: self.news.set(),
            on_lost=lambda p, loss: None,
            spin_ns=spec.get("spin_ns", SPIN_NS),
        )
        endpoint = Endpoint(
            rank=rank, hostid=str(rank), pid=os.getpid(), addresses=tuple(spec["addresses"][rank])
        )
        shared: dict[str, Any] = {
            "proxy": self.engine,
            "secret": b"bench",
            "job": b"bench",
            "timeout": TIMEOUT_S,
        }
        self.transport: Any
        if udp:
            self.transport = DatagramTransport(
                endpoint, options=DatagramOptions(**spec.get("options", {})), **shared
            )
        else:
            streams = SocketOptions(nstreams=spec.get("streams", 2), buffer_bytes=4 << 20)
            self.transport = SocketTransport(endpoint, options=streams, **shared)
        pipe.send(self.transport.setup())
        infos = pipe.recv()
        pairs = self.transport.connect({r: i for r, i in infos.items() if r != rank})
        atomics = native_atomics()
        self.sends = {r: SendEnd(p.send, atomics) for r, p in pairs.items()}
        self.recvs = {r: RecvEnd(p.recv, atomics) for r, p in pairs.items()}
        self.memory = {r: PrivateMemory(max(spec["nbytes"], 4096)) for r in pairs}

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank}: no progress")
            self.news.wait(0.05)
            self.news.clear()

    def stream(self, nbytes: int, seconds: float) -> list[float]:
        """Rank 1 sends messages for a time; rank 0 returns when each one arrived."""
        times: list[float] = []
        if self.rank:
            end, sent = time.monotonic() + seconds, self.sends[0]
            while time.monotonic() < end:
                self.wait(lambda: sent.post_address(self.memory[0].address, nbytes))
            self.wait(lambda: sent.released == sent.posted)
            self.wait(lambda: sent.post(b"end"))
            return times
        recv, ahead = self.recvs[1], 0
        while True:
            while ahead < NSLOTS:
                recv.clear_to_send(self.memory[1].address, nbytes, ahead=ahead)
                ahead += 1
            self.wait(lambda: recv.peek() is not None)
            message = recv.peek()
            assert message is not None
            recv.consume()
            ahead -= 1
            if message.nbytes == 3:
                return times
            times.append(time.monotonic())

    def one_by_one(self, nbytes: int, count: int) -> list[float]:
        """Rank 1 sends one message at a time; it returns the time of each, with an answer."""
        times: list[float] = []
        peer = 1 - self.rank
        send, recv, memory = self.sends[peer], self.recvs[peer], self.memory[peer]
        for _ in range(count):
            start = time.monotonic()
            if self.rank:
                self.wait(lambda: send.post_address(memory.address, nbytes))
                self.wait(lambda: recv.peek() is not None)
                recv.consume()
            else:
                recv.clear_to_send(memory.address, nbytes)
                self.wait(lambda: recv.peek() is not None)
                recv.consume()
                self.wait(lambda: send.post(b"ok"))
            times.append(time.monotonic() - start)
        return times

    def incast(self, nbytes: int) -> list[float]:
        """All other ranks send one message to rank 0 at once; it returns when each one arrived."""
        start = time.monotonic()
        if self.rank:
            self.sends[0].post_address(self.memory[0].address, nbytes)
            self.wait(lambda: self.sends[0].released == 1)
            return []
        waiting, times = set(self.recvs), []
        while waiting:
            self.wait(lambda: any(self.recvs[r].peek() for r in waiting))
            for r in [r for r in waiting if self.recvs[r].peek()]:
                self.recvs[r].consume()
                waiting.discard(r)
                times.append(time.monotonic() - start)
        return times

    def prepare_incast(self, nbytes: int) -> None:
        for r, recv in self.recvs.items():
            if not self.rank:
                recv.clear_to_send(self.memory[r].address, nbytes)

    def paths(self) -> list[dict[str, Any]]:
        if not isinstance(self.engine, DatagramEngine):
            return []
        return [vars(report) for report in self.engine.reports()]

    def usage(self) -> dict[str, float]:
        """Processor time of this process by thread and mode, rounds and system calls so far."""
        found = {"user_s": 0.0, "system_s": 0.0, "engine_s": 0.0, "rounds": self.engine.rounds}
        engines = {t.native_id for t in threading.enumerate() if t.name.startswith("miraccl-")}
        for task in Path("/proc/self/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            user, system = (int(fields[i]) / TICKS for i in (11, 12))
            found["user_s"] += user
            found["system_s"] += system
            if int(task.name) in engines:
                found["engine_s"] += user + system
        if isinstance(self.engine, DatagramEngine):
            found |= self.engine.system_calls()
        return found

    def wait_open(self) -> None:
        """Wait until every path is open: a lost ARP request is repeated after a second only."""
        self.wait(lambda: all(path["state"] == "open" for path in self.paths()))

    def close(self) -> None:
        self.transport.close()
        self.engine.close()


def serve(rank: int, nranks: int, spec: dict[str, Any], pipe: Connection) -> None:
    """Body of a process: connect, then run the commands that come through ``pipe``."""
    if "namespaces" in spec:
        netlab.enter(spec["namespaces"][rank])
    me = Rank(rank, nranks, spec, pipe)
    pipe.send("connected")
    while True:
        name, *arguments = pipe.recv()
        before = time.process_time()
        result = getattr(me, name)(*arguments)
        pipe.send((result, time.process_time() - before))
        if name == "close":
            return


class Ranks:
    """Processes of a row, and calls of methods of all of them at once."""

    def __init__(self, spec: dict[str, Any]) -> None:
        n = len(spec["addresses"])
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for rank in range(n):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, n, spec, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        infos = dict(enumerate(self._receive()))
        for pipe in self.pipes:
            pipe.send(infos)
        self._receive()
        self.call("wait_open")

    def _receive(self) -> list[Any]:
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"rank {rank} does not answer")
            results.append(pipe.recv())
        return results

    def start(self, name: str, *arguments: Any) -> None:
        for pipe in self.pipes:
            pipe.send((name, *arguments))

    def finish(self) -> tuple[list[Any], float]:
        """Return the results by rank, and processor time of all in seconds."""
        results = self._receive()
        return [r for r, _ in results], sum(cpu for _, cpu in results)

    def call(self, name: str, *arguments: Any) -> tuple[list[Any], float]:
        self.start(name, *arguments)
        return self.finish()

    def close(self) -> None:
        with contextlib.suppress(TimeoutError, EOFError, OSError):
            self.call("close")
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()


@contextlib.contextmanager
def ranks_in(lab: netlab.Lab | None, n: int, **spec: Any) -> Iterator[Ranks]:
    """Connect one rank per host of a lab, or ``n`` ranks over loopback.

    ``npaths`` limits the paths of the lab that they use.
    """
    npaths = spec.pop("npaths", None)
    if lab is None:
        spec["addresses"] = [("127.0.0.1",)] * n
    else:
        spec["namespaces"] = [lab.host(i) for i in range(n)]
        spec["addresses"] = [lab.addresses(i)[:npaths] for i in range(n)]
    ranks = Ranks({"nbytes": MESSAGE, **spec})
    try:
        yield ranks
    finally:
        ranks.close()


def udp_rate(lab: netlab.Lab | None, seconds: float, **options: Any) -> dict[str, Any]:
    """Stream messages over UDP; return goodput in Mbit/s, CPU, and what the paths resent."""
    spec = {"net": options.pop("net", "udp"), "spin_ns": options.pop("spin_ns", SPIN_NS)}
    spec["npaths"] = options.pop("npaths", None)
    with ranks_in(lab, 2, options=options, **spec) as ranks:
        before = ranks.call("usage")[0]
        (times, _), cpu = ranks.call("stream", MESSAGE, seconds)
        after = ranks.call("usage")[0]
        paths = ranks.call("paths")[0][1]
    nbytes = MESSAGE * (len(times) - 1)
    gigabytes = MESSAGE * len(times) / 1e9
    names = ("receiver", "sender")
    return {
        "mbps": nbytes * 8 / (times[-1] - times[0]) / 1e6,
        "cpu_s_per_GB": cpu / gigabytes,
        "per_GB": {
            f"{name} {what}": (new[what] - old[what]) / gigabytes
            for name, old, new in zip(names, before, after, strict=True)
            for what in old
        },
        "sent": sum(p["sent_packets"] for p in paths),
        "resent": sum(p["resent"] for p in paths),
        "mbps_by_path": [round(p["sent_bytes"] * 8 / seconds / 1e6, 1) for p in paths],
    }


def iperf_rate(
    lab: netlab.Lab,
    seconds: float,
    congestion: str,
    streams: int,
    targets: Sequence[str] = (),
) -> dict[str, Any]:
    """Run iperf3 over all paths at once, ``streams`` streams on each.

    Args:
        targets: Addresses of the receiver instead, each with ``streams`` streams.
    """
    pairs = []
    for path, target in enumerate(targets or lab.addresses(0)):
        port = str(5201 + path)
        inside = ["ip", "netns", "exec"]
        server = subprocess.Popen(
            [*inside, lab.host(0), "iperf3", "-s", "-1", "-p", port, "-B", target],
            stdout=subprocess.DEVNULL,
        )
        pairs.append((server, port, target))
    time.sleep(0.3)
    clients = []
    for _, port, target in pairs:
        words = [
            "iperf3",
            "-c",
            target,
            "-p",
            port,
            "-t",
            f"{seconds:.0f}",
            "-J",
            "-P",
            str(streams),
        ]
        clients.append(
            subprocess.Popen(
                ["ip", "netns", "exec", lab.host(1), *words, "-C", congestion],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    results = [json.loads(client.communicate(timeout=seconds + 30)[0]) for client in clients]
    for server, _, _ in pairs:
        server.wait(10)
    received = sum(r["end"]["sum_received"]["bytes"] for r in results)
    cpu = sum(
        (
            r["end"]["cpu_utilization_percent"]["host_total"]
            + r["end"]["cpu_utilization_percent"]["remote_total"]
        )
        / 100
        * seconds
        for r in results
    )
    return {
        "mbps": sum(r["end"]["sum_received"]["bits_per_second"] for r in results) / 1e6,
        "cpu_s_per_GB": cpu / received * 1e9,
        "resent": sum(r["end"]["sum_sent"].get("retransmits", 0) for r in results),
    }


def add_ecmp(lab: netlab.Lab) -> str:
    """Give both hosts an address that is reached over all paths, by a hash of addresses and ports;
    return that of host 0.
    """
    addresses = [f"10.89.0.{host + 1}" for host in range(2)]
    for host, other in ((0, 1), (1, 0)):
        hops = []
        for path, via in enumerate(lab.addresses(other)):
            hops += ["nexthop", "via", via, "dev", f"p{path}"]
        inside = ["ip", "-n", lab.host(host)]
        source = ["src", addresses[host]]
        policy = ["sysctl", "-qw", "net.ipv4.fib_multipath_hash_policy=1"]
        for words in (
            ["ip", "netns", "exec", lab.host(host), *policy],
            [*inside, "addr", "add", f"{addresses[host]}/32", "dev", "lo"],
            [*inside, "route", "add", f"{addresses[other]}/32", *source, *hops],
        ):
            subprocess.run(words, check=True)
    return addresses[0]


def median_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the median rate, with the range of all."""
    ordered = sorted(runs, key=lambda run: float(run["mbps"]))
    middle = dict(ordered[len(ordered) // 2])
    middle["range_mbps"] = [round(ordered[0]["mbps"], 1), round(ordered[-1]["mbps"], 1)]
    return middle


def compare_rates(args: argparse.Namespace, title: str, **shape: Any) -> dict[str, Any]:
    """Measure UDP and the peers on one lab, in turns; on several paths also UDP on one of them, 8
    streams of TCP over ECMP, and MPTCP.
    """
    slow = shape.pop("slow", None)
    streams = shape.pop("streams", 1)
    several = shape.get("paths", 1) > 1 and slow is None
    with netlab.Lab(queue=args.queue, **shape) as lab:
        capacity = shape["rate"] * shape.get("paths", 1)
        if slow is not None:
            lab.set_rate(0, slow)
            capacity += slow - shape["rate"]
        variants: dict[str, Callable[[], dict[str, Any]]] = {
            "udp": lambda: udp_rate(lab, args.seconds, ports=1, congestion=args.congestion),
            "iperf3 cubic": lambda: iperf_rate(lab, args.seconds, "cubic", streams),
            "iperf3 bbr": lambda: iperf_rate(lab, args.seconds, "bbr", streams),
        }
        if several:
            variants |= peers_of_several(lab, args)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
        for _ in range(args.rounds):
            for name, measure in variants.items():
                before = counters(lab)
                runs[name].append(measure())
                after = counters(lab)
                runs[name][-1]["lost_by_lab"] = after["lost"] - before["lost"]
                runs[name][-1]["queue_drops"] = after["queue_drops"] - before["queue_drops"]
    payload = shape.get("mtu", 1500) - 28 - 44
    share = payload / (shape.get("mtu", 1500) + ETHERNET_BYTES)
    possible = capacity * (1 - shape.get("loss", 0.0)) * share / 1e6
    row = {"title": title, "possible_mbps": round(possible, 1)}
    row |= {name: median_of(found) for name, found in runs.items()}
    row["of_possible"] = round(row["udp"]["mbps"] / possible, 3)
    return row


def counters(lab: netlab.Lab) -> Counter[str]:
    """Return the counters of all paths together."""
    return sum((Counter(lab.counters(path)) for path in range(lab.npaths)), Counter())


def peers_of_several(
    lab: netlab.Lab, args: argparse.Namespace
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Measurements of a lab with several paths beside those of ``compare_rates``."""
    target = add_ecmp(lab)
    options = {"ports": 1, "congestion": args.congestion, "npaths": 1}
    variants: dict[str, Callable[[], dict[str, Any]]] = {
        ONE_OF_SEVERAL: lambda: udp_rate(lab, args.seconds, **options)
    }
    for name in ("cubic", "bbr"):
        variants[f"iperf3 {name}, 8 over ECMP"] = partial(
            iperf_rate, lab, args.seconds, name, 8, [target]
        )
        if not mptcp.missing():
            variants[f"mptcp {name}"] = partial(mptcp.mptcp_rate, lab, args.seconds, name)
    return variants


# ---- rows


def rows_one(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for loss in (0.0, 0.001, 0.01, 0.05):
        yield compare_rates(args, f"one path, loss {loss:.1%}", rate=args.rate, loss=loss)


def rows_four(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for loss in (0.0, 0.01, 0.05):
        title = f"four paths, loss {loss:.0%}"
        yield compare_rates(args, title, rate=args.rate / 4, paths=4, loss=loss, streams=2)


def rows_slow(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rate = args.rate / 4
    title = "four paths, one at a tenth"
    yield compare_rates(args, title, rate=rate, paths=4, slow=rate / 10, streams=2)


def rows_tail(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """p99 of messages of 1 MiB, one by one, beside miraccl's TCP."""
    row: dict[str, Any] = {"title": "1 MiB one by one, loss 1%"}
    with netlab.Lab(queue=args.queue, rate=args.rate, loss=0.01) as lab:
        for net in ("udp", "tcp"):
            times: list[float] = []
            for _ in range(args.rounds):
                with ranks_in(lab, 2, net=net, options={"ports": 1}) as ranks:
                    times += ranks.call("one_by_one", MESSAGE, 60)[0][1][5:]
            times.sort()
            p50, p99 = statistics.median(times), times[int(len(times) * 0.99)]
            row[net] = {"p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3, "p99_over_p50": p99 / p50}
    yield row


def rows_failure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A path dies and heals under load; then all paths die for a while."""
    small = 64 << 10
    with netlab.Lab(queue=args.queue, rate=args.rate / 2, paths=2) as lab:
        with ranks_in(lab, 2, net="udp", options={"ports": 1}) as ranks:
            ranks.start("stream", small, 4.0)
            start = time.monotonic()
            time.sleep(1.0)
            lab.set_up(1, up=False)
            died = time.monotonic()
            time.sleep(1.5)
            lab.set_up(1, up=True)
            healed = time.monotonic()
            (times, _), _ = ranks.finish()
            died_path = ranks.call("paths")[0][1][1]
        gaps = [(b - a, a) for a, b in itertools.pairwise(times)]

        def rate_in(low: float, high: float) -> float:
            return sum(low <= t < high for t in times) * small * 8 / (high - low) / 1e6

        half = rate_in(start + 0.3, died) / 2
        back = next(
            (t for t in times if t > healed and rate_in(t, t + 0.1) > 1.5 * half), float("nan")
        )
        yield {
            "title": "one of two paths dies for 1.5 s",
            "before_mbps": rate_in(start + 0.3, died),
            "during_mbps": rate_in(died + 0.1, healed),
            "longest_gap_ms": max(g for g, at in gaps if died - 0.1 < at < healed) * 1e3,
            "longest_gap_before_ms": max(g for g, at in gaps if start + 0.3 < at < died) * 1e3,
            "suspect_after_ms": died_path["silence"] / 1e6,
            "of_which_thread_late_ms": died_path["late"] / 1e6,
            "used_again_after_ms": (back - healed) * 1e3,
        }
        with ranks_in(lab, 2, net="udp", options={"ports": 1}) as ranks:
            ranks.start("stream", small, OUTAGE_S + 2.0)
            time.sleep(1.0)
            for path in (0, 1):
                lab.set_up(path, up=False)
            time.sleep(OUTAGE_S)
            for path in (0, 1):
                lab.set_up(path, up=True)
            healed = time.monotonic()
            (times, _), _ = ranks.finish()
        first = next(t for t in times if t > healed)
        yield {
            "title": f"both paths die for {OUTAGE_S:.0f} s",
            "messages": len(times),
            "resumed_after_ms": (first - healed) * 1e3,
        }


def rows_incast(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Eight senders of 4 MiB each into one port."""
    nbytes, senders = 4 << 20, 8
    with netlab.Lab(hosts=senders + 1, queue=args.queue, rate=args.rate) as lab:
        payload = (1500 - 72) / (1500 + ETHERNET_BYTES)
        ideal = senders * nbytes * 8 / (args.rate * payload)
        for name, spec in (
            ("udp credit", {"net": "udp", "options": {"ports": 1, "admission": "credit"}}),
            ("udp cts", {"net": "udp", "options": {"ports": 1}}),
            ("tcp cubic", {"net": "tcp", "streams": 1}),
        ):
            found = []
            for _ in range(args.rounds):
                before = lab.counters(0)
                with ranks_in(lab, senders + 1, nbytes=nbytes, **spec) as ranks:
                    ranks.call("prepare_incast", nbytes)
                    times = ranks.call("incast", nbytes)[0][0]
                    paths = [p for each in ranks.call("paths")[0][1:] for p in each]
                after = lab.counters(0)
                rates = [1 / t for t in times]
                jain = sum(rates) ** 2 / (len(rates) * sum(r * r for r in rates))
                sent = max(1, sum(p["sent_packets"] for p in paths))
                found.append(
                    {
                        "over_ideal": max(times) / ideal,
                        "jain": jain,
                        "queue_drops": after["queue_drops"] - before["queue_drops"],
                        "resent_share": sum(p["resent"] for p in paths) / sent,
                    }
                )
            middle = sorted(found, key=lambda f: f["over_ideal"])[len(found) // 2]
            yield {"title": f"incast of 8, {name}", **middle}


def rows_loopback(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Processor time per GB on loopback, where super-packets are not cut."""
    for mtu in (0, 1472):
        row: dict[str, Any] = {"title": f"cpu, loopback, packets of {mtu or MAX_MTU} bytes"}
        for _ in range(args.rounds):
            for protection in ("mac", "aead", "none"):
                found = udp_rate(None, args.seconds, mtu=mtu, protection=protection)
                row.setdefault(f"udp {protection}", []).append(found)
            row.setdefault("tcp", []).append(udp_rate(None, args.seconds, net="tcp"))
        for name in list(row)[1:]:
            row[name] = median_of(row[name])
        yield row


def rows_cpu(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Processor time per GB, packets of 1500 bytes cut before the wire and jumbo frames."""
    for mtu in (1500, 9000):
        with netlab.Lab(rate=0, mtu=mtu) as lab:
            row: dict[str, Any] = {"title": f"cpu, MTU {mtu}, no limit of rate"}
            for _ in range(args.rounds):
                for protection in ("mac", "aead", "none"):
                    found = udp_rate(lab, args.seconds, ports=1, protection=protection)
                    row.setdefault(f"udp {protection}", []).append(found)
                row.setdefault("tcp", []).append(udp_rate(lab, args.seconds, net="tcp"))
                row.setdefault("iperf3", []).append(iperf_rate(lab, args.seconds, "cubic", 1))
            for name in list(row)[1:]:
                row[name] = median_of(row[name])
            yield row


def rows_spin(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time that idle threads poll before they sleep: processor time and latency, in turns."""
    costs: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        costs.setdefault(name, []).append(value)

    with netlab.Lab(queue=args.queue, rate=args.rate) as lab:
        for _ in range(args.rounds):
            for spin_us in (0, 10, 50, 200):
                spin = {"spin_ns": spin_us * 1000}
                found = udp_rate(None, args.seconds / 2, mtu=1472, **spin)
                note(f"{spin_us} us: loopback s per GB", found["cpu_s_per_GB"])
                note(f"{spin_us} us: loopback Mbit/s", found["mbps"])
                found = udp_rate(lab, args.seconds / 2, ports=1, **spin)
                note(f"{spin_us} us: {args.rate / 1e6:.0f} Mbit/s s per GB", found["cpu_s_per_GB"])
                note(f"{spin_us} us: {args.rate / 1e6:.0f} Mbit/s reached", found["mbps"])
                for net in ("udp", "tcp"):
                    with ranks_in(None, 2, net=net, options={"ports": 1}, **spin) as ranks:
                        times = ranks.call("one_by_one", 64 << 10, 400)[0][1][50:]
                    note(
                        f"{spin_us} us: {net} 64 KiB and answer us", statistics.median(times) * 1e6
                    )
    figures = {name: statistics.median(values) for name, values in costs.items()}
    yield {"title": "polling before sleep", **figures}


ROWS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "one": rows_one,
    "four": rows_four,
    "slow": rows_slow,
    "tail": rows_tail,
    "failure": rows_failure,
    "incast": rows_incast,
    "cpu": rows_cpu,
    "loopback": rows_loopback,
    "spin": rows_spin,
}


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rate", type=float, default=500e6, help="bits per second, all paths")
    parser.add_argument("--queue", type=int, default=300_000, help="bytes of each switch port")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--congestion", default="swift")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    args = parser.parse_args()
    if reason := netlab.missing():
        parser.error(f"cannot make the network: {reason}")
    machine, found, began = describe_machine(), [], time.monotonic()
    for name in args.rows:
        for row in ROWS[name](args):
            found.append(rounded(row))
            print(json.dumps(found[-1]), flush=True)
            if args.out:
                write_results(args, machine, time.monotonic() - began, found)


def write_results(
    args: argparse.Namespace, machine: dict[str, Any], seconds: float, rows: list[dict[str, Any]]
) -> None:
    """Write what has been measured so far."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    document = {"settings": settings, "machine": machine, "seconds": round(seconds), "rows": rows}
    args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    parts = [heading("UDP between namespaces", machine)]
    rates = [row for row in rows if "possible_mbps" in row]
    if rates:
        parts.append(markdown_table(RATE_COLUMNS, [rate_cells(row) for row in rates]))
    several = [row for row in rates if ONE_OF_SEVERAL in row]
    if several:
        names = [name for name, found in several[0].items() if isinstance(found, dict)]
        cells = [[row["title"], *(row[name]["mbps"] for name in names)] for row in several]
        for line, row in zip(cells, several, strict=True):
            line.append(f"{row['udp']['mbps'] / row[ONE_OF_SEVERAL]['mbps']:.2f}")
        parts.append(markdown_table(["Mbit/s", *names, "UDP: times one path"], cells))
    costs = [row for row in rows if row["title"].startswith("cpu")]
    if costs:
        names = [name for name in costs[0] if name != "title"]
        cells = [[row["title"], *(f"{row[n]['cpu_s_per_GB']:.2f}" for n in names)] for row in costs]
        parts.append(markdown_table(["Processor time, s per GB", *names], cells))
    for row in rows:
        if row not in rates and row not in costs:
            figures = [[name, value] for name, value in plain_items(row) if name != "title"]
            parts.append(markdown_table([row["title"], ""], figures))
    args.out.with_suffix(".md").write_text("\n\n".join(parts) + "\n")


RATE_COLUMNS = (
    "Mbit/s",
    "Possible",
    "UDP",
    "Share",
    "iperf3 cubic",
    "iperf3 bbr",
    "UDP resent / lost on the way",
)


def rate_cells(row: dict[str, Any]) -> list[object]:
    """Cells of a row with rates."""
    udp = row["udp"]
    return [
        row["title"],
        row["possible_mbps"],
        udp["mbps"],
        row["of_possible"],
        row["iperf3 cubic"]["mbps"],
        row["iperf3 bbr"]["mbps"],
        f"{udp['resent']} / {udp['lost_by_lab']}",
    ]


def plain_items(row: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the figures of a row with their names, nested ones with both."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{name} {inner}", figure) for inner, figure in value.items())
        else:
            yield name, value


if __name__ == "__main__":
    main()
