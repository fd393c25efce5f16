"""Plugins of others: all versions, and faults in every entry, which the error names."""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miraccl.errors import InvalidUsage, MiracclError, SystemFailure
from miraccl.native import nccl_net_abi as abi
from miraccl.native.nccl_net_plugin import NetPlugin, load_first
from miraccl.proxy.thread import Proxy
from miraccl.tools.net.plugins import report
from miraccl.transport import net_plugin
from miraccl.transport.base import Endpoint
from miraccl.transport.net_plugin import PluginTransport
from tests.nccl_plugin.foreign_plugin import Fault, ForeignPlugin, get, put
from tests.transport.conformance import World, pattern

CODES = [(each.value, each.name) for each in abi.Result if each] + [(99, "99"), (-1, "-1")]


@pytest.mark.parametrize("version", abi.VERSIONS)
def test_every_version(tmp_path: Path, version: int) -> None:
    foreign = ForeignPlugin(tmp_path, version)
    plugin = load_first([foreign.path])
    assert (plugin.name, plugin.version) == ("foreign", version)
    (device,) = plugin.devices()
    assert (device.name, device.speed_mbps, device.pci_path) == ("wire0", 100_000, "")
    handle, listening = plugin.listen(0)
    assert plugin.accept(listening) is None
    send = plugin.connect(0, plugin.handle_buffer(handle))
    recv = plugin.accept(listening)
    assert send
    assert recv
    source, target = ctypes.create_string_buffer(b"abc", 100), ctypes.create_string_buffer(100)
    addresses = ctypes.addressof(source), ctypes.addressof(target)
    keys = [plugin.register(comm, a, 100) for comm, a in zip((send, recv), addresses, strict=True)]
    into = plugin.irecv(recv, addresses[1], 100, 1, keys[1])
    assert into
    assert plugin.test(into) is None
    out = plugin.isend(send, addresses[0], 3, 1, keys[0])
    assert out
    assert plugin.test(out) == plugin.test(into) == 3
    assert target.value == b"abc"
    for comm, key in zip((send, recv), keys, strict=True):
        plugin.deregister(comm, key)
    plugin.close_send(send)
    plugin.close_recv(recv)
    plugin.close_listen(listening)


def drive(plugin: NetPlugin) -> None:
    """Call every entry that the transport uses."""
    plugin.devices()
    handle, listening = plugin.listen(0)
    send = plugin.connect(0, plugin.handle_buffer(handle)) or 0
    recv = plugin.accept(listening) or 0
    memory = ctypes.create_string_buffer(100)
    address = ctypes.addressof(memory)
    key = plugin.register(send, address, 100)
    plugin.irecv(recv, address, 50, 1, key)
    request = plugin.isend(send, address + 50, 50, 1, key)
    plugin.test(request or 0)
    plugin.deregister(send, key)
    plugin.close_send(send)
    plugin.close_recv(recv)
    plugin.close_listen(listening)


SOURCES = ("init", "devices", "getProperties", "listen", "connect", "accept", "regMr")
USED = (*SOURCES, "deregMr", "isend", "irecv", "test", "closeSend", "closeRecv", "closeListen")


@pytest.mark.parametrize("entry", USED)
@pytest.mark.parametrize("version", [6, 12])
def test_codes_and_missing_entries_are_named(tmp_path: Path, version: int, entry: str) -> None:
    for code, name in CODES:
        foreign = ForeignPlugin(tmp_path, version, faults={entry: code})
        with pytest.raises(SystemFailure) as caught:
            drive(NetPlugin(foreign.path))
        assert caught.value.message == f"network plugin foreign failed in {entry}: {name}"
    foreign = ForeignPlugin(tmp_path, version, faults={entry: None})
    with pytest.raises(SystemFailure) as caught:
        drive(NetPlugin(foreign.path))
    assert caught.value.message == f"network plugin foreign has no {entry} (interface v{version})"


