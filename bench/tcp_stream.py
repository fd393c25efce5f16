"""One-way send/recv through the socket transport and its proxy, compared with a plain socket loop.

Two processes on loopback, the same number of streams. The plain loop is careful hand-written code:
one thread per side, non-blocking sockets, epoll, calls of 1 MiB, the same kernel buffers, the
message divided evenly among the streams. In the other row the sender posts the address of its
buffer and the receiver receives into its own, so both rows copy each byte twice, user to kernel and
back. The two alternate, and the receiver's answer ends each measurement. ``cpu`` is processor time
of both processes, which other load affects less than the wall clock; with the two processes on one
core it is the reciprocal of the speed.

    python bench/tcp_stream.py --bytes 64M --streams 2 --rounds 15
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping

from miraccl import params
from miraccl.proxy.stream_engine import ProgressEngine
from miraccl.transport.base import Endpoint, FifoPair
from miraccl.transport.connect_round import set_tcp_options
from miraccl.transport.ends import RecvEnd, SendEnd
from miraccl.transport.fifo import PrivateMemory, memory_at, native_atomics
from miraccl.transport.socket import SocketOptions, SocketTransport

TIMEOUT_S = 30.0
CALL_BYTES = 1 << 20


class Peer:
    """One of the two processes: rank 0 sends, rank 1 receives. ``control`` is a blocking socket."""

    def __init__(self, rank: int, control: socket.socket, args: argparse.Namespace) -> None:
        self.rank = rank
        self.control = control
        self.nbytes = args.bytes
        self.address = args.address
        self.options = SocketOptions(nstreams=args.streams, buffer_bytes=args.buffer)
        self.memory = PrivateMemory(max(self.nbytes, 1))
        self.buffer = memory_at(self.memory.address, self.nbytes)
        self.buffer[:] = bytes([rank + 1]) * self.nbytes

    def swap(self, blob: bytes) -> bytes:
        """Exchange small blobs with the other process; also a barrier."""
        self.control.sendall(len(blob).to_bytes(4, "little") + blob)
        size = int.from_bytes(self.control.recv(4, socket.MSG_WAITALL), "little")
        return self.control.recv(size, socket.MSG_WAITALL) if size else b""


class Plain:
    """The plain socket loop."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        buffer_bytes = peer.options.buffer_bytes
        self.streams: list[socket.socket] = []
        if peer.rank:
            listener = socket.create_server(
                (peer.address, 0), family=socket.AF_INET6 if ":" in peer.address else socket.AF_INET
            )
            set_tcp_options(listener, buffer_bytes)
            peer.swap(listener.getsockname()[1].to_bytes(2, "little"))
            self.streams = [listener.accept()[0] for _ in range(peer.options.nstreams)]
            listener.close()
        else:
            port = int.from_bytes(peer.swap(b""), "little")
            for _ in range(peer.options.nstreams):
                stream = socket.socket(socket.AF_INET6 if ":" in peer.address else socket.AF_INET)
                set_tcp_options(stream, buffer_bytes)
                stream.connect((peer.address, port))
                self.streams.append(stream)
        for stream in self.streams:
            stream.setblocking(False)

    def transfer(self) -> None:
        total, n = self.peer.nbytes, len(self.streams)
        spans = {
            s.fileno(): [s, total * i // n, total * (i + 1) // n]
            for i, s in enumerate(self.streams)
        }
        with select.epoll() as epoll:
            for fd in spans:
                epoll.register(fd, select.EPOLLIN if self.peer.rank else select.EPOLLOUT)
            while spans:
                for fd, _ in epoll.poll(TIMEOUT_S):
                    span = spans[fd]
                    stream, at, end = span
                    view = self.peer.buffer[at : min(end, at + CALL_BYTES)]
                    span[1] += stream.recv_into(view) if self.peer.rank else stream.send(view)
                    if span[1] == end:
                        epoll.unregister(fd)
                        del spans[fd]

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


class Miraccl:
    """The socket transport and its proxy."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.atomics = native_atomics()
        self.news = threading.Event()
        self.proxy = ProgressEngine(
            rank=peer.rank,
            wake=lambda _: self.news.set(),
            on_lost=lambda p, loss: print(f"rank {p}: {loss}"),
        )
        endpoint = Endpoint(
            rank=peer.rank, hostid=str(peer.rank), pid=os.getpid(), addresses=(peer.address,)
        )
        self.transport = SocketTransport(
            endpoint,
            proxy=self.proxy,
            secret=b"bench",
            job=b"bench",
            options=peer.options,
            timeout=TIMEOUT_S,
        )
        infos: Mapping[int, bytes] = {1 - peer.rank: peer.swap(self.transport.setup())}
        pair: FifoPair = self.transport.connect(infos)[1 - peer.rank]
        self.send = SendEnd(pair.send, self.atomics)
        self.recv = RecvEnd(pair.recv, self.atomics)

    def transfer(self) -> None:
        if self.peer.rank:
            self.recv.clear_to_send(self.peer.memory.address, self.peer.nbytes)
            self.wait(lambda: self.recv.peek() is not None)
            self.recv.consume()
        else:
            self.send.post_address(self.peer.memory.address, self.peer.nbytes)
            self.wait(lambda: self.send.released == self.send.posted)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if not self.news.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("no message came")
            self.news.clear()

    def close(self) -> None:
        self.peer.swap(b"")
        self.transport.close()
        self.proxy.close()


def measure(peer: Peer, way: Plain | Miraccl) -> tuple[float, float]:
    """Return wall time and processor time of this process, in seconds."""
    peer.swap(b"")
    start, cpu = time.perf_counter(), time.process_time()
    way.transfer()
    peer.swap(b"")
    return time.perf_counter() - start, time.process_time() - cpu


def run(
    rank: int, control: socket.socket, args: argparse.Namespace
) -> dict[str, list[tuple[float, float]]]:
    """Return wall time and processor time of both processes by variant and round, in seconds."""
    peer = Peer(rank, control, args)
    ways: dict[str, Plain | Miraccl] = {"plain": Plain(peer), "miraccl": Miraccl(peer)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for round_ in range(args.rounds + 2):  # the first two warm up
        for name, way in ways.items():
            taken = measure(peer, way)
            if round_ >= 2:
                times[name].append(taken)
    if rank and bytes(peer.buffer) != b"\x01" * args.bytes:
        raise AssertionError("wrong bytes arrived")
    for way in ways.values():
        way.close()
    others = json.loads(peer.swap(json.dumps(times).encode()))
    return {
        name: [(wall, cpu + other[1]) for (wall, cpu), other in zip(times[name], others[name])]
        for name in times
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=params.parse_size, default=64 << 20)
    parser.add_argument("--streams", type=int, default=SocketOptions.from_environment().nstreams)
    parser.add_argument(
        "--buffer",
        type=params.parse_size,
        default=params.SOCKET_BUFFER.read(),
        help="kernel buffers, 0: the kernel's tuning",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            here.close()
            run(1, there, args)
            status = 0
        finally:
            os._exit(status)
    there.close()
    times = run(0, here, args)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("the receiver failed")
    report(args, times)


def report(args: argparse.Namespace, times: dict[str, list[tuple[float, float]]]) -> None:
    rows = {}
    for name, samples in times.items():
        walls = sorted(wall for wall, _ in samples)
        rows[name] = {
            "best_GBps": args.bytes / walls[0] / 1e9,
            "median_GBps": args.bytes / statistics.median(walls) / 1e9,
            "cpu_ms": statistics.median(cpu for _, cpu in samples) * 1e3,
        }
    ratios = [p[0] / m[0] for p, m in zip(times["plain"], times["miraccl"])]
    rows["ratio"] = {
        "best": rows["miraccl"]["best_GBps"] / rows["plain"]["best_GBps"],
        "median": rows["miraccl"]["median_GBps"] / rows["plain"]["median_GBps"],
        "median_of_pairs": statistics.median(ratios),
        "cpu": rows["plain"]["cpu_ms"] / rows["miraccl"]["cpu_ms"],
    }
    if args.json:
        print(
            json.dumps(
                {"bytes": args.bytes, "streams": args.streams, "buffer": args.buffer, **rows}
            )
        )
        return
    print(
        f"{args.bytes} bytes one way, {args.streams} streams, kernel buffers"
        f" {args.buffer or 'automatic'}, {args.rounds} rounds"
    )
    for name, row in rows.items():
        print(f"  {name:8}", "  ".join(f"{key} {value:.2f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
