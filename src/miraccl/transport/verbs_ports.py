"""Ports that verbs may use on this host, and the settings of the transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from miraccl import params, trace
from miraccl.errors import MissingDependency, SystemFailure
from miraccl.native.verbs_abi import load_library
from miraccl.topo.hca import Hca, Port, read_hcas, select_ports
from miraccl.transport.verbs import VerbsOptions
from miraccl.transport.verbs_device import QpSettings
from miraccl.wire.verbs.gids import GidWish
from miraccl.wire.verbs.policy import NAMES
from miraccl.wire.verbs.rows import MAX_DEVICES

log = trace.logger("verbs")


def usable_ports(environ: Mapping[str, str] | None = None) -> list[tuple[Hca, Port]]:
    """Return the active ports that the settings select, all of the kind of the first.

    Raises:
        MissingDependency: libibverbs is not installed.
        SystemFailure: There is no such port; the text says why.
    """
    if params.IB_DISABLE.read(environ):
        raise SystemFailure("cannot use verbs: MIRACCL_IB_DISABLE is set")
    hcas = read_hcas()
    if not hcas:
        raise SystemFailure(
            "cannot use verbs: this host has no InfiniBand or RoCE device",
            hint="/sys/class/infiniband is empty; is the driver of the adapter loaded?",
        )
    wanted = params.IB_HCA.read(environ)
    ports = select_ports(hcas, wanted)
    if not ports:
        states = ", ".join(f"{h.name}:{p.number} is {p.state}" for h in hcas for p in h.ports)
        chosen = f" among those that MIRACCL_IB_HCA={wanted} selects" if wanted else ""
        raise SystemFailure(
            f"cannot use verbs: no port is active{chosen} ({states})",
            hint="check cable and switch; on InfiniBand, whether a subnet manager runs",
        )
    load_library()
    alike = [(hca, port) for hca, port in ports if port.kind == ports[0][1].kind]
    return alike[:MAX_DEVICES] if params.IB_MERGE_NICS.read(environ) else alike[:1]


def usable_kinds(net: str) -> tuple[str, ...]:
    """Return the kinds of the usable ports, for ``Endpoint.hcas``.

    Args:
        net: Value of ``MIRACCL_NET``. With ``verbs``, the log says why there are none; ranks of
            one host do not need any.
    """
    if net not in ("auto", "verbs"):
        return ()
    try:
        return tuple(port.kind for _, port in usable_ports())
    except (MissingDependency, SystemFailure) as error:
        if net == "verbs":
            log.warning("%s", error)
        return ()


def options_from_environment(environ: Mapping[str, str] | None = None) -> VerbsOptions:
    """Return the transport's options as the settings say."""
    options = VerbsOptions(
        qps_per_connection=params.IB_QPS_PER_CONNECTION.read(environ),
        policy=NAMES.index(params.IB_POLICY.read(environ)),
        gid=GidWish(
            index=params.IB_GID_INDEX.read(environ),
            version=params.IB_ROCE_VERSION_NUM.read(environ),
            family=params.IB_ADDR_FAMILY.read(environ),
            range=params.IB_ADDR_RANGE.read(environ),
        ),
        control_class=params.IB_FIFO_TC.read(environ),
        adaptive=params.IB_ADAPTIVE_ROUTING.read(environ),
        adaptive_bytes=params.IB_AR_THRESHOLD.read(environ),
        qp=QpSettings(
            timeout=params.IB_TIMEOUT.read(environ),
            retry_count=params.IB_RETRY_CNT.read(environ),
            traffic_class=params.IB_TC.read(environ),
            service_level=params.IB_SL.read(environ),
            pkey_index=params.IB_PKEY.read(environ),
            relaxed_ordering=params.IB_PCI_RELAXED_ORDERING.read(environ),
        ),
    )
    if not params.IB_INLINE.read(environ):
        options = replace(options, qp=replace(options.qp, inline_bytes=0))
    return options
