"""Declaration of every setting: name, type, unit, default and description.

``MIRACCL_<NAME>`` sets a parameter. Where NCCL has a variable of the same meaning, ``NCCL_<NAME>``
is read too; ours takes precedence. The environment is read at the edge of the library: state
machines and records get values. ``miraccl env`` prints this table.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from miraccl.errors import InvalidUsage

T = TypeVar("T")

#: Longest timeout, in seconds (three years); its nanoseconds still fit into 64 bits.
FOREVER = 1e8
AGGREGATIONS = ("auto", "always", "never", "star", "two_level", "rail_trees")
CTA_POLICIES = ("default", "efficiency", "zero")
PROTOCOLS = ("simple", "ll", "ll128")
DEBUG_LEVELS = ("none", "warn", "info", "trace", "version", "abort")


@dataclass(frozen=True, kw_only=True)
class Param(Generic[T]):
    """One setting.

    Attributes:
        name: Name without the prefix ``MIRACCL_``.
        parse: Converts the text of the environment; raises ``ValueError`` that says what is
            allowed.
        kind: Kind of value, as ``miraccl env`` shows it.
        nccl: Name of NCCL's variable without ``NCCL_``, or None.
    """

    name: str
    default: T
    parse: Callable[[str], T]
    kind: str
    unit: str
    help: str
    nccl: str | None = None

    def read(self, environ: Mapping[str, str] | None = None) -> T:
        return self.resolve(environ)[0]

    def resolve(self, environ: Mapping[str, str] | None = None) -> tuple[T, str]:
        """Return the value and its source: ``MIRACCL_X``, ``NCCL_X`` or ``default``."""
        environ = os.environ if environ is None else environ
        for variable in (f"MIRACCL_{self.name}", f"NCCL_{self.nccl}" if self.nccl else ""):
            text = environ.get(variable, "").strip() if variable else ""
            if text:
                try:
                    return self.parse(text), variable
                except ValueError as error:
                    raise InvalidUsage(f"{variable}={text!r}: {error}") from None
        return self.default, "default"


PARAMS: dict[str, Param[Any]] = {}


def declare(
    name: str,
    default: T,
    parse: Callable[[str], T],
    help: str,
    *,
    kind: str = "",
    unit: str = "",
    nccl: str | None = None,
) -> Param[T]:
    """Declare a parameter; ``nccl`` is NCCL's variable of the same meaning, without ``NCCL_``."""
    if name in PARAMS:
        raise ValueError(f"cannot declare parameter {name}: it exists")
    param = Param(
        name=name,
        default=default,
        parse=parse,
        kind=kind or parse.__name__,
        unit=unit,
        help=help,
        nccl=nccl,
    )
    PARAMS[name] = param
    return param


