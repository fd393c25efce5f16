"""The datagram engine over unreliable queue pairs instead of UDP sockets.

Flows, timers and the loop are those of ``proxy.datagram_engine``; packets are posted and polled by
``proxy.kernels.packet_queues``. A queue pair whose work requests fail is reset and used again;
until then its packets count as lost, and the flows use other paths.
"""

from __future__ import annotations

import select
import struct
from collections.abc import Sequence

from miraccl import clock, native, trace
from miraccl.errors import SystemFailure
from miraccl.native import verbs_abi as abi
from miraccl.native.verbs_abi import VerbsLibrary
from miraccl.proxy.compiled_thread import has_one_core
from miraccl.proxy.datagram_engine import DatagramEngine
from miraccl.proxy.flow_memory import FlowMemory
from miraccl.proxy.kernels import flow_layout, link_layout, queue_layout
from miraccl.transport.base import DatagramConnection, Driving, OnLost, Wake
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.transport.verbs_datagram import VerbsDatagramConnection
from miraccl.transport.verbs_packets import SEND_SLOTS, PacketDevice, PacketPair

log = trace.logger("verbs")

#: Time in which a failed queue pair completes what was posted.
FLUSH_S = 0.005


class VerbsDatagramEngine(DatagramEngine):
    """Moves messages for one rank over UD or UC; see ``ProgressEngine``.

    Args:
        library: Functions of libibverbs.
    """

    transport = "verbs"
    #: With more cores ``drive`` was not measured on devices that are not simulated.
    can_be_driven = False

    def __init__(
        self,
        *,
        rank: int,
        library: VerbsLibrary,
        wake: Wake,
        on_lost: OnLost,
        control: int = 0,
    ) -> None:
        self._verbs = library
        self._devices: Sequence[PacketDevice] = ()
        self._queues = PrivateMemory(queue_layout.table_bytes(queue_layout.MAX_DEVICES))
        self._records: dict[PacketPair, PrivateMemory] = {}
        super().__init__(rank=rank, wake=wake, on_lost=on_lost, control=control)

    def _prepare(self) -> None:
        super()._prepare()
        self._post_receives = self._function("post_receives")
        self._drain_queues = self._function("drain_queues")

    def driver(self, *, overlap: bool) -> Driving:
        """Return how a waiting executor advances the flows; with a single core it sleeps there."""
        if not has_one_core():
            return super().driver(overlap=overlap)
        self._share_core([each.device.channel_fd for each in self._devices])
        function = self._library.address(native.PREFIX + "drive")
        return Driving(function, self._memory.address, sleeps=True)

    def failed_pairs(self) -> list[str]:
        """Return the names of queue pairs that have failed and could not be used again."""
        return [
            pair.name
            for pair, record in list(self._records.items())
            if _word(record.address + queue_layout.PAIR_STATUS)
        ]

    def counters(self) -> dict[str, int]:
        """Return counts so far: rounds of the thread and of executors, calls that posted packets,
        packets.
        """
        records = [record.address for record in self._records.values()]
        return {
            "rounds": self.rounds,
            "driven": self._get(link_layout.ENGINE_DRIVEN),
            "posts": sum(_word(each + queue_layout.PAIR_POSTS) for each in records),
            "packets": sum(_word(each + queue_layout.PAIR_SENT) for each in records),
        }

    # --- the thread

    def _open_port(self, connection: DatagramConnection) -> None:
        super()._open_port(connection)
        assert isinstance(connection, VerbsDatagramConnection)
        if not self._devices:
            self._devices = connection.devices
            for index, device in enumerate(self._devices):
                self._add_device(index, device)
            _store(self._queues.address + queue_layout.TABLE_COUNT, len(self._devices))
        for pair in connection.pairs:
            if pair not in self._records:
                self._records[pair] = record = PrivateMemory(queue_layout.PAIR_BYTES)
                self._write_pair(pair, record.address)
                self._start(pair, record.address)
        self._store_port(flow_layout.PORT_QUEUES, self._queues.address)

    def _device_record(self, index: int) -> int:
        return self._queues.address + queue_layout.TABLE_FIRST + index * queue_layout.DEVICE_BYTES

    def _add_device(self, index: int, made: PacketDevice) -> None:
        record, device = self._device_record(index), made.device
        for offset, value in (
            (queue_layout.DEVICE_SEND_CQ, made.send_queue),
            (queue_layout.DEVICE_RECV_CQ, made.recv_queue),
            (queue_layout.DEVICE_CHANNEL, device.channel),
            (queue_layout.DEVICE_POLL, device.operations[abi.OP_POLL_CQ]),
            (queue_layout.DEVICE_NOTIFY, device.operations[abi.OP_REQ_NOTIFY_CQ]),
            (queue_layout.DEVICE_GET_EVENT, self._verbs.address("ibv_get_cq_event")),
            (queue_layout.DEVICE_ACK_EVENTS, self._verbs.address("ibv_ack_cq_events")),
        ):
            _store(record + offset, value)
        self._watch(device.channel_fd, select.EPOLLIN, flow_layout.QUEUE_DATA + index)

    def _write_pair(self, pair: PacketPair, record: int) -> None:
        operations = pair.on.device.operations
        for offset, value in (
            (queue_layout.PAIR_QP, pair.pointer),
            (queue_layout.PAIR_DEVICE, self._device_record(self._devices.index(pair.on))),
            (queue_layout.PAIR_POST_SEND, operations[abi.OP_POST_SEND]),
            (queue_layout.PAIR_POST_RECV, operations[abi.OP_POST_RECV]),
            (queue_layout.PAIR_KEY, pair.key),
            (queue_layout.PAIR_SLOT_BYTES, pair.slot_bytes),
            (queue_layout.PAIR_SEND_BUFFER, pair.send_buffer),
            (queue_layout.PAIR_SEND_SLOTS, SEND_SLOTS),
            (queue_layout.PAIR_RECV_BUFFER, pair.recv_buffer),
            (queue_layout.PAIR_RECV_BYTES, pair.recv_bytes),
            (queue_layout.PAIR_HEADER, pair.header_bytes),
        ):
            _store(record + offset, value)

    def _start(self, pair: PacketPair, record: int) -> None:
        """Post all receives of a queue pair in INIT, and make it ready."""
        code = self._post_receives(record, pair.receives)
        if code:
            raise SystemFailure(
                f"cannot post receives on {pair.name}: errno {code}", rank=self.rank
            )
        pair.to_ready()

    def _write_address(self, flow: FlowMemory, connection: DatagramConnection, index: int) -> None:
        assert isinstance(connection, VerbsDatagramConnection)
        flow.write_path(index, flow_layout.PATH_ADDRESS, connection.addresses[index])
        flow.store_path(index, flow_layout.PATH_ADDRESS_BYTES, queue_layout.ADDRESS_BYTES)
        record = self._records[connection.pairs[index]].address
        flow.store_path(index, flow_layout.PATH_PAIR, record)

    def _local_name(self, connection: DatagramConnection, index: int) -> str:
        assert isinstance(connection, VerbsDatagramConnection)
        return connection.pairs[index].name

    def _service(self) -> None:
        """Reset queue pairs that have failed."""
        failed = [
            (pair, record.address)
            for pair, record in self._records.items()
            if _word(record.address + queue_layout.PAIR_STATUS)
        ]
        if not failed:
            return
        for pair, record in failed:
            status = _word(record + queue_layout.PAIR_STATUS)
            log.warning("queue pair %s failed with status %d", pair.name, status)
            self._revive(pair, record)
        for index in range(len(self._devices)):
            _store(self._device_record(index) + queue_layout.DEVICE_FAILED, 0)

    def _revive(self, pair: PacketPair, record: int) -> None:
        try:
            pair.to_error()
            clock.sleep(FLUSH_S)
            self._drain_queues(self._port.address, 0)
            pair.to_reset()
            for offset in (queue_layout.PAIR_SENT, queue_layout.PAIR_DONE):
                _store(record + offset, 0)
            pair.to_init()
            _store(record + queue_layout.PAIR_STATUS, 0)
            self._start(pair, record)
        except SystemFailure as error:
            _store(record + queue_layout.PAIR_STATUS, abi.WC_WR_FLUSH_ERR)
            log.warning("queue pair %s stays unused: %s", pair.name, error)


def _word(address: int) -> int:
    return int(struct.unpack("<q", memory_at(address, 8))[0])


def _store(address: int, value: int) -> None:
    memory_at(address, 8)[:] = struct.pack("<q", value)
