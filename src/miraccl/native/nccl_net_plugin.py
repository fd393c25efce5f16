"""Loader of NCCL's network plugins: any version from 6 to 12 behind one set of methods.

The methods are those of the newest interface without what older ones lack; each is one C call
without the interpreter's lock. As in NCCL, ``connect``, ``accept``, ``isend`` and ``irecv`` return
None where the plugin cannot proceed yet, and the caller tries again.

Only host memory is used.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from miraccl import trace
from miraccl.errors import InvalidUsage, SystemFailure, as_system_failure
from miraccl.native import nccl_net_abi as abi
from miraccl.native.nccl_net_abi import HANDLE_BYTES, PTR_HOST, Result

log = trace.logger("net_plugin")

_P = ctypes.c_void_p
_LOGGER = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p
)
_UNDEFINED_TRAFFIC_CLASS = -1
MAX_DEVICES = 256
"""Largest number of devices of a plugin; NCCL has room for 64 (``NCCL_TOPO_MAX_NODES``)."""
STATIC_PLUGIN = "STATIC_PLUGIN"


@dataclass(frozen=True, kw_only=True)
class PluginDevice:
    """Properties of a plugin's device.

    Attributes:
        speed_mbps: Speed of the port.
        pci_path: Folder in sysfs, "" if there is none.
        pointer_support: PTR_HOST, PTR_CUDA, PTR_DMABUF as bits.
        max_receives: Buffers per irecv.
    """

    name: str
    pci_path: str
    guid: int
    pointer_support: int
    speed_mbps: int
    port: int
    latency_us: float
    max_comms: int
    max_receives: int


def open_library(path: str) -> ctypes.CDLL:
    """Open a plugin as NCCL does (``src/plugin/plugin_open.cc``)."""
    if path == STATIC_PLUGIN:
        return ctypes.CDLL(None)
    if "/" not in path and ".so" not in path:
        with suppress(OSError):
            return ctypes.CDLL(f"libnccl-net-{path}.so")
    with as_system_failure(f"cannot load the network plugin {path}"):
        return ctypes.CDLL(path)


def _log_format(level: int, flags: int, file: bytes, line: int, text: bytes) -> None:
    # The callback is variadic; only the format is passed on.
    log.info("plugin: %s", (text or b"").decode(errors="replace"))


log_callback = _LOGGER(_log_format)
"""``ncclDebugLogger_t`` that writes to this process's log."""