def parse_size(text: str) -> int:
    """Parse a number of bytes with an optional binary suffix K, M or G: ``4M`` is 4194304."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgKMG]?)(?:i?[bB])?", text.strip())
    if not match:
        raise ValueError("allowed is a number with an optional K, M or G, such as 256K")
    value = float(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}[match[2].lower()]
    if value >= 1 << 63:
        raise ValueError("allowed are sizes below 2**63 bytes")
    if value != int(value):
        raise ValueError("allowed are whole numbers of bytes")
    return int(value)


def parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("allowed are 0 and 1")


def parse_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError("allowed are finite numbers of seconds greater than 0, such as 30 or 0.5")
    return min(value, FOREVER)


def parse_count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("allowed are whole numbers from 0 on")
    return int(text)


def _parse_port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError("allowed are ports 1 to 65535, and 0")
    return int(text)


def parse_integer(text: str) -> int:
    """Parse a decimal or 0x whole number; negative ones have a meaning for some parameters."""
    try:
        return int(text, 0)
    except ValueError:
        raise ValueError("allowed is a whole number such as 4 or 0x10") from None


def _parse_aggregation(text: str) -> str:
    if text not in AGGREGATIONS:
        raise ValueError(f"allowed are {', '.join(AGGREGATIONS)}")
    return text


def _parse_flag(text: str) -> int:
    """Parse a flag of NCCL, which is a number; ``true`` and ``on`` are accepted as well."""
    try:
        return parse_integer(text)
    except ValueError:
        return int(parse_bool(text))


def _parse_path(text: str) -> str:
    """Expand ``~``, which shells leave alone between quotes and in settings files."""
    return os.path.expanduser(text)


class PortRange(NamedTuple):
    """First and last port of a range; (0, 0) lets the kernel choose."""

    first: int = 0
    last: int = 0

    def __str__(self) -> str:
        if self.first == self.last:
            return str(self.first or "")
        return f"{self.first}-{self.last}"


def parse_port_range(text: str) -> PortRange:
    """Parse ``20000-20099`` or one port."""
    match = re.fullmatch(r"(\d{1,5})(?:\s*-\s*(\d{1,5}))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise ValueError("allowed are a port from 1 to 65535 and a range such as 20000-20099")
    return PortRange(first, last)


def parse_net(text: str) -> str:
    """Parse ``udp`` or ``plugin:PATH``; the name in any case, the path as it is."""
    name, colon, path = text.partition(":")
    return name.strip().lower() + colon + path.strip()


def _parse_debug(text: str) -> str:
    if text.lower() not in DEBUG_LEVELS:
        raise ValueError(f"allowed are {', '.join(DEBUG_LEVELS)}")
    return text.lower()


def _parse_multiprocessors(text: str) -> int:
    value = parse_integer(text)
    if value < -1:
        raise ValueError(
            "allowed are a number of multiprocessors, 0 (copy engines) and -1 (as many as fit)"
        )
    return value


def _parse_threshold(text: str) -> str:
    if text.lower() != "never":
        parse_size(text)
    return text.lower()


def _parse_cumem(text: str) -> int:
    """Parse 1 and 0 as NCCL does; ``auto`` and NCCL's -2 become -1."""
    if text.lower() in ("auto", "-2", "-1"):
        return -1
    if text in ("0", "1"):
        return int(text)
    raise ValueError("allowed are auto, 0 and 1")


def _parse_p2p_trust(text: str) -> str:
    if text not in ("job", "target"):
        raise ValueError("allowed are job and target")
    return text


def _parse_cta_policy(text: str) -> str:
    """Parse the names of ``NCCL_CTA_POLICY_*``, or NCCL's numbers for them."""
    name = dict(zip("012", CTA_POLICIES, strict=True)).get(text, text.lower())
    if name not in CTA_POLICIES:
        raise ValueError(f"allowed are {', '.join(CTA_POLICIES)}, or 0, 1 and 2")
    return name


