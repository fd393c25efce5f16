"""``miraccl perf write|read|writev``: one-sided transfers between two processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
import numpy as np

from miraccl import clock
from miraccl.errors import InvalidUsage, MiracclError, TransferError
from miraccl.p2p.agent import Agent
from miraccl.p2p.descriptors import RemoteMemory
from miraccl.p2p.peer import Peer
from miraccl.tools.options import OutputFile, Sizes, write_json
from miraccl.tools.perf.plot import load_figure_class
from miraccl.tools.perf.transfer_memory import PerfMemory, make_memory, pattern
from miraccl.tools.perf.transfer_peers import PEERS, PeerPair, find_python
from miraccl.tools.perf.transfer_worker import measure

KINDS = ("write", "read", "writev")
DEFAULT_SIZES = "256,4K,64K,1M,10M,100M"
#: Turns of miraccl and each peer at a size; the best one counts.
_ROUNDS = 3
_COLUMNS = f"{'bytes':>12} {'blocks':>7} {'us':>10} {'GB/s':>8} {'Gbit/s':>8}  {'method':<8} wrong"


@dataclass(frozen=True, kw_only=True)
class TransferRow:
    """Result of one size; ``wrong`` is the number of wrong bytes, -1 if they were not compared.

    ``engine`` is miraccl or a peer; ``ratio`` of a peer its time over that of miraccl.
    """

    engine: str = "miraccl"
    kind: str
    nbytes: int
    blocks: int
    us: float
    method: str
    extents: int
    wrong: int
    device: str = "cpu"
    predicted_us: float = 0.0
    ratio: float = 1.0

    @property
    def gb_s(self) -> float:
        return self.nbytes * self.blocks / self.us / 1e3

    def line(self) -> str:
        wrong = "-" if self.wrong < 0 else str(self.wrong)
        ratio = "" if self.engine == "miraccl" else f"  {self.engine}: {self.ratio:.2f} x"
        return (
            f"{self.nbytes:>12} {self.blocks:>7} {self.us:>10.2f} {self.gb_s:>8.2f} "
            f"{8 * self.gb_s:>8.2f}  {self.method:<8} {wrong:>5}{ratio}"
        )


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Measurement that the options describe."""

    kind: str
    sizes: list[int]
    counts: list[int]
    window: bool
    device: str
    seconds: float
    checks: bool
    quiet: bool
    peers: dict[str, str]  # name -> Python

    @property
    def most(self) -> int:
        return max(size * count for size in self.sizes for count in self.counts)


@click.command(short_help="Measure one-sided transfers.")
@click.argument("kind", type=click.Choice(KINDS))
@click.option(
    "--role",
    type=click.Choice(("both", "server", "client")),
    default="both",
    show_default=True,
    help="both starts the server as a process of its own.",
)
@click.option("--connect", metavar="HOST:PORT", help="Address that the server has printed.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the server.")
@click.option(
    "--secret",
    metavar="TEXT",
    help="Secret of both sides, default MIRACCL_SECRET.",
)
@click.option(
    "-s",
    "--sizes",
    type=Sizes(),
    default=DEFAULT_SIZES,
    show_default=True,
    help="Bytes of a transfer; of a block for writev.",
)
@click.option(
    "--blocks", default="1024", show_default=True, help="Numbers of blocks of writev, 1,128,4096."
)
@click.option("--private", is_flag=True, help="Private memory at the server, no window.")
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="cpu|cuda[:N]",
    help="Memory of the data, on both sides.",
)
@click.option(
    "--compare",
    metavar="nixl,mooncake",
    default="",
    help="Measure these in turns as well, in CPU memory of this host.",
)
@click.option("--peer-python", help="Python that has the peers.  [default: this one]")
@click.option("--seconds", type=float, default=0.5, show_default=True, help="Time per size.")
@click.option("--no-check", is_flag=True, help="Do not compare the bytes.")
@click.option(
    "--json",
    "json_target",
    type=OutputFile(),
    metavar="FILE",
    is_flag=False,
    flag_value="-",
    help="Write one JSON object; - is standard output.  [default: -]",
)
@click.option("--plot", type=OutputFile(), help="Write a plot of GB/s (needs matplotlib).")
def transfers(
    kind: str,
    role: str,
    connect: str | None,
    host: str,
    port: int,
    secret: str | None,
    sizes: list[int],
    blocks: str,
    private: bool,
    device: str,
    compare: str,
    peer_python: str | None,
    seconds: float,
    no_check: bool,
    json_target: str | None,
    plot: str | None,
) -> None:
    """Measure writes, reads or block lists between two processes, one after the other.

    \b
    Examples:
      miraccl perf write --sizes 256,64K,100M
      miraccl perf writev --sizes 16K --blocks 128,4096 --private
      miraccl perf write --compare nixl,mooncake --peer-python ~/venvs/nixl/bin/python
      miraccl perf writev --device cuda --sizes 16K --blocks 1024
      miraccl perf read --role server --host 10.0.0.7 --secret abc
      miraccl perf read --role client --connect 10.0.0.7:4711 --secret abc
    """
    if role == "client" and not connect:
        raise InvalidUsage("cannot measure: --role client needs --connect HOST:PORT")
    secret = secret or _default_secret(role)
    quiet = json_target == "-"
    if role == "server":
        _serve(host, port, secret, quiet=quiet)
        return
    job = _Job(
        kind=kind,
        sizes=sizes,
        counts=_parse_counts(blocks) if kind == "writev" else [1],
        window=not private,
        device=_checked_device(device),
        seconds=seconds,
        checks=not no_check,
        quiet=quiet,
        peers=_find_peers(compare, peer_python, device, role),
    )
    server = None
    local = make_memory(None, job.most, job.device)  # the reason, if there is no GPU
    if role == "both":
        server, connect = _start_server(secret)
    try:
        with Agent("perf-client", secret=secret, host=host, timeout=60) as agent:
            assert connect is not None
            rows = _measure_all(agent, connect, job, local)
    finally:
        if server is not None:
            server.wait(10)
    if json_target:
        write_json(json_target, {"rows": [asdict(row) | {"gb_s": row.gb_s} for row in rows]})
    if plot:
        _plot(rows, plot)
    if any(row.wrong > 0 for row in rows):
        sys.exit(1)