class LoadedPlugin:
    """A plugin's table of functions and the entries that network and CollNet plugins share.

    Args:
        path: File of the shared object; a name ``x``, which also stands for ``libnccl-net-x.so``;
            or ``STATIC_PLUGIN``, a plugin linked into this process.
        version: Version to use; by default the newest that the plugin has.

    Raises:
        SystemFailure: The file cannot be loaded, or a call of the plugin fails.
        InvalidUsage: It has no plugin of this kind, or none of this version.
    """

    #: Text of errors; name of the symbol and names of the functions by version; set by each kind.
    kind: ClassVar[str]
    symbol: ClassVar[Callable[[int], str]]
    entries: ClassVar[Callable[[int], Sequence[str]]]

    def __init__(self, path: str, version: int = 0) -> None:
        self.path = path
        self._library = open_library(path)
        symbol = type(self).symbol
        wanted = (version,) if version else abi.VERSIONS
        found = [each for each in wanted if hasattr(self._library, symbol(each))]
        if not found:
            raise InvalidUsage(
                f"cannot use {path} as a {self.kind} plugin: it has none of the symbols "
                f"{', '.join(map(symbol, wanted))}"
            )
        self.version = found[0]
        entries = type(self).entries(self.version)
        table = ctypes.addressof(ctypes.c_char.in_dll(self._library, symbol(self.version)))
        words = (ctypes.c_uint64 * (1 + len(entries))).from_address(table)
        self.name = ctypes.string_at(words[0]).decode(errors="replace") if words[0] else "unnamed"
        self._functions = {
            entry: ctypes.CFUNCTYPE(ctypes.c_int)(address) if address else None
            for entry, address in zip(entries, words[1:], strict=True)
        }
        self._context = _P()
        self._initialize()

    def _initialize(self) -> None:
        """Call the plugin's ``init``."""
        raise NotImplementedError

    def has(self, entry: str) -> bool:
        """Return True if the plugin's table has a function for an entry."""
        return self._functions.get(entry) is not None

    def _call(self, entry: str, *arguments: Any) -> None:
        function = self._functions.get(entry)
        plugin = f"{self.kind} plugin {self.name}"
        if function is None:
            raise SystemFailure(f"{plugin} has no {entry} (interface v{self.version})")
        result = function(*arguments)
        if result != Result.SUCCESS:
            reason = Result(result).name if result in set(Result) else str(result)
            raise SystemFailure(f"{plugin} failed in {entry}: {reason}")

    def _contextual(self) -> tuple[Any, ...]:
        return (self._context,) if self.version >= 11 else ()

    def devices(self) -> list[PluginDevice]:
        """Return the properties of all devices; without one, no other method may be called."""
        count = ctypes.c_int()
        self._call("devices", ctypes.byref(count))
        if not 0 <= count.value <= MAX_DEVICES:
            self._reject("devices", f"{count.value} devices; allowed are 0 to {MAX_DEVICES}")
        return [self._device(dev) for dev in range(count.value)]

    def _reject(self, entry: str, what: str) -> NoReturn:
        """Raise ``SystemFailure`` for a result that cannot be true."""
        raise SystemFailure(f"{self.kind} plugin {self.name} returned from {entry} {what}")

    def _object(self, entry: str, found: ctypes.c_void_p) -> int:
        """Return a pointer that a successful call must have set."""
        if not found.value:
            self._reject(entry, "success and no object")
        return found.value

    def _device(self, dev: int) -> PluginDevice:
        p: Any = abi.PROPERTIES[self.version]()
        self._call("getProperties", ctypes.c_int(dev), ctypes.byref(p))
        return PluginDevice(
            name=(p.name or b"").decode(errors="replace"),
            pci_path=(p.pciPath or b"").decode(errors="replace"),
            guid=p.guid,
            pointer_support=p.ptrSupport,
            speed_mbps=p.speed,
            port=p.port,
            latency_us=p.latency if math.isfinite(p.latency) else 0.0,
            max_comms=p.maxComms,
            max_receives=p.maxRecvs,
        )

    def listen(self, dev: int) -> tuple[bytes, int]:
        """Return the handle for the peers' ``connect``, and the listening object."""
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        comm = _P()
        self._call("listen", *self._contextual(), ctypes.c_int(dev), handle, ctypes.byref(comm))
        return handle.raw, self._object("listen", comm)

    def register(self, comm: int, address: int, nbytes: int) -> int:
        """Register host memory; return the plugin's handle for it."""
        handle = _P()
        size = ctypes.c_size_t(nbytes) if self.version >= 8 else ctypes.c_int(nbytes)
        self._call(
            "regMr", _P(comm), _P(address), size, ctypes.c_int(PTR_HOST), ctypes.byref(handle)
        )
        return handle.value or 0

    def deregister(self, comm: int, handle: int) -> None:
        self._call("deregMr", _P(comm), _P(handle))

    def test(self, request: int) -> int | None:
        """Return the bytes of a finished request, None for one that has not finished; -1 if the
        plugin does not say how many there are, which some do not.
        """
        done, size = ctypes.c_int(), ctypes.c_int(-1)
        self._call("test", _P(request), ctypes.byref(done), ctypes.byref(size))
        return size.value if done.value else None

    def close_listen(self, listening: int) -> None:
        self._call("closeListen", _P(listening))


