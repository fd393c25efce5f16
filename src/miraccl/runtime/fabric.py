"""Connections between the ranks of one communicator: endpoints, transports, FIFOs, engine context.

Setup takes four phases (``setup_phases``): the description and settings of each rank (compared:
``PlanMismatch``), how to reach its memory, whether its memory is readable, and completion.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from miraccl import params
from miraccl.bootstrap.events import Event, PeerLeft, PeerLost
from miraccl.errors import BootstrapError, MiracclError, PeerDied, SystemFailure
from miraccl.native import atomics
from miraccl.runtime import net_status
from miraccl.runtime.engine_state import (
    ControlPage,
    drive_network,
    fanout_bytes,
    open_context,
    wait_policy,
)
from miraccl.runtime.loss_notice import await_notice, run_after_notice
from miraccl.runtime.rank_records import exchange_records, read_host_settings
from miraccl.runtime.window import WindowAllocator
from miraccl.transport import registry
from miraccl.transport.base import (
    Capability,
    Endpoint,
    FifoPair,
    NetworkProxy,
    OnLost,
    PathStatus,
    Transport,
    TransportContext,
)
from miraccl.transport.fifo import MAX_SLOT_BYTES, NSLOTS
from miraccl.transport.shm import ShmTransport
from miraccl.wire.proxy_records import Loss, LossKind

if TYPE_CHECKING:
    from miraccl.runtime.fabric_contract import AgreedConfig
    from miraccl.runtime.setup_phases import SetupPhases
    from miraccl.transport.registry import TransportChoice

#: FIFO slot size to other hosts, and budget of all slots of one direction. A message costs the
#: proxy some 100 us, so pieces are large.
NET_SLOT, NET_BUDGET = 1 << 20, 16 << 20


class ProcessFabric:
    """Connections of a rank that is a process (``fabric_contract.Fabric``).

    Owns the transports and the context; ``close`` may be called twice.

    The arguments are those of ``FabricFactory``.
    """

    def __init__(
        self, setup: SetupPhases, config: AgreedConfig, *, timeout: float, on_lost: OnLost
    ) -> None:
        self.session = session = setup.session
        self.rank, self.nranks = session.rank, session.nranks
        self.timeout = timeout
        self._setup, self._connected = setup, False
        self._on_lost = on_lost
        self._transports: list[Transport] = []
        self._proxies: dict[str, NetworkProxy] = {}
        self._path_source = net_status.PathSource(
            name=session.name, rank=self.rank, nranks=self.nranks, paths=self.paths
        )
        self.early_events: list[Event] = []  # events before ``Faults`` exists
        session.on_event(self.early_events.append)
        try:
            self._connect(config)
        except BaseException as error:
            self.close(abort=f"could not connect: {error}")
            raise
        self._connected = True
        if self.paths():
            net_status.server.add(self._path_source)

    def _connect(self, config: AgreedConfig) -> None:
        records = self._ranks = exchange_records(
            self._setup, config, **read_host_settings(self.nranks)
        )
        self.constants_text, self.endpoints = records.constants_text, records.endpoints
        self.hosts, self.local = records.hosts, records.local
        self.ranks_per_core = records.ranks_per_core
        self._open_transports(records.me, config)

    def _open_transports(self, me: Endpoint, config: AgreedConfig) -> None:
        self.choices = self._choose_transports(me)
        peers: dict[str, dict[int, Endpoint]] = {}
        for rank, choice in self.choices.items():
            peers.setdefault(choice.name, {})[rank] = self.endpoints[rank]
        # Shared memory is always opened: it has this rank's control page and window.
        context = self._transport_context(me, config, mixed=any(map(_needs_progress, peers)))
        near = replace(context, peers=peers.pop(registry.SHM.name, {}))
        shm = self.shm = ShmTransport(
            me, near.peers, budget=near.budget, max_slot_bytes=near.max_slot_bytes
        )
        self._page = ControlPage(shm.control)
        self._transports.append(shm)
        context = replace(
            context,
            control=shm.control,
            window=(shm.window.address, shm.window.nbytes),
            memory=(shm.segment, shm.window),
        )
        opened: dict[str, tuple[Transport, dict[int, Endpoint]]] = {
            registry.SHM.name: (shm, dict(near.peers))
        }
        for name, ranks in peers.items():
            given = replace(context, peers=ranks)
            if _needs_progress(name):
                given = replace(
                    given,
                    budget=NET_BUDGET,
                    max_slot_bytes=NET_SLOT,
                    proxy=partial(self._open_proxy, registry.spec_of(name)),
                )
            transport = registry.spec_of(name).open_for(given)
            self._transports.append(transport)
            opened[name] = (transport, ranks)
        blob = {name: transport.setup().hex() for name, (transport, _) in opened.items()}
        infos = self._setup.exchange("fabric connect", blob)
        self.pairs: dict[int, FifoPair] = {}
        for name, (transport, ranks) in opened.items():
            descriptions = {r: bytes.fromhex(infos[r].get(name, "")) for r in ranks}
            self.pairs.update(self._connect_transport(transport, descriptions))
            for rank in ranks:
                if text := transport.describe(rank):
                    reason = f"{self.choices[rank].reason}; {text}"
                    self.choices[rank] = replace(self.choices[rank], reason=reason)
        direct = {r for r, p in self.pairs.items() if not _progressed(p)}
        readable = (
            [] if params.CMA_DISABLE.read() else [r for r in direct if self.pairs[r].readable]
        )
        abilities_here = {
            "readable": sorted(readable),
            "membarrier": atomics.register_membarrier(),
            "domains": self._ranks.domain_order(),
        }
        abilities = self._setup.exchange("fabric abilities", abilities_here)
        for transport in self._transports:
            transport.release()
        self.order = self._ranks.ring_order(abilities[0]["domains"])
        self.readable = {r for r in direct if self.rank in abilities[r]["readable"]}
        #: Every rank can read and write every other's private memory; the same on all ranks.
        self.addressable = all(len(a["readable"]) == self.nranks - 1 for a in abilities)
        reserved = fanout_bytes(shm.slot_bytes, len(direct), shm.window.nbytes)
        self.window = WindowAllocator(shm.window, reserved)
        for transport in self._transports:
            transport.watch_window(self.window)
        self.stream_from = self._ranks.cache_share()
        self.context = open_context(
            self._ranks,
            self.pairs,
            control=shm.control,
            window=(shm.window.address, shm.window.nbytes),
            fanout=shm.window.address + self.window.end if reserved else 0,
            readable=self.readable,
            policy=wait_policy(
                self.ranks_per_core, self.timeout, all(a["membarrier"] for a in abilities)
            ),
        )
        networks = [opened[name][0] for name in peers if _needs_progress(name)]
        if len(networks) == 1:  # a wait drives one proxy, or the engine of one transport
            mover = next(iter(self._proxies.values()), networks[0])
            drive_network(self.context, mover, self.ranks_per_core)
        slots = [pair.send.slot_bytes for pair in self.pairs.values()]
        slot_bytes = min(slots, default=shm.slot_bytes)
        # Hosts with many ranks have smaller slots; all ranks use the smallest.
        self.slot_bytes = min(int(n) for n in self._setup.exchange("fabric ready", slot_bytes))

    def _choose_transports(self, me: Endpoint) -> dict[int, TransportChoice]:
        specs = registry.allowed(params.NET.read())
        return {
            r: registry.choose(me, endpoint, specs)
            for r, endpoint in self.endpoints.items()
            if r != self.rank
        }

    def _transport_context(
        self, me: Endpoint, config: AgreedConfig, *, mixed: bool
    ) -> TransportContext:
        return TransportContext(
            endpoint=me,
            peers={},
            budget=config.buffsize,
            max_slot_bytes=NET_SLOT if mixed else MAX_SLOT_BYTES,
            secret=self.session.data_key,
            job=self.session.name.encode(),
            deadline=self._setup.deadline,
            check=self._check,
            wake=self.wake,
            on_lost=self._lost,
        )

    def _connect_transport(
        self, transport: Transport, infos: dict[int, bytes]
    ) -> dict[int, FifoPair]:
        """Connect a transport; if that fails because a process ended, raise its death instead."""
        try:
            return transport.connect(infos)
        except (SystemFailure, BootstrapError):
            # A peer also leaves when the shared deadline expires, so the search for the root cause
            # continues until DEATH_NOTICE_S has passed.
            await_notice(self._check)
            raise

    def _check(self) -> None:
        """Raise if a rank has died or left, or if the setup was cancelled."""
        self._setup.check()
        for event in self.early_events:
            if isinstance(event, PeerLost | PeerLeft):
                who = f"rank {event.rank}" if event.rank >= 0 else "the control plane"
                verb = "died" if isinstance(event, PeerLost) else "left"
                raise PeerDied(
                    f"{who} {verb} while the ranks were connecting: {event.reason}",
                    rank=self.rank,
                    peer=event.rank,
                )

    def _open_proxy(self, spec: registry.TransportSpec) -> NetworkProxy:
        """Return the proxy of a transport, one of each kind; ranks of one host import none."""
        if spec.proxy not in self._proxies:
            self._proxies[spec.proxy] = spec.open_proxy(
                rank=self.rank, wake=self.wake, on_lost=self._lost, control=self.shm.control
            )
        return self._proxies[spec.proxy]

    def _lost(self, peer: int, loss: Loss) -> None:
        """Handle the loss of a connection; called by the proxy."""
        self._on_lost(peer, loss)
        # Ranks that are still connecting may wait for ``peer``, and it for a connection of theirs.
        if not self._connected and loss.kind is not LossKind.CLOSED:
            run_after_notice(self.session, loss, lambda: self._cancel_setup(peer, loss))

    def _cancel_setup(self, peer: int, loss: Loss) -> None:
        if not self._connected:
            self._setup.cancel(loss.error(rank=self.rank, peer=peer))

    def wake(self, rank: int) -> None:
        """Wake this rank if it sleeps in the engine; callable from any thread."""
        del rank
        self._page.wake()

    def set_abort(self, code: int) -> None:
        """End every wait of this rank, now and later, with ``code``; callable from any thread."""
        self._page.set_abort(code)

    def board(self) -> dict[str, int]:
        """Return the state of the engine as its progress page shows it to the other ranks."""
        return self._page.board()

    @property
    def shm_ranks(self) -> list[int]:
        """Ranks whose control pages are mapped here, this rank first; pages stay after a rank has
        ended.
        """
        return [self.rank, *(r for r, pair in self.pairs.items() if pair.control)]

    def history(self, rank: int) -> dict[int, tuple[int, int]]:
        """Return {sequence number, low bits: (signature, count)} of the last operations of
        ``rank``.

        ``rank`` is one of ``shm_ranks``.
        """
        page = self._page if rank == self.rank else ControlPage(self.pairs[rank].control)
        return page.history()

    def memory(self) -> dict[str, int]:
        """Return the bytes this rank holds for the communicator, by purpose."""
        network = sum(
            2 * NSLOTS * pair.send.slot_bytes
            for rank, pair in self.pairs.items()
            if self.choices[rank].name != registry.SHM.name
        )
        shared = self.shm.window.resident_bytes(self.window.end, self.window.reserved)
        return {
            "fifo": self.shm.segment.file.resident_bytes(0, self.shm.segment.nbytes) + shared,
            "fifo_reserved": self.shm.segment.nbytes + self.window.reserved,
            "window": self.window.resident_bytes(),
            "network": network,
            "private": self.context.private_bytes(),
        }

    def paths(self) -> list[PathStatus]:
        """Return the state of the network paths to all peers; callable from any thread."""
        return [path for transport in list(self._transports) for path in transport.paths()]

    def close(self, *, abort: str = "") -> None:
        net_status.server.remove(self._path_source)
        for transport in reversed(self._transports):
            try:
                if abort:
                    transport.abort(abort)
                else:
                    transport.close()
            except (OSError, MiracclError):  # a broken transport may fail to close
                continue
        self._transports.clear()
        for proxy in self._proxies.values():
            proxy.close()
        self._proxies.clear()


def _progressed(pair: FifoPair) -> bool:
    """Return True if a proxy moves the messages of ``pair``."""
    return Capability.NEEDS_PROGRESS in pair.capabilities


def _needs_progress(name: str) -> bool:
    return Capability.NEEDS_PROGRESS in registry.spec_of(name).capabilities
