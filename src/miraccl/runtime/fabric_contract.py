"""Contract of a fabric: what connects the ranks of one communicator, as its core uses it.

Two kinds fulfil it and run the same conformance kit (``tests/runtime/fabric_conformance.py``):
``fabric.ProcessFabric`` for ranks that are processes, over shared memory and network transports,
and ``memory_fabric.MemoryFabric`` for virtual ranks, which are threads of one process. A
``FabricFactory`` makes one; ``CommunicatorCore`` receives it beside its session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from miraccl.bootstrap.events import Event
from miraccl.errors import PlanMismatch
from miraccl.executor.cpu.context import Context
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.runtime.window import WindowAllocator
from miraccl.transport.base import Endpoint, FifoPair, OnLost, PathStatus
from miraccl.transport.registry import TransportChoice


@dataclass(frozen=True, kw_only=True)
class AgreedConfig:
    """Settings that all ranks must share before they move data; ``PlanMismatch`` names these
    fields.
    """

    version: str
    algo: str
    proto: str
    deterministic: bool
    buffsize: int
    single_copy: str
    net: str
    constants: str

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


@runtime_checkable
class Fabric(Protocol):
    """Connections of one rank in one communicator, with the engine context that works on them.

    Attributes:
        timeout: Deadline of operations, in seconds; may be changed between operations.
        constants_text: Cost model of rank 0, which all ranks use.
        endpoints: By rank, the endpoint between which further connections can be opened.
        hosts: By rank, the number of its host; equal numbers share memory.
        local: Ranks of this rank's host, this rank included.
        order: Order of neighbours in rings; empty for the order of the ranks.
        ranks_per_core: Largest number of ranks per processor of any machine.
        choices: By peer, its transport and the reason.
        pairs: By peer, its FIFOs.
        addressable: Every rank can read and write every other's private memory; the same on all
            ranks.
        slot_bytes: Bytes of a FIFO slot, the smallest of all ranks.
        stream_from: Bytes from which an operation writes more than the caches hold.
        window: Memory that the other ranks of the host can address.
        context: State of the compiled engine; owned by the fabric.
        early_events: Events of the control plane since the construction began.
    """

    rank: int
    nranks: int
    timeout: float
    constants_text: str
    endpoints: dict[int, Endpoint]
    hosts: tuple[int, ...]
    local: list[int]
    order: tuple[int, ...]
    ranks_per_core: float
    choices: dict[int, TransportChoice]
    pairs: dict[int, FifoPair]
    addressable: bool
    slot_bytes: int
    stream_from: int
    window: WindowAllocator
    context: Context
    early_events: list[Event]

    @property
    def shm_ranks(self) -> Sequence[int]:
        """Ranks whose control pages are mapped here, this rank first; pages stay after a rank has
        ended.
        """

    def wake(self, rank: int) -> None:
        """Wake this rank if it sleeps in the engine; callable from any thread."""

    def set_abort(self, code: int) -> None:
        """End every wait of this rank, now and later, with ``code``; callable from any thread."""

    def board(self) -> dict[str, int]:
        """Return the state of the engine as its progress page shows it to the other ranks."""

    def history(self, rank: int) -> dict[int, tuple[int, int]]:
        """Return {sequence number, low bits: (signature, count)} of the last operations of
        ``rank``, one of ``shm_ranks``.
        """

    def memory(self) -> dict[str, int]:
        """Return the bytes this rank holds for the communicator, by purpose: ``fifo``,
        ``fifo_reserved``, ``window``, ``network`` and ``private``.
        """

    def paths(self) -> Sequence[PathStatus]:
        """Return the state of the network paths to all peers; callable from any thread."""

    def close(self, *, abort: str = "") -> None:
        """Free the connections; may be called twice. ``abort``: the reason, sent to the peers."""


class FabricFactory(Protocol):
    """Maker of the fabric of one communicator; its construction is collective.

    Args:
        setup: Phases of the construction; their session is the control plane.
        config: Settings, which must be the same on all ranks.
        timeout: Deadline of operations, in seconds.
        on_lost: Called with (rank, loss) on any thread when a connection ends.

    Raises:
        PlanMismatch: The ranks have different settings.
        BootstrapError, PeerDied, CollectiveTimeout: A rank is missing or has ended.
    """

    def __call__(
        self, setup: SetupPhases, config: AgreedConfig, *, timeout: float, on_lost: OnLost
    ) -> Fabric: ...


def check_agreement(configs: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``PlanMismatch``, naming the ranks and the field, if ranks have different settings."""
    for field in configs[0]:
        if field == "constants":  # all ranks use those of rank 0
            continue
        values = [b.get(field) for b in configs]
        if any(v != values[0] for v in values):
            groups = {repr(v): [r for r, w in enumerate(values) if w == v] for v in values}
            text = "; ".join(
                f"{value} on rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}"
                for value, who in groups.items()
            )
            settings = "MIRACCL_NET" if field == "net" else "settings"
            raise PlanMismatch(
                f"ranks disagree on {field}: {text}", hint=f"give all ranks the same {settings}"
            )
