"""A rank whose process is killed: the others learn it at once, from the kernel, and nobody
waits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from miraccl.transport.ends import RecvEnd, SendEnd
from miraccl.transport.fifo import PrivateMemory
from miraccl.wire.proxy_records import LossKind
from tests.transport.conformance import WAIT_S
from tests.transport.socket_world import build_world

pytestmark = pytest.mark.multiprocess

CHILD = """
import sys
from miraccl.transport.ends import SendEnd
from tests.transport.conformance import World
from tests.transport.socket_world import build_rank

world = World(transports={})
rank = build_rank(world, 1, timeout=20)
print(rank.setup().hex(), flush=True)
world.connect_rank(1, {0: bytes.fromhex(sys.stdin.readline())})
SendEnd(world.pairs[1][0].send, world.atomics).post(b"alive", signature=5)
sys.stdin.readline()
"""


class Child:
    def __init__(self, world):
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.pipes = (self.process.stdin, self.process.stdout)
        info = bytes.fromhex(self.process.stdout.readline())
        self.process.stdin.write(world.transports[0].setup().hex() + "\n")
        self.process.stdin.flush()
        world.connect_rank(0, {1: info})

    def stop(self):
        self.process.kill()
        self.process.wait(WAIT_S)
        for pipe in self.pipes:
            pipe.close()


@pytest.fixture
def world():
    world = build_world(1, timeout=20.0)
    yield world
    world.close()


@pytest.fixture
def child(world):
    child = Child(world)
    yield child
    child.stop()


def ends(world):
    pair = world.pairs[0][1]
    return SendEnd(pair.send, world.atomics), RecvEnd(pair.recv, world.atomics)


@pytest.mark.parametrize("busy", [False, True])
def test_killed_process_is_lost_and_its_last_message_is_kept(world, child, busy):
    send, recv = ends(world)
    world.wait(recv.peek, "the child never spoke")
    if busy:  # a message is announced, wanted by nobody, and eight more fill the ring
        memory = PrivateMemory(1 << 20)
        while send.post_address(memory.address, 1 << 20):
            pass
    os.kill(child.process.pid, signal.SIGKILL)
    world.wait(lambda: world.losses[0], "the death was not noticed")
    ((peer, loss),) = world.losses[0]
    assert (peer, loss.kind) == (1, LossKind.RESET)
    assert recv.peek().payload == b"alive"
    world.transports[0].close()


def test_stopped_process_does_not_make_close_wait_for_ever(world, child):
    send, recv = ends(world)
    world.wait(recv.peek, "the child never spoke")
    os.kill(child.process.pid, signal.SIGSTOP)
    send.post(b"x")
    world.transports[0].close()
    assert world.losses[0] == []