TIMEOUT = declare(
    "TIMEOUT", 300.0, parse_seconds, "Deadline of every operation.", kind="time", unit="s"
)
BOOTSTRAP_TIMEOUT = declare(
    "BOOTSTRAP_TIMEOUT",
    60.0,
    parse_seconds,
    "Deadline for all ranks to find each other and to connect.",
    kind="time",
    unit="s",
)
SECRET = declare(
    "SECRET",
    "",
    str,
    "Shared secret of the job. Default: miraccl run creates one; ranks that share a port derive "
    "one from port, user and job number.",
    kind="text",
)
AGGREGATORS = declare(
    "AGGREGATORS",
    0,
    parse_count,
    "Aggregators among the processes of the job, the last ones; miraccl run --aggregators sets it.",
    kind="count",
)
AGGREGATION = declare(
    "AGGREGATION",
    "auto",
    _parse_aggregation,
    "Use of aggregators: auto where a measurement says that they are faster, always, never, or"
    " always with a schedule: star, two_level (groups of ranks, a root), rail_trees (one per local"
    " rank).",
    kind="name",
)
SWITCH = declare(
    "SWITCH",
    "",
    str,
    "Software switches that add for the ranks, HOST:PORT separated by commas: processes `miraccl"
    " aggregator --listen HOST:PORT`.",
    kind="address",
)
P2P_HOST = declare(
    "P2P_HOST",
    "127.0.0.1",
    str,
    "Address at which an agent of one-sided transfers listens; 0.0.0.0 is all IPv4 interfaces.",
    kind="address",
)
P2P_TRUST = declare(
    "P2P_TRUST",
    "job",
    _parse_p2p_trust,
    "Access of agents of this host to registered memory: job maps windows and lets peers with the "
    "secret copy; target has the owner's process make all copies.",
    kind="choice",
)
P2P_STREAMS = declare(
    "P2P_STREAMS",
    2,
    parse_count,
    "TCP streams of a connection between agents of different hosts.",
    kind="number",
)
LISTEN_PORT = declare(
    "LISTEN_PORT",
    0,
    _parse_port,
    "Port at which rank 0 listens where it is mapped to MASTER_PORT, as by docker -p; 0: at"
    " MASTER_PORT itself.",
    kind="count",
)
HOSTID = declare(
    "HOSTID",
    "",
    str,
    "Name of this host; ranks with different names never share memory.",
    kind="text",
    nccl="HOSTID",
)
NET = declare(
    "NET",
    "auto",
    parse_net,
    "Transport between hosts: auto, tcp, udp, plugin:PATH, or the name of another one.",
    kind="text",
)
SOCKET_IFNAME = declare(
    "SOCKET_IFNAME",
    "",
    str,
    "Interfaces to use: a list of prefixes; ^ excludes them, = selects exact names.",
    kind="text",
    nccl="SOCKET_IFNAME",
)
NET_PLUGIN = declare(
    "NET_PLUGIN",
    "",
    str,
    "Network plugins of NCCL, files or names separated by commas, of which MIRACCL_NET=plugin uses "
    "the first that loads.",
    kind="text",
    nccl="NET_PLUGIN",
)
NET_PORT_RANGE = declare(
    "NET_PORT_RANGE",
    PortRange(),
    parse_port_range,
    "TCP and UDP ports on which ranks listen, such as 20000-20099, for firewalls; empty: the "
    "kernel chooses. Each rank of a host needs one TCP port, one more while it connects a "
    "communicator, and one more for put and get; over UDP, UDP_PORTS of them per communicator.",
    kind="ports",
)
SOCKET_NTHREADS = declare(
    "SOCKET_NTHREADS",
    1,
    parse_count,
    "TCP streams between two ranks, times NSOCKS_PERTHREAD; one thread serves all of them.",
    kind="count",
    nccl="SOCKET_NTHREADS",
)
NSOCKS_PERTHREAD = declare(
    "NSOCKS_PERTHREAD",
    2,
    parse_count,
    "TCP streams between two ranks, times SOCKET_NTHREADS.",
    kind="count",
    nccl="NSOCKS_PERTHREAD",
)
SOCKET_BUFFER = declare(
    "SOCKET_BUFFER",
    1 << 22,
    parse_size,
    "Kernel buffer of each TCP stream and direction; 0 leaves the size to the kernel.",
    kind="size",
    unit="B",
)
UDP_PORTS = declare(
    "UDP_PORTS",
    2,
    parse_count,
    "UDP ports per network interface; each is a path between two ranks, 16 paths at most.",
    kind="count",
)
UDP_CC = declare(
    "UDP_CC",
    "swift",
    str.lower,
    "Congestion control of UDP: swift, cubic, reno, bbr, timely, nscc or fixed.",
    kind="text",
)
UDP_PROTECTION = declare(
    "UDP_PROTECTION",
    "mac",
    str.lower,
    "Protection of UDP packets: mac (authentication), aead (encryption as well) or none.",
    kind="text",
)
UDP_ADMISSION = declare(
    "UDP_ADMISSION",
    "cts",
    str.lower,
    "What a rank lets its peers send over UDP: off (into free slots of its FIFOs; the same on all "
    "ranks), cts (also straight into posted receives) or credit (as cts, and no more than "
    "UDP_CREDIT bytes of all peers on their way at a time).",
    kind="text",
)
UDP_CREDIT = declare(
    "UDP_CREDIT",
    256 << 10,
    parse_size,
    "Bytes that all peers of a rank together may have on their way to each of its network "
    "interfaces, with UDP_ADMISSION=credit; at most a quarter of the socket buffers.",
    kind="size",
    unit="B",
)
UDP_MTU = declare(
    "UDP_MTU",
    0,
    parse_count,
    "Payload of a UDP packet; 0 takes the MTU of the interfaces on both sides.",
    kind="size",
    unit="B",
)
ALGO = declare(
    "ALGO",
    "",
    str.lower,
    "Algorithm for every collective that has it, such as ring. NCCL_ALGO takes NCCL's names and "
    "lists and is a hint.",
    kind="text",
    nccl="ALGO",
)
PROTO = declare(
    "PROTO",
    "",
    str.lower,
    "Protocol: simple, ll or (on GPU memory) ll128. NCCL_PROTO may be a list that allows one.",
    kind="text",
    nccl="PROTO",
)
DETERMINISTIC = declare(
    "DETERMINISTIC",
    False,
    parse_bool,
    "Results that depend on neither size, algorithm nor layout, unless init() says otherwise.",
    kind="flag",
)
BUFFSIZE = declare(
    "BUFFSIZE",
    0,
    parse_size,
    "Bytes of all FIFOs of a CPU rank; 0 chooses. NCCL_BUFFSIZE, in NCCL the bytes of one "
    "connection, is read as the total.",
    kind="size",
    unit="B",
    nccl="BUFFSIZE",
)
CTA_POLICY = declare(
    "CTA_POLICY",
    "",
    _parse_cta_policy,
    "GPU resources of kernels: default (fastest), efficiency (few multiprocessors for large "
    "operations) or zero (copy engines).",
    kind="choice",
    nccl="CTA_POLICY",
)
SMS = declare(
    "SMS",
    -1,
    _parse_multiprocessors,
    "Multiprocessors that kernels may occupy; -1: as many as fit, 0: copy engines only, where "
    "possible.",
    kind="count",
)
SHM_DISABLE = declare(
    "SHM_DISABLE", False, parse_bool, "Do not use shared memory.", kind="flag", nccl="SHM_DISABLE"
)
CMA_DISABLE = declare(
    "CMA_DISABLE",
    False,
    parse_bool,
    "Do not read a peer's private memory (process_vm_readv).",
    kind="flag",
)
SINGLE_COPY = declare(
    "SINGLE_COPY",
    "",
    _parse_threshold,
    "Size from which a peer's private memory is read directly (process_vm_readv), or never; empty: "
    "measured.",
    kind="size",
    unit="B",
)
CUMEM = declare(
    "CUMEM",
    -1,
    _parse_cumem,
    "Memory sharing between GPUs: 1 virtual memory management, 0 CUDA IPC, -1 or auto chooses.",
    kind="choice",
    nccl="CUMEM_ENABLE",
)
GPU_STAGING = declare(
    "GPU_STAGING",
    4 << 20,
    parse_size,
    "Pinned host memory of each staging buffer for GPU data to other hosts; there are four.",
    kind="size",
    unit="B",
)
CACHE_DIR = declare(
    "CACHE_DIR",
    "",
    _parse_path,
    "Directory of compiled code, measured constants and plans; empty: miraccl below XDG_CACHE_HOME "
    "or ~/.cache.",
    kind="path",
)
DEBUG = declare(
    "DEBUG",
    "warn",
    _parse_debug,
    "Log level: none, warn, info or trace.",
    kind="text",
    nccl="DEBUG",
)
DEBUG_SUBSYS = declare(
    "DEBUG_SUBSYS",
    "",
    str.lower,
    "Subsystems to log, comma separated, such as bootstrap,socket; ^ in front excludes them; "
    "empty: all.",
    kind="text",
    nccl="DEBUG_SUBSYS",
)