def _checked_device(device: str) -> str:
    kind, colon, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (colon and (kind == "cpu" or not number.isdecimal())):
        raise InvalidUsage(f"cannot measure: --device {device!r}; allowed are cpu, cuda and cuda:N")
    return device


def _find_peers(compare: str, python: str | None, device: str, role: str) -> dict[str, str]:
    """Return the Python of each peer of ``--compare``."""
    names = [name for name in compare.split(",") if name]
    if unknown := sorted(set(names) - set(PEERS)):
        raise InvalidUsage(f"cannot compare with {unknown[0]}; allowed are {', '.join(PEERS)}")
    if names and (device != "cpu" or role != "both"):
        raise InvalidUsage("cannot compare: --compare needs --role both and --device cpu")
    return {name: find_python(name, python) for name in names}


def _default_secret(role: str) -> str:
    from miraccl import params

    given = params.SECRET.read()
    if given:
        return given
    if role == "both":
        return clock.random_hex(16)
    raise InvalidUsage("cannot measure: give both sides the same --secret, or set MIRACCL_SECRET")


def _parse_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if any(n < 1 for n in counts):
        raise InvalidUsage(f"cannot measure: --blocks {text!r}; allowed are numbers from 1 on")
    return counts


# ---- server


def _start_server(secret: str) -> tuple[subprocess.Popen[str], str]:
    """Start the server of ``--role both``; return it and its address."""
    words = [sys.executable, "-m", "miraccl", "perf", "write", "--role", "server", "--json", "-"]
    server = subprocess.Popen(
        words,
        env={**os.environ, "MIRACCL_SECRET": secret},  # words of a command are visible to others
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line.startswith("{"):
        raise MiracclError("the server of the measurement did not start")
    return server, str(json.loads(line)["address"])


def _serve(host: str, port: int, secret: str, *, quiet: bool) -> None:
    """Offer memory to one client until it ends; print its results."""
    with Agent("perf-server", secret=secret, host=host, port=port, timeout=60) as agent:
        if quiet:
            print(json.dumps({"address": agent.address}), flush=True)
        else:
            print(f"listening at {agent.address}", flush=True)
        peer: Peer | None = None
        memory: Any = None
        while (found := agent.wait_notification(1e6)) is not None:
            if found.error is not None:
                continue
            command, _, text = found.data.decode().partition(" ")
            if command == "hello":
                peer = agent.connect(text)
            elif command == "offer" and peer is not None:
                nbytes, window, device = json.loads(text)
                memory = make_memory(agent, nbytes, device, window=window)
                memory.store(pattern(nbytes))
                peer.notify(agent.register(memory.array).advertise())
            elif command == "row" and not quiet:
                print(text, flush=True)
            elif command == "end":
                return


# ---- client


def _measure_all(agent: Agent, address: str, job: _Job, local: PerfMemory) -> list[TransferRow]:
    peer = agent.connect(address)
    peer.notify(f"hello {agent.address}".encode())
    peer.notify(f"offer {json.dumps([job.most, job.window, job.device])}".encode())
    answer = agent.wait_notification(60)
    if answer is None or answer.error is not None:
        raise TransferError(f"the server at {address} offers no memory", agent=peer.name)
    remote = RemoteMemory.decode(answer.data)
    local.store(pattern(job.most))
    rows: list[TransferRow] = []
    with contextlib.ExitStack() as undo:
        others = [
            undo.enter_context(PeerPair(name, python, method=peer.method, nbytes=job.most))
            for name, python in job.peers.items()
        ]
        for text in (f"# {job.kind} with {peer.name} at {address}, {job.device}", _COLUMNS):
            _show(peer, text, job.quiet)
        for size in job.sizes:
            for count in job.counts:
                for row in _measure(peer, remote, local, job, size, count, others):
                    rows.append(row)
                    _show(peer, row.line(), job.quiet)
    peer.notify(b"end")
    return rows


def _show(peer: Peer, text: str, quiet: bool) -> None:
    """Print a line here and at the server."""
    if not quiet:
        print(text, flush=True)
    peer.notify(f"row {text}".encode())


def _measure(
    peer: Peer,
    remote: RemoteMemory,
    local: PerfMemory,
    job: _Job,
    size: int,
    count: int,
    others: list[PeerPair],
) -> list[TransferRow]:
    """Return the row of miraccl and those of the peers, measured in turns."""
    total = size * count
    part = replace(remote, nbytes=total, block_nbytes=size)
    blocks: dict[str, Any] = {}
    order: list[int] | None = None
    if job.kind == "writev":  # scattered at the target: block i goes to (i * step) mod count
        step = next(s for s in range(max(1, count // 3), 2 * count + 3) if np.gcd(s, count) == 1)
        there = (np.arange(count, dtype=np.int64) * step % count).astype(np.int32)
        blocks = {"local_blocks": np.arange(count, dtype=np.int32), "remote_blocks": there}
        order = there.tolist()
    elif job.kind == "read":
        local.store(np.zeros(total, np.uint8))
    kind = "read" if job.kind == "read" else "write"
    prepared = peer.prepare(kind, local.part(total), part, **blocks)
    turns = _ROUNDS if others else 1
    ours, theirs = float("inf"), dict.fromkeys(others, (float("inf"), True))
    for _ in range(turns):
        ours = min(ours, measure(lambda: prepared.start().wait(), job.seconds / turns))
        for other in others:
            us, right = other.measure(kind, size, order, job.seconds / turns)
            best, all_right = theirs[other]
            theirs[other] = min(best, us), all_right and right
    plan = prepared.explain()
    wrong = _wrong_bytes(peer, part, local, blocks, size, job.device) if job.checks else -1
    common: dict[str, Any] = {"kind": job.kind, "nbytes": size, "blocks": count}
    rows = [
        TransferRow(
            us=ours,
            method=plan.method,
            extents=plan.extents,
            wrong=wrong,
            device=job.device,
            predicted_us=plan.predicted_us,
            **common,
        )
    ]
    rows += [
        TransferRow(
            engine=other.name,
            us=us,
            method="",
            extents=count,
            wrong=0 if right else size * count,
            ratio=us / ours,
            **common,
        )
        for other, (us, right) in theirs.items()
    ]
    return rows


def _wrong_bytes(
    peer: Peer,
    part: RemoteMemory,
    local: PerfMemory,
    blocks: dict[str, Any],
    size: int,
    device: str,
) -> int:
    """Return the number of bytes that differ between the two sides, read back by the client."""
    memory = make_memory(None, part.nbytes, device)
    peer.read(memory.part(part.nbytes), part).wait()
    back, here = memory.load(part.nbytes), local.load(part.nbytes)
    if blocks:
        back = back.reshape(-1, size)[blocks["remote_blocks"]].reshape(-1)
    return int((back != here).sum())


def _plot(rows: list[TransferRow], path: str) -> None:
    figure = load_figure_class()(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for engine, count in dict.fromkeys((row.engine, row.blocks) for row in rows):
        shown = [row for row in rows if (row.engine, row.blocks) == (engine, count)]
        label = engine if rows[0].kind != "writev" else f"{engine}, {count} blocks"
        axes.plot([r.nbytes for r in shown], [r.gb_s for r in shown], marker="o", label=label)
    axes.set(xscale="log", xlabel="bytes of a block", ylabel="GB/s", title=rows[0].kind)
    axes.legend()
    figure.savefig(path)
