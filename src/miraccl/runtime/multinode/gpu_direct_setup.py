"""Set-up of ``gpu_direct``: the ranks agree whether adapters access GPU memory, and connect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miraccl import params
from miraccl.errors import MiracclError, SystemFailure
from miraccl.runtime.multinode.gpu_direct import GpuDirect
from miraccl.runtime.multinode.streams import network_between_hosts
from miraccl.transport import registry
from miraccl.transport.base import TransportContext
from miraccl.transport.fifo import MIN_SLOT_BYTES
from miraccl.transport.verbs_gpu_access import GpuAccess, GpuTraits, decide_registration

if TYPE_CHECKING:
    from miraccl.executor.cuda.gpu import Gpu
    from miraccl.runtime.core_access import CoreAccess
    from miraccl.runtime.multinode.node_layout import NodeLayout
    from miraccl.runtime.setup_phases import SetupPhases
    from miraccl.wire.proxy_records import Loss


def gpu_direct_possible(core: CoreAccess) -> bool:
    """Return True if reliable queue pairs connect all ranks of different hosts; all ranks agree."""
    reliable = params.IB_QP_TYPE.read() == "rc"
    return reliable and network_between_hosts(core) == registry.VERBS.name


def open_gpu_direct(
    stages: SetupPhases, core: CoreAccess, layout: NodeLayout, gpu: Gpu, slot_bytes: int
) -> tuple[GpuDirect | None, str]:
    """Connect the ranks of different nodes, collectively, if all of them can.

    Args:
        slot_bytes: Size of the first slots.

    Returns:
        (connections or None, data path or the first rank's reason against it).
    """
    made: GpuDirect | None = None
    info, reason = b"", ""
    try:
        made, info = _prepare(stages, core, layout, gpu, slot_bytes)
    except MiracclError as error:
        reason = f"rank {core.rank}: {error.message}"
    try:
        reasons = [text for text in stages.exchange("gpu direct", reason) if text]
        if reasons or made is None:
            if made is not None:
                made.close()
            return None, reasons[0]
        infos = stages.gather("gpu direct connect", info)
        made.connect({rank: infos[rank] for rank in layout.remote_ranks})
    except BaseException:
        if made is not None:
            made.close()
        raise
    return made, made.description


def _prepare(
    stages: SetupPhases, core: CoreAccess, layout: NodeLayout, gpu: Gpu, slot_bytes: int
) -> tuple[GpuDirect, bytes]:
    """Open the adapters, register slots and check them; return the description for the peers."""
    from miraccl.native.verbs_abi import load_library
    from miraccl.proxy.verbs import open_reliable
    from miraccl.transport.verbs_ports import usable_ports

    ports = usable_ports()
    traits = GpuTraits(
        bus_id=gpu.bus_id,
        sm=gpu.arch,
        dma_buf=gpu.exports_dma_buf,
        writes_ordering=gpu.writes_ordering,
    )
    decision = decide_registration(traits, load_library(), [hca for hca, _ in ports])
    if not decision.possible:
        raise SystemFailure(f"cannot access GPU memory by RDMA: {decision.reason}")
    losses: dict[int, Loss] = {}
    context = TransportContext(
        endpoint=core.endpoints[core.rank],
        peers={rank: core.endpoints[rank] for rank in layout.remote_ranks},
        max_slot_bytes=MIN_SLOT_BYTES,  # none is used
        deadline=stages.deadline,
        check=stages.check,
        on_lost=losses.__setitem__,
    )
    transport = open_reliable(context, ports, in_place_only=True)
    made = GpuDirect(core, gpu, transport, GpuAccess(traits, decision), losses)
    try:
        info = transport.setup()
        made.prepare(slot_bytes)
    except BaseException:
        made.close()
        raise
    return made, info
