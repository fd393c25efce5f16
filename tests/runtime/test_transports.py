"""The collectives, and send and recv, over every registered transport."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl import Communicator, nccl_plugin
from miraccl.topo.hca import read_hcas
from miraccl.transport import registry
from tests.runtime import cases
from tests.runtime.test_life import in_threads
from tests.support.ranks import run_ranks
from tests.transport import pipes

COUNTS = [0, 1, 7, 1000, 70_001]
NETWORKS = [name for name in registry.names() if registry.spec_of(name).network]


def perform(comm: Communicator, net: str, seed: int) -> list[str]:
    """Run random collectives and a ring of messages; return the transports of the peers."""
    rng = np.random.default_rng(seed)
    for _ in range(12):
        case = cases.random_case(
            rng, comm.nranks, COUNTS, [*cases.EVEN, *cases.UNEVEN], ordered=lambda case: False
        )
        cases.perform(comm, case)
    x, out = np.full(70_001, comm.rank, np.int32), np.zeros(70_001, np.int32)
    after, before = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
    comm.sendrecv(x, after, out, before)
    assert (out == before).all()
    assert net in comm.summary()
    for text in ("congestion control swift (keeps", "protection mac", "admission cts"):
        assert net != "udp" or text in comm.summary()
    return [choice.name for choice in comm._core.fabric.choices.values()]


def in_processes(net: str, seed: int) -> list[str]:
    if net == "plugin":  # the plugin that this process exports carries the data over TCP
        os.environ["MIRACCL_NET"] = "tcp"
        os.environ["MIRACCL_NET"] = f"plugin:{nccl_plugin.export(set_environment=False).path}"
    with miraccl.init(timeout=30) as comm:
        return perform(comm, net, seed)


@pytest.mark.multiprocess
@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("net", [n for n in NETWORKS if n != "memory"])
def test_collectives_between_processes(net: str, nranks: int) -> None:
    if net == registry.VERBS.name and not read_hcas():
        pytest.skip("this host has no InfiniBand or RoCE device; make test-guest has")
    env = {"MIRACCL_NET": net, "MIRACCL_SHM_DISABLE": "1"}
    for names in run_ranks(in_processes, nranks, net, 7, env=env):
        assert names == [net] * (nranks - 1)


@pytest.mark.parametrize("net", ["memory", pipes.PIPES.name])
def test_collectives_between_threads(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRACCL_NET", net)

    def work(comm: Communicator) -> Any:
        return perform(comm, net, 11)

    assert in_threads(3, work) == [[net] * 2] * 3


def test_ranks_reject_a_network_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRACCL_NET", "carrier-pigeons")
    with pytest.raises(miraccl.InvalidUsage, match="cannot use MIRACCL_NET=carrier-pigeons"):
        miraccl.init()
