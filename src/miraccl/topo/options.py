"""Settings of topology and paths as plain values.

``TopoOptions`` selects the part of a file that takes part; ``PathOptions`` holds NCCL's rules for
the use of paths. The environment is read in :meth:`PathOptions.read` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from miraccl import params
from miraccl.errors import InvalidUsage
from miraccl.topo.records import PathType


@dataclass(frozen=True, kw_only=True)
class PathOptions:
    """Rules for the corrections of paths; the defaults are NCCL's.

    ``p2p_level`` and ``gdr_level`` are the farthest path types for peer access and for GPUDirect
    RDMA; None selects PXB (SYS for peer access between two GPUs on AMD). ``gdr_read`` controls
    GPUDirect for sends: 0 never, 1 always, negative by architecture. ``net_per_gpu`` is the number
    of nearest nets that a GPU uses: 0 shares them evenly among the GPUs, -1 uses all.
    """

    p2p_level: PathType | None = None
    nvb: bool = True
    pxn: bool = True
    pxn_c2c: bool = True
    gdr_level: PathType | None = None
    gdr_read: int = -2
    gdr_c2c: bool = True
    shm: bool = True
    net_intra: bool = True
    net_per_gpu: int = 0

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> PathOptions:
        """Read the rules from an environment, under our names or NCCL's.

        ``P2P_DISABLE=1`` takes precedence over ``P2P_LEVEL``.
        """

        def level(value: int) -> PathType | None:
            return None if value < 0 else PathType(value)

        p2p = (
            PathType.LOC
            if params.P2P_DISABLE.read(environ) == 1
            else level(params.P2P_LEVEL.read(environ))
        )
        return cls(
            p2p_level=p2p,
            nvb=params.NVB_DISABLE.read(environ) == 0,
            pxn=params.PXN_DISABLE.read(environ) != 1,
            pxn_c2c=params.PXN_C2C.read(environ) != 0,
            gdr_level=level(params.NET_GDR_LEVEL.read(environ)),
            gdr_read=params.NET_GDR_READ.read(environ),
            gdr_c2c=params.NET_GDR_C2C.read(environ) != 0,
            shm=not params.SHM_DISABLE.read(environ),
            net_intra=params.NET_DISABLE_INTRA.read(environ) != 1,
            net_per_gpu=_nets_per_gpu(params.NETDEVS_POLICY.read(environ)),
        )


def _nets_per_gpu(policy: str) -> int:
    return (
        {"AUTO": 0, "ALL": -1}[policy]
        if policy in ("AUTO", "ALL")
        else int(policy.partition(":")[2])
    )


@dataclass(frozen=True, kw_only=True)
class TopoOptions:
    """Part of a file that takes part, in a job of ``nodes`` identical nodes.

    ``gpus`` lists device numbers in the order of their local ranks; empty means all. ``fuse`` reads
    the file like one process per GPU with ``NCCL_TOPO_FILE`` would (each keeps its own GPU, then
    the trees are merged); otherwise the file is the merged topology. ``collnet`` gives CollNet
    support to every net without a ``coll`` attribute. Raises ``InvalidUsage`` for fewer than 1 node
    or a repeated GPU.
    """

    nodes: int = 1
    gpus: tuple[int, ...] = ()
    fuse: bool = False
    collnet: bool = False
    paths: PathOptions = field(default_factory=PathOptions)

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise InvalidUsage(f"cannot plan for {self.nodes} nodes: a job has at least 1")
        if len(set(self.gpus)) != len(self.gpus):
            raise InvalidUsage(
                f"cannot select GPUs {','.join(map(str, self.gpus))}: a number is repeated"
            )
