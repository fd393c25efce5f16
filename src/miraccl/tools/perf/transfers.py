"""``miraccl perf write|read|writev``: one-sided transfers between two processes."""

from __future__ import annotations

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
from miraccl.tools.options import OutputFile, Sizes
from miraccl.tools.perf.plot import load_figure_class

KINDS = ("write", "read", "writev")
DEFAULT_SIZES = "256,4K,64K,1M,10M,100M"
#: Period of the test pattern: no power of two, so that a shifted block is found.
_PERIOD = 253
_COLUMNS = f"{'bytes':>12} {'blocks':>7} {'us':>10} {'GB/s':>8} {'Gbit/s':>8}  {'method':<8} wrong"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result of one size; ``wrong`` is the number of wrong bytes, -1 if they were not compared."""

    kind: str
    nbytes: int
    blocks: int
    us: float
    method: str
    extents: int
    wrong: int

    @property
    def gb_s(self) -> float:
        return self.nbytes * self.blocks / self.us / 1e3

    def line(self) -> str:
        wrong = "-" if self.wrong < 0 else str(self.wrong)
        return (
            f"{self.nbytes:>12} {self.blocks:>7} {self.us:>10.2f} {self.gb_s:>8.2f} "
            f"{8 * self.gb_s:>8.2f}  {self.method:<8} {wrong}"
        )


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
@click.option("--device", type=click.Choice(("cpu",)), default="cpu", help="Memory of the data.")
@click.option("--seconds", type=float, default=0.5, show_default=True, help="Time per size.")
@click.option("--no-check", is_flag=True, help="Do not compare the bytes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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
    seconds: float,
    no_check: bool,
    as_json: bool,
    plot: str | None,
) -> None:
    """Measure writes, reads or block lists between two processes, one after the other.

    \b
    Examples:
      miraccl perf write --sizes 256,64K,100M
      miraccl perf writev --sizes 16K --blocks 128,4096 --private
      miraccl perf read --role server --host 10.0.0.7 --secret abc
      miraccl perf read --role client --connect 10.0.0.7:4711 --secret abc
    """
    counts = _parse_counts(blocks) if kind == "writev" else [1]
    if role == "client" and not connect:
        raise InvalidUsage("cannot measure: --role client needs --connect HOST:PORT")
    secret = secret or _default_secret(role)
    if role == "server":
        _serve(host, port, secret, quiet=as_json)
        return
    server = None
    if role == "both":
        server, connect = _start_server(secret)
    try:
        with Agent("perf-client", secret=secret, host=host, timeout=60) as agent:
            assert connect is not None
            rows = _measure_all(
                agent, connect, kind, sizes, counts, not private, seconds, not no_check, as_json
            )
    finally:
        if server is not None:
            server.wait(10)
    if as_json:
        print(json.dumps({"rows": [asdict(row) | {"gb_s": row.gb_s} for row in rows]}))
    if plot:
        _plot(rows, plot)
    if any(row.wrong > 0 for row in rows):
        sys.exit(1)


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
    words = [sys.executable, "-m", "miraccl", "perf", "write", "--role", "server", "--json"]
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
                nbytes, window = json.loads(text)
                memory = agent.empty(nbytes) if window else np.zeros(nbytes, np.uint8)
                memory[:] = np.resize(np.arange(_PERIOD, dtype=np.uint8), nbytes)
                peer.notify(agent.register(memory).advertise())
            elif command == "row" and not quiet:
                print(text, flush=True)
            elif command == "end":
                return


# ---- client


def _measure_all(
    agent: Agent,
    address: str,
    kind: str,
    sizes: list[int],
    counts: list[int],
    window: bool,
    seconds: float,
    checks: bool,
    quiet: bool,
) -> list[Row]:
    peer = agent.connect(address)
    peer.notify(f"hello {agent.address}".encode())
    most = max(size * count for size in sizes for count in counts)
    peer.notify(f"offer {json.dumps([most, window])}".encode())
    answer = agent.wait_notification(60)
    if answer is None or answer.error is not None:
        raise TransferError(f"the server at {address} offers no memory", agent=peer.name)
    remote = RemoteMemory.decode(answer.data)
    local = np.resize(np.arange(_PERIOD, dtype=np.uint8), most)
    rows = []
    for text in (f"# {kind} with {peer.name} at {address}", _COLUMNS):
        _show(peer, text, quiet)
    for size in sizes:
        for count in counts:
            row = _measure(peer, remote, local, kind, size, count, seconds, checks)
            rows.append(row)
            _show(peer, row.line(), quiet)
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
    local: Any,
    kind: str,
    size: int,
    count: int,
    seconds: float,
    checks: bool,
) -> Row:
    total = size * count
    part = replace(remote, nbytes=total, block_nbytes=size)
    blocks: dict[str, Any] = {}
    if kind == "writev":  # scattered at the target: block i goes to (i * step) mod count
        step = next(s for s in range(max(1, count // 3), 2 * count + 3) if np.gcd(s, count) == 1)
        order = (np.arange(count, dtype=np.int64) * step % count).astype(np.int32)
        blocks = {"local_blocks": np.arange(count, dtype=np.int32), "remote_blocks": order}
    elif kind == "read":
        local[:total] = 0
    prepared = peer.prepare("read" if kind == "read" else "write", local[:total], part, **blocks)
    start = clock.perf_counter()
    prepared.start().wait()
    calls = max(1, min(5000, int(seconds / 5 / max(clock.perf_counter() - start, 1e-6))))
    best = float("inf")
    for _ in range(5):
        start = clock.perf_counter()
        for _ in range(calls):
            prepared.start().wait()
        best = min(best, (clock.perf_counter() - start) / calls)
    plan = prepared.explain()
    return Row(
        kind=kind,
        nbytes=size,
        blocks=count,
        us=best * 1e6,
        method=plan.method,
        extents=plan.extents,
        wrong=_wrong_bytes(peer, part, local, blocks, size) if checks else -1,
    )


def _wrong_bytes(
    peer: Peer, part: RemoteMemory, local: Any, blocks: dict[str, Any], size: int
) -> int:
    """Return the number of bytes that differ between the two sides, read back by the client."""
    back = np.zeros(part.nbytes, np.uint8)
    peer.read(back, part).wait()
    here = local[: part.nbytes]
    if blocks:
        back = back.reshape(-1, size)[blocks["remote_blocks"]].reshape(-1)
    return int((back != here).sum())


def _plot(rows: list[Row], path: str) -> None:
    figure = load_figure_class()(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for count in sorted({row.blocks for row in rows}):
        shown = [row for row in rows if row.blocks == count]
        axes.plot([r.nbytes for r in shown], [r.gb_s for r in shown], marker="o", label=f"{count}")
    axes.set(xscale="log", xlabel="bytes of a block", ylabel="GB/s", title=rows[0].kind)
    axes.legend(title="blocks")
    figure.savefig(path)
