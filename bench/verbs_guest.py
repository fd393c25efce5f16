"""Verbs against perftest on the same Soft-RoCE devices, in the same boot of a guest.

    tests/guest/vm/run-in-vm --engine uml -r 2 -t 1800 -w bench/results -- \\
        .venv/bin/python bench/verbs_guest.py --out bench/results/verbs_guest/MACHINE-DATE

Only ratios mean something here. With one processor the peers are ``ib_send_bw`` and ``ib_send_lat``
with --events: for writes perftest can only poll, and two processes that poll on one processor take
turns by its tick (4.5 ms per message of 64 KiB). Ours is the difference between a long and a short
run, perftest's what it prints. perftest writes without notifying its receiver; our receiver gets
every message, checks its signature and gives the memory back. Both have eight messages in flight:
with the 128 of perftest's default, Soft-RoCE loses packets and is several times slower. Variants
take turns; run it on an idle machine, as one processor of the guest carries both sides and the
network.

The cases with loss set netem on both devices and compare the recovery of UC and UD by the datagram
machine with that of Soft-RoCE's reliable connections (go-back-N, perftest's and ours).

UD and UC run under the datagram machine, without protection and with cubic, as delays on one
processor are those of its scheduler, against ``ib_send_bw`` of the same
kind; messages of UD are compared by their bytes, as perftest sends one packet each: so many per
call (``-l``) as a message of ours has.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from numba import njit

from miraccl import native
from miraccl.native.intrinsics import (
    SYS_FUTEX,
    call4,
    exchange,
    libc_write,
    load,
    load32,
    load_acquire,
    sched_yield,
    store,
    store_release,
    syscall,
)
from miraccl.native.sleep_words import DOORBELL, SLEEP
from miraccl.native.verbs_abi import load_library
from miraccl.proxy.kernels.progress_engine import (
    DRIVE_HAND_OVER,
    DRIVE_POLL,
    DRIVE_POSTED,
    DRIVE_SLEEP,
)
from miraccl.proxy.verbs.engine import VerbsEngine
from miraccl.proxy.verbs.packet_engine import VerbsDatagramEngine
from miraccl.runtime.engine_state import DRIVING_SPINS, DRIVING_YIELDS
from miraccl.topo.hca import read_hcas
from miraccl.transport.base import DatagramOptions, Endpoint, Fifo, TransportContext
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.transport.verbs import VerbsOptions, VerbsTransport
from miraccl.transport.verbs_datagram import VerbsDatagramTransport
from miraccl.transport.verbs_packets import PairKind

TIMEOUT_S = 120.0
FUTEX_WAIT = 0
SLEEP_NS = 10_000_000
SERVER = "10.77.0.1"
GID_INDEX = "1"
MTU = 4096


# --- the executor's part, compiled


@njit(nogil=True)
def publish(ctx, doorbell, asleep):
    """Have the engine process what was published: advance it here, or wake its thread."""
    drive = load(ctx)
    if drive != 0 and call4(drive, load(ctx + 8), DRIVE_POSTED, 0, 0) != 0:
        return
    if exchange(asleep, 0) != 0:
        libc_write(doorbell, ctx + 24, 8)


@njit(nogil=True)
def futex_sleep(ctx, address, target):
    """Leave the connections to the engine's thread and sleep."""
    if load(ctx) != 0:
        call4(load(ctx), load(ctx + 8), DRIVE_HAND_OVER, 0, 0)
    control = load(ctx + 16)
    value = load32(control + DOORBELL)
    exchange(control + SLEEP, 1)
    if load_acquire(address) < target:
        store(ctx + 56, load(ctx + 56) + 1)
        syscall(SYS_FUTEX, control + DOORBELL, FUTEX_WAIT, value, ctx + 32, 0, 0)
    store(control + SLEEP, 0)


