"""What a communicator asks about its operations on GPUs, and the plans that it was given; ``executor.cuda.choice`` chooses the others.

``DevicePlanner`` is to GPU memory what ``comm.planner.Planner`` is to CPU memory.
"""

from __future__ import annotations

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda.choice import choose
from miraccl.executor.cuda.plan import DevicePlan, Request, check_protocol
from miraccl.ops.arguments import resolve_operator
from miraccl.planning import nccl_hints
from miraccl.planning.nccl_hints import NcclHints
from miraccl.runtime.gpu.collectives import SUM, Operator
from miraccl.runtime.options import Options
from miraccl.schedule import catalog
from miraccl.types import Collective, DType, RedOp


class DevicePlanner:
    """Makes requests of calls and finds plans for these, for one communicator and rank."""

    def __init__(self, rank: int, nranks: int, options: Options) -> None:
        """An algorithm or a protocol that does not exist is refused here (``InvalidUsage``)."""
        self.rank, self.nranks = rank, nranks
        self.algo, self.proto = (
            options.algo,
            "" if options.proto_hints else options.proto,
        )  # that is what CPU ranks make of them
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
        self, collective: Collective, dtype: DType, count: int, op: Operator = SUM, root: int = 0
    ) -> Request:
        """What ``choose`` decides about, on all multiprocessors; ``count`` are the elements of a block."""
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
        """What was asked for where it has a schedule, and why, or nothing: then ``choose`` does. A wish that rules forbid is none."""
        ordered = self.deterministic and collective.reduces
        asked = self.algo or self._constraints.algorithms.get(collective, "")
        if asked and catalog.get(asked).supports(collective, self.nranks):
            if not ordered or catalog.get(asked).rank_ordered:
                return asked, "asked for" if self.algo else "asked for (NCCL_ALGO)"
            if self.algo:
                text = f"{collective.label}: {asked} does not add in the order of the ranks (deterministic)"
                raise InvalidUsage(text, rank=self.rank)
        return "", ""

    def plan(self, request: Request) -> DevicePlan:
        """The plan for a request: one that was given, else what ``choose`` says."""
        return self.user_plan(request) or choose(request)

    def user_plan(self, request: Request) -> DevicePlan | None:
        return self._user_plans.get((request.collective, request.dtype, request.count, request.op))

    def use(
        self, collective: Collective, dtype: DType, count: int, plan: DevicePlan, op: RedOp
    ) -> None:
        """Give ``plan`` for all requests of this kind."""
        self._user_plans[collective, dtype, count, op] = plan

    def forget_user_plans(self) -> None:
        """Forget the plans that were given."""
        self._user_plans.clear()
