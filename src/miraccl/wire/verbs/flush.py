"""Decision whether and how to flush GPU memory after a receive: a pure table with reasons.

A NIC that writes into GPU memory reports the completion into host memory, on another path through
the machine: a kernel that starts on the completion may read the old bytes. NCCL reads one byte back
through a loop-back queue pair (``net_ib/p2p.cc``, ``ncclIbIflush``) unless the GPU orders such
writes itself. The rows below are tried in order; the first whose conditions hold decides.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class FlushMethod(enum.Enum):
    """Way in which writes of a NIC to GPU memory are made visible."""

    NONE = "none"
    READ = "read"
    """RDMA READ of the last byte through a loop-back queue pair."""
    ATOMIC = "atomic"
    """Fetch-and-add on the memory, with a null memory region as its local buffer."""
    GDRCOPY = "gdrcopy"
    """Read of a mapped GPU page by the CPU."""
    DATA_DIRECT = "data direct"
    """Data-direct path of the NIC, with a flush of its own."""


@dataclass(frozen=True, kw_only=True)
class FlushFacts:
    """Facts from which the method follows.

    Attributes:
        memory: ``host`` or ``gpu``.
        vendor: ``nvidia`` or ``amd``.
        compute_capability: 90 for Hopper.
        c2c: The NIC reaches the GPU over a C2C link of the CPU.
        writes_ordering: CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: 0 none, 100 for the
            owner, 200 for all devices; -1 unknown.
        forced: True: always flush (NCCL_NET_FORCE_FLUSH=1, or the plugin asks for it).
        disabled: True: never flush (NCCL_GDR_FLUSH_DISABLE=1).
        null_mr, gdrcopy, data_direct: Abilities of device and host.
    """

    memory: str = "host"
    vendor: str = "nvidia"
    compute_capability: int = 0
    c2c: bool = False
    writes_ordering: int = -1
    forced: bool = False
    disabled: bool = False
    null_mr: bool = False
    gdrcopy: bool = False
    data_direct: bool = False


@dataclass(frozen=True, kw_only=True)
class FlushDecision:
    """Method and reason, as ``miraccl doctor`` prints them."""

    method: FlushMethod
    reason: str


_Row = tuple[Callable[[FlushFacts], bool], FlushMethod, str]

TABLE: tuple[_Row, ...] = (
    (lambda f: f.memory == "host", FlushMethod.NONE, "payload in host memory is ordered before "
     "its completion"),
    (lambda f: f.disabled and not f.forced, FlushMethod.NONE, "disabled by a setting"),
    (lambda f: not f.forced and f.writes_ordering >= 100, FlushMethod.NONE,
     "the driver says that the GPU orders writes of NICs"),
    (lambda f: not f.forced and f.vendor == "nvidia" and f.compute_capability >= 90 and not f.c2c,
     FlushMethod.NONE, "GPUs from compute capability 9.0 on order writes that come over PCIe"),
    (lambda f: f.data_direct, FlushMethod.DATA_DIRECT,
     "the NIC writes by its data-direct function, which has a flush of its own"),
    (lambda f: f.gdrcopy and not f.c2c, FlushMethod.GDRCOPY,
     "a read of the CPU through gdrcopy is the fastest flush"),
    (lambda f: f.null_mr and f.vendor == "nvidia", FlushMethod.ATOMIC,
     "a fetch-and-add needs no local buffer, and cannot pass earlier writes"),
    (lambda f: True, FlushMethod.READ, "a read over the NIC cannot pass its earlier writes"),
)  # fmt: skip


def decide_flush(facts: FlushFacts) -> FlushDecision:
    """Return how to flush, and why."""
    for holds, method, reason in TABLE:
        if holds(facts):
            cause = "; asked for by a setting" if facts.forced and facts.memory == "gpu" else ""
            return FlushDecision(method=method, reason=reason + cause)
    raise AssertionError("the last row holds always")