@njit(nogil=True)
def await_word(ctx, address, target):
    """Wait as a rank does that shares its core (``executor.cpu.kernels.waiting``)."""
    drive, turns = load(ctx), 0
    if load(ctx + 80) != 0:
        while load_acquire(address) < target:
            if call4(drive, load(ctx + 8), DRIVE_SLEEP, SLEEP_NS, 0) == 0:
                futex_sleep(ctx, address, target)
    while load_acquire(address) < target:
        turns += 1
        if turns > load(ctx + 72):
            sched_yield()
            store(ctx + 48, load(ctx + 48) + 1)
        if drive != 0:
            call4(drive, load(ctx + 8), DRIVE_POLL, 0, 0)
        if turns > load(ctx + 72) + load(ctx + 64):
            futex_sleep(ctx, address, target)


@njit(nogil=True)
def send_messages(ctx, descs, tail, doorbell, asleep, first, count, address, nbytes):
    """Post ``count`` messages at one address, at most eight at a time, and wait for their end."""
    for m in range(first, first + count):
        await_word(ctx, tail, m - 7)
        line = descs + (m & 7) * 64
        store(line + 8, m)
        store(line + 16, nbytes)
        store(line + 24, 3 if nbytes > 32 else 1)  # ADDRESS or INLINE
        store(line + 32, address)
        store_release(line, m + 1)
        publish(ctx, doorbell, asleep)
    await_word(ctx, tail, first + count)
    return 0


@njit(nogil=True)
def receive_messages(ctx, descs, cts, tail, doorbell, asleep, first, count, address, nbytes):
    """Receive ``count`` messages, each posted eight ahead; return how many signatures differ."""
    wrong, ahead = 0, first
    for m in range(first, first + count):
        before = ahead
        while ahead < m + 8 and nbytes > 32:
            line = cts + (ahead & 7) * 64
            store(line + 8, address)
            store(line + 16, nbytes)
            store_release(line, ahead + 1)
            ahead += 1
        if ahead != before or m > first:
            publish(ctx, doorbell, asleep)
        line = descs + (m & 7) * 64
        await_word(ctx, line, m + 1)
        if load(line + 8) != m:
            wrong += 1
        store_release(tail, m + 1)
    publish(ctx, doorbell, asleep)
    return wrong