# Channels and the tuning model (NCCL's variables of the same names).
MIN_NCHANNELS = declare(
    "MIN_NCHANNELS",
    0,
    parse_integer,
    "Least number of collective channels.",
    kind="count",
    nccl="MIN_NCHANNELS",
)
MAX_NCHANNELS = declare(
    "MAX_NCHANNELS",
    64,
    parse_integer,
    "Most collective channels.",
    kind="count",
    nccl="MAX_NCHANNELS",
)
MIN_NRINGS = declare(
    "MIN_NRINGS",
    0,
    parse_integer,
    "Older name of MIN_NCHANNELS, which takes precedence.",
    kind="count",
    nccl="MIN_NRINGS",
)
MAX_NRINGS = declare(
    "MAX_NRINGS",
    64,
    parse_integer,
    "Older name of MAX_NCHANNELS, which takes precedence.",
    kind="count",
    nccl="MAX_NRINGS",
)
MIN_CTAS = declare(
    "MIN_CTAS",
    1,
    parse_integer,
    "Least number of channels of a communicator.",
    kind="count",
    nccl="MIN_CTAS",
)
MAX_CTAS = declare(
    "MAX_CTAS", 64, parse_integer, "Most channels of a communicator.", kind="count", nccl="MAX_CTAS"
)
MIN_P2P_NCHANNELS = declare(
    "MIN_P2P_NCHANNELS",
    1,
    parse_integer,
    "Least number of channels for send and receive.",
    kind="count",
    nccl="MIN_P2P_NCHANNELS",
)
MAX_P2P_NCHANNELS = declare(
    "MAX_P2P_NCHANNELS",
    64,
    parse_integer,
    "Most channels for send and receive.",
    kind="count",
    nccl="MAX_P2P_NCHANNELS",
)
NCHANNELS_PER_NET_PEER = declare(
    "NCHANNELS_PER_NET_PEER",
    0,
    parse_integer,
    "Channels per peer over the network; 0 chooses.",
    kind="count",
    nccl="NCHANNELS_PER_NET_PEER",
)
NVLS_ENABLE = declare(
    "NVLS_ENABLE",
    2,
    parse_integer,
    "NVLink SHARP: 0 off, 1 on, 2 where the GPUs support it.",
    kind="choice",
    nccl="NVLS_ENABLE",
)
NVLS_NCHANNELS = declare(
    "NVLS_NCHANNELS",
    0,
    parse_integer,
    "Channels for NVLS; 0 chooses.",
    kind="count",
    nccl="NVLS_NCHANNELS",
)
COLLNET_ENABLE = declare(
    "COLLNET_ENABLE",
    1,
    _parse_flag,
    "0 disables CollNet, even where miraccl plan --collnet assumes a CollNet plugin.",
    kind="flag",
    nccl="COLLNET_ENABLE",
)
COLLNET_NODE_THRESHOLD = declare(
    "COLLNET_NODE_THRESHOLD",
    2,
    parse_integer,
    "Least number of nodes for CollNet.",
    kind="count",
    nccl="COLLNET_NODE_THRESHOLD",
)
NTHREADS = declare(
    "NTHREADS",
    0,
    parse_integer,
    "Most threads of a ring or tree block; 0 chooses.",
    kind="count",
    nccl="NTHREADS",
)
LL128_NTHREADS = declare(
    "LL128_NTHREADS",
    0,
    parse_integer,
    "Most threads of an LL128 block; 0 chooses.",
    kind="count",
    nccl="LL128_NTHREADS",
)
THREAD_THRESHOLDS = declare(
    "THREAD_THRESHOLDS",
    "",
    str,
    "Bytes per thread below which channels are dropped: tree LL, LL128, Simple, ring LL, LL128, "
    "Simple.",
    kind="text",
    unit="B",
    nccl="THREAD_THRESHOLDS",
)
LL128_C2C = declare(
    "LL128_C2C",
    1,
    _parse_flag,
    "LL128 may use paths up to PXN on Hopper and later; 0 limits it to PXB.",
    kind="flag",
    nccl="LL128_C2C",
)
PAT_ENABLE = declare(
    "PAT_ENABLE",
    2,
    parse_integer,
    "PAT: 0 off, 1 on, 2 where each node has one rank.",
    kind="choice",
    nccl="PAT_ENABLE",
)
NET_OVERHEAD = declare(
    "NET_OVERHEAD",
    -2,
    parse_integer,
    "Time to post a network operation; -2 chooses by CPU type.",
    kind="time",
    unit="ns",
    nccl="NET_OVERHEAD",
)

