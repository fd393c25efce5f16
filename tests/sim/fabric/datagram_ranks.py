"""Ranks whose UDP sockets are ends of a simulated fabric: the transport and its reference driver
run unchanged, in virtual time.

Whoever waits advances the fabric (``FabricNetwork.step``), so runs need no threads of their own and
no sleeps.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from miraccl.proxy.datagram_driver import DatagramDriver, DatagramSockets
from miraccl.sim.fabric.datagram_host import IP_UDP_BYTES
from miraccl.sim.fabric.events import SECOND
from miraccl.sim.fabric.network import PacketFabric
from miraccl.sim.fabric.ports import FabricPacket, OutputPort
from miraccl.sim.fabric.topology import FabricTopology, LinkProfile
from miraccl.transport.base import DatagramConnection, DatagramOptions, Endpoint, NetConnection
from miraccl.transport.datagram import DatagramTransport, SocketInfo
from miraccl.transport.fifo import PAGE_BYTES, PrivateMemory, native_atomics
from miraccl.wire import proxy_records as wire
from miraccl.wire.datagram.seal import AES_128_GCM

PORT = 4791


def switched_paths(nhosts: int, npaths: int, profile: LinkProfile) -> FabricTopology:
    """Build ``npaths`` switches to which every host has a cable."""
    result = FabricTopology(nhosts, npaths)
    for path in range(npaths):
        for host in range(nhosts):
            result.connect(host, nhosts + path, profile)
            result.routes[path][host] = (result.connect(nhosts + path, host, profile),)
    return result


class FabricSocket:
    """The methods of a UDP socket that transport and driver call."""

    def __init__(self, network: FabricNetwork, host: FabricHost, path: int) -> None:
        self.network, self.host, self.path = network, host, path
        self.arrived: deque[bytes] = deque()
        self.descriptor = os.eventfd(0)

    def fileno(self) -> int:
        return self.descriptor

    def getsockopt(self, level: int, option: int) -> int:
        return 4 << 20

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def sendto(self, data: bytes, address: tuple[str, int]) -> None:
        target = int(address[0].rpartition(".")[2]) - 1
        size = len(data) + IP_UDP_BYTES
        packet = FabricPacket(self.host.number, target, 0, self.path, size, content=data)
        self.host.ports[self.path].enqueue(packet)

    def recvmsg(self, nbytes: int, control: int) -> tuple[bytes, list[Any], int, None]:
        if not self.arrived:
            raise BlockingIOError
        return self.arrived.popleft(), [], 0, None


class FabricHost:
    """One rank's end of the fabric."""

    def __init__(self, network: FabricNetwork, number: int, npaths: int) -> None:
        self.network, self.number = network, number
        self.ports: list[OutputPort] = network.fabric.attach(number, self)
        self.sockets = [FabricSocket(network, self, path) for path in range(npaths)]

    def receive(self, packet: FabricPacket) -> None:
        data = packet.content
        if packet.corrupted:
            at = self.network.fabric.draws.next()
            data = bytearray(data)
            data[at % len(data)] ^= 1 << (at >> 16 & 7)
        self.sockets[packet.entropy].arrived.append(bytes(data))


class FabricNetwork:
    """Ranks on a fabric."""

    def __init__(self, nranks: int, npaths: int, profile: LinkProfile, seed: int = 0) -> None:
        self.fabric = PacketFabric(switched_paths(nranks, npaths, profile), seed=seed)
        self.hosts = [FabricHost(self, rank, npaths) for rank in range(nranks)]
        self.proxies: list[FabricProxy] = []
        self.lock = threading.RLock()
        self.news = Advance(self)

    def now_ns(self) -> int:
        """Virtual time, from 1 s on: 0 means none in flows."""
        return self.fabric.now + SECOND

    def step(self) -> None:
        """Advance all ranks, or move time to the next event if none is busy."""
        with self.lock:
            busy = [proxy.poll() for proxy in self.proxies]
            if any(busy):
                return
            now, times = self.now_ns(), []
            for proxy in self.proxies:
                for driver in proxy.drivers.values():
                    if driver.alive and (due := driver.flow.timer(now)):
                        times.append(due - SECOND)
            if times:
                self.fabric.events.schedule(min(times), lambda _: None)
            if len(self.fabric.events):
                self.fabric.events.run(self.fabric.events._events[0][0])


