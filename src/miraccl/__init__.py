"""miraccl: collective communication between processes, hosts and GPUs, with explained decisions.

import numpy as np, miraccl
with miraccl.init() as comm:
    x = np.full(1 << 20, comm.rank, np.float32)
    comm.all_reduce(x)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from miraccl.address_space import require_address_space
from miraccl.errors import (
    AgentLost,
    AuthenticationError,
    BootstrapError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorAborted,
    CommunicatorClosed,
    InvalidUsage,
    MiracclError,
    PeerDied,
    PlanMismatch,
    ScheduleError,
    StaleDescriptor,
    SystemFailure,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from miraccl.types import Collective, DType, PreMulSum, Protocol, RedOp
from miraccl.version import __version__

if TYPE_CHECKING:
    from miraccl.api.communicator import Communicator
    from miraccl.api.init import init
    from miraccl.bootstrap import UniqueId, get_unique_id
    from miraccl.p2p.agent import Agent
    from miraccl.p2p.reshard import Mesh, Replicate, Shard, Versions, reshard
    from miraccl.runtime.group import group
    from miraccl.runtime.work import Work

SUM, PROD, MIN, MAX, AVG = RedOp.SUM, RedOp.PROD, RedOp.MIN, RedOp.MAX, RedOp.AVG

#: Names that need NumPy or compiled code: imported on first access.
_LATE = {
    "Agent": "miraccl.p2p.agent",
    "Communicator": "miraccl.api.communicator",
    "Mesh": "miraccl.p2p.reshard",
    "Replicate": "miraccl.p2p.reshard",
    "Shard": "miraccl.p2p.reshard",
    "UniqueId": "miraccl.bootstrap",
    "Versions": "miraccl.p2p.reshard",
    "Work": "miraccl.runtime.work",
    "get_unique_id": "miraccl.bootstrap",
    "group": "miraccl.runtime.group",
    "init": "miraccl.api.init",
    "reshard": "miraccl.p2p.reshard",
}

__all__ = [
    "AVG",
    "MAX",
    "MIN",
    "PROD",
    "SUM",
    "Agent",
    "AgentLost",
    "AuthenticationError",
    "BootstrapError",
    "Collective",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "CommunicatorAborted",
    "CommunicatorClosed",
    "DType",
    "InvalidUsage",
    "Mesh",
    "MiracclError",
    "PeerDied",
    "PlanMismatch",
    "PreMulSum",
    "Protocol",
    "RedOp",
    "Replicate",
    "ScheduleError",
    "Shard",
    "StaleDescriptor",
    "SystemFailure",
    "TransferCancelled",
    "TransferError",
    "TransferTimeout",
    "UniqueId",
    "Versions",
    "Work",
    "__version__",
    "get_unique_id",
    "group",
    "init",
    "reshard",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'miraccl' has no attribute {name!r}")
    require_address_space("numpy", "llvmlite", do=f"load miraccl.{name}")
    # Cached: ``miraccl.group`` stays the function even if a module of that name is loaded.
    value = getattr(importlib.import_module(_LATE[name]), name)
    globals()[name] = value
    return value
