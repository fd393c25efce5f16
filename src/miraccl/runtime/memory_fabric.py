"""Fabric of virtual ranks, which are threads of one process: no segment, socket, file or proxy.

With ``bootstrap.memory.InMemoryJob`` as the control plane, a process runs any number of ranks on
any number of virtual hosts, with the planner and the compiled engine of real ones: the hosts are
those of the job, all pairs use the transport ``memory``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from miraccl.bootstrap.events import Event
from miraccl.executor.cpu.context import VirtualSleeper, WaitPolicy
from miraccl.runtime.engine_state import (
    SHARED_CORES,
    ControlPage,
    fanout_bytes,
    open_context,
)
from miraccl.runtime.fabric_contract import AgreedConfig
from miraccl.runtime.rank_records import exchange_records
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.runtime.window import WindowAllocator
from miraccl.transport import registry
from miraccl.transport.base import FifoPair, OnLost, PathStatus, TransportContext
from miraccl.transport.fifo import NSLOTS, PAGE_BYTES, PrivateMemory
from miraccl.transport.mapped_file import AnonymousMemory

#: Bytes of a rank's window. Only touched pages take memory.
WINDOW_BYTES = 1 << 30


def _policy(timeout: float, sleeper: VirtualSleeper | None) -> WaitPolicy:
    policy = replace(SHARED_CORES, timeout_s=timeout, migrate=False, sleeper=sleeper)
    # Nothing changes while a virtual rank spins: the others run when it sleeps.
    return replace(policy, spin=0, yields=0) if sleeper else policy


class MemoryFabric:
    """Connections of a rank that is a thread (``fabric_contract.Fabric``).

    The arguments are those of ``FabricFactory``, and:

    Args:
        window_bytes: Size of this rank's window.
        sleeper: Clock of the engine's waits; default: that of the system.
    """

    def __init__(
        self,
        setup: SetupPhases,
        config: AgreedConfig,
        *,
        timeout: float,
        on_lost: OnLost,
        window_bytes: int = WINDOW_BYTES,
        sleeper: VirtualSleeper | None = None,
    ) -> None:
        session = self.session = setup.session
        self.rank, self.nranks, self.timeout = session.rank, session.nranks, timeout
        self.early_events: list[Event] = []
        session.on_event(self.early_events.append)
        ranks = exchange_records(setup, config)
        self.constants_text, self.endpoints = ranks.constants_text, ranks.endpoints
        self.hosts, self.local = ranks.hosts, ranks.local
        self.ranks_per_core, self.stream_from = ranks.ranks_per_core, ranks.cache_share()
        self.order = ranks.ring_order(())
        self.choices = {
            rank: registry.choose(ranks.me, endpoint, [registry.MEMORY])
            for rank, endpoint in self.endpoints.items()
            if rank != self.rank
        }
        self._memory = PrivateMemory(PAGE_BYTES)
        self._page = ControlPage(self._memory.address)
        region = AnonymousMemory(window_bytes)
        self._transport = registry.MEMORY.open_for(
            TransportContext(
                endpoint=ranks.me,
                peers={rank: self.endpoints[rank] for rank in self.choices},
                control=self._page.address,
                window=(region.address, region.nbytes),
                memory=(self._memory, region),
                budget=config.buffsize,
                on_lost=on_lost,
            )
        )
        infos = setup.exchange("fabric connect", self._transport.setup().decode())
        self.pairs: dict[int, FifoPair] = self._transport.connect(
            {rank: str(infos[rank]).encode() for rank in self.choices}
        )
        self.addressable = True
        slots = [pair.send.slot_bytes for pair in self.pairs.values()]
        mine = min(slots, default=PAGE_BYTES)
        reserved = fanout_bytes(mine, len(slots), region.nbytes)
        self.window = WindowAllocator(region, reserved)
        self.context = open_context(
            ranks,
            self.pairs,
            control=self._page.address,
            window=(region.address, region.nbytes),
            fanout=region.address + self.window.end if reserved else 0,
            readable=self.pairs,
            policy=_policy(timeout, sleeper),
        )
        self.slot_bytes = min(int(n) for n in setup.exchange("fabric ready", mine))

    @property
    def shm_ranks(self) -> list[int]:
        return [self.rank, *self.pairs]

    def wake(self, rank: int) -> None:
        del rank
        self._page.wake()

    def set_abort(self, code: int) -> None:
        self._page.set_abort(code)

    def board(self) -> dict[str, int]:
        return self._page.board()

    def history(self, rank: int) -> dict[int, tuple[int, int]]:
        page = self._page if rank == self.rank else ControlPage(self.pairs[rank].control)
        return page.history()

    def memory(self) -> dict[str, int]:
        reserved = sum(NSLOTS * pair.send.slot_bytes for pair in self.pairs.values())
        return {
            "fifo": reserved,
            "fifo_reserved": reserved,
            "window": self.window.resident_bytes(),
            "network": 0,
            "private": self.context.private_bytes(),
        }

    def paths(self) -> Sequence[PathStatus]:
        return self._transport.paths()

    def close(self, *, abort: str = "") -> None:
        del abort  # peers learn the reason from the control plane
        self._transport.close()