class Peer:
    """One of two processes: rank 0 sends, rank 1 receives and answers."""

    def __init__(
        self,
        rank: int,
        control: socket.socket,
        qps: int,
        nbytes: int,
        kind: PairKind | None,
        datagram: DatagramOptions,
    ) -> None:
        self.rank, self.control, self.nbytes = rank, control, nbytes
        self.memory = PrivateMemory(max(nbytes, 4096))
        self.page = PrivateMemory(1 << 16)  # the executor's control page
        # drive, its argument, control page, the number 1, timeout of a sleep (two words), counts of
        # yields and sleeps, yields before a sleep, turns before a yield, 1 to sleep in drive
        self.context = PrivateMemory(4096)
        library = load_library()
        ports = [(h, h.ports[0]) for h in read_hcas() if h.name == f"rxe{1 - rank}"]
        endpoints = [
            Endpoint(rank=r, hostid=str(r), pid=os.getpid(), hcas=("roce",)) for r in (0, 1)
        ]
        context = TransportContext(
            endpoint=endpoints[rank],
            peers={1 - rank: endpoints[1 - rank]},
            max_slot_bytes=8192,
            deadline=TIMEOUT_S,
        )
        shared: dict[str, Any] = {
            "library": library,
            "ports": ports,
            "options": VerbsOptions(qps_per_connection=qps, copy_bytes=0),
        }
        self.transport: Any
        if kind is None:
            self.transport = VerbsTransport(context, engine=self._open_engine, **shared)
        else:
            self.transport = VerbsDatagramTransport(
                context,
                engine=self._open_packet_engine,
                kind=kind,
                datagram=datagram,
                **shared,
            )
        info = self.swap(self.transport.setup())
        self.pair = self.transport.connect({1 - rank: info})[1 - rank]
        if kind is None:
            self.engine.add_region(self.memory.address, max(nbytes, 4096))
        self.counts = [0, 0]
        driving = self.engine.driver(overlap=False)
        words = (driving.function, driving.argument, self.page.address, 1, 0, 1_000_000, 0, 0)
        words += (DRIVING_YIELDS, DRIVING_SPINS, int(driving.sleeps))
        for i, word in enumerate(words):
            memory_at(self.context.address + 8 * i, 8)[:] = word.to_bytes(8, "little")

    def _open_engine(self) -> VerbsEngine:
        self.engine: VerbsEngine | VerbsDatagramEngine = VerbsEngine(
            rank=self.rank,
            library=load_library(),
            wake=lambda _: None,
            on_lost=lambda peer, loss: print(f"rank {peer}: {loss}", file=sys.stderr),
            control=self.page.address,
        )
        return self.engine

    def _open_packet_engine(self) -> VerbsDatagramEngine:
        self.engine = VerbsDatagramEngine(
            rank=self.rank,
            library=load_library(),
            wake=lambda _: None,
            on_lost=lambda peer, loss: print(f"rank {peer}: {loss}", file=sys.stderr),
            control=self.page.address,
        )
        return self.engine

    def profile(self) -> dict[str, int]:
        """Return counts of the engine and the executor, and CPU time per thread in us."""
        words = memory_at(self.context.address + 48, 16)
        found = dict(self.engine.counters())
        found |= {"yields": int.from_bytes(words[:8], "little")}
        found |= {"futex sleeps": int.from_bytes(words[8:16], "little")}
        for thread in sorted(os.listdir("/proc/self/task"), key=int):
            with open(f"/proc/self/task/{thread}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            fields = rest.split()
            name = name if thread == str(os.getpid()) else f"thread {thread}"
            found[f"{name} us"] = sum(int(fields[at]) * 10_000 for at in (11, 12))
            with open(f"/proc/self/task/{thread}/status") as file:
                lines = [line.split() for line in file if "ctxt_switches" in line]
            found[f"{name} switches"] = sum(int(line[1]) for line in lines)
        with open("/proc/stat") as file:
            total = [int(n) for n in file.readline().split()[1:]]
        folder = Path(f"/sys/class/infiniband/rxe{1 - self.rank}/ports/1/hw_counters")
        found |= {path.name: int(path.read_text()) for path in folder.iterdir()}
        names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq")
        found |= {f"all {n}": 10_000 * v for n, v in zip(names, total, strict=False) if v}
        return found

    def swap(self, blob: bytes) -> bytes:
        """Exchange small blobs with the other process; also a barrier."""
        self.control.sendall(len(blob).to_bytes(4, "little") + blob)
        size = int.from_bytes(self.control.recv(4, socket.MSG_WAITALL), "little")
        return self.control.recv(size, socket.MSG_WAITALL) if size else b""

    def send(self, count: int) -> None:
        fifo: Fifo = self.pair.send
        send_messages(
            self.context.address,
            fifo.descriptors,
            fifo.tail,
            fifo.doorbell,
            fifo.asleep,
            self.counts[0],
            count,
            self.memory.address,
            self.nbytes,
        )
        self.counts[0] += count

    def receive(self, count: int) -> None:
        fifo: Fifo = self.pair.recv
        wrong = receive_messages(
            self.context.address,
            fifo.descriptors,
            fifo.cts,
            fifo.tail,
            fifo.doorbell,
            fifo.asleep,
            self.counts[1],
            count,
            self.memory.address,
            self.nbytes,
        )
        self.counts[1] += count
        if wrong:
            raise AssertionError(f"{wrong} messages with a wrong signature")

    def stream(self, count: int) -> float:
        """Return the seconds of ``count`` messages one way."""
        self.swap(b"")
        start = time.perf_counter()
        (self.receive if self.rank else self.send)(count)
        self.swap(b"")
        return time.perf_counter() - start

    def ping_pong(self, count: int) -> float:
        """Return the seconds of ``count`` round trips."""
        self.swap(b"")
        start = time.perf_counter()
        for _ in range(count):
            if self.rank:
                self.receive(1)
                self.send(1)
            else:
                self.send(1)
                self.receive(1)
        return time.perf_counter() - start


def ours(
    kind: str,
    qps: int,
    nbytes: int,
    counts: tuple[int, int],
    pair: PairKind | None,
    datagram: DatagramOptions,
) -> float:
    """Return seconds per message one way, from the difference of two runs."""
    ends = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            _serve(Peer(1, ends[1], qps, nbytes, pair, datagram), kind, counts)
        finally:
            os._exit(0)
    peer = Peer(0, ends[0], qps, nbytes, pair, datagram)
    note("connected")
    times = _serve(peer, kind, counts)
    os.waitpid(pid, 0)
    return (times[1] - times[0]) / (counts[1] - counts[0]) / (2 if kind == "lat" else 1)


def within(seconds: float, measure: Callable[[], float]) -> float:
    """Return the result of ``measure`` in an own process, NaN if it takes too long or fails."""
    ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        try:
            os.write(ends[1], repr(measure()).encode())
        except Exception as error:
            note(repr(error))
        finally:
            os._exit(0)
    until = time.monotonic() + seconds
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.02)
    os.close(ends[1])
    text = os.read(ends[0], 100).decode()
    os.close(ends[0])
    return float(text or "nan")


