"""One process of a comparison of transfer engines: miraccl, NIXL or Mooncake behind JSON lines.

It is run as a file and imports nothing of this package unless the engine is miraccl, so it also
runs in an environment that has only the peers and NumPy. ``bench/transfers.py`` and ``miraccl perf
write --compare`` use it.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
import time  # noqa: TID251  # the file runs without miraccl
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the peer must not import the files beside this one
    _here = Path(__file__).resolve().parent
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != _here]

import numpy as np

SECRET = "bench"


def memory_mib() -> float:
    """Return the resident memory of this process in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def pattern(nbytes: int) -> Any:
    """Return numbered bytes of a period that is no power of two."""
    return np.resize(np.arange(253, dtype=np.uint8), nbytes)


class Miraccl:
    """Engine ``miraccl``; ``window``: the target's memory is window memory."""

    def __init__(self, name: str, window: bool) -> None:
        from miraccl import Agent

        self.before = memory_mib()
        start = time.perf_counter()
        self.agent = Agent(name, secret=SECRET, timeout=30)
        self.start_ms = (time.perf_counter() - start) * 1e3
        self.window = window

    def offer(self, nbytes: int) -> Any:
        self.memory = self.agent.empty(nbytes) if self.window else np.zeros(nbytes, np.uint8)
        self.memory[:] = 0
        registration = self.agent.register(self.memory)
        return {"blob": registration.advertise().hex(), "address": self.agent.address}

    def connect(self, offer: Any, nbytes: int) -> float:
        from miraccl.p2p.descriptors import RemoteMemory

        self.local = np.zeros(nbytes, np.uint8)
        self.local[:] = pattern(nbytes)
        start = time.perf_counter()
        self.peer = self.agent.connect(offer["address"])
        self.remote = RemoteMemory.decode(bytes.fromhex(offer["blob"]))
        self.peer.write(self.local[:64], self._part(64, 64)).wait()
        return (time.perf_counter() - start) * 1e3

    def _part(self, nbytes: int, block: int) -> Any:
        from dataclasses import replace

        return replace(self.remote, nbytes=nbytes, block_nbytes=block)

    def prepare(self, kind: str, nbytes: int, blocks: list[int] | None) -> Any:
        if blocks is None:
            prepared = self.peer.prepare(kind, self.local[:nbytes], self._part(nbytes, nbytes))
        else:
            total = nbytes * len(blocks)
            prepared = self.peer.prepare(
                kind,
                self.local[:total],
                self._part(total, nbytes),
                local_blocks=np.arange(len(blocks), dtype=np.int32),
                remote_blocks=np.array(blocks, np.int32),
            )
        start = prepared.start
        return lambda: start().wait()

    def ping(self, seconds: float) -> float:
        """Return us of a notification round trip with an agent in ``pong``."""
        peer, agent = self.peer, self.agent
        peer.notify(agent.address.encode())
        agent.wait_notification(10)
        best = float("inf")
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(20):
                peer.notify(b"ping")
                agent.wait_notification(10)
            best = min(best, (time.perf_counter() - start) / 20)
        peer.notify(b"end")
        return best * 1e6

    def metadata(self) -> str:
        """Return what ``pong`` of the target needs: nothing."""
        return ""

    def pong(self, metadata: str) -> None:
        first = self.agent.wait_notification(30)
        assert first is not None
        peer = self.agent.connect(first.data.decode())
        peer.notify(b"ready")
        while True:
            found = self.agent.wait_notification(30)
            if found is None or found.data == b"end":
                return
            peer.notify(found.data)

    def progress(self) -> None:
        """Nothing: the agent needs no polling."""

    polls = False