# Topology and paths

_PATH_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_OLD_LEVELS = (0, 4, 5, 8, 9, 9)  # NCCL's numbers before 2.5: LOC PIX PXB PHB SYS SYS


def parse_path_level(text: str) -> int:
    """Parse a path type, or a number of NCCL's old scale 0 to 5, to a ``topo.records.PathType``
    value.

    -1 leaves the choice open.
    """
    if text == "-1":
        return -1
    if text.upper() in _PATH_LEVELS:
        return _PATH_LEVELS.index(text.upper())
    if text[:1].isdigit():
        return _OLD_LEVELS[min(parse_integer(text), len(_OLD_LEVELS) - 1)]
    raise ValueError(f"allowed are {' '.join(_PATH_LEVELS)}, 0 to 5 on NCCL's old scale, and -1")


def _parse_merge_level(text: str) -> int:
    """Parse a path type, or PORT: the ports of one NIC."""
    level = 1 if text.upper() in ("PORT", "1") else parse_path_level(text)
    if level < 0:
        raise ValueError(f"allowed are PORT, {' '.join(_PATH_LEVELS)}")
    return level


def parse_netdevs_policy(text: str) -> str:
    upper = text.upper()
    if upper in ("AUTO", "ALL") or re.fullmatch(r"MAX:0*[1-9]\d{0,8}", upper):
        return upper
    raise ValueError("allowed are AUTO, ALL and MAX:<number>")


