"""Explanation of the plan on GPU memory: ``Communicator.explain(..., device="cuda")``.

Candidates are built from the plans that the calls themselves use (``executor.cuda.choice``), so
the explanation and the execution cannot differ. Window memory belongs to a call and is unknown
here: an algorithm that needs it is a candidate with its condition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from miraccl.executor.cuda import copies, staged_copies
from miraccl.executor.cuda.choice import UNREACHABLE_BYTES, choose, may_use_trees, ring_min_bytes
from miraccl.executor.cuda.plan import ALGORITHMS, TREES, DevicePlan, Request, frame_of
from miraccl.schedule.catalog import TOPOLOGY_ORDERED
from miraccl.types import Collective

ConnectionInfo = tuple[tuple[int, int], str, str]
"""(pair of ranks, how data go between them, why)."""
MESSAGE_COLLECTIVES = (Collective.GATHER, Collective.SCATTER, Collective.BARRIER)


@dataclass(frozen=True, kw_only=True)
class DeviceCandidate:
    """One algorithm that could run an operation on GPU memory, and the reason it was (not) chosen.

    The kernel has ``blocks`` of ``threads`` threads, each with ``unroll`` vectors in flight; 0 if
    no kernel of this host does the work alone. ``frame``: how packets carry their flags
    (docs/design/kernels.md), empty without packets. ``order``: ranks in neighbour order, for
    algorithms that have neighbours, and ``order_reason``. ``connections``: the data path of each
    pair of ranks, the same for all candidates.
    """

    algo: str
    proto: str
    chosen: bool
    reason: str
    frame: str = ""
    blocks: int = 0
    threads: int = 0
    unroll: int = 0
    order: tuple[int, ...] = ()
    order_reason: str = ""
    connections: tuple[ConnectionInfo, ...] = ()


def candidates(
    request: Request,
    *,
    order: tuple[int, ...],
    order_reason: str,
    connections: Sequence[ConnectionInfo],
    given: DevicePlan | None = None,
    no_multiprocessors: bool = False,
    all_direct: bool = True,
) -> list[DeviceCandidate]:
    """Return all candidates for a request on one host, the chosen one first.

    ``given``: a plan that the application has set.
    """
    all_connections = tuple(connections)
    if request.nranks == 1:
        return [
            DeviceCandidate(
                algo="none",
                proto="",
                chosen=True,
                reason="one rank: the result is the input",
                connections=all_connections,
            )
        ]
    if request.collective in MESSAGE_COLLECTIVES:
        reason = "messages between pairs of ranks; how many warps follows from their sizes"
        return [
            DeviceCandidate(
                algo="p2p", proto="", chosen=True, reason=reason, connections=all_connections
            )
        ]

    def candidate_of(plan: DevicePlan, chosen: bool, reason: str) -> DeviceCandidate:
        uses_order = plan.algo in TOPOLOGY_ORDERED
        return DeviceCandidate(
            algo=plan.algo,
            proto=plan.proto,
            chosen=chosen,
            reason=reason,
            frame=frame_of(request, plan.proto).value if plan.uses_packets else "",
            blocks=plan.blocks,
            threads=plan.threads,
            unroll=plan.unroll,
            order=order if uses_order else (),
            order_reason=order_reason if uses_order else "",
            connections=all_connections,
        )

    kernel = given or choose(request)
    others = [
        candidate_of(*_alternative(request, name, kernel))
        for name in ALGORITHMS[request.collective]
        if name != kernel.algo
    ]
    if copies.is_supported(request.collective, request.nranks):
        threshold = copies.faster_min_bytes(request.collective, request.nranks)
        condition = f"taken into windows (comm.empty), from {threshold >> 20} MiB of other ranks on"
        others.append(
            candidate_of(
                copies.copy_plan(request),
                False,
                "taken into windows (MIRACCL_SMS=0)" if no_multiprocessors else condition,
            )
        )
    if no_multiprocessors and all_direct and request.collective in staged_copies.ALGORITHMS:
        engines = staged_copies.staged_plan(request)
        unused = candidate_of(kernel, False, "kernels are not to be used (MIRACCL_SMS=0)")
        return [candidate_of(engines, True, f"{engines.reason} (MIRACCL_SMS=0)"), unused, *others]
    return [candidate_of(kernel, True, "given with use_plan" if given else kernel.reason), *others]


def _alternative(request: Request, name: str, chosen: DevicePlan) -> tuple[DevicePlan, bool, str]:
    """Return the plan of another algorithm, False (not chosen) and the reason."""
    plan = choose(replace(request, algo=name))
    if request.algo:
        return plan, False, f"{request.algo} was {request.why}"
    if name == "ring":
        threshold = ring_min_bytes(request)
        rule = (
            f"from {threshold >> 20} MiB on" if threshold < UNREACHABLE_BYTES else "on request only"
        )
        return plan, False, f"{rule}: sums are rounded at every hop" if request.reduces else rule
    if name == TREES and not may_use_trees(request):
        return plan, False, "on request only: no size is known at which it wins"
    return plan, False, f"{chosen.algo} is taken for {chosen.reason.partition(';')[0]}"
