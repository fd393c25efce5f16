"""Transport over a network plugin of NCCL: ``MIRACCL_NET=plugin:/path/libnccl-net-x.so``.

Any shared object with a table ``ncclNetPlugin_v6`` to ``v12`` serves. Without a path the names in
``NCCL_NET_PLUGIN`` are tried in turn, as NCCL does. Each rank listens once per peer; the handles
travel in ``setup()``, and each pair connects both directions.

The device is the plugin's first. What crosses the network, and whether peers are authenticated, is
the plugin's affair; the control plane of the job is authenticated as always.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from miraccl import clock, params
from miraccl.deadline import Deadline
from miraccl.errors import (
    BootstrapError,
    CommunicatorClosed,
    InvalidUsage,
    ProtocolError,
)
from miraccl.native.nccl_net_abi import HANDLE_BYTES
from miraccl.native.nccl_net_plugin import NetPlugin, load_first
from miraccl.transport import registry
from miraccl.transport.base import (
    Endpoint,
    FifoPair,
    NetConnection,
    ProxyPort,
    Transport,
    TransportContext,
    proxied_pair,
)
from miraccl.transport.fifo import check_slot_bytes, slot_bytes_for

DEVICE = 0
POLL_S = 0.0005


@dataclass(frozen=True, kw_only=True)
class PluginConnection(NetConnection):
    """Both directions to a peer over a plugin.

    Attributes:
        send_comm, recv_comm: The plugin's connections; the driver closes them.
    """

    driver = "miraccl.proxy.plugin_driver"
    plugin: NetPlugin
    send_comm: int
    recv_comm: int


@functools.cache
def load(paths: tuple[str, ...]) -> NetPlugin:
    """Return the first of these plugins that can be used; one per process."""
    return load_first(paths)


def plugin_paths() -> tuple[str, ...]:
    """Return the plugins that the settings name.

    Raises:
        InvalidUsage: Neither ``MIRACCL_NET`` nor ``NCCL_NET_PLUGIN`` names one.
    """
    _, _, path = params.NET.read().partition(":")
    named = path or params.NET_PLUGIN.read()
    # NCCL uses no plugin if "none" is named.
    paths = tuple(p for p in map(str.strip, named.split(",")) if p and p.lower() != "none")
    if not paths:
        raise InvalidUsage(
            "cannot use MIRACCL_NET=plugin: no plugin is named; write MIRACCL_NET=plugin:PATH, or "
            "set NCCL_NET_PLUGIN"
        )
    return paths


class PluginTransport(Transport):
    """Messages over a network plugin to ranks of other hosts.

    Args:
        peers: Ranks that will be connected.
        proxy: Moves the messages.
        timeout: Seconds that bound each ``connect``, or a deadline of all of them.
        check: Called while connecting; raises if a peer has died.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        peers: Mapping[int, Endpoint],
        *,
        plugin: NetPlugin,
        proxy: ProxyPort,
        slot_bytes: int = 64 << 10,
        timeout: float | Deadline = 60.0,
        linger: float = 5.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = endpoint.rank
        self._peers = sorted(peers)
        self._plugin, self._proxy = plugin, proxy
        self._slot_bytes = check_slot_bytes(slot_bytes)
        self._timeout, self._linger, self._check = timeout, linger, check
        self._listening: dict[int, int] = {}
        self._info: bytes | None = None
        self._connected: dict[int, FifoPair] = {}
        self._closed = False

    def setup(self) -> bytes:
        self._check_open()
        if self._info is None:
            handles = {}
            for peer in self._peers:
                handle, self._listening[peer] = self._plugin.listen(DEVICE)
                handles[peer] = handle.hex()
            self._info = json.dumps(
                {"plugin": self._plugin.name, "slot": self._slot_bytes, "handles": handles}
            ).encode()
        return self._info

    def connect(self, infos: Mapping[int, bytes]) -> dict[int, FifoPair]:
        self._check_open()
        self.setup()
        wanted = {r: self._decode(r, d) for r, d in infos.items() if r not in self._connected}
        deadline = Deadline.after(self._timeout)
        sends, recvs = self._connect_all({r: handle for r, (handle, _) in wanted.items()}, deadline)
        connections = [
            self._connection(peer, sends[peer], recvs[peer], slot)
            for peer, (_, slot) in wanted.items()
        ]
        self._proxy.attach(connections)
        self._connected |= {c.peer: c.pair for c in connections}
        return {rank: self._connected[rank] for rank in infos}

    def _decode(self, peer: int, data: bytes) -> tuple[bytes, int]:
        """Return the peer's handle for this rank, and its slot size."""
        try:
            info = json.loads(data)
            name, slot = str(info["plugin"]), check_slot_bytes(int(info["slot"]))
            handle = bytes.fromhex(info["handles"][str(self.rank)])
            if len(handle) != HANDLE_BYTES:
                raise ValueError(f"a handle of {len(handle)} bytes")
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise ProtocolError(
                f"cannot read the connect info of rank {peer}'s network plugin: {problem}"
            ) from None
        if name != self._plugin.name:
            raise InvalidUsage(
                f"cannot connect ranks {self.rank} and {peer}: they use the network plugins "
                f"{self._plugin.name!r} and {name!r}",
                rank=self.rank,
                peer=peer,
            )
        return handle, slot

    def _connect_all(
        self, handles: Mapping[int, bytes], deadline: Deadline
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Connect both directions to all peers by turns; none of the plugin's calls blocks."""
        plugin = self._plugin
        buffers = {peer: plugin.handle_buffer(handle) for peer, handle in handles.items()}
        sends: dict[int, int] = {}
        recvs: dict[int, int] = {}
        while len(sends) + len(recvs) < 2 * len(buffers):
            self._check()
            for peer in [p for p in buffers if p not in sends]:
                if comm := plugin.connect(DEVICE, buffers[peer]):
                    sends[peer] = comm
            for peer in [p for p in buffers if p not in recvs]:
                if comm := plugin.accept(self._listening[peer]):
                    recvs[peer] = comm
            if deadline.left <= 0:
                missing = sorted(p for p in buffers if p not in sends or p not in recvs)
                raise BootstrapError(
                    f"cannot connect to ranks {missing} over network plugin {plugin.name} in time",
                    rank=self.rank,
                    peer=missing[0] if missing else None,
                )
            clock.sleep(POLL_S)
        return sends, recvs

    def _connection(self, peer: int, send: int, recv: int, peer_slot: int) -> PluginConnection:
        capabilities = registry.PLUGIN.capabilities
        return PluginConnection(
            peer=peer,
            streams=(),
            pair=proxied_pair(self._proxy, self._slot_bytes, capabilities=capabilities),
            peer_slot_bytes=peer_slot,
            plugin=self._plugin,
            send_comm=send,
            recv_comm=recv,
        )

    def release(self) -> None:
        """Close the listening objects; connections stay."""
        for listening in self._listening.values():
            self._plugin.close_listen(listening)
        self._listening.clear()

    def close(self) -> None:
        if not self._closed and self._connected:
            self._proxy.detach(list(self._connected), linger=self._linger)
        self._free()

    def abort(self, text: str) -> None:
        if not self._closed and self._connected:
            self._proxy.abort(text)
        self._free()

    def _free(self) -> None:
        self._closed = True
        self.release()

    def _check_open(self) -> None:
        if self._closed:
            raise CommunicatorClosed("the plugin transport is closed", rank=self.rank)


def open_transport(context: TransportContext) -> PluginTransport:
    """Open the plugin that the settings name; see ``registry.TransportSpec``."""
    assert context.proxy is not None, "a network plugin needs a proxy"
    return PluginTransport(
        context.endpoint,
        context.peers,
        plugin=load(plugin_paths()),
        proxy=context.proxy(),
        slot_bytes=slot_bytes_for(len(context.peers), context.budget, context.max_slot_bytes),
        timeout=context.deadline,
        check=context.check,
    )