TOPO_FILE = declare(
    "TOPO_FILE",
    "",
    _parse_path,
    "Topology file to read instead of detecting the machine.",
    kind="path",
    nccl="TOPO_FILE",
)
TOPO_DUMP_FILE = declare(
    "TOPO_DUMP_FILE",
    "",
    _parse_path,
    "File to which miraccl plan and miraccl topo show write the topology in use.",
    kind="path",
    nccl="TOPO_DUMP_FILE",
)
ACCELERATORS = declare(
    "ACCELERATORS",
    "",
    str,
    "TOML files that describe accelerators, separated by colons.",
    kind="path",
)
P2P_DISABLE = declare(
    "P2P_DISABLE",
    0,
    _parse_flag,
    "1 disables access of GPUs to each other's memory.",
    kind="flag",
    nccl="P2P_DISABLE",
)
P2P_LEVEL = declare(
    "P2P_LEVEL",
    -1,
    parse_path_level,
    "Farthest path type over which GPUs access each other's memory; -1 chooses.",
    kind="path type",
    nccl="P2P_LEVEL",
)
NVB_DISABLE = declare(
    "NVB_DISABLE",
    0,
    _parse_flag,
    "1 disables routes over the NVLinks of another GPU.",
    kind="flag",
    nccl="NVB_DISABLE",
)
PXN_DISABLE = declare(
    "PXN_DISABLE",
    0,
    _parse_flag,
    "1 disables access to a NIC through another GPU.",
    kind="flag",
    nccl="PXN_DISABLE",
)
PXN_C2C = declare(
    "PXN_C2C",
    1,
    _parse_flag,
    "1 allows PXN to use a NIC that is reached over C2C.",
    kind="flag",
    nccl="PXN_C2C",
)
NET_GDR_LEVEL = declare(
    "NET_GDR_LEVEL",
    -1,
    parse_path_level,
    "Farthest path type over which a NIC accesses GPU memory: LOC never, -1 up to PXB.",
    kind="path type",
    nccl="NET_GDR_LEVEL",
)
NET_GDR_READ = declare(
    "NET_GDR_READ",
    -2,
    parse_integer,
    "GPUDirect for sends: 0 off, 1 on; negative chooses.",
    kind="choice",
    nccl="NET_GDR_READ",
)
NET_GDR_C2C = declare(
    "NET_GDR_C2C",
    1,
    _parse_flag,
    "1 enables GPUDirect over C2C to NICs at the CPU.",
    kind="flag",
    nccl="NET_GDR_C2C",
)
NET_MERGE_LEVEL = declare(
    "NET_MERGE_LEVEL",
    1,
    _parse_merge_level,
    "Farthest path type of ports that become one network device: LOC fuses none, PORT the ports of "
    "a NIC, then the path types.",
    kind="path type",
    nccl="NET_MERGE_LEVEL",
)
NET_FORCE_MERGE = declare(
    "NET_FORCE_MERGE",
    "",
    str,
    "Ports that become one network device: names separated by commas, groups by semicolons.",
    kind="text",
    nccl="NET_FORCE_MERGE",
)
NET_FORCE_FLUSH = declare(
    "NET_FORCE_FLUSH",
    0,
    _parse_flag,
    "1 flushes GPU memory after every receive of a NIC, also where the GPU orders its writes.",
    kind="flag",
    nccl="NET_FORCE_FLUSH",
)
GDR_FLUSH_DISABLE = declare(
    "GDR_FLUSH_DISABLE",
    0,
    _parse_flag,
    "1 never flushes GPU memory after a receive of a NIC.",
    kind="flag",
    nccl="GDR_FLUSH_DISABLE",
)
NET_DISABLE_INTRA = declare(
    "NET_DISABLE_INTRA",
    0,
    _parse_flag,
    "1 disables the network inside a node, even where it is faster.",
    kind="flag",
    nccl="NET_DISABLE_INTRA",
)
NETDEVS_POLICY = declare(
    "NETDEVS_POLICY",
    "AUTO",
    parse_netdevs_policy,
    "Nearest NICs that a GPU uses: AUTO shares them among the GPUs, ALL, or MAX:<number>.",
    kind="choice",
    nccl="NETDEVS_POLICY",
)