def _serve(peer: Peer, kind: str, counts: tuple[int, int]) -> list[float]:
    action: Callable[[int], float] = peer.ping_pong if kind == "lat" else peer.stream
    action(max(1, counts[0] // 4))  # warm up
    before = peer.profile()
    times = [action(count) for count in counts]
    used = {name: n - before.get(name, 0) for name, n in peer.profile().items()}
    per = ", ".join(f"{name} {n / sum(counts):.2f}" for name, n in used.items() if n)
    note(f"rank {peer.rank}, per message: {per}")
    if isinstance(peer.engine, VerbsDatagramEngine):
        note(f"rank {peer.rank}: {peer.engine.reports()}")
    peer.swap(b"")
    peer.transport.close()
    return times


def perftest(
    kind: str,
    qps: int,
    nbytes: int,
    counts: tuple[int, int],
    verb: str,
    pair: PairKind | None = None,
    *,
    depth: int = 8,
) -> float:
    """Return the same as ``ib_write_bw`` or ``ib_write_lat`` report; ``verb`` may be ``send``."""
    parts, count, posting = 1, counts[1], []
    if pair is PairKind.UD:  # one packet per message
        parts = -(-nbytes // 4096)
        nbytes, count = 4096, count * parts
        depth, posting = depth * parts, ["-l", str(parts)]
    command = [f"ib_{verb}_{kind}", "-x", GID_INDEX, "-m", "4096", "-s", str(nbytes), "-F"]
    if kind == "bw":  # eight as our FIFO; Soft-RoCE loses packets of deeper queues
        command += ["-t", str(depth), "-q", str(qps), *posting]
    if pair:
        command += ["-c", pair.name]
    if verb == "send" or pair:
        command.append("--events")
    many = max(40, count // qps)  # per queue pair
    seconds, row = run_perftest([*command, "-n", str(many)])
    # Latency: bytes, iterations, least, most, typical, average; bandwidth: bytes, iterations,
    # peak, average in MB/s.
    value = float(row[5 if kind == "lat" else 3])
    if value and math.isfinite(value):
        return value / 1e6 if kind == "lat" else nbytes * parts / (value * (1 << 20))
    # On a busy machine perftest finds no clock rate and prints zeros.
    less, _ = run_perftest([*command, "-n", str(many // 8)])
    messages = (many - many // 8) * qps
    return (seconds - less) / messages * (0.5 if kind == "lat" else parts)


def run_perftest(command: list[str]) -> tuple[float, list[str]]:
    """Run both sides; return the client's seconds, and the row that it prints."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([*command, "-d", "rxe0"], **quiet)  # type: ignore[call-overload]
    time.sleep(1.0)
    client = [*command, "-d", "rxe1", SERVER]
    start = time.perf_counter()
    try:
        text = subprocess.run(
            client, check=True, timeout=TIMEOUT_S, capture_output=True, text=True
        ).stdout
    finally:
        server.kill()
        server.wait(TIMEOUT_S)
    seconds = time.perf_counter() - start
    nbytes = command[command.index("-s") + 1]
    rows = [line.split() for line in text.splitlines() if line.split()[:1] == [nbytes]]
    note(f"{' '.join(command)}: {seconds:.2f} s, {rows}")
    return seconds, rows[-1]


def provide_clock_rate() -> None:
    """Give perftest a clock rate: it prints zeros where /proc/cpuinfo has none (User-mode Linux),
    and measures the rate itself if this one is wrong.
    """
    with open("/proc/cpuinfo") as file:
        text = file.read()
    if "MHz" in text:
        return
    with open("/tmp/cpuinfo", "w") as file:
        file.write(text.rstrip() + "\ncpu MHz\t\t: 1000.000\n\n")
    subprocess.run(["mount", "--bind", "/tmp/cpuinfo", "/proc/cpuinfo"], check=True)


#: Case: (kind, queue pairs, bytes, message counts of the two runs, kind of queue pairs).
CASES: dict[str, tuple[str, int, int, tuple[int, int], PairKind | None]] = {
    "64 KiB, 1 QP": ("bw", 1, 1 << 16, (500, 4000), None),
    "64 KiB, 4 QPs": ("bw", 4, 1 << 16, (500, 4000), None),
    "1 MiB, 1 QP": ("bw", 1, 1 << 20, (100, 500), None),
    "1 MiB, 4 QPs": ("bw", 4, 1 << 20, (100, 500), None),
    "8 B one way": ("lat", 1, 8, (500, 4000), None),
    "UC 64 KiB": ("bw", 1, 1 << 16, (500, 4000), PairKind.UC),
    "UD 64 KiB": ("bw", 1, 1 << 16, (300, 2300), PairKind.UD),
}
#: With ``LOSS`` on both devices, against perftest's RC.
LOSS = "1%"
LOSS_CASES: dict[str, tuple[str, int, int, tuple[int, int], PairKind | None]] = {
    "loss, RC 64 KiB": ("bw", 1, 1 << 16, (100, 1100), None),
    "loss, UC 64 KiB": ("bw", 1, 1 << 16, (100, 1100), PairKind.UC),
    "loss, UD 64 KiB": ("bw", 1, 1 << 16, (100, 1100), PairKind.UD),
}
DEVICES = ("r0", "r1")


def set_loss(share: str) -> None:
    """Drop packets between the devices; "" drops none."""
    for device in DEVICES:
        command = ["tc", "qdisc", "replace" if share else "del", "dev", device, "root"]
        command += ["netem", "loss", share, "limit", "10000"] if share else []
        subprocess.run(command, check=bool(share), stderr=None if share else subprocess.DEVNULL)


def compile_loops() -> None:
    """Compile the loops, and load the engine, before processes are forked."""
    native.library(VerbsEngine.kernel)
    native.library(VerbsDatagramEngine.kernel)
    memory = PrivateMemory(4096)
    words = [memory.address + 64 * i for i in range(8)]
    send_messages(words[0], words[1], words[2], 0, words[3], 0, 0, words[4], 8)
    receive_messages(words[0], words[1], words[5], words[2], 0, words[3], 0, 0, words[4], 8)


def note(text: str) -> None:
    """Show progress on standard error."""
    print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True)


def report(out: str, settings: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    """Write the cases so far: a run that is cut off keeps them."""
    columns = ("Case", "perftest us", "miraccl us", "Ratio", "Goal")
    rows = []
    for name, each in results.items():
        times = (f"{each[key]:.1f}" for key in ("perftest_us", "miraccl_us"))
        rows.append((name, *times, f"{each['ratio']:.2f}", each["goal"]))
    text = common.heading("Verbs in a guest", settings["machine"])
    text += (
        "\nMicroseconds per message, medians of the rounds; the ratio, median of those of the "
        "rounds, is the share of perftest's bandwidth, or the multiple of its latency. One "
        "processor (User-mode Linux) for both sides and Soft-RoCE: only ratios mean something.\n\n"
    )
    common.save(out, settings | {"cases": results}, text + common.markdown_table(columns, rows))


def earlier_results(out: str | None) -> dict[str, dict[str, Any]]:
    """Return the cases that are saved under this name: a run replaces those that it repeats."""
    path = Path(f"{out}.json")
    if not out or not path.exists():
        return {}
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())["cases"]
    return found


def goal_of(name: str, kind: str, pair: PairKind | None) -> str:
    """Return the goal of a case."""
    if name in LOSS_CASES:
        return ">= 5" if pair else "-"
    if kind == "lat":
        return "<= 1.25"
    return ">= 0.90" if pair else ">= 0.95"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all message counts")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of one measurement")
    parser.add_argument("--loss-congestion", default="cubic", help="controller with loss")
    parser.add_argument("--depth", type=int, default=8, help="messages of perftest in flight")
    parser.add_argument("--cases", default="", help="names of cases separated by semicolons")
    common.add_output_option(parser)
    args = parser.parse_args()
    verb = "send" if os.cpu_count() == 1 else "write"
    settings: dict[str, Any] = {
        "machine": common.describe_machine(),
        "peer": f"ib_{verb}_bw, ib_{verb}_lat",
        "depth": args.depth,
        "loss": LOSS,
        "loss_congestion": args.loss_congestion,
    }
    results = earlier_results(args.out)
    compile_loops()
    provide_clock_rate()
    note("compiled")
    for name, (kind, qps, nbytes, counts, pair) in (CASES | LOSS_CASES).items():
        if args.cases and name not in args.cases.split(";"):
            continue
        lossy = name in LOSS_CASES
        set_loss(LOSS if lossy else "")
        # A packet that Soft-RoCE cuts is lost with each of its parts, and takes the next one along.
        datagram = DatagramOptions(
            protection="none",
            congestion=args.loss_congestion if lossy else "cubic",
            mtu=MTU if lossy else 0,
        )
        scaled = (max(5, int(counts[0] * args.scale)), max(10, int(counts[1] * args.scale)))
        rows: list[tuple[float, float]] = []
        for _ in range(args.rounds):
            peer_kind = None if lossy else pair
            peer_verb = "send" if pair and not lossy else verb
            other = functools.partial(
                perftest, kind, qps, nbytes, scaled, peer_verb, peer_kind, depth=args.depth
            )
            peer = within(args.timeout, other)
            one = functools.partial(ours, kind, qps, nbytes, scaled, pair, datagram)
            rows.append((peer, within(args.timeout, one)))
            note(f"{name}: perftest {peer * 1e6:.1f} us, miraccl {rows[-1][1] * 1e6:.1f} us")
        theirs, own = (statistics.median(column) * 1e6 for column in zip(*rows, strict=True))
        # Bandwidth as a share of perftest's; latency as a multiple of it. Both runs of a round see
        # the same host, which other work may slow down.
        ratios = [own / peer if kind == "lat" else peer / own for peer, own in rows]
        results[name] = {
            "perftest_us": theirs,
            "miraccl_us": own,
            "ratio": statistics.median(ratios),
            "goal": goal_of(name, kind, pair),
            "rows": rows,
        }
        report(args.out, settings, results)
    set_loss("")


if __name__ == "__main__":
    main()
