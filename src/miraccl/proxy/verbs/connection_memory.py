"""Access of Python to the compiled state of a verbs connection."""

from __future__ import annotations

from dataclasses import dataclass, field

from miraccl.proxy.compiled_thread import has_one_core
from miraccl.proxy.kernels import link_layout
from miraccl.proxy.link_memory import LinkMemory
from miraccl.proxy.verbs.kernels import verbs_layout as layout
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.transport.verbs import VerbsConnection
from miraccl.wire.proxy_records import LinkConfig, Loss, LossKind
from miraccl.wire.verbs.failover import Failover
from miraccl.wire.verbs.rows import ROW_BYTES

PAUSED, MOVING = 1, 2

#: Texts of faults by code, besides those of ``proxy.link_memory``.
FAULT_TEXTS = {
    layout.REGISTER_FAILED: "cannot register {0} bytes at {1:#x} for a transfer (is the limit of "
    "locked memory, ulimit -l, too low?)",
    layout.BAD_ROW: "it sent a row of kind {0} on stream {1} that cannot be true ({2})",
    layout.BAD_PLACEMENT: "it placed message {0} of {1} bytes where it may not (place {2})",
}


@dataclass(eq=False)
class EngineConnection:
    """Connection of an engine: its compiled state, and the recovery of its queue pairs.

    Attributes:
        index: Entry in the engine's table.
        texts: First error of each queue pair that failed.
        pending: Rows that found no room yet: (kind, 128 bytes).
        moves: Stream -> number of the last work request on the pair that it leaves.
        attempts: Queue pair -> times that it was connected again, as the peer had not answered.
    """

    conn: VerbsConnection
    index: int
    failover: Failover
    link: LinkMemory
    state: PrivateMemory
    arguments: PrivateMemory
    texts: dict[int, str] = field(default_factory=dict)
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    moves: dict[int, int] = field(default_factory=dict)
    stopped_at: dict[int, float] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    closed: bool = False

    @classmethod
    def build(
        cls, conn: VerbsConnection, *, index: int, engine: int, initiator: bool
    ) -> EngineConnection:
        """Allocate the state of a connection and write its constants."""
        count = len(conn.qps)
        slots = not conn.options.in_place_only
        config = LinkConfig(
            nstreams=count,
            send_slot_bytes=conn.peer_slot_bytes if slots else 0,
            recv_slot_bytes=conn.pair.recv.slot_bytes if slots else 0,
            segment_bytes=conn.options.piece_bytes,
            queue_bytes=1 << 23,
            # With one core and one port, messages on one queue pair are posted by one call.
            spread=len(conn.devices) > 1 or not has_one_core(),
            policy=conn.options.policy,
            control_streams=conn.options.control_pairs,
        )
        made = cls(
            conn=conn,
            index=index,
            failover=Failover(count, initiator=initiator),
            link=LinkMemory(config, engine=engine, peer=conn.peer, pair=conn.pair),
            state=PrivateMemory(layout.CONN_BYTES),
            arguments=PrivateMemory(4096),
        )
        made._write_connection(engine, count)
        return made

    def _write_connection(self, engine: int, count: int) -> None:
        conn, memory = self.conn, self.conn.memory
        assert conn.remote is not None
        inline = all(qp.inline for qp in conn.qps)
        for offset, value in (
            (layout.CONN_LINK, self.link.address),
            (layout.CONN_ENGINE, engine),
            (layout.CONN_NQPS, count),
            (layout.CONN_NSTREAMS, count),
            (layout.CONN_NCQS, len(conn.devices)),
            (layout.CONN_ROWS_IN, memory.rows_in),
            (layout.CONN_ROWS_OUT, memory.rows_out),
            (layout.CONN_PEER_ROWS, conn.remote.rows),
            (layout.CONN_PEER_SLOTS, conn.remote.slots),
            (layout.CONN_SLOTS_OUT, memory.slots_out[0]),
            (layout.CONN_SLOTS_OUT_END, memory.slots_out[1]),
            (layout.CONN_INLINE, 8 if inline else 0),
            (layout.CONN_COPY_BYTES, conn.options.copy_bytes),
            (layout.CONN_TEXT_IN, memory.text_in),
            (layout.CONN_TEXT_OUT, memory.text_out),
            (layout.CONN_PEER_TEXT, conn.remote.text),
        ):
            self.store(offset, value)
        for i, queue in enumerate(conn.queues):
            self.store(layout.CONN_CQS + 8 * i, queue)
        for i, (qp, end) in enumerate(zip(conn.qps, conn.ends, strict=True)):
            device = i % len(conn.devices)
            for offset, value in (
                (layout.QP_POINTER, qp.pointer),
                (layout.QP_DEVICE, device),
                (layout.QP_PEER_DEVICE, end.device),
                (layout.QP_SIZE, qp.send_depth),
                (layout.QP_KEY, conn.keys[device][0]),
                (layout.QP_LOCAL_KEY, conn.keys[device][0]),
                (layout.QP_PEER_KEY, conn.remote.keys[end.device]),
                (layout.QP_NSTREAMS, 1),
                (layout.QP_RECV_DEPTH, qp.recv_depth),
                (layout.QP_APART_BYTES, conn.options.apart_bytes(qp.device.port.kind)),
            ):
                self.store_qp(i, offset, value)
            self.store_stream(i, layout.STREAM_QP, i)

    # --- words

    def _get(self, address: int) -> int:
        return int.from_bytes(memory_at(address, 8), "little", signed=True)

    def _put(self, address: int, value: int) -> None:
        memory_at(address, 8)[:] = value.to_bytes(8, "little", signed=True)

    def word(self, offset: int) -> int:
        return self._get(self.state.address + offset)

    def store(self, offset: int, value: int) -> None:
        self._put(self.state.address + offset, value)

    def link_word(self, offset: int) -> int:
        return self.link.word(offset)

    def store_link(self, offset: int, value: int) -> None:
        self.link.store(offset, value)

    def qp_word(self, qp: int, offset: int) -> int:
        return self.word(layout.CONN_QPS + qp * layout.QP_BYTES + offset)

    def store_qp(self, qp: int, offset: int, value: int) -> None:
        self.store(layout.CONN_QPS + qp * layout.QP_BYTES + offset, value)

    def stream_word(self, stream: int, offset: int) -> int:
        return self.word(layout.CONN_STREAMS + stream * layout.STREAM_BYTES + offset)

    def store_stream(self, stream: int, offset: int, value: int) -> None:
        self.store(layout.CONN_STREAMS + stream * layout.STREAM_BYTES + offset, value)

    # --- views

    @property
    def address(self) -> int:
        """Address of the compiled state."""
        return self.state.address

    @property
    def peer(self) -> int:
        return self.conn.peer

    @property
    def count(self) -> int:
        return len(self.conn.qps)

    @property
    def alive(self) -> bool:
        """True while queue pairs and memory are in use."""
        return self.link.alive

    def take_end(self) -> tuple[bool, Loss | None]:
        """Return (True, loss) once, when the connection has ended; see ``CompiledPeer``."""
        if not self.link.take_end():
            return False, None
        return True, self._loss() if self.link.lost else None

    def _loss(self) -> Loss:
        if (
            self.link_word(link_layout.LINK_FAULT) == link_layout.FAULT_RESET
            and self.link_word(link_layout.LINK_FAULT_CODE) == layout.ALL_PATHS_FAILED
        ):
            failed = [f"{self.conn.edges[qp]}: {text}" for qp, text in sorted(self.texts.items())]
            return Loss(LossKind.RESET, "no queue pair works: " + "; ".join(dict.fromkeys(failed)))
        return self.link.loss(FAULT_TEXTS)

    def note_ready(self) -> None:
        """Set ``conn.ready`` once the peer's packets have arrived on every working queue pair."""
        if self.conn.ready.is_set():
            return
        heard = self.word(layout.CONN_HELLOS)
        up = [i for i in range(self.count) if i not in self.texts]
        if up and all(heard >> i & 1 for i in up):
            self.conn.ready.set()

    def received(self) -> list[int]:
        """Return the rows processed of each incoming stream."""
        return [self.stream_word(i, layout.STREAM_PROCESSED) for i in range(self.count)]

    def take_inbox(self) -> list[bytes]:
        """Return the rows that compiled code has left for Python, and empty the inbox."""
        count = self.word(layout.CONN_INBOX_COUNT)
        start = self.state.address + layout.CONN_INBOX
        rows = [bytes(memory_at(start + i * ROW_BYTES, ROW_BYTES)) for i in range(count)]
        self.store(layout.CONN_INBOX_COUNT, 0)
        return rows

    def write_arguments(self, *words: int, data: bytes = b"") -> int:
        """Write the arguments of a compiled function; return their address."""
        address = self.arguments.address
        for i, word in enumerate(words):
            self._put(address + 8 * i, word)
        start = address + 8 * len(words)
        memory_at(start, ROW_BYTES)[:] = data.ljust(ROW_BYTES, b"\0")[:ROW_BYTES]
        return address

    def all_closed(self) -> bool:
        """Return True if the peer has closed every stream."""
        return all(
            self.link_word(
                link_layout.LINK_STREAMS + i * link_layout.STREAM_BYTES + link_layout.STREAM_CLOSED
            )
            for i in range(self.count)
        )