class Advance(threading.Event):
    """Event whose ``wait`` advances the fabric."""

    def __init__(self, network: FabricNetwork) -> None:
        super().__init__()
        self.network = network

    def wait(self, timeout: float | None = None) -> bool:
        self.network.step()
        return self.is_set()


class FabricProxy:
    """Drivers of one rank; see ``transport.base.DatagramPort``."""

    ciphers = (AES_128_GCM,)

    def __init__(self, network: FabricNetwork, losses: list[tuple[int, wire.Loss]]) -> None:
        self.network, self.losses = network, losses
        self.drivers: dict[int, DatagramDriver] = {}
        self.sockets: DatagramSockets | None = None
        self.words = PrivateMemory(PAGE_BYTES)
        self.doorbell = os.eventfd(0, os.EFD_NONBLOCK)
        network.proxies.append(self)

    @property
    def asleep(self) -> int:
        return self.words.address

    def attach(self, connections: Sequence[NetConnection]) -> None:
        with self.network.lock:
            for connection in connections:
                assert isinstance(connection, DatagramConnection)
                self.sockets = self.sockets or DatagramSockets(connection.streams)
                self.drivers[connection.peer] = DatagramDriver(
                    connection,
                    sockets=self.sockets,
                    atomics=native_atomics(),
                    on_lost=lambda peer, loss: self.losses.append((peer, loss)),
                    segment_bytes=1 << 17,
                )

    def poll(self) -> bool:
        busy = False
        for driver in self.drivers.values():
            busy |= driver.alive and (driver.poll() or driver.scan())
        return busy

    def reached(self, peer: int) -> bool:
        self.network.step()
        return self.drivers[peer].reached

    def paths(self) -> tuple[()]:
        return ()

    def detach(self, peers: Sequence[int], *, linger: float) -> None:
        network, closing = self.network, [self.drivers[p] for p in peers if p in self.drivers]
        with network.lock:
            for driver in closing:
                driver.arm()
                driver.handle(wire.CloseRequested())
            until = network.now_ns() + int(linger * SECOND)
            network.fabric.events.schedule(until - SECOND, lambda _: None)
        while any(driver.alive for driver in closing) and network.now_ns() < until:
            network.step()
        self._remove(peers)

    def abort(self, text: str) -> None:
        with self.network.lock:
            for driver in self.drivers.values():
                driver.handle(wire.AbortRequested(text))
        self._remove(list(self.drivers))

    def _remove(self, peers: Sequence[int]) -> None:
        with self.network.lock:
            for peer in peers:
                if driver := self.drivers.pop(peer, None):
                    driver.close()

    def close(self) -> None:
        self._remove(list(self.drivers))
        if self.doorbell >= 0:
            os.close(self.doorbell)
        self.doorbell = -1


class FabricTransport(DatagramTransport):
    """The UDP transport with sockets of a fabric."""

    def __init__(
        self, network: FabricNetwork, rank: int, proxy: FabricProxy, options: DatagramOptions
    ) -> None:
        super().__init__(
            Endpoint(rank=rank, hostid=f"host{rank}", pid=os.getpid()),
            proxy=proxy,
            secret=b"secret",
            job=b"test",
            slot_bytes=1 << 12,
            options=options,
            linger=1.0,
        )
        self._network = network

    def _open_sockets(self) -> tuple[SocketInfo, ...]:
        sockets: list[Any] = self._network.hosts[self.rank].sockets
        self._sockets = list(sockets)
        return tuple(
            SocketInfo(
                host=f"10.88.{s.path}.{self.rank + 1}", port=PORT, mtu=1472, share_bytes=1 << 20
            )
            for s in sockets
        )
