"""Connections between the ranks of one communicator: endpoints, transports, FIFOs, engine context.

Setup takes four phases (``setup_phases``): the description and settings of each rank (compared:
``PlanMismatch``), how to reach its memory, whether its memory is readable, and completion.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from miraccl import clock, params
from miraccl.bootstrap import Event, PeerLeft, PeerLost, Session
from miraccl.deadline import Deadline
from miraccl.errors import BootstrapError, MiracclError, PeerDied, PlanMismatch, SystemFailure
from miraccl.executor.cpu.context import Context, PeerConnections, WaitPolicy, words_at
from miraccl.executor.cpu.kernels import layout
from miraccl.graph.rank_order import RankLocation, order_ranks
from miraccl.native import atomics
from miraccl.runtime import group
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.runtime.window import WindowAllocator
from miraccl.transport import registry
from miraccl.transport.base import (
    Capability,
    Endpoint,
    FifoPair,
    OnLost,
    ProxyPort,
    Transport,
    TransportContext,
    machine_id,
)
from miraccl.transport.fifo import MAX_SLOT_BYTES
from miraccl.transport.registry import TransportChoice
from miraccl.transport.shm import ShmTransport
from miraccl.wire.proxy_records import Loss, LossKind

#: FIFO slot size to other hosts, and budget of all slots of one direction. A message costs the
#: proxy some 100 us, so pieces are large.
NET_SLOT, NET_BUDGET = 1 << 20, 16 << 20

#: Wait policies of ranks with a core each, and of ranks that share cores.
DEDICATED_CORES = WaitPolicy(spin=1000, yields=5)
SHARED_CORES = WaitPolicy(spin=30, yields=60, membarrier=False)

#: Time for the control plane to report a death that a system call has shown.
DEATH_NOTICE_S = 1.0
#: Time in which the control plane may report why a connection ended.
NOTICE_FIRST_S = 0.5
#: Time for a delayed watcher thread to process the notices received so far.
CATCH_UP_S = 5.0


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
    constants: str

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Fabric:
    """Connections of one rank in one communicator.

    Owns the transports and the context; ``close`` may be called twice.

    Args:
        setup: Phases of the construction; their session is the control plane.
        config: Settings, which must be the same on all ranks.
        timeout: Deadline of operations, in seconds.
        on_lost: Called with (rank, loss) on any thread when a connection ends.
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
        self._proxies: dict[str, Any] = {}
        self.early_events: list[Event] = []  # events before ``Faults`` exists
        session.on_event(self.early_events.append)
        try:
            self._connect(config)
        except BaseException as error:
            self.close(abort=f"could not connect: {error}")
            raise
        self._connected = True

    def _connect(self, config: AgreedConfig) -> None:
        host = params.HOSTID.read() or self.session.hosts[self.rank]
        me = Endpoint(
            rank=self.rank,
            hostid=f"{host}/rank{self.rank}" if params.SHM_DISABLE.read() else host,
            pid=os.getpid(),
            addresses=tuple(self.session.all_addresses[self.rank])
            or (self.session.addresses[self.rank],),
            machine=machine_id(),
        )
        if self.session.addresses[self.rank] not in me.addresses:
            me = replace(me, addresses=(self.session.addresses[self.rank], *me.addresses))
        hello = {
            "beliefs": config.to_dict(),
            "hostid": me.hostid,
            "host": host,
            "pid": me.pid,
            "addresses": me.addresses,
            "cores": _cores(),
            "machine": me.machine,
            "numa": numa_domain(),
        }
        records = self._setup.exchange("fabric hello", hello)
        _check_agreement([record["beliefs"] for record in records])
        self.constants_text = str(records[0]["beliefs"]["constants"])
        self.endpoints = {
            r: Endpoint(
                rank=r,
                hostid=rec["hostid"],
                pid=rec["pid"],
                addresses=tuple(rec["addresses"]),
                machine=rec["machine"],
            )
            for r, rec in enumerate(records)
        }
        names = list(dict.fromkeys(e.hostid for e in self.endpoints.values()))
        self.hosts = tuple(names.index(self.endpoints[r].hostid) for r in range(self.nranks))
        self.local = [r for r in range(self.nranks) if records[r]["host"] == host]
        self.places = [
            RankLocation(host=self.hosts[r], numa=int(rec["numa"])) for r, rec in enumerate(records)
        ]
        # Ranks with different MIRACCL_HOSTID may share the cores of one machine.
        machines = [record["machine"] for record in records]
        self.ranks_per_core = max(
            machines.count(rec["machine"]) / max(1, int(rec["cores"])) for rec in records
        )
        self.threaded = len({(machines[r], e.pid) for r, e in self.endpoints.items()}) < self.nranks
        self._open_transports(me, config)

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
                    proxy=partial(self._open_proxy, registry.spec_of(name).proxy),
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
        direct = {r for r, p in self.pairs.items() if not _progressed(p)}
        readable = (
            [] if params.CMA_DISABLE.read() else [r for r in direct if self.pairs[r].readable]
        )
        abilities_here = {
            "readable": sorted(readable),
            "membarrier": atomics.register_membarrier(),
            "domains": self._domains(),
        }
        abilities = self._setup.exchange("fabric abilities", abilities_here)
        for transport in self._transports:
            transport.release()
        order = order_ranks(self.places, abilities[0]["domains"])
        self.order = () if order == tuple(range(self.nranks)) else order
        self.readable = {r for r in direct if self.rank in abilities[r]["readable"]}
        #: Every rank can read and write every other's private memory; the same on all ranks.
        self.addressable = all(len(a["readable"]) == self.nranks - 1 for a in abilities)
        self.window = WindowAllocator(shm.window)
        self.stream_from = last_level_cache_bytes() // max(1, len(self.local))
        policy = self._wait_policy(all(a["membarrier"] for a in abilities))
        connections = {r: self._peer_connections(r, pair) for r, pair in self.pairs.items()}
        self.context = Context(
            rank=self.rank,
            nranks=self.nranks,
            ctrl=shm.control,
            connections=connections,
            policy=policy,
            window=(shm.window.address, shm.window.address + shm.window.nbytes),
            threaded=self.threaded,
            groups=group.address(),
            stream_from=self.stream_from,
        )
        slot_bytes = min([c.slot_bytes for c in connections.values()], default=shm.slot_bytes)
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
            notice = Deadline.after(DEATH_NOTICE_S)
            while notice.left:
                self._check()
                clock.sleep(0.01)
            raise

    def _domains(self) -> list[int]:
        """Return the order of this host's NUMA domains; empty if its ranks share one."""
        if len({place.numa for place in self.places if place.host == self.hosts[self.rank]}) < 2:
            return []
        # Imported late: most hosts have one domain.
        from miraccl.graph.cpu_host import detect_host, domain_order

        return domain_order(detect_host(len(self.local)))

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

    def _open_proxy(self, name: str) -> ProxyPort:
        """Return the proxy ``module:class``; ranks of one host import none."""
        if name not in self._proxies:
            module, _, kind = name.partition(":")
            self._proxies[name] = getattr(importlib.import_module(module), kind)(
                rank=self.rank, wake=self.wake, on_lost=self._lost, control=self.shm.control
            )
        proxy: ProxyPort = self._proxies[name]
        return proxy

    def _lost(self, peer: int, loss: Loss) -> None:
        """Handle the loss of a connection; called by the proxy."""
        self._on_lost(peer, loss)
        # Ranks that are still connecting may wait for ``peer``, and it for a connection of theirs.
        if not self._connected and loss.kind is not LossKind.CLOSED:
            run_after_notice(self.session, loss, lambda: self._cancel_setup(peer, loss))

    def _cancel_setup(self, peer: int, loss: Loss) -> None:
        if not self._connected:
            self._setup.cancel(loss.error(rank=self.rank, peer=peer))

    def _wait_policy(self, membarrier: bool) -> WaitPolicy:
        policy = SHARED_CORES if self.ranks_per_core > 1 else DEDICATED_CORES
        return replace(policy, timeout_s=self.timeout, membarrier=membarrier and policy.membarrier)

    def _peer_connections(self, peer: int, pair: FifoPair) -> PeerConnections:
        return PeerConnections(
            capabilities=int(pair.capabilities),
            slot_bytes=pair.send.slot_bytes,
            send_descs=pair.send.descriptors,
            send_tail=pair.send.tail,
            send_slots=pair.send.slots,
            recv_descs=pair.recv.descriptors,
            recv_tail=pair.recv.tail,
            recv_slots=pair.recv.slots,
            recv_cts=pair.recv.cts,
            ctrl=pair.control,
            pid=pair.pid,
            window=pair.window,
            readable=peer in self.readable or Capability.IN_PLACE in pair.capabilities,
            doorbell=pair.send.doorbell,
            asleep=pair.send.asleep,
        )

    def wake(self, rank: int) -> None:
        """Wake this rank if it sleeps in the engine; callable from any thread."""
        del rank
        atomics.ring_futex(self.shm.control + layout.CTRL_DOORBELL)

    def set_abort(self, code: int) -> None:
        """End every wait of this rank, now and later, with ``code``; callable from any thread."""
        atomics.store_release(self.shm.control + layout.CTRL_ABORT, code)
        self.wake(self.rank)

    def board(self) -> dict[str, int]:
        """Return the state of the engine as its progress page shows it to the other ranks."""
        words = words_at(self.shm.control, layout.PAGE // 8)
        names = {
            "seq": layout.PROGRESS_SEQ,
            "sig": layout.PROGRESS_SIG,
            "count": layout.PROGRESS_COUNT,
            "step": layout.PROGRESS_STEP,
            "peer": layout.PROGRESS_PEER,
            "state": layout.PROGRESS_STATE,
            "p2p_sig": layout.PROGRESS_P2P_SIG,
            "p2p_count": layout.PROGRESS_P2P_COUNT,
        }
        return {name: int(words[place // 8]) for name, place in names.items()}

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
        page = self.shm.control if rank == self.rank else self.pairs[rank].control
        words = words_at(page + layout.CTRL_HISTORY, 2 * layout.HISTORY)
        entries = [(int(words[2 * i]), int(words[2 * i + 1])) for i in range(layout.HISTORY)]
        return {sig & layout.SEQ_MASK: (sig, count) for sig, count in entries if sig}

    def memory(self) -> dict[str, int]:
        """Return the bytes this rank holds for the communicator, by purpose."""
        network = sum(
            2 * layout.NSLOTS * pair.send.slot_bytes
            for rank, pair in self.pairs.items()
            if self.choices[rank].name != registry.SHM.name
        )
        return {
            "fifo": self.shm.segment.file.resident_bytes(0, self.shm.segment.nbytes),
            "fifo_reserved": self.shm.segment.nbytes,
            "window": self.window.resident_bytes(),
            "network": network,
            "private": self.context.private_bytes(),
        }

    def close(self, *, abort: str = "") -> None:
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


def run_after_notice(session: Session, loss: Loss, action: Callable[[], None]) -> None:
    """Run ``action`` for a lost connection, after the control plane had time to report the cause.

    A peer that died, or raised an error before, is a better explanation than its lost connection.
    """

    def look() -> None:
        session.drain(CATCH_UP_S)
        action()

    timer = clock.timer(
        NOTICE_FIRST_S if loss.kind in (LossKind.RESET, LossKind.ABORTED) else 0.0, look
    )
    timer.daemon, timer.name = True, "miraccl connection lost"
    try:
        timer.start()
    except RuntimeError:  # cannot start a thread: report the cause known so far
        action()


def _progressed(pair: FifoPair) -> bool:
    """Return True if a proxy moves the messages of ``pair``."""
    return Capability.NEEDS_PROGRESS in pair.capabilities


def _needs_progress(name: str) -> bool:
    return Capability.NEEDS_PROGRESS in registry.spec_of(name).capabilities


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def numa_domain() -> int:
    """Return the NUMA domain of this thread's first allowed processor (sysfs); -1 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        cpu = min(os.sched_getaffinity(0))
        for entry in os.listdir(f"/sys/devices/system/cpu/cpu{cpu}"):
            if entry.startswith("node"):
                return int(entry[4:])
    return -1


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache of CPU 0 (sysfs); 32 MiB if unknown."""
    sizes = []
    for index in range(8):
        try:
            with open(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size") as file:
                sizes.append(params.parse_size(file.read().strip()))
        except (OSError, ValueError):
            continue
    return max(sizes, default=0) or 32 << 20


def _check_agreement(configs: list[dict[str, Any]]) -> None:
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
            raise PlanMismatch(
                f"ranks disagree on {field}: {text}", hint="give all ranks the same settings"
            )
