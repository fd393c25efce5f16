"""How many multiprocessors kernels may take: the CTA policy, in the words of NCCL's ``ncclConfig_t`` (``CTAPolicy``, 2.27 and later).

A kernel of a large operation is limited by the links, not by multiprocessors, and those that it takes are missing to whatever runs beside
it.  ``default`` takes what makes the operation itself shortest; ``efficiency`` takes few for large operations, as training wants it, where
the gradients of one layer travel while those of the next are computed; ``zero`` leaves it to copy engines where that is possible.
``MIRACCL_SMS`` says a number for operations of all sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miraccl import params
from miraccl.executor.cuda.plan import Request
from miraccl.types import Collective

#: multiprocessors that all kernels leave to others
RESERVED_SMS = 4
#: (bytes that a rank sends up to, multiprocessors at most) of the policy ``efficiency``, measured on H200 (docs/performance.md).  Up to
#: 1 MiB an operation is over before it is missed.  Sums read and write the plain data as well, and need more than what is only moved.
SmLimits = tuple[tuple[int, int], ...]
NO_LIMIT, MIB = 1 << 30, 1 << 20
MOVE_LIMITS: SmLimits = ((MIB, NO_LIMIT), (28 * MIB, 24), (1 << 62, 64))
REDUCE_LIMITS: SmLimits = ((MIB, NO_LIMIT), (16 * MIB, 32), (64 * MIB - 1, 48), (1 << 62, 64))
_BLOCK_PER_PEER = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)


@dataclass(frozen=True, kw_only=True)
class CtaLimits:
    """What all ranks have agreed on. ``most`` multiprocessors may be filled; ``limited``: that many because MIRACCL_SMS says so; ``none``:
    copy engines where possible."""

    max_sms: int
    fixed: bool = False
    efficiency: bool = False
    copy_engines_only: bool = False

    @staticmethod
    def proposal(multiprocessors: int, policy: str) -> dict[str, Any]:
        """What one rank asks for, on a GPU of so many multiprocessors; ``policy`` is that of the program, after the environment's."""
        limit = params.SMS.read()
        policy = params.CTA_POLICY.read() or policy
        if limit < 0 and policy == "zero":
            limit = 0
        return {
            "most": max(1, multiprocessors - RESERVED_SMS),
            "limit": limit,
            "efficient": limit < 0 and policy == "efficiency",
        }

    @classmethod
    def agree(cls, proposals: Sequence[Mapping[str, Any]]) -> CtaLimits:
        """The least number of all ranks counts, and one that asks for the policy."""
        limits = [int(proposal["limit"]) for proposal in proposals if int(proposal["limit"]) >= 0]
        most = min([int(proposal["most"]) for proposal in proposals] + limits)
        return cls(
            max_sms=max(1, most),
            fixed=bool(limits),
            efficiency=any(proposal["efficient"] for proposal in proposals),
            copy_engines_only=most == 0,
        )

    def apply(self, request: Request) -> Request:
        """The request with the multiprocessors that its kernel may take."""
        if self.fixed:
            return replace(request, multiprocessors=self.max_sms, packed=True)
        if not self.efficiency:
            return replace(request, multiprocessors=self.max_sms)
        block_per_peer = request.collective in _BLOCK_PER_PEER  # a block for each of the others
        sent = request.block_bytes * (request.nranks - 1 if block_per_peer else 1)
        max_sms = next(
            count
            for up_to, count in (MOVE_LIMITS if block_per_peer else REDUCE_LIMITS)
            if sent <= up_to
        )
        return replace(
            request, multiprocessors=min(self.max_sms, max_sms), packed=max_sms < self.max_sms
        )
