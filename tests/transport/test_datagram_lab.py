"""UDP transport between namespaces: the conformance kit with loss, paths that die and heal."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from miraccl.proxy.datagram_engine import DatagramEngine
from miraccl.transport.base import DatagramOptions
from miraccl.transport.datagram import DatagramTransport
from miraccl.transport.registry import UDP
from tests.support import netlab
from tests.transport.conformance import TransportConformance, World
from tests.transport.socket_world import SLOT
from tests.transport.test_datagram import build_rank

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(netlab.missing()), reason=netlab.missing() or "-"),
]
OPTIONS = DatagramOptions(ports=1)


def build_between(lab: netlab.Lab, nranks: int, stack: ExitStack) -> World:
    """Return ranks whose sockets are in the hosts of a lab."""
    world = World(transports={})
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    stack.callback(os.close, own)
    for rank in range(nranks):
        transport = build_rank(world, rank, addresses=lab.addresses(rank), options=OPTIONS)
        netlab.enter(lab.host(rank))
        try:
            transport.setup()
        finally:
            netlab._libc.setns(own, netlab.CLONE_NEWNET)
    return world


@pytest.fixture
def make_lab() -> Iterator[Callable[..., netlab.Lab]]:
    with ExitStack() as stack:

        def make(**options: Any) -> netlab.Lab:
            try:
                return stack.enter_context(netlab.Lab(**options))
            except OSError as error:
                pytest.skip(f"no network namespaces here: {error}")

        yield make


class TestDatagramWithLoss(TransportConformance):
    """1 % of the packets are lost, in both directions."""

    spec = UDP

    @pytest.fixture(scope="class")
    def lab(self) -> Iterator[netlab.Lab]:
        try:
            with netlab.Lab(hosts=3, loss=0.01) as lab:
                yield lab
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")

    @pytest.fixture(autouse=True)
    def use(self, lab: netlab.Lab) -> Iterator[None]:
        with ExitStack() as stack:
            self.lab_, self.stack = lab, stack
            yield

    def build(self, nranks: int) -> World:
        return build_between(self.lab_, nranks, self.stack)


def test_a_path_that_dies_is_left_and_used_again(
    make_lab: Callable[..., netlab.Lab], caplog: pytest.LogCaptureFixture
) -> None:
    lab = make_lab(paths=2)
    with ExitStack() as stack:
        stack.enter_context(caplog.at_level(logging.INFO, logger="miraccl"))
        world = build_between(lab, 2, stack)
        stack.callback(world.close)
        world.connect()
        transport = world.transports[0]
        assert isinstance(transport, DatagramTransport)
        engine = transport._proxy
        assert isinstance(engine, DatagramEngine)
        way = world.way(0, 1)

        def states() -> list[str]:
            way.post(b"x" * SLOT)
            assert way.take()[0] == b"x" * SLOT
            time.sleep(0.002)
            return [report.state for report in engine.reports()]

        world.wait(lambda: states() == ["open", "open"])
        lab.set_up(1, up=False)
        # a busy host may suspect path 0 for a moment: it must be in use while path 1 is not
        world.wait(lambda: states()[0] == "open" and states()[1] != "open")
        world.wait(lambda: "path 1 to 10.88.1.2:" in caplog.text)
        assert "is dead; 1 of 2 paths work" in caplog.text
        lab.set_up(1, up=True)
        world.wait(lambda: states() == ["open", "open"])
        world.wait(lambda: "is used again; 2 of 2 paths work" in caplog.text)