class NetPlugin(LoadedPlugin):
    """A loaded network plugin."""

    kind, symbol, entries = "network", abi.symbol, abi.entries

    def _initialize(self) -> None:
        self._config = ctypes.c_int(_UNDEFINED_TRAFFIC_CLASS)
        if self.version >= 11:
            self._call(
                "init",
                ctypes.byref(self._context),
                ctypes.c_uint64(0),
                ctypes.byref(self._config),
                log_callback,
                _P(),
            )
        elif self.version == 10:
            self._call("init", log_callback, _P())
        else:
            self._call("init", log_callback)

    def connect(self, dev: int, handle: Any) -> int | None:
        """Begin or continue to connect.

        Args:
            handle: Buffer from ``handle_buffer``: the plugin keeps its progress in it, so all calls
                for a connection pass the same one.
        """
        comm, device = _P(), _P()
        config = (ctypes.byref(self._config),) if self.version == 10 else ()
        device_argument = (ctypes.byref(device),) if self.version >= 7 else ()
        self._call(
            "connect",
            *self._contextual(),
            ctypes.c_int(dev),
            *config,
            handle,
            ctypes.byref(comm),
            *device_argument,
        )
        return comm.value

    @staticmethod
    def handle_buffer(handle: bytes) -> Any:
        """Return a copy of a handle for ``connect``."""
        return ctypes.create_string_buffer(handle, HANDLE_BYTES)

    def accept(self, listening: int) -> int | None:
        comm, device = _P(), _P()
        device_argument = (ctypes.byref(device),) if self.version >= 7 else ()
        self._call("accept", _P(listening), ctypes.byref(comm), *device_argument)
        return comm.value

    def isend(self, comm: int, address: int, nbytes: int, tag: int, mhandle: int) -> int | None:
        request = _P()
        size = ctypes.c_size_t(nbytes) if self.version >= 9 else ctypes.c_int(nbytes)
        profiler = (_P(),) if self.version >= 10 else ()
        self._call(
            "isend",
            _P(comm),
            _P(address),
            size,
            ctypes.c_int(tag),
            _P(mhandle),
            *profiler,
            ctypes.byref(request),
        )
        return request.value

    def irecv(self, comm: int, address: int, nbytes: int, tag: int, mhandle: int) -> int | None:
        request = _P()
        sizes: Any = ctypes.c_size_t(nbytes) if self.version >= 9 else ctypes.c_int(nbytes)
        data, tags, mhandles, profiler = _P(address), ctypes.c_int(tag), _P(mhandle), _P()
        profilers = (ctypes.byref(profiler),) if self.version >= 10 else ()
        self._call(
            "irecv",
            _P(comm),
            ctypes.c_int(1),
            ctypes.byref(data),
            ctypes.byref(sizes),
            ctypes.byref(tags),
            ctypes.byref(mhandles),
            *profilers,
            ctypes.byref(request),
        )
        return request.value

    def close_send(self, comm: int) -> None:
        self._call("closeSend", _P(comm))

    def close_recv(self, comm: int) -> None:
        self._call("closeRecv", _P(comm))


def load_first(paths: Sequence[str]) -> NetPlugin:
    """Return the first plugin of a list that loads and has a device for host memory, as NCCL reads
    ``NCCL_NET_PLUGIN``.

    Raises:
        SystemFailure: None does; the message has every reason.
    """
    reasons = []
    for path in paths:
        try:
            plugin = NetPlugin(path)
            if problem := _device_problem(plugin.devices()):
                raise SystemFailure(f"network plugin {plugin.name} {problem}")
            return plugin
        except (SystemFailure, InvalidUsage) as error:
            reasons.append(f"{path}: {error}")
    raise SystemFailure(f"cannot load a network plugin: {'; '.join(reasons) or 'none is named'}")


def _device_problem(devices: Sequence[PluginDevice]) -> str:
    """Return why the first device cannot be used, "" if it can."""
    if not devices:
        return "has no device"
    if not devices[0].pointer_support & PTR_HOST:
        return f"has a first device, {devices[0].name}, that cannot access host memory"
    return ""
