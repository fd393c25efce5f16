"""SM limits of kernels: proposals of ranks, their agreement, and its effect on plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from miraccl import params
from miraccl.errors import InvalidUsage
from miraccl.executor.cuda.choice import choose
from miraccl.executor.cuda.plan import DevicePlan, Request, kernel_spec
from miraccl.planning.cta_limits import RESERVED_SMS, CtaLimits
from miraccl.runtime.options import Options
from miraccl.types import Collective, DType, RedOp
from tests.gpu import emulated_ranks
from tests.gpu.emulator import folder, needs_compiler
from tests.support.ranks import run_ranks

MIB = 1 << 20


def agreed_limits(
    monkeypatch: pytest.MonkeyPatch,
    *environments: dict[str, str],
    policy: str = "",
    multiprocessors: int = 132,
) -> CtaLimits:
    """Return the limits that ranks with these environments agree on."""
    proposals = []
    for environment in environments:
        for name in ("MIRACCL_SMS", "MIRACCL_CTA_POLICY", "NCCL_CTA_POLICY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        proposals.append(CtaLimits.proposal(multiprocessors, policy))
    return CtaLimits.agree(proposals)


def request(collective: Collective, nbytes: int, nranks: int = 2, **more: Any) -> Request:
    return Request(
        collective=collective,
        dtype=DType.FLOAT32,
        op=RedOp.SUM,
        count=nbytes // 4,
        nranks=nranks,
        **more,
    )


def test_default_leaves_reserved_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    ctas = agreed_limits(monkeypatch, {}, {})
    assert ctas == CtaLimits(max_sms=132 - RESERVED_SMS)
    limited = ctas.apply(request(Collective.ALL_REDUCE, 64 * MIB))
    assert (limited.multiprocessors, limited.packed) == (132 - RESERVED_SMS, False)


def test_lowest_number_and_any_policy_win(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed_limits(
        monkeypatch, {"MIRACCL_SMS": "16"}, {}, {"MIRACCL_SMS": "24"}
    ) == CtaLimits(max_sms=16, fixed=True)
    assert agreed_limits(monkeypatch, {"MIRACCL_SMS": "0"}, {}) == CtaLimits(
        max_sms=1, fixed=True, copy_engines_only=True
    )
    assert agreed_limits(monkeypatch, {"MIRACCL_SMS": "500"}) == CtaLimits(
        max_sms=132 - RESERVED_SMS, fixed=True
    )
    assert agreed_limits(monkeypatch, {}, {"NCCL_CTA_POLICY": "1"}) == CtaLimits(
        max_sms=132 - RESERVED_SMS, efficiency=True
    )


def test_environment_policy_overrides_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert agreed_limits(monkeypatch, {}, policy="efficiency").efficiency
    assert not agreed_limits(
        monkeypatch, {"MIRACCL_CTA_POLICY": "default"}, policy="efficiency"
    ).efficiency
    assert agreed_limits(
        monkeypatch, {"MIRACCL_CTA_POLICY": "zero"}, policy="efficiency"
    ).copy_engines_only
    number = agreed_limits(monkeypatch, {"MIRACCL_CTA_POLICY": "efficiency", "MIRACCL_SMS": "40"})
    assert number == CtaLimits(max_sms=40, fixed=True), "a number says more than a policy"


@pytest.mark.parametrize("text", ["fast", "3", "-1"])
def test_unknown_policies_are_rejected(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MIRACCL_CTA_POLICY", text)
    with pytest.raises(InvalidUsage, match="default, efficiency, zero"):
        params.CTA_POLICY.read()
    with pytest.raises(InvalidUsage, match="default, efficiency, zero"):
        Options.create(cta_policy=text)


@pytest.mark.parametrize("nranks", [2, 4, 8])
@pytest.mark.parametrize(
    "collective",
    [Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.BROADCAST],
)
def test_efficiency_limits_large_operations_only(collective: Collective, nranks: int) -> None:
    ctas = CtaLimits(max_sms=128, efficiency=True)
    small = request(collective, MIB // 8, nranks)
    assert choose(ctas.apply(small)) == choose(replace(small, multiprocessors=128))
    for nbytes in (4 * MIB, 25 * MIB, 256 * MIB):
        limited = ctas.apply(request(collective, nbytes, nranks))
        plan = choose(limited)
        assert plan.blocks <= limited.multiprocessors <= 64, plan
        assert plan.min_blocks == 1
        assert plan.threads <= 1024
        assert "CTA policy" in plan.reason


@pytest.mark.parametrize("most", [1, 2, 16, 100])
@pytest.mark.parametrize("nranks", [2, 3, 4, 8])
def test_fixed_limit_applies_to_all_sizes_and_kernels(most: int, nranks: int) -> None:
    """One block per SM: the GPU would spread small blocks over idle SMs that concurrent kernels
    need.
    """
    ctas = CtaLimits(max_sms=most, fixed=True)
    for collective in (
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
        Collective.ALL_TO_ALL,
        Collective.REDUCE,
    ):
        for nbytes in (16, 4096, 200_000, MIB, 16 * MIB, 512 * MIB):
            for proto in ("", "simple"):
                limited = ctas.apply(request(collective, nbytes, nranks, proto=proto))
                plan: DevicePlan = choose(limited)
                assert 1 <= plan.blocks <= most, (nbytes, plan)
                assert plan.min_blocks == 1, (nbytes, plan)
                assert plan.threads <= 1024, (nbytes, plan)
                assert kernel_spec(plan, limited).threads == plan.threads


@pytest.mark.multiprocess
@needs_compiler
def test_communicators_respect_cta_options() -> None:
    run_ranks(
        emulated_ranks.cta_policy, 2, env={"MIRACCL_EMULATOR_CACHE": str(folder())}, timeout=100.0
    )
