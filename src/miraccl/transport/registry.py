"""Table of the transports, and the choice of one for each pair of ranks.

A transport is one entry: name, capabilities, score for a pair of endpoints, and the function that
opens it. For each pair the transport with the highest score is used; a score of 0 means that it
cannot connect the pair. Both ranks decide alike, because a score depends on the two endpoints only
and all ranks have the same ``MIRACCL_NET``.

``MIRACCL_NET`` chooses among the network transports, those with ``network`` set: ``auto`` allows
the ones with ``automatic`` set, a name allows that one alone. Shared memory within a host is not
subject to it (``MIRACCL_SHM_DISABLE``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from miraccl.errors import InvalidUsage, SystemFailure, did_you_mean
from miraccl.transport.base import (
    Capability,
    Endpoint,
    NetworkProxy,
    OnLost,
    Transport,
    TransportContext,
    Wake,
)

AUTO = "auto"
Score = tuple[int, str]
"""(points, reason); 0 points: cannot connect the pair."""


@dataclass(frozen=True, kw_only=True)
class TransportSpec:
    """Registry entry of a transport.

    Attributes:
        name: Name in ``MIRACCL_NET``, summaries and explanations.
        module: Module with a function ``open_transport(context) -> Transport``; imported late.
        score: Points of a pair of endpoints, symmetric, and the reason.
        network: True if ``MIRACCL_NET`` chooses it.
        automatic: True if ``MIRACCL_NET=auto`` allows it.
        on_request: Reason to ask for it by name, in the explanation of pairs that could use it.
        proxy: Module and class of the proxy that moves its messages, imported late.
        open: Function that opens it, instead of ``module``.
    """

    name: str
    capabilities: Capability
    score: Callable[[Endpoint, Endpoint], Score]
    module: str = ""
    network: bool = True
    automatic: bool = True
    on_request: str = ""
    proxy: str = "miraccl.proxy.stream_engine:ProgressEngine"
    open: Callable[[TransportContext], Transport] | None = None

    def __post_init__(self) -> None:
        if Capability.ORDERED not in self.capabilities:
            raise ValueError(f"cannot register transport {self.name}: it is not ordered")
        if not self.module and self.open is None:
            raise ValueError(f"cannot register transport {self.name}: nothing opens it")

    def open_for(self, context: TransportContext) -> Transport:
        """Open the transport for one communicator and rank."""
        open_transport = self.open or importlib.import_module(self.module).open_transport
        transport: Transport = open_transport(context)
        return transport

    def open_proxy(
        self, *, rank: int, wake: Wake, on_lost: OnLost, control: int = 0
    ) -> NetworkProxy:
        """Start the proxy that moves its messages; arguments as for ``proxy.stream_engine``."""
        module, _, kind = self.proxy.partition(":")
        proxy: NetworkProxy = getattr(importlib.import_module(module), kind)(
            rank=rank, wake=wake, on_lost=on_lost, control=control
        )
        return proxy


@dataclass(frozen=True, kw_only=True)
class TransportChoice:
    """Transport of one pair of ranks.

    Attributes:
        reason: Sentence fragment that explains the choice.
        rejected: Transport -> reason, for those that cannot connect the pair or scored less.
    """

    name: str
    score: int
    reason: str
    rejected: Mapping[str, str] = field(default_factory=dict)


_specs: dict[str, TransportSpec] = {}


def register(spec: TransportSpec) -> TransportSpec:
    """Add a transport to the table; registering an equal entry again has no effect."""
    if _specs.get(spec.name, spec) != spec:
        raise ValueError(f"cannot register transport {spec.name}: the name is in use")
    _specs[spec.name] = spec
    return spec


def unregister(name: str) -> None:
    """Remove a transport from the table; for tests and plugins."""
    _specs.pop(name, None)


def spec_of(name: str) -> TransportSpec:
    return _specs[name]


def names() -> list[str]:
    """Return the names of all transports in the order of their registration."""
    return list(_specs)


def allowed(net: str = AUTO) -> list[TransportSpec]:
    """Return the transports that ``MIRACCL_NET=net`` allows.

    Raises:
        InvalidUsage: ``net`` is neither ``auto`` nor the name of a network transport.
    """
    networks = [spec.name for spec in _specs.values() if spec.network]
    given, net = net, net.partition(":")[0]  # plugin:PATH
    if net != AUTO and net not in networks:
        raise InvalidUsage(
            f"cannot use MIRACCL_NET={given}: allowed are {', '.join([AUTO, *networks])}",
            hint=did_you_mean(net, [AUTO, *networks]),
        )
    return [
        spec
        for spec in _specs.values()
        if not spec.network or spec.name == net or (net == AUTO and spec.automatic)
    ]


def choose(a: Endpoint, b: Endpoint, specs: Iterable[TransportSpec]) -> TransportChoice:
    """Choose the transport of a pair of ranks; of equal scores the first in the table wins.

    Where a network is chosen, ``rejected`` names those that the user may ask for instead.

    Raises:
        SystemFailure: None of ``specs`` can connect the pair.
    """
    best: TransportChoice | None = None
    rejected: dict[str, str] = {}
    specs = list(specs)
    for spec in specs:
        points, reason = spec.score(a, b)
        if points > (best.score if best else 0):
            if best:
                rejected[best.name] = f"{spec.name} is preferred"
            best = TransportChoice(name=spec.name, score=points, reason=reason)
        else:
            rejected[spec.name] = f"{best.name} is preferred" if points and best else reason
    if best is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
        raise SystemFailure(
            f"cannot connect ranks {a.rank} and {b.rank}: {reasons or 'no transport is allowed'}",
            rank=a.rank,
            peer=b.rank,
            hint="MIRACCL_NET chooses the network, MIRACCL_SOCKET_IFNAME its interfaces",
        )
    chosen = next(spec for spec in specs if spec.name == best.name)
    if Capability.NEEDS_PROGRESS in chosen.capabilities:
        for spec in _specs.values():
            if spec.on_request and spec not in specs and spec.score(a, b)[0]:
                rejected[spec.name] = spec.on_request
    return TransportChoice(name=best.name, score=best.score, reason=best.reason, rejected=rejected)


def _score_memory(a: Endpoint, b: Endpoint) -> Score:
    if a.rank == b.rank or (a.machine, a.pid) != (b.machine, b.pid):
        return 0, "not in one process"
    return 200, "threads of one process"


def _score_shm(a: Endpoint, b: Endpoint) -> Score:
    if a.hostid != b.hostid or a.rank == b.rank:
        return 0, "not on one host"
    return 100, "same host"


def _score_tcp(a: Endpoint, b: Endpoint) -> Score:
    families = ({":" in x for x in a.addresses}, {":" in x for x in b.addresses})
    if a.rank == b.rank or not families[0] & families[1]:
        return 0, "no addresses of a common family"
    return 10, "addresses of a common family"


def _score_plugin(a: Endpoint, b: Endpoint) -> Score:
    return (0, "one rank") if a.rank == b.rank else (10, "the network plugin that is named")


def _score_verbs(a: Endpoint, b: Endpoint) -> Score:
    if a.rank == b.rank:
        return 0, "one rank"
    if not (a.hcas and b.hcas):
        return 0, "no usable InfiniBand or RoCE port (miraccl net devices says why)"
    common = set(a.hcas) & set(b.hcas)
    if not common:
        return 0, f"{'/'.join(sorted(set(a.hcas)))} and {'/'.join(sorted(set(b.hcas)))} ports"
    return 30, "RoCE" if "roce" in common else "InfiniBand"


SHM = register(
    TransportSpec(
        name="shm",
        capabilities=Capability.ORDERED | Capability.ONE_SIDED | Capability.AUTHENTICATED,
        score=_score_shm,
        module="miraccl.transport.shm",
        network=False,
    )
)
TCP = register(
    TransportSpec(
        name="tcp",
        capabilities=Capability.ORDERED
        | Capability.IN_PLACE
        | Capability.NEEDS_PROGRESS
        | Capability.AUTHENTICATED,
        score=_score_tcp,
        module="miraccl.transport.socket",
    )
)
UDP = register(
    TransportSpec(
        name="udp",
        capabilities=Capability.ORDERED
        | Capability.IN_PLACE
        | Capability.NEEDS_PROGRESS
        | Capability.AUTHENTICATED,
        score=_score_tcp,
        module="miraccl.transport.datagram",
        automatic=False,
        on_request="more processor time per byte; MIRACCL_NET=udp where packets are lost",
        proxy="miraccl.proxy.datagram_engine:DatagramEngine",
    )
)
PLUGIN = register(
    TransportSpec(
        name="plugin",
        capabilities=Capability.ORDERED | Capability.IN_PLACE | Capability.NEEDS_PROGRESS,
        score=_score_plugin,
        module="miraccl.transport.net_plugin",
        automatic=False,
        proxy="miraccl.proxy.thread:Proxy",
    )
)
MEMORY = register(
    TransportSpec(
        name="memory",
        capabilities=Capability.ORDERED | Capability.ONE_SIDED | Capability.AUTHENTICATED,
        score=_score_memory,
        module="miraccl.transport.memory",
        automatic=False,
    )
)
VERBS = register(
    TransportSpec(
        name="verbs",
        capabilities=Capability.ORDERED | Capability.IN_PLACE | Capability.NEEDS_PROGRESS,
        score=_score_verbs,
        module="miraccl.proxy.verbs",
    )
)
