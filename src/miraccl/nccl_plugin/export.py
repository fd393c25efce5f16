"""Export of miraccl's network transports as a network plugin of NCCL, without a compiler.

``export`` writes a shared object that holds only data, loads it, and fills its tables with compiled
entries (``kernels.entries``) and with callbacks into this process for setting up connections.
NCCL, loading the same file later in this process, sees the filled tables.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miraccl import native, trace
from miraccl.errors import InvalidUsage, as_system_failure
from miraccl.native import elf, nccl_collnet_abi, nccl_net_abi
from miraccl.native.nccl_net_abi import HANDLE_BYTES, PTR_HOST, UNDEFINED_ID
from miraccl.nccl_plugin.callbacks import guarded, store_word
from miraccl.nccl_plugin.collnet import CollNetEntries
from miraccl.nccl_plugin.endpoint import PENDING_OFFSET, PluginEndpoint
from miraccl.transport.fifo import memory_at

log = trace.logger("nccl_plugin")

KERNEL = "miraccl.nccl_plugin.kernels.entries"
NAME = b"miraccl"
EXPORTED = (8, 9, 10, 11, 12)
#: Largest message: lengths of a stream's frames are bounded by ``wire.stream.MAX_MESSAGE_BYTES``.
MAX_BYTES = 1 << 40
SPEED_MBPS = 10_000
_INT64 = ctypes.c_int64


@dataclass(eq=False)
class NcclPlugin:
    """An exported plugin; it serves until the process ends.

    Attributes:
        path: Value for ``NCCL_NET_PLUGIN``.
        versions: Versions of the interface that it offers.
        endpoint: Its connections.
    """

    path: str
    versions: tuple[int, ...]
    endpoint: PluginEndpoint
    keep: list[Any] = field(default_factory=list, repr=False)
    """Objects that NCCL holds addresses of."""


_exported: NcclPlugin | None = None


def export(
    *, versions: Sequence[int] = EXPORTED, path: str | None = None, set_environment: bool = True
) -> NcclPlugin:
    """Make this process's NCCL use miraccl's transports between hosts.

    Call it before the first NCCL communicator is created, on every rank. The transport is the one
    that ``MIRACCL_NET`` names, TCP by default. NCCL stages GPU memory through host memory, as with
    its own sockets.

    Args:
        versions: Versions of NCCL's interface to offer, of 8 to 12; NCCL uses the newest it knows.
        path: File of the shared object to write; by default a temporary one that is removed when
            the process ends, because NCCL opens it by its path.
        set_environment: Set ``NCCL_NET_PLUGIN`` in this process's environment.

    Returns:
        The plugin; a second call returns the first call's.

    Raises:
        InvalidUsage: A version is unknown, or ``MIRACCL_NET`` names no network transport.
        SystemFailure: The file cannot be written or loaded, or no address can be listened on.
    """
    global _exported
    unknown = [v for v in versions if v not in EXPORTED]
    if unknown or not versions:
        raise InvalidUsage(
            f"cannot export versions {list(versions)} of NCCL's plugin interface: allowed are "
            f"{', '.join(map(str, EXPORTED))}"
        )
    if _exported is None:
        _exported = _export(tuple(versions), path)
    if set_environment:
        os.environ["NCCL_NET_PLUGIN"] = _exported.path
    return _exported


def _export(versions: tuple[int, ...], path: str | None) -> NcclPlugin:
    image = elf.data_object(
        {nccl_net_abi.symbol(v): nccl_net_abi.table_bytes(v) for v in versions}
        | {nccl_collnet_abi.symbol(v): nccl_collnet_abi.table_bytes(v) for v in versions},
        "libnccl-net-miraccl.so",
    )
    with as_system_failure("cannot write the plugin's shared object"):
        if path is None:
            folder = tempfile.mkdtemp(prefix="miraccl-nccl-")
            # NCCL opens the file by its path when it creates its first communicator.
            atexit.register(_remove_folder, folder, os.getpid())
            path = str(Path(folder) / "libnccl-net-miraccl.so")
        Path(path).write_bytes(image)
        library = ctypes.CDLL(path)
    plugin = NcclPlugin(path, versions, PluginEndpoint(), [library])
    callbacks, collnet = _Callbacks(plugin.endpoint), CollNetEntries()
    name = ctypes.create_string_buffer(NAME)
    plugin.keep += [callbacks, collnet, name]
    for version in versions:
        for abi, functions in ((nccl_net_abi, callbacks), (nccl_collnet_abi, collnet)):
            table = ctypes.addressof(ctypes.c_char.in_dll(library, abi.symbol(version)))
            addresses = [
                ctypes.addressof(name),
                *(functions.address(entry, version) for entry in abi.entries(version)),
            ]
            view = memory_at(table, abi.table_bytes(version)).cast("Q")
            for index, address in enumerate(addresses):
                view[index] = address
    log.info("NCCL's network plugin is %s, over %s", path, plugin.endpoint.spec.name)
    return plugin


def _remove_folder(folder: str, owner: int) -> None:
    """Remove the shared object's folder, unless this is a child that inherited the handler."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


#: Entries that compiled code serves: name -> export of the kernel, by the version's calling form.
_COMPILED = {
    "iflush": "iflush",
    "test": "test",
    "regMr": "register",
    "deregMr": "deregister",
    "setNetAttr": "accepted",
}
#: Entries without a function, as in NCCL's own sockets: no DMA-BUF, no device side, no virtual
#: devices. NCCL calls irecvConsumed after every receive if it is there.
_ABSENT = ("regMrDmaBuf", "getDeviceMr", "irecvConsumed", "makeVDevice")


