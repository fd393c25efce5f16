"""The shared-memory transport in the conformance kit."""

from __future__ import annotations

import os

import pytest

from miraccl.errors import SystemFailure
from miraccl.transport.base import Endpoint
from miraccl.transport.registry import SHM
from miraccl.transport.shm import ShmTransport
from tests.support.fault_injection import limit_descriptors, open_files
from tests.transport.conformance import TransportConformance, World


class TestShm(TransportConformance):
    spec = SHM

    def build(self, nranks):
        endpoints = {r: Endpoint(rank=r, hostid="here", pid=os.getpid()) for r in range(nranks)}
        transports = {
            r: ShmTransport(
                endpoints[r], {p: e for p, e in endpoints.items() if p != r}, window_bytes=1 << 20
            )
            for r in range(nranks)
        }
        world = World(transports=dict(transports))
        for transport in transports.values():
            world.cleanup.callback(transport.close)
        return world


@pytest.mark.parametrize("count", range(2))
def test_a_rank_that_is_short_of_descriptors_says_so_and_leaves_none(count):
    files = open_files()
    with (
        limit_descriptors(count),
        pytest.raises(SystemFailure, match=r"cannot make a shared segment .* Too many open files"),
    ):
        ShmTransport(Endpoint(rank=0, hostid="here", pid=os.getpid()), {})
    assert open_files() <= files
