"""Limits on the SMs that kernels may occupy: the CTA policy of ``ncclConfig_t`` (NCCL 2.27).

A kernel of a large operation is limited by the links, not by SMs, and the SMs that it occupies
are unavailable to computation that runs concurrently. ``default`` minimises the time of the
operation itself. ``efficiency`` uses few SMs for large operations, which suits training: the
gradients of one layer are reduced while the next are computed. ``zero`` prefers copy engines.
``MIRACCL_SMS`` sets a number for all sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miraccl import params
from miraccl.executor.cuda.plan import Request
from miraccl.types import Collective

#: SMs that no kernel occupies
RESERVED_SMS = 4
#: (largest number of bytes that a rank sends, SMs) of the policy ``efficiency``, measured on H200
#: (docs/measurements.md). Up to 1 MiB an operation ends before its SMs are missed. Reductions also
#: read and write the plain data and need more SMs than operations that only move it.
SmLimits = tuple[tuple[int, int], ...]
NO_LIMIT, MIB = 1 << 30, 1 << 20
MOVE_LIMITS: SmLimits = ((MIB, NO_LIMIT), (28 * MIB, 24), (1 << 62, 64))
REDUCE_LIMITS: SmLimits = ((MIB, NO_LIMIT), (16 * MIB, 32), (64 * MIB - 1, 48), (1 << 62, 64))
_BLOCK_PER_PEER = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)


@dataclass(frozen=True, kw_only=True)
class CtaLimits:
    """Limits that all ranks have agreed on.

    ``max_sms``: SMs that kernels may fill. ``fixed``: the number comes from MIRACCL_SMS.
    ``efficiency``: the CTA policy. ``copy_engines_only``: use no SMs where copy engines can do it.
    """

    max_sms: int
    fixed: bool = False
    efficiency: bool = False
    copy_engines_only: bool = False

    @staticmethod
    def proposal(multiprocessors: int, policy: str) -> dict[str, Any]:
        """Return one rank's proposal for a GPU with this many SMs.

        ``policy`` is the application's choice; the environment overrides it.
        """
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
        """Combine all ranks' proposals: the lowest number, and the policy if any rank sets it."""
        requested = [int(proposal["limit"]) for proposal in proposals]
        limits = [limit for limit in requested if limit >= 0]
        most = min([int(proposal["most"]) for proposal in proposals] + limits)
        return cls(
            max_sms=max(1, most),
            fixed=bool(limits),
            efficiency=any(proposal["efficient"] for proposal in proposals),
            copy_engines_only=most == 0,
        )

    def apply(self, request: Request) -> Request:
        """Return ``request`` with the SMs that its kernel may use."""
        if self.fixed:
            return replace(request, multiprocessors=self.max_sms, packed=True)
        if not self.efficiency:
            return replace(request, multiprocessors=self.max_sms)
        block_per_peer = request.collective in _BLOCK_PER_PEER
        sent = request.block_bytes * (request.nranks - 1 if block_per_peer else 1)
        limits = MOVE_LIMITS if block_per_peer else REDUCE_LIMITS
        max_sms = next(count for up_to, count in limits if sent <= up_to)
        packed = max_sms < self.max_sms
        return replace(request, multiprocessors=min(self.max_sms, max_sms), packed=packed)
