"""The toy transport in the conformance kit: an example of how a new transport is tested."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from miraccl.transport.base import Endpoint, TransportContext
from tests.transport import pipes
from tests.transport.conformance import TransportConformance, World


class TestPipes(TransportConformance):
    spec = pipes.PIPES
    buffered = 65536 // pipes.HEADER.size  # a pipe holds 64 KiB

    def build(self, nranks):
        world = World(transports={})
        for rank in range(nranks):
            endpoints = {r: Endpoint(rank=r, hostid=str(r), pid=os.getpid()) for r in range(nranks)}
            context = TransportContext(
                endpoint=endpoints.pop(rank),
                peers=endpoints,
                max_slot_bytes=16384,
                wake=lambda _: world.news.set(),
            )
            world.transports[rank] = transport = self.spec.open_for(context)
            world.cleanup.callback(transport.close)
        return world


def test_nothing_is_left_behind():
    world = TestPipes().build(2)
    world.connect()
    world.close()
    assert not list(Path(tempfile.gettempdir()).glob("miraccl-pipes-*"))


def test_the_example_stays_short():
    assert len(Path(pipes.__file__).read_text().splitlines()) <= 150