# The channel search.
CROSS_NIC = declare(
    "CROSS_NIC",
    2,
    parse_integer,
    "Channels may enter and leave a node by different NICs: 0 no, 1 yes, 2 where it helps.",
    kind="choice",
    nccl="CROSS_NIC",
)
GRAPH_FILE = declare(
    "GRAPH_FILE",
    "",
    _parse_path,
    "XML file of channel graphs that replace the search.",
    kind="path",
    nccl="GRAPH_FILE",
)
GRAPH_DUMP_FILE = declare(
    "GRAPH_DUMP_FILE",
    "",
    _parse_path,
    "File to which miraccl plan writes the channel graphs, in NCCL's XML.",
    kind="path",
    nccl="GRAPH_DUMP_FILE",
)

# InfiniBand and RoCE

_POLICIES = ("rotate", "split", "pieces")  # NCCL's numbers 0 and 1, and one of ours


def _parse_policy(text: str) -> str:
    name = dict(zip("01", _POLICIES, strict=False)).get(text, text.lower())
    if name not in _POLICIES:
        raise ValueError(f"allowed are {', '.join(_POLICIES)}, 0 (rotate) and 1 (split)")
    return name


def _parse_within(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        value = parse_integer(text)
        if not low <= value <= high:
            raise ValueError(f"allowed are {low} to {high}")
        return value

    return parse


def _parse_family(text: str) -> int:
    """Parse ``AF_INET`` and ``AF_INET6`` as NCCL does, or 4 and 6; 0 is any."""
    families = {"AF_INET": 4, "4": 4, "AF_INET6": 6, "6": 6, "0": 0}
    if text.upper() not in families:
        raise ValueError("allowed are AF_INET and AF_INET6")
    return families[text.upper()]


def _parse_pair_kind(text: str) -> str:
    if text.lower() not in ("rc", "uc", "ud"):
        raise ValueError("allowed are rc, uc and ud")
    return text.lower()


def _parse_network(text: str) -> str:
    """Parse an IP network such as ``10.0.0.0/8``; bits of its hosts are ignored."""
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise ValueError("allowed are networks such as 10.0.0.0/8 and fd00::/8") from None


IB_DISABLE = declare(
    "IB_DISABLE",
    0,
    _parse_flag,
    "1 ignores InfiniBand and RoCE devices.",
    kind="flag",
    nccl="IB_DISABLE",
)
IB_HCA = declare(
    "IB_HCA",
    "",
    str,
    "Devices to use: a list of prefixes, with :port where needed; ^ excludes them, = selects "
    "exact names.",
    kind="text",
    nccl="IB_HCA",
)
IB_MERGE_NICS = declare(
    "IB_MERGE_NICS",
    1,
    _parse_flag,
    "Ports used as one: 0 the first, 1 up to 8 of the same kind.",
    kind="flag",
    nccl="IB_MERGE_NICS",
)
IB_QPS_PER_CONNECTION = declare(
    "IB_QPS_PER_CONNECTION",
    2,
    _parse_within(1, 32),
    "Queue pairs between two ranks, per port; the same on all ranks.",
    kind="count",
    nccl="IB_QPS_PER_CONNECTION",
)
IB_POLICY = declare(
    "IB_POLICY",
    "split",
    _parse_policy,
    "Messages of more than 64 KiB: split over all queue pairs, rotate, or pieces for the shortest "
    "queue.",
    kind="choice",
    nccl="IB_SPLIT_DATA_ON_QPS",
)
IB_QP_TYPE = declare(
    "IB_QP_TYPE",
    "rc",
    _parse_pair_kind,
    "Kind of the queue pairs: rc (reliable), or uc and ud under the paths, loss detection and "
    "congestion control of UDP; the same on all ranks.",
    kind="choice",
)
IB_GID_INDEX = declare(
    "IB_GID_INDEX",
    -1,
    _parse_within(-1, 1 << 15),
    "Entry of the table of GIDs to use; -1 chooses for each pair of ports.",
    kind="count",
    nccl="IB_GID_INDEX",
)
IB_ROCE_VERSION_NUM = declare(
    "IB_ROCE_VERSION_NUM",
    0,
    _parse_within(0, 2),
    "RoCE version of the GIDs to use; 0 prefers 2.",
    kind="choice",
    nccl="IB_ROCE_VERSION_NUM",
)
IB_ADDR_FAMILY = declare(
    "IB_ADDR_FAMILY",
    0,
    _parse_family,
    "Address family of the GIDs to use; 0 prefers IPv4.",
    kind="choice",
    nccl="IB_ADDR_FAMILY",
)
IB_ADDR_RANGE = declare(
    "IB_ADDR_RANGE",
    "",
    _parse_network,
    "Network that the GIDs must be in, such as 10.0.0.0/8.",
    kind="text",
    nccl="IB_ADDR_RANGE",
)
IB_TIMEOUT = declare(
    "IB_TIMEOUT",
    14,
    _parse_within(1, 31),
    "Time without an acknowledgement before a request is repeated: 4.096 us * 2**timeout.",
    kind="count",
    nccl="IB_TIMEOUT",
)
IB_RETRY_CNT = declare(
    "IB_RETRY_CNT",
    7,
    _parse_within(0, 7),
    "Repetitions of a request before its queue pair has failed.",
    kind="count",
    nccl="IB_RETRY_CNT",
)
IB_TC = declare(
    "IB_TC",
    0,
    _parse_within(0, 255),
    "Traffic class of RoCE packets.",
    kind="count",
    nccl="IB_TC",
)
IB_FIFO_TC = declare(
    "IB_FIFO_TC",
    -1,
    _parse_within(-1, 255),
    "Traffic class of an own queue pair for clear-to-send and other control rows; -1 sends them "
    "with the payloads. The same on all ranks.",
    kind="count",
    nccl="IB_FIFO_TC",
)
IB_ADAPTIVE_ROUTING = declare(
    "IB_ADAPTIVE_ROUTING",
    -1,
    _parse_within(-2, 1),
    "Adaptive routing, which reorders the packets of a queue pair: 1 on, 0 off, -1 on for "
    "InfiniBand.",
    kind="choice",
    nccl="IB_ADAPTIVE_ROUTING",
)
IB_AR_THRESHOLD = declare(
    "IB_AR_THRESHOLD",
    8192,
    _parse_within(0, 1 << 31),
    "With adaptive routing, payloads of more bytes are followed by a request without bytes that "
    "carries the immediate.",
    kind="count",
    nccl="IB_AR_THRESHOLD",
)
IB_SL = declare(
    "IB_SL",
    0,
    _parse_within(0, 15),
    "Service level of InfiniBand packets.",
    kind="count",
    nccl="IB_SL",
)
IB_PKEY = declare(
    "IB_PKEY",
    0,
    _parse_within(0, 65535),
    "Entry of the table of partition keys.",
    kind="count",
    nccl="IB_PKEY",
)
IB_INLINE = declare(
    "IB_INLINE",
    1,
    _parse_flag,
    "1 writes rows of control data into work requests where the device can.",
    kind="flag",
    nccl="IB_USE_INLINE",
)
IB_PCI_RELAXED_ORDERING = declare(
    "IB_PCI_RELAXED_ORDERING",
    2,
    _parse_within(0, 2),
    "Relaxed ordering of PCI writes into payload memory: 0 off, 1 on, 2 where the device has it.",
    kind="choice",
    nccl="IB_PCI_RELAXED_ORDERING",
)