def test_a_table_of_null_pointers(tmp_path: Path) -> None:
    faults: dict[str, Fault] = dict.fromkeys(abi.entries(9))
    foreign = ForeignPlugin(tmp_path, 9, faults=faults, name=None)
    with pytest.raises(SystemFailure, match="network plugin unnamed has no init"):
        NetPlugin(foreign.path)


def counts(number: int) -> Any:
    def devices(plugin: ForeignPlugin, count: int) -> int:
        put(count, number, 4)
        return 0

    return devices


@pytest.mark.parametrize(
    ("faults", "properties", "reason"),
    [
        ({"devices": counts(0)}, {}, "has no device"),
        ({"devices": counts(-5)}, {}, "returned from devices -5 devices"),
        ({"devices": counts(1 << 30)}, {}, "1073741824 devices; allowed are 0 to 256"),
        ({}, {"ptrSupport": abi.PTR_CUDA}, "device, wire0, that cannot access host memory"),
        ({}, {"ptrSupport": 0, "name": None}, "cannot access host memory"),
    ],
)
def test_unusable_devices(
    tmp_path: Path, faults: dict[str, Fault], properties: dict[str, Any], reason: str
) -> None:
    """The next plugin of the list is used, and without one all reasons are given."""
    mean = ForeignPlugin(tmp_path, 12, faults=faults, properties=properties)
    good = ForeignPlugin(tmp_path, 6, name=b"good")
    with pytest.raises(SystemFailure, match=f"cannot load a network plugin: .*{reason}"):
        load_first([mean.path])
    assert load_first(["/nowhere.so", mean.path, good.path]).name == "good"


def test_properties_out_of_range_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {
        "name": b"\xff\xfe",
        "speed": -7,
        "port": 1 << 30,
        "maxComms": 0,
        "maxRecvs": -1,
        "latency": math.nan,
    }
    foreign = ForeignPlugin(tmp_path, 11, properties=properties)
    monkeypatch.setenv("MIRACCL_NET", f"plugin:{foreign.path}")
    (device,) = report().devices
    assert device.speed_mbit == -7 or device.speed_mbit == 0
    json.dumps(device.details, allow_nan=False)


@pytest.mark.parametrize("end", ["SIGKILL", "exit status 7"])
def test_a_plugin_that_ends_the_process_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    def devices(plugin: ForeignPlugin, count: int) -> int:
        if end == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)

    foreign = ForeignPlugin(tmp_path, 8, faults={"devices": devices})
    monkeypatch.setenv("MIRACCL_NET", f"plugin:{foreign.path}")
    (finding,) = report().findings
    assert finding.status == "missing"
    assert f"one ends the process ({end})" in finding.found


def test_listen_without_an_object(tmp_path: Path) -> None:
    foreign = ForeignPlugin(tmp_path, 12, faults={"listen": 0})
    with pytest.raises(SystemFailure, match="returned from listen success and no object"):
        NetPlugin(foreign.path).listen(0)


def test_none_is_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRACCL_NET", "plugin")
    monkeypatch.setenv("NCCL_NET_PLUGIN", "none")
    with pytest.raises(InvalidUsage, match="no plugin is named"):
        net_plugin.plugin_paths()


# --- faults while data move


class Ranks(World):
    """Two ranks over a foreign plugin."""

    def __init__(self, foreign: ForeignPlugin) -> None:
        super().__init__(transports={})
        self.foreign = foreign  # its callbacks live as long
        for rank in range(2):
            losses = self.losses.setdefault(rank, [])

            def on_lost(peer: int, loss: Any, losses: Any = losses) -> None:
                losses.append((peer, loss))
                self.news.set()

            proxy = Proxy(
                rank=rank, wake=lambda _: self.news.set(), on_lost=on_lost, segment_bytes=1 << 17
            )
            self.cleanup.callback(proxy.close)
            ends = {r: Endpoint(rank=r, hostid=f"host{r}", pid=0) for r in range(2)}
            self.transports[rank] = PluginTransport(
                ends[rank],
                {1 - rank: ends[1 - rank]},
                plugin=NetPlugin(foreign.path),
                proxy=proxy,
                slot_bytes=16384,
                timeout=5.0,
                linger=0.2,
            )
            self.cleanup.callback(self.transports[rank].abort, "the test is over")


