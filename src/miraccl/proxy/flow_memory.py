"""Memory of compiled flows: writes a ``FlowConfig`` as the words of ``kernels.flow_layout``."""

from __future__ import annotations

import struct
from collections.abc import Callable

from miraccl.native import PREFIX
from miraccl.proxy.kernels import flow_layout as layout
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.wire.datagram.control import controller
from miraccl.wire.datagram.flow_records import FlowConfig
from miraccl.wire.datagram.path import MTU_PROBE_FIRST_NS, PACKET_THRESHOLD, PROBE_FIRST_NS
from miraccl.wire.datagram.rtt import INITIAL_NS

_CONTROL_FUNCTIONS = {
    layout.PATH_ACKED_FN: "acked",
    layout.PATH_LOST_FN: "lost",
    layout.PATH_TIMEOUT_FN: "timeout",
    layout.PATH_UNDO_FN: "undo",
}


class FlowMemory:
    """A compiled flow.

    Args:
        link: Address of the link whose frames it moves.
        symbol: Returns the address of a function of the kernel.
    """

    def __init__(self, config: FlowConfig, link: int, symbol: Callable[[str], int]) -> None:
        self.config = config
        self._memory = PrivateMemory(layout.flow_bytes(config.npaths, config.nstreams))
        self.address = self._memory.address
        self._paths = self.address + layout.FLOW_BYTES
        self._streams = self._paths + layout.PATH_BYTES * config.npaths
        for offset, value in (
            (layout.FLOW_LINK, link),
            (layout.FLOW_NPATHS, config.npaths),
            (layout.FLOW_NSTREAMS, config.nstreams),
            (layout.FLOW_CONNECTION, config.connection),
            (layout.FLOW_PEER_CONNECTION, config.peer_connection),
            (layout.FLOW_GRANTED, -1 if config.granted is None else config.granted),
            (layout.FLOW_PATHS, self._paths),
            (layout.FLOW_STREAMS, self._streams),
        ):
            self.store(offset, value)
        for index in range(config.nstreams):
            stream = layout.FSTREAM_BYTES * index + self._streams - self.address
            self.store(stream + layout.FSTREAM_LENGTH, -1)
        for index in range(config.npaths):
            self._write_path(index, symbol)

    def _write_path(self, index: int, symbol: Callable[[str], int]) -> None:
        control = controller(self.config.congestion)
        words = {
            layout.PATH_INDEX: index,
            layout.PATH_MTU: self.config.mtu,
            layout.PATH_FULL_MTU: self.config.mtu,
            layout.PATH_MTU_PROBE_INTERVAL: MTU_PROBE_FIRST_NS,
            layout.PATH_MAX_IN_FLIGHT: self.config.max_in_flight,
            layout.PATH_SMOOTHED: INITIAL_NS,
            layout.PATH_VARIATION: INITIAL_NS // 2,
            layout.PATH_LARGEST_ACKED: -1,
            layout.PATH_LARGEST: -1,
            layout.PATH_THRESHOLD: PACKET_THRESHOLD,
            layout.PATH_PROBE_INTERVAL: PROBE_FIRST_NS,
        }
        for offset, name in _CONTROL_FUNCTIONS.items():
            words[offset] = symbol(f"{PREFIX}{control.name}_{name}")
        for slot, value in enumerate(control.start(self.config.mtu)):
            words[layout.PATH_CONTROL + 8 * slot] = value
        for offset, value in words.items():
            self.store_path(index, offset, value)

    def validate_paths(self, now: int) -> None:
        """Carry probes only on each path until one of them is acknowledged."""
        for index in range(self.config.npaths):
            self.store_path(index, layout.PATH_STATE, layout.PROBING)
            self.store_path(index, layout.PATH_PROBES, 1)
            self.store_path(index, layout.PATH_PROBE_AT, now + PROBE_FIRST_NS)

    def path(self, index: int, offset: int) -> int:
        """Return a word of a path."""
        return self.word(self._paths - self.address + layout.PATH_BYTES * index + offset)

    def store_path(self, index: int, offset: int, value: int) -> None:
        """Set a word of a path."""
        self.store(self._paths - self.address + layout.PATH_BYTES * index + offset, value)

    def write_path(self, index: int, offset: int, data: bytes) -> None:
        """Write bytes into a path."""
        address = self._paths + layout.PATH_BYTES * index + offset
        memory_at(address, len(data))[:] = data

    def word(self, offset: int) -> int:
        """Return a word of the flow."""
        return int(struct.unpack("<q", memory_at(self.address + offset, 8))[0])

    def store(self, offset: int, value: int) -> None:
        """Set a word of the flow."""
        memory_at(self.address + offset, 8)[:] = struct.pack("<q", value)
