"""Planner of a communicator on CPU memory, and the settings that its ranks compare."""

from __future__ import annotations

from miraccl import params
from miraccl.planning.cost_model import CommunicatorShape, CpuConstants
from miraccl.planning.planner import Overrides, Planner
from miraccl.planning.tuning import prepare
from miraccl.runtime.fabric_contract import AgreedConfig, Fabric
from miraccl.runtime.options import Options
from miraccl.version import __version__


def agreed_config(options: Options, constants: CpuConstants | None) -> AgreedConfig:
    """Return the settings that all ranks must share.

    ``constants``: cost model of the machine; None loads or measures it, and compiles the engine.
    """
    algo_hints = (f"{collective.label}:{name}" for collective, name in options.algo_hints)
    proto_hints = (f"{collective.label}:{name}" for collective, name in options.proto_hints)
    return AgreedConfig(
        version=__version__,
        algo=options.algo or " ".join(algo_hints),
        proto=" ".join(proto_hints) or options.proto,
        deterministic=options.deterministic,
        buffsize=options.buffsize,
        single_copy=options.single_copy,
        # the file of a plugin may have another path on each host
        net=params.NET.read().partition(":")[0],
        constants=(constants or prepare()).to_json(),
    )


def open_planner(fabric: Fabric, options: Options) -> Planner:
    """Return the planner for the ranks of ``fabric``, with the cost model that they agreed on."""
    constants = CpuConstants.from_json(fabric.constants_text)

    def threshold(measured: int) -> int:
        """Return the bytes from which a peer reads private memory directly; -1 for never."""
        if not fabric.addressable or options.single_copy == "never":
            return -1
        return params.parse_size(options.single_copy) if options.single_copy else measured

    return Planner(
        rank=fabric.rank,
        shape=CommunicatorShape(
            nranks=fabric.nranks,
            ranks_per_core=max(1.0, fabric.ranks_per_core),
            hosts=fabric.hosts if len(set(fabric.hosts)) > 1 else (),
            order=fabric.order,
        ),
        slot_bytes=fabric.slot_bytes,
        constants=constants,
        overrides=Overrides(
            algo=options.algo,
            proto=options.proto,
            deterministic=options.deterministic,
            hints=dict(options.algo_hints),
        ),
        stream_from=fabric.stream_from,
        single_copy=threshold(constants.single_copy_from),
        exchange_copy=threshold(constants.exchange_copy_from),
        addressable=fabric.addressable,
    )
