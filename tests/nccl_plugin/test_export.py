"""The exported plugin, driven by the loader as NCCL drives it: two processes, real sockets."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
from functools import partial

import pytest

from miraccl import nccl_plugin
from miraccl.errors import InvalidUsage, SystemFailure
from miraccl.native import nccl_net_abi, verbs_abi
from miraccl.native.nccl_net_plugin import NetPlugin, load_first
from miraccl.nccl_plugin import endpoint
from miraccl.nccl_plugin.kernels import comm_layout
from miraccl.sim.verbs import SimulatedVerbs
from miraccl.tools.net.plugins import report
from miraccl.transport import verbs_ports

from . import peer


def exchange(version: int, sizes: list[int]) -> tuple[list[int], list[int]]:
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        other = pool.apply_async(run_peer, (there, version, sizes))
        received = peer.transfer(here, version, sizes, sends=False)
        return received, other.get(peer.TIMEOUT_S)


def run_peer(pipe: object, version: int, sizes: list[int]) -> list[int]:
    return peer.transfer(pipe, version, sizes, sends=True)  # type: ignore[arg-type]


def run_over(net: str, pipe: object, sizes: list[int], sends: bool) -> list[int]:
    os.environ["MIRACCL_NET"] = net
    return peer.transfer(pipe, 12, sizes, sends)  # type: ignore[arg-type]


def test_messages_over_udp() -> None:
    sizes = [0, 33, 65537, 1 << 20, 7]
    ends = multiprocessing.Pipe()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        sides = [
            pool.apply_async(run_over, ("udp", end, sizes, sends))
            for end, sends in zip(ends, (True, False), strict=True)
        ]
        assert [side.get(peer.TIMEOUT_S) for side in sides] == [sizes, sizes]


def run_over_verbs(sizes: list[int]) -> list[int]:
    """Both ends in one process, over a simulated adapter."""
    verbs = SimulatedVerbs(["adapter0"])
    vars(verbs_abi)["load_library"] = lambda: verbs.library
    vars(verbs_ports).update(
        load_library=lambda: verbs.library, usable_ports=lambda: verbs.ports("adapter0")
    )
    os.environ["MIRACCL_NET"] = "verbs"
    plugin = NetPlugin(nccl_plugin.export().path)
    handle, listening = plugin.listen(0)
    started = plugin.handle_buffer(handle)
    send = peer.poll(lambda: plugin.connect(0, started))
    recv = peer.poll(lambda: plugin.accept(listening))
    done = []
    for size in sizes:
        data = peer.pattern(size, size)
        source, target = (ctypes.create_string_buffer(max(1, size)) for _ in range(2))
        ctypes.memmove(source, data, size)
        into = peer.poll(partial(plugin.irecv, recv, ctypes.addressof(target), size, 1, 0))
        out = peer.poll(partial(plugin.isend, send, ctypes.addressof(source), size, 1, 0))
        done.append(peer.poll(partial(plugin.test, into)))
        peer.poll(partial(plugin.test, out))
        assert target.raw[:size] == data
    plugin.close_send(send)
    plugin.close_recv(recv)
    return done


def test_messages_over_verbs() -> None:
    sizes = [1, 32, 33, 65536, 65537, 1 << 20, 7]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(run_over_verbs, (sizes,)).get(peer.TIMEOUT_S) == sizes


def test_memory_of_requests_is_not_accessed_after_close() -> None:
    """The other end sends into a receive that was posted before the connection was closed."""
    size = 1 << 20
    plugin = NetPlugin(nccl_plugin.export(set_environment=False).path)
    handle, listening = plugin.listen(0)
    started = plugin.handle_buffer(handle)
    send = peer.poll(lambda: plugin.connect(0, started))
    recv = peer.poll(lambda: plugin.accept(listening))
    source, target = (ctypes.create_string_buffer(size) for _ in range(2))
    ctypes.memset(source, 1, size)
    peer.poll(partial(plugin.irecv, recv, ctypes.addressof(target), size, 1, 0))
    plugin.close_recv(recv)

    def send_to_closed() -> None:
        out = peer.poll(partial(plugin.isend, send, ctypes.addressof(source), size, 1, 0))
        peer.poll(partial(plugin.test, out))

    with pytest.raises(SystemFailure):
        send_to_closed()
    assert not any(target.raw)
    plugin.close_send(send)


def test_verbs_without_a_port_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRACCL_NET", "verbs")
    monkeypatch.setattr(endpoint, "usable_kinds", lambda net: ())
    with pytest.raises(SystemFailure, match="cannot export MIRACCL_NET=verbs: there is no usable"):
        endpoint.PluginEndpoint()


@pytest.mark.parametrize("version", nccl_plugin.EXPORTED)
def test_messages_of_all_sizes(version: int) -> None:
    rng = random.Random(version)
    sizes = [0, 1, 32, 33, 65536, 65537, 1 << 20]
    sizes += [rng.choice((rng.randrange(100), rng.randrange(200_000))) for _ in range(40)]
    received, sent = exchange(version, sizes)
    assert received == sent == sizes


def test_device_properties() -> None:
    for version in nccl_plugin.EXPORTED:
        plugin = NetPlugin(nccl_plugin.export(set_environment=False).path, version)
        (device,) = plugin.devices()
        assert plugin.name == device.name == "miraccl"
        assert device.pointer_support == nccl_net_abi.PTR_HOST
        assert device.max_receives == 1
        assert device.speed_mbps > 0
        # NCCL calls this one after every receive if it is there.
        assert not plugin.has("irecvConsumed")


def test_bad_input() -> None:
    with pytest.raises(InvalidUsage, match="allowed are 8, 9, 10, 11, 12"):
        nccl_plugin.export(versions=(7,))
    plugin = NetPlugin(nccl_plugin.export(set_environment=False).path)
    for dev in (1, -1):
        with pytest.raises(SystemFailure, match="failed in getProperties: INVALID_ARGUMENT"):
            plugin._device(dev)
        with pytest.raises(SystemFailure, match="failed in listen: INVALID_ARGUMENT"):
            plugin.listen(dev)
    with pytest.raises(SystemFailure, match="failed in connect"):
        plugin.connect(0, plugin.handle_buffer(bytes(128)))
    with pytest.raises(SystemFailure, match=r"/nowhere\.so"):
        load_first(["/nowhere.so"])
    with pytest.raises(InvalidUsage, match="ncclNetPlugin_v12"):
        NetPlugin("libm.so.6")
    with pytest.raises(InvalidUsage, match="cannot use STATIC_PLUGIN as a network plugin"):
        NetPlugin("STATIC_PLUGIN")


@pytest.mark.parametrize("version", nccl_plugin.EXPORTED)
def test_counts_and_sizes_out_of_range(version: int) -> None:
    """NCCL passes one buffer per receive, as maxRecvs says; others are invalid, not undefined."""
    plugin = NetPlugin(nccl_plugin.export(set_environment=False).path, version)
    comm = ctypes.create_string_buffer(comm_layout.COMM_BYTES)
    words = (ctypes.c_uint64 * 16)()
    address = ctypes.c_void_p(ctypes.addressof(words))
    handles = (address,) * (2 if version >= 10 else 1)  # of registrations, and of the profiler
    for n in (0, 2, 9, -1):
        with pytest.raises(SystemFailure, match="failed in irecv: INVALID_ARGUMENT"):
            plugin._call(
                "irecv", comm, ctypes.c_int(n), address, address, address, *handles, address
            )
    for size in (-1, 1 << 50):
        if version == 8 and size > 0:
            continue  # an int cannot say it
        with pytest.raises(SystemFailure, match="failed in isend: INVALID_ARGUMENT"):
            plugin.isend(ctypes.addressof(comm), address.value or 0, size, 0, 0)


def test_unknown_name() -> None:
    with pytest.raises(SystemFailure, match=r"plugin nosuch: nosuch: cannot open"):
        NetPlugin("nosuch")


def test_devices_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report().devices == ()
    path = nccl_plugin.export(set_environment=False).path
    monkeypatch.setenv("MIRACCL_NET", f"plugin:{path}")
    (device,) = report().devices
    assert (device.kind, device.name, device.used) == ("plugin", "miraccl", True)
    assert device.details["path"] == path
    monkeypatch.setenv("MIRACCL_NET", "plugin:/nowhere.so")
    (finding,) = report().findings
    assert finding.status == "missing"
    assert "/nowhere.so" in finding.found
