"""Agent in a process of its own, driven by JSON lines on standard input: see ``tests.p2p.kit``."""

from __future__ import annotations

import json
import os
import sys
import threading
import zlib
from typing import Any

import numpy as np

import miraccl
from miraccl.p2p.registration import Registration


class Worker:
    """Commands of the test process; each method is one."""

    def __init__(self, name: str) -> None:
        self.agent = miraccl.Agent(name, secret="test", timeout=10)
        self.arrays: dict[str, Any] = {}
        self.registrations: dict[str, Registration] = {}
        self.peers: dict[str, Any] = {}
        self.flood: threading.Thread | None = None
        self.flood_result: dict[str, Any] = {}
        self.flood_done = 0

    def hello(self) -> Any:
        return {"pid": os.getpid(), "address": self.agent.address}

    def make(self, name: str, shape: list[int], dtype: str, window: bool) -> None:
        array = self.agent.empty(tuple(shape), dtype) if window else np.zeros(shape, dtype)
        self.arrays[name] = array

    def register(self, name: str, access: str = "rw", block_nbytes: int = 0) -> str:
        self.registrations[name] = self.agent.register(
            self.arrays[name], access, block_nbytes=block_nbytes
        )
        return self.registrations[name].advertise().hex()

    def deregister(self, name: str, timeout: float = 10) -> None:
        self.registrations[name].deregister(timeout)

    def fill(self, name: str, value: int) -> None:
        self.arrays[name].view(np.uint8)[...] = value

    def count(self) -> None:
        """Number all bytes of all arrays."""
        for array in self.arrays.values():
            flat = array.reshape(-1).view(np.uint8)
            flat[:] = np.arange(flat.size) % 251

    def bytes(self, name: str) -> str:
        return str(self.arrays[name].tobytes().hex())

    def checksum(self, name: str) -> int:
        return zlib.crc32(self.arrays[name].tobytes())

    def notification(self, timeout: float = 10) -> Any:
        found = self.agent.wait_notification(timeout)
        if found is None:
            return None
        error = found.error
        return {
            "peer": found.peer,
            "tag": found.tag,
            "data": found.data.hex(),
            "error": error and [type(error).__name__, str(error), error.block, error.reason],
        }

    def connect(self, address: str) -> str:
        self.peers[address] = self.agent.connect(address)
        return str(self.peers[address].method)

    def notify(self, address: str, data: str) -> None:
        self.peers[address].notify(bytes.fromhex(data))

    def start_echo(self, address: str, count: int) -> None:
        """Return each of ``count`` notifications to an agent."""

        def run() -> None:
            peer = self.agent.connect(address)
            peer.notify(b"ready")
            for _ in range(count):
                found = self.agent.wait_notification(10)
                assert found is not None
                peer.notify(found.data)

        threading.Thread(target=run, daemon=True).start()

    def start_flood(self, address: str, blob: str, name: str) -> None:
        """Write an array again and again until a write fails."""
        peer, remote = self.peers[address], bytes.fromhex(blob)

        def run() -> None:
            prepared = peer.prepare("write", self.arrays[name], remote)
            try:
                while True:
                    prepared.start().wait()
                    self.flood_done += 1
            except miraccl.MiracclError as error:
                self.flood_result = {"done": self.flood_done, "error": type(error).__name__}

        self.flood_done = 0
        self.flood = threading.Thread(target=run)
        self.flood.start()

    def flood_count(self) -> int:
        return self.flood_done

    def end_flood(self) -> Any:
        assert self.flood is not None
        self.flood.join(10)
        return self.flood_result

    def close(self) -> None:
        self.agent.close()


def main() -> None:
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": getattr(worker, name)(**arguments)}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error)]}
        print(json.dumps(answer), flush=True)
        if name == "close":
            break


if __name__ == "__main__":
    main()
