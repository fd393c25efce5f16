"""Records by which ranks introduce themselves to each other before they connect."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from miraccl import params
from miraccl.bootstrap.contract import Session
from miraccl.graph.rank_order import RankLocation, order_ranks
from miraccl.runtime.fabric_contract import AgreedConfig, check_agreement
from miraccl.runtime.host_facts import allowed_cores, last_level_cache_bytes, numa_domain
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.transport import registry
from miraccl.transport.base import Endpoint, machine_id


@dataclass(frozen=True, kw_only=True)
class RankRecords:
    """Ranks of a communicator as they have introduced themselves; the same on all ranks but for
    ``rank``.

    Attributes:
        endpoints: Endpoint by rank; ranks with equal ``hostid`` may share memory.
        locations: Host number and NUMA domain by rank.
        machine_hosts: Name of the host by rank, also where shared memory is disabled.
        ranks_per_core: Largest number of ranks per processor of any machine.
        threaded: True if some ranks are threads of one process.
        constants_text: Cost model of rank 0.
    """

    rank: int
    endpoints: dict[int, Endpoint]
    locations: tuple[RankLocation, ...]
    machine_hosts: tuple[str, ...]
    ranks_per_core: float
    threaded: bool
    constants_text: str

    @property
    def me(self) -> Endpoint:
        return self.endpoints[self.rank]

    @property
    def hosts(self) -> tuple[int, ...]:
        """Number of the host by rank."""
        return tuple(location.host for location in self.locations)

    @property
    def local(self) -> list[int]:
        """Ranks of this rank's host, this rank included."""
        host = self.machine_hosts[self.rank]
        return [rank for rank, other in enumerate(self.machine_hosts) if other == host]

    def ring_order(self, domains: Sequence[int]) -> tuple[int, ...]:
        """Return the order of neighbours in rings, empty for that of the ranks.

        ``domains``: order of the NUMA domains of a host.
        """
        order = order_ranks(self.locations, domains)
        return () if order == tuple(range(len(order))) else order

    def cache_share(self) -> int:
        """Return the bytes of the largest cache per rank of this host."""
        return last_level_cache_bytes() // max(1, len(self.local))

    def domain_order(self) -> list[int]:
        """Return the order of this host's NUMA domains; empty if its ranks share one."""
        host = self.locations[self.rank].host
        if len({place.numa for place in self.locations if place.host == host}) < 2:
            return []
        # Imported late: most hosts have one domain.
        from miraccl.graph.cpu_host import detect_host, domain_order

        return domain_order(detect_host(len(self.local)))


def exchange_records(
    setup: SetupPhases,
    config: AgreedConfig,
    *,
    host: str = "",
    share_memory: bool = True,
    hcas: tuple[str, ...] = (),
) -> RankRecords:
    """Exchange records with all ranks, and check that they have the same settings.

    Args:
        host: Name of this rank's host; default: that of its session.
        share_memory: False keeps the rank apart from the others of its host.
        hcas: Kinds of the InfiniBand and RoCE ports that this rank may use.

    Raises:
        PlanMismatch: The ranks have different settings.
    """
    me = replace(_describe_self(setup.session, host, share_memory), hcas=hcas)
    hello = {
        "beliefs": config.to_dict(),
        "hostid": me.hostid,
        "host": host or setup.session.hosts[me.rank],
        "pid": me.pid,
        "addresses": me.addresses,
        "cores": allowed_cores(),
        "machine": me.machine,
        "hcas": me.hcas,
        "numa": numa_domain(),
    }
    records = setup.exchange("fabric hello", hello)
    check_agreement([record["beliefs"] for record in records])
    return _parse(me.rank, records)


def _describe_self(session: Session, host: str, share_memory: bool) -> Endpoint:
    rank = session.rank
    name = host or session.hosts[rank]
    me = Endpoint(
        rank=rank,
        hostid=name if share_memory else f"{name}/rank{rank}",
        pid=os.getpid(),
        addresses=tuple(session.all_addresses[rank]) or (session.addresses[rank],),
        machine=machine_id(),
    )
    if session.addresses[rank] not in me.addresses:
        me = replace(me, addresses=(session.addresses[rank], *me.addresses))
    return me


def _parse(rank: int, records: Sequence[dict[str, Any]]) -> RankRecords:
    endpoints = {
        r: Endpoint(
            rank=r,
            hostid=rec["hostid"],
            pid=rec["pid"],
            addresses=tuple(rec["addresses"]),
            machine=rec["machine"],
            hcas=tuple(rec["hcas"]),
        )
        for r, rec in enumerate(records)
    }
    names = list(dict.fromkeys(e.hostid for e in endpoints.values()))
    # Ranks with different MIRACCL_HOSTID may share the cores of one machine.
    machines = [record["machine"] for record in records]
    processes = {(machines[r], e.pid) for r, e in endpoints.items()}
    return RankRecords(
        rank=rank,
        endpoints=endpoints,
        locations=tuple(
            RankLocation(host=names.index(endpoints[r].hostid), numa=int(rec["numa"]))
            for r, rec in enumerate(records)
        ),
        machine_hosts=tuple(str(record["host"]) for record in records),
        ranks_per_core=max(
            machines.count(rec["machine"]) / max(1, int(rec["cores"])) for rec in records
        ),
        threaded=len(processes) < len(records),
        constants_text=str(records[0]["beliefs"]["constants"]),
    )


def read_host_settings(nranks: int) -> dict[str, Any]:
    """Return ``host``, ``share_memory`` and ``hcas`` of ``exchange_records`` from the settings."""
    return {
        "host": params.HOSTID.read() or "",
        "share_memory": not params.SHM_DISABLE.read(),
        "hcas": _verbs_kinds() if nranks > 1 else (),
    }


def _verbs_kinds() -> tuple[str, ...]:
    """Return the kinds of ports that verbs may use; loads nothing on hosts without devices."""
    net = params.NET.read()
    if net != registry.VERBS.name and not os.path.isdir("/sys/class/infiniband"):
        return ()
    from miraccl.transport.verbs_ports import usable_kinds

    return usable_kinds(net)
