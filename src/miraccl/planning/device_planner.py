"""Planner for GPU memory: requests for a communicator's calls, and plans set by the application.

``DevicePlanner`` is the counterpart of ``planning.planner.Planner``; other plans come from
``executor.cuda.choice``.
"""

from __future__ import annotations

from typing import Protocol

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda.choice import choose
from miraccl.executor.cuda.plan import DevicePlan, Request, check_protocol
from miraccl.ops.arguments import resolve_operator
from miraccl.planning import nccl_hints
from miraccl.planning.nccl_hints import NcclHints
from miraccl.schedule import catalog
from miraccl.types import Collective, DType, Operator, RedOp


class PlannerOptions(Protocol):
    """Options of a communicator that the planner reads (``runtime.options.Options``)."""

    @property
    def algo(self) -> str: ...
    @property
    def proto(self) -> str: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def algo_hints(self) -> tuple[tuple[Collective, str], ...]: ...
    @property
    def proto_hints(self) -> tuple[tuple[Collective, str], ...]: ...


class DevicePlanner:
    """Makes requests from calls and finds their plans, for one communicator and rank."""

    def __init__(self, rank: int, nranks: int, options: PlannerOptions) -> None:
        """Raise ``InvalidUsage`` for an unknown algorithm or protocol."""
        self.rank, self.nranks = rank, nranks
        self.algo, self.proto = (
            options.algo,
            "" if options.proto_hints else options.proto,
        )  # ``proto`` then holds the CPU ranks' interpretation of NCCL_PROTO
        check_protocol(self.proto)
        if self.algo:
            catalog.get(self.algo)
        self.deterministic = options.deterministic
        self._constraints = NcclHints(
            algorithms=nccl_hints.gpu_algorithms(dict(options.algo_hints)),
            protocols=dict(options.proto_hints),
        )
        self._user_plans: dict[tuple[Collective, DType, int, RedOp], DevicePlan] = {}

    def request(
        self,
        collective: Collective,
        dtype: DType,
        count: int,
        op: Operator = RedOp.SUM,
        root: int = 0,
    ) -> Request:
        """Return the planner's input on all SMs; ``count``: elements per block."""
        kind, scalar = resolve_operator(op, dtype, collective.label)
        algo, why = self._algorithm(collective)
        return Request(
            collective=collective,
            dtype=dtype,
            op=kind,
            scalar=scalar,
            count=count,
            nranks=self.nranks,
            root=root,
            algo=algo,
            why=why,
            ordered=self.deterministic,
            proto=self.proto or self._constraints.protocols.get(collective, ""),
        )

    def _algorithm(self, collective: Collective) -> tuple[str, str]:
        """Return the configured algorithm and its reason; empty if ``choose`` is to decide.

        A hint that other rules forbid is ignored.
        """
        ordered = self.deterministic and collective.reduces
        algorithm = self.algo or self._constraints.algorithms.get(collective, "")
        if algorithm and catalog.get(algorithm).supports(collective, self.nranks):
            if not ordered or catalog.get(algorithm).rank_ordered:
                return algorithm, "asked for" if self.algo else "asked for (NCCL_ALGO)"
            if self.algo:
                text = (
                    f"{collective.label}: cannot use {algorithm}: "
                    "deterministic reductions must add in rank order"
                )
                raise InvalidUsage(text, rank=self.rank)
        return "", ""

    def plan(self, request: Request) -> DevicePlan:
        """Return the plan for a request: the application's, or the one that ``choose`` finds."""
        return self.user_plan(request) or choose(request)

    def user_plan(self, request: Request) -> DevicePlan | None:
        return self._user_plans.get((request.collective, request.dtype, request.count, request.op))

    def use(
        self, collective: Collective, dtype: DType, count: int, plan: DevicePlan, op: RedOp
    ) -> None:
        """Use ``plan`` for all requests of this kind."""
        self._user_plans[collective, dtype, count, op] = plan

    def forget_user_plans(self) -> None:
        """Discard the application's plans."""
        self._user_plans.clear()