@pytest.fixture
def ranks() -> Iterator[Any]:
    opened: list[Ranks] = []

    def make(foreign: ForeignPlugin) -> Ranks:
        opened.append(Ranks(foreign))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.mark.parametrize("version", [6, 9, 12])
def test_messages(tmp_path: Path, ranks: Any, version: int) -> None:
    foreign = ForeignPlugin(tmp_path, version)
    world = ranks(foreign)
    world.connect()
    for source, destination in ((0, 1), (1, 0)):
        way = world.way(source, destination)
        for nbytes in (0, 1, 33, 16384):
            way.post(pattern(nbytes), nbytes)
            assert way.take()[0] == pattern(nbytes)
    assert set(foreign.posted_receives) == {1}


def sizes(change: Any) -> Any:
    def test(plugin: ForeignPlugin, request: int, done: int, size: int) -> int:
        result = plugin._test(request, done, size)
        if get(done, 4):
            put(size, change(get(size, 4)), 4)
        return result

    return test


@pytest.mark.parametrize(
    "change", [lambda n: n - 1, lambda n: n + 1, lambda n: 1, lambda n: (1 << 31) - 1]
)
def test_wrong_sizes_are_named(tmp_path: Path, ranks: Any, change: Any) -> None:
    foreign = ForeignPlugin(tmp_path, 12, faults={"test": sizes(change)})
    world = ranks(foreign)
    world.connect()
    world.way(0, 1).post(pattern(1000))
    world.wait(lambda: world.losses[1], "a wrong size was accepted")
    assert "network plugin foreign reports" in str(world.losses[1][0][1])


def test_sizes_that_are_not_reported(tmp_path: Path, ranks: Any) -> None:
    """Google's Fast Socket leaves them alone."""
    world = ranks(ForeignPlugin(tmp_path, 8, faults={"test": sizes(lambda n: 0)}))
    world.connect()
    way = world.way(0, 1)
    way.post(pattern(1000))
    assert way.take()[0] == pattern(1000)


@pytest.mark.parametrize("entry", ["isend", "irecv", "test"])
def test_an_error_while_data_move_is_named(tmp_path: Path, ranks: Any, entry: str) -> None:
    broken = False

    def fails(plugin: ForeignPlugin, *args: int) -> int:
        return 6 if broken else int(getattr(plugin, f"_{entry}")(*args))

    world = ranks(ForeignPlugin(tmp_path, 12, faults={entry: fails}))
    world.connect()
    way = world.way(0, 1)
    way.post(pattern(100))
    assert way.take()[0] == pattern(100)
    broken = True
    way.post(pattern(100))
    world.wait(lambda: any(world.losses.values()), "the error was not noticed")
    texts = [str(loss) for each in world.losses.values() for _, loss in each]
    assert f"network plugin foreign failed in {entry}: REMOTE_ERROR" in texts[0]


def test_requests_that_never_complete_do_not_hold_up_the_end(tmp_path: Path, ranks: Any) -> None:
    def never(plugin: ForeignPlugin, request: int, done: int, size: int) -> int:
        put(done, 0, 4)
        return 0

    world = ranks(ForeignPlugin(tmp_path, 12, faults={"test": never}))
    world.connect()
    way = world.way(0, 1)
    way.post(pattern(100))
    assert way.recv.peek() is None
    for transport in world.transports.values():
        transport.close()


def test_connect_that_never_finishes_is_named(tmp_path: Path, ranks: Any) -> None:
    world = ranks(ForeignPlugin(tmp_path, 12, faults={"accept": 0}))
    for transport in world.transports.values():
        transport._timeout = 0.2
    with pytest.raises(MiracclError, match=r"over network plugin foreign in time"):
        world.connect()


def test_refused_registration_is_named(tmp_path: Path, ranks: Any) -> None:
    world = ranks(ForeignPlugin(tmp_path, 12, faults={"regMr": 2}))
    with pytest.raises(MiracclError, match="network plugin foreign failed in regMr: SYSTEM_ERROR"):
        world.connect()
