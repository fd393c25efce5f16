"""The shared-memory transport in the conformance kit."""

from __future__ import annotations

import os

from miraccl.transport.base import Endpoint
from miraccl.transport.shm import ShmTransport
from tests.transport.conformance import TransportConformance, World


class TestShm(TransportConformance):
    def build(self, nranks):
        endpoints = {r: Endpoint(rank=r, hostid="here", pid=os.getpid()) for r in range(nranks)}
        transports = {
            r: ShmTransport(endpoints[r], {p: e for p, e in endpoints.items() if p != r}, window_bytes=1 << 20) for r in range(nranks)
        }
        world = World(transports=dict(transports))
        for transport in transports.values():
            world.cleanup.callback(transport.close)
        return world
