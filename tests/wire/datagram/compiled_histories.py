"""Random histories of a network between two compiled flows, a thousand times as many as
``histories`` runs of the specification in the same time.

    python -m tests.wire.datagram.compiled_histories --count 1000000 --processes 1
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

from miraccl import native
from miraccl.native.crypto import AesGcm
from miraccl.proxy.datagram_engine import write_crypto
from miraccl.proxy.flow_memory import FlowMemory
from miraccl.proxy.kernels import flow_layout, link_layout
from miraccl.proxy.link_memory import write_link
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.wire.datagram.control import CONTROLLERS
from miraccl.wire.datagram.flow_records import FlowConfig
from miraccl.wire.datagram.packets import MAX_PATHS
from miraccl.wire.proxy_records import LinkConfig
from tests.wire.datagram import history_layout as layout
from tests.wire.datagram.campaign import run_campaign

KERNEL = "tests.wire.datagram.history_kernel"
CHUNK = 2000
MTU = 1472


class CompiledWorld:
    """Two compiled flows and the network between them."""

    def __init__(self) -> None:
        self._library = native.library(KERNEL)
        self._kept: list[Any] = []
        self.address = self._allocate(layout.WORLD_BYTES)
        keys = [AesGcm(bytes(16)) for _ in range(4)]
        self._kept += keys
        for offset, size in (
            (layout.HEAP, 16 * layout.NEVENTS),
            (layout.FREE, 8 * layout.NPACKETS),
            (layout.BUFFERS, layout.PACKET_BYTES * layout.NPACKETS),
        ):
            self._store(self.address + offset, self._allocate(size))
        self._store(self.address + layout.CONTROLLERS, len(CONTROLLERS))
        self._store(self.address + layout.PROTECTION, -1)
        for number in (0, 1):
            side = self.address + layout.SIDES + number * layout.SIDE_BYTES
            self._store(side + layout.SEAL, keys[2 * number].prepared(sealing=True))
            self._store(side + layout.OPEN, keys[2 * number + 1].prepared(sealing=False))
            self._store(side + layout.AEGIS_KEY, self._allocate(16))
            self._prepare(side, number)

    def _prepare(self, side: int, number: int) -> None:
        """Allocate and fill the memory of a side."""
        engine, port = self._allocate(link_layout.ENGINE_BYTES), self._port()
        link, template = self._link(engine), self._link(engine)
        flows = self._allocate(8 * len(CONTROLLERS))
        for i, name in enumerate(sorted(CONTROLLERS)):
            config = FlowConfig(
                connection=1 + number,
                peer_connection=2 - number,
                npaths=layout.MAX_NPATHS,
                nstreams=layout.NSTREAMS,
                mtu=MTU,
                congestion=name,
            )
            memory = FlowMemory(config, link, self._library.address)
            memory.store(flow_layout.FLOW_PORT, port)
            self._kept.append(memory)
            self._store(flows + 8 * i, memory.address)
        flow = self._allocate(flow_layout.flow_bytes(layout.MAX_NPATHS, layout.NSTREAMS))
        for each in (link, template):
            self._store(each + link_layout.LINK_FLOW, flow)
        self._store(engine + link_layout.ENGINE_LINKS, self._words(link))
        self._store(engine + link_layout.ENGINE_NLINKS, 1)
        # connection number -> flow, found at its own place of 16 entries
        table = self._allocate(16 * 16)
        memory_at(table + 16 * (1 + number), 16)[:] = struct.pack("<2q", 1 + number, flow)
        self._store(port + flow_layout.PORT_HASH, table)
        self._store(port + flow_layout.PORT_HASH_MASK, 15)
        for offset, value in (
            (layout.FLOW, flow),
            (layout.LINK, link),
            (layout.PORT, port),
            (layout.ENGINE, engine),
            (layout.LOG, self._allocate(1 << 22)),
            (layout.LANDING, self._landing()),
            (layout.SOURCE, self._allocate(layout.FRAME_STRIDE * layout.MAX_FRAMES)),
            (layout.LINK_TEMPLATE, template),
            (layout.FLOW_TEMPLATES, flows),
        ):
            self._store(side + offset, value)

    def _link(self, engine: int) -> int:
        link = self._allocate(link_layout.link_bytes(layout.NSTREAMS))
        config = LinkConfig(nstreams=layout.NSTREAMS, send_slot_bytes=4096, recv_slot_bytes=4096)
        write_link(link, config)
        self._store(link + link_layout.LINK_ENGINE, engine)
        self._store(link + link_layout.LINK_SEND_TAIL, self._allocate(4096))
        return link

    def _port(self) -> int:
        port = self._allocate(flow_layout.PORT_BYTES)
        for offset, size in (
            (flow_layout.PORT_OUT, flow_layout.OUT_BYTES),
            (flow_layout.PORT_VECTORS, 16 * flow_layout.VECTORS_PER_PATH * MAX_PATHS),
            (flow_layout.PORT_SCRATCH, flow_layout.SCRATCH_PER_PATH * MAX_PATHS),
        ):
            self._store(port + offset, self._allocate(size))
        write_crypto(port)
        return port

    def _landing(self) -> int:
        """Allocate memory for incoming frames, with guard bytes around each."""
        size = flow_layout.LANDING_BYTES * layout.NSTREAMS + 2 * layout.GUARD_BYTES
        address = self._allocate(size)
        memory_at(address, size)[:] = b"\xa5" * size
        return address + layout.GUARD_BYTES

    def _allocate(self, size: int) -> int:
        memory = PrivateMemory(size)
        self._kept.append(memory)
        return memory.address

    def _words(self, *values: int) -> int:
        address = self._allocate(8 * len(values))
        memory_at(address, 8 * len(values))[:] = struct.pack(f"<{len(values)}q", *values)
        return address

    @staticmethod
    def _store(address: int, value: int) -> None:
        memory_at(address, 8)[:] = struct.pack("<q", value)

    def word(self, offset: int) -> int:
        """Return a word of the world."""
        return int(struct.unpack("<q", memory_at(self.address + offset, 8))[0])

    def run(
        self, first: int, count: int, *, protection: int = -1
    ) -> tuple[dict[str, int], list[tuple[int, str]]]:
        """Run histories by seed up to the first violation.

        Args:
            first, count: Seeds.
            protection: Value of ``flow_layout.FLOW_PROTECTION`` in all of them, -1 to draw it.

        Returns:
            Counts, and violations as (seed, text).
        """
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)
        run = kind(self._library.address(native.PREFIX + "run_histories"))
        for offset in layout.COUNTS.values():
            self._store(self.address + offset, 0)
        self._store(self.address + layout.FAULT, 0)
        self._store(self.address + layout.PROTECTION, protection)
        seed = int(run(self.address, first, count))
        counts = {name: self.word(offset) for name, offset in layout.COUNTS.items()}
        if seed < 0:
            return counts, []
        text = layout.VIOLATIONS[self.word(layout.FAULT)]
        return counts, [(seed, f"{text} ({self.word(layout.FAULT_ARGUMENT)})")]


@functools.cache
def world() -> CompiledWorld:
    """Return the world of this process."""
    return CompiledWorld()


def run_chunk(first: int) -> dict[str, Any]:
    """Run ``CHUNK`` histories; findings are returned with their seeds."""
    counts, findings = world().run(first, CHUNK)
    if findings:
        world.cache_clear()  # its memory is as the violation left it
    return {**counts, "findings": findings}


def main() -> None:
    run_campaign(
        run_chunk,
        about=__doc__.split("\n\n")[0],
        unit="histories",
        chunk=CHUNK,
        count=1_000_000,
        step=CHUNK,
    )


if __name__ == "__main__":
    main()