def nixl_api() -> Any:
    """Return NIXL's module, whose name depends on the wheel. Raises ``ImportError``."""
    for name in ("nixl_cu12._api", "nixl_cu13._api", "nixl._api"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError("neither nixl_cu12, nixl_cu13 nor nixl is installed")


class Nixl:
    """Engine ``nixl``; the transports of UCX are in UCX_TLS."""

    polls = True

    def __init__(self, name: str, window: bool) -> None:
        api = nixl_api()
        nixl_agent, nixl_agent_config = api.nixl_agent, api.nixl_agent_config
        self.before = memory_mib()
        start = time.perf_counter()
        installed = os.environ.get("NIXL_AS_INSTALLED") == "1"
        if installed:
            self.agent = nixl_agent(name, nixl_agent_config())
        else:
            self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            self.agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
        self.start_ms = (time.perf_counter() - start) * 1e3
        self.name = name

    def offer(self, nbytes: int) -> Any:
        self.memory = np.zeros(nbytes, np.uint8)
        self.memory[:] = 0
        address = self.memory.ctypes.data
        self.agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        return {
            "meta": self.agent.get_agent_metadata().hex(),
            "address": address,
            "name": self.name,
        }

    def connect(self, offer: Any, nbytes: int) -> float:
        self.local = np.zeros(nbytes, np.uint8)
        self.local[:] = pattern(nbytes)
        start = time.perf_counter()
        self.agent.register_memory([(self.local.ctypes.data, nbytes, 0, "")], "DRAM")
        self.remote_name = self.agent.add_remote_agent(bytes.fromhex(offer["meta"]))
        if isinstance(self.remote_name, bytes):
            self.remote_name = self.remote_name.decode()
        self.remote = offer["address"]
        self.prepare("write", 64, None)()
        return (time.perf_counter() - start) * 1e3

    def prepare(self, kind: str, nbytes: int, blocks: list[int] | None) -> Any:
        chosen = [0] if blocks is None else blocks
        base = self.local.ctypes.data
        here = self.agent.get_xfer_descs(
            [(base + i * nbytes, nbytes, 0) for i in range(len(chosen))], "DRAM"
        )
        there = self.agent.get_xfer_descs(
            [(self.remote + b * nbytes, nbytes, 0) for b in chosen], "DRAM"
        )
        handle = self.agent.initialize_xfer(kind.upper(), here, there, self.remote_name)
        transfer, state = self.agent.transfer, self.agent.check_xfer_state

        def run() -> None:
            status = transfer(handle)
            while status != "DONE":
                if status == "ERR":
                    raise RuntimeError("NIXL reports ERR")
                status = state(handle)

        return run

    def progress(self) -> None:
        self.agent.get_new_notifs()

    def metadata(self) -> str:
        return str(self.agent.get_agent_metadata().hex())

    def _next(self) -> bytes:
        """Return the next notification. Raises ``RuntimeError`` after 5 s without one."""
        end = time.perf_counter() + 5
        while time.perf_counter() < end:
            for _ in range(1000):
                for found in self.agent.get_new_notifs().values():
                    return bytes(found[0])
        raise RuntimeError("no notification for 5 s")

    def ping(self, seconds: float) -> float:
        send, name = self.agent.send_notif, self.remote_name
        send(name, b"first")
        self._next()
        best, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(20):
                send(name, b"ping")
                self._next()
            best = min(best, (time.perf_counter() - start) / 20)
        send(name, b"end")
        return best * 1e6

    def pong(self, metadata: str) -> None:
        name = self.agent.add_remote_agent(bytes.fromhex(metadata))
        if isinstance(name, bytes):
            name = name.decode()
        while (found := self._next()) != b"end":
            self.agent.send_notif(name, found)


class Mooncake:
    """Engine ``mooncake``, protocol tcp."""

    polls = False

    def __init__(self, name: str, window: bool) -> None:
        mooncake = importlib.import_module("mooncake.engine")

        self.before = memory_mib()
        start = time.perf_counter()
        self.engine = mooncake.TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake cannot be initialized")
        self.start_ms = (time.perf_counter() - start) * 1e3

    def offer(self, nbytes: int) -> Any:
        self.memory = np.zeros(nbytes, np.uint8)
        self.memory[:] = 0
        self.engine.register_memory(self.memory.ctypes.data, nbytes)
        return {
            "address": self.memory.ctypes.data,
            "name": f"127.0.0.1:{self.engine.get_rpc_port()}",
        }

    def connect(self, offer: Any, nbytes: int) -> float:
        self.local = np.zeros(nbytes, np.uint8)
        self.local[:] = pattern(nbytes)
        start = time.perf_counter()
        self.engine.register_memory(self.local.ctypes.data, nbytes)
        self.remote, self.remote_name = offer["address"], offer["name"]
        self.prepare("write", 64, None)()
        return (time.perf_counter() - start) * 1e3

    def prepare(self, kind: str, nbytes: int, blocks: list[int] | None) -> Any:
        base, name = self.local.ctypes.data, self.remote_name
        if blocks is None:
            call = getattr(self.engine, f"transfer_sync_{kind}")
            arguments: tuple[Any, ...] = (name, base, self.remote, nbytes)
        else:
            call = getattr(self.engine, f"batch_transfer_sync_{kind}")
            arguments = (
                name,
                [base + i * nbytes for i in range(len(blocks))],
                [self.remote + b * nbytes for b in blocks],
                [nbytes] * len(blocks),
            )

        def run() -> None:
            if call(*arguments) != 0:
                raise RuntimeError(f"Mooncake's transfer_sync_{kind} failed")

        return run

    def progress(self) -> None:
        """Nothing: it has threads."""

    def metadata(self) -> str:
        return ""

    def ping(self, seconds: float) -> float:
        raise NotImplementedError

    def pong(self, metadata: str) -> None:
        raise NotImplementedError


def measure(run: Any, seconds: float) -> float:
    """Return us per call: the best of many short batches.

    A batch takes some 300 us, less than a time slice, so that on a busy machine some batches run
    undisturbed.
    """
    run()
    start = time.perf_counter()
    run()
    once = max(time.perf_counter() - start, 1e-7)
    count, best = max(1, min(500, int(300e-6 / once))), float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(count):
            run()
        passed = (time.perf_counter() - start) / count
        if passed < best:
            best = passed
            count = max(1, min(500, int(300e-6 / passed)))
    return best * 1e6


def main() -> None:
    kind, name, window = sys.argv[1:4]
    engine: Any = {"miraccl": Miraccl, "nixl": Nixl, "mooncake": Mooncake}[kind](
        name, window == "window"
    )
    # Polling engines are polled while the other side measures; the rest sleep.
    stdin = sys.stdin.buffer
    while True:
        if engine.polls:
            while not select.select([stdin], [], [], 0)[0]:
                for _ in range(200):
                    engine.progress()
        line = stdin.readline()
        if not line:
            break
        command, arguments = json.loads(line)
        try:
            value = handle(engine, command, arguments)
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            continue
        if command != "pong":
            print(json.dumps({"value": value}), flush=True)
    os._exit(0)


def handle(engine: Any, command: str, arguments: Any) -> Any:
    if command == "offer":
        return engine.offer(*arguments)
    if command == "connect":
        return engine.connect(*arguments)
    if command == "start_ms":
        return engine.start_ms
    if command == "memory":
        return memory_mib() - engine.before
    if command == "pong":
        return engine.pong(*arguments)
    if command == "metadata":
        return engine.metadata()
    if command == "ping":
        return engine.ping(*arguments)
    if command == "cpu":
        start, used = time.perf_counter(), time.process_time()
        time.sleep(arguments[0])
        return 100 * (time.process_time() - used) / (time.perf_counter() - start)
    if command == "check":  # block i of the local memory is at block arguments[1][i] here
        nbytes, blocks = arguments
        chosen = [0] if blocks is None else blocks
        expected = pattern(nbytes * len(chosen))
        for i in range(0, len(chosen), max(1, len(chosen) // 8)):
            part = engine.memory[chosen[i] * nbytes : (chosen[i] + 1) * nbytes]
            if (part != expected[i * nbytes : (i + 1) * nbytes]).any():
                return False
        return True
    if command == "measure":
        kind, nbytes, blocks, seconds = arguments
        return measure(engine.prepare(kind, nbytes, blocks), seconds)
    raise ValueError(command)


if __name__ == "__main__":
    main()