class _Callbacks:
    """Addresses of the functions of the tables, and the callbacks among them."""

    def __init__(self, endpoint: PluginEndpoint) -> None:
        self._endpoint = endpoint
        self._library = native.library(KERNEL)
        self._kept: dict[tuple[str, int], Any] = {}

    def address(self, entry: str, version: int) -> int:
        """Return the address of a table's function, 0 for one that may be absent."""
        if entry in _ABSENT:
            return 0
        kernel = _COMPILED.get(entry)
        if entry in ("isend", "irecv"):
            kernel = f"{entry}{max(8, min(version, 10))}"
        if kernel:
            return self._library.address(native.PREFIX + kernel)
        function, nargs = self._function(entry, version)
        # Every C argument of these entries is an integer or a pointer in a register of its own.
        kept = self._kept[entry, version] = ctypes.CFUNCTYPE(ctypes.c_int, *[_INT64] * nargs)(
            guarded(entry, function)
        )
        return ctypes.cast(kept, ctypes.c_void_p).value or 0

    def _function(self, entry: str, version: int) -> tuple[Callable[..., None], int]:
        """Return a callback and its number of arguments in a version."""
        context = version >= 11
        config = version == 10
        match entry:
            case "init":
                return (self._init, 5) if context else (_nothing, 2 if config else 1)
            case "devices":
                return self._devices, 1
            case "getProperties":
                return lambda dev, address: self._properties(version, dev, address), 2
            case "listen":
                return self._after(self._listen, context), 3 + context
            case "connect":
                return self._connect_form(version), 4 + (context or config)
            case "accept":
                return self._accept, 3
            case "finalize":
                return _nothing, 1
            case "closeListen":
                return self._endpoint.close_listening, 1
        return self._endpoint.close, 1  # closeSend, closeRecv

    @staticmethod
    def _after(function: Callable[..., None], skip: bool) -> Callable[..., None]:
        """Return ``function`` without the context that newer versions pass first."""
        return (lambda _, *rest: function(*rest)) if skip else function

    def _connect_form(self, version: int) -> Callable[..., None]:
        if version == 10:
            return lambda dev, _config, handle, comm, device: self._connect(dev, handle, comm)
        if version >= 11:
            return lambda _context, dev, handle, comm, device: self._connect(dev, handle, comm)
        return lambda dev, handle, comm, device: self._connect(dev, handle, comm)

    def _init(self, context: int, *_: int) -> None:
        store_word(context, 1)

    def _devices(self, count: int) -> None:
        memory_at(count, 4)[:] = (1).to_bytes(4, "little")

    @staticmethod
    def _check_device(dev: int) -> None:
        if dev & 0xFFFFFFFF:  # an int in a register
            raise InvalidUsage(f"cannot use device {dev & 0xFFFFFFFF}: there is one, number 0")

    def _properties(self, version: int, dev: int, address: int) -> None:
        self._check_device(dev)
        kind = nccl_net_abi.PROPERTIES[version]
        ctypes.memset(address, 0, ctypes.sizeof(kind))
        values: dict[str, Any] = {
            "name": ctypes.cast(self._name(), ctypes.c_char_p),
            "guid": int.from_bytes(self._endpoint.guid, "little"),
            "ptrSupport": PTR_HOST,
            "speed": self._endpoint.speed_mbps or SPEED_MBPS,
            "port": 1,
            "maxComms": 1 << 16,
            "maxRecvs": 1,
            "maxP2pBytes": MAX_BYTES,
            "maxCollBytes": MAX_BYTES,
            "maxMultiRequestSize": 1,
            "railId": UNDEFINED_ID,
            "planeId": UNDEFINED_ID,
        }
        properties = kind.from_address(address)
        fields = {name for name, *_ in kind._fields_}
        for name, value in values.items():
            if name in fields:
                setattr(properties, name, value)
        if "vProps" in fields:
            properties.vProps.ndevs = 1
            properties.vProps.devs[0] = 0

    def _name(self) -> Any:
        if ("name", 0) not in self._kept:
            self._kept["name", 0] = ctypes.create_string_buffer(NAME)
        return self._kept["name", 0]

    def _listen(self, dev: int, handle: int, comm: int) -> None:
        self._check_device(dev)
        data, number = self._endpoint.listen()
        memory_at(handle, HANDLE_BYTES)[:] = data
        store_word(comm, number)

    def _connect(self, dev: int, handle: int, comm: int) -> None:
        """Begin or continue an attempt, whose number the handle keeps between the calls."""
        self._check_device(dev)
        pending = handle + PENDING_OFFSET
        store_word(comm, 0)
        number = int.from_bytes(memory_at(pending, 8), "little")
        if number == 0:
            store_word(
                pending, self._endpoint.start_connect(bytes(memory_at(handle, HANDLE_BYTES)))
            )
            return
        connection = self._endpoint.poll_connect(number)
        if connection:
            store_word(comm, connection.address)

    def _accept(self, listening: int, comm: int, device: int) -> None:
        connection = self._endpoint.poll_accept(listening)
        store_word(comm, connection.address if connection else 0)


def _nothing(*_: int) -> None:
    pass
