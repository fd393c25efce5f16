"""Choice of the mapping between each two GPUs of a host: a function of exchanged facts.

All ranks decide alike. Mappings, best first: ``process`` (both ranks are threads of one process:
plain pointers), ``vmm`` (virtual memory management, passed as a file descriptor), ``ipc`` (CUDA IPC
handles), ``host`` (pinned host memory of the receiver). The first three need peer access: both GPUs
support it (cuDeviceCanAccessPeer), and the path between them is not longer than ``P2P_LEVEL``, in
terms of ``topo``; NCCL's default is PXB, and SYS for two GPUs on AMD hosts (NCCL 2.28
``src/graph/paths.cc``, ncclTopoCheckP2p). Mappings that failed are in ``FailedMappings``; the next
one is used instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from miraccl import params
from miraccl.errors import InvalidUsage, ProtocolError, SystemFailure
from miraccl.topo.analyse import Topology, analyse_topology
from miraccl.topo.load import load_topology
from miraccl.topo.options import PathOptions, TopoOptions
from miraccl.topo.queries import p2p_level
from miraccl.topo.records import LOCAL_ID_MASK, PathType
from miraccl.topo.xmlfile import XmlNode
from miraccl.topo.xmlfile import bus_id as bus_number

SELF, PROCESS, VMM, IPC, HOST = "self", "process", "vmm", "ipc", "host"
#: mappings of the receiver's device memory
DIRECT = (PROCESS, VMM, IPC)

Pair = tuple[int, int]
Access = int | None
"""Driver's answer to a rank about another GPU: one of the constants below, None if it does not see
that GPU.
"""
# LINKED: with atomics over the link, which NVLink has and PCIe lacks
NO_ACCESS, ACCESS, LINKED = (
    0,
    1,
    2,
)
FailedMappings = Mapping[tuple[Pair, str], str]
"""(pair, mapping) -> reason of its failure."""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """Facts of a rank that mappings are chosen from.

    Attributes:
        process: Identifier of the process, equal for its threads only.
        descriptors: True if the GPU exports memory as file descriptors.
        cumem: Parameter CUMEM.
    """

    rank: int
    process: str
    pid: int
    pid_namespace: int
    ordinal: int
    bus_id: str
    arch: int
    nbytes: int
    descriptors: bool
    cumem: int = -1
    p2p_disable: bool = False
    p2p_level: int = -1
    shm_disable: bool = False

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes, rank: int) -> GpuFacts:
        try:
            facts = cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise ProtocolError(
                f"cannot read the GPU description of rank {rank}: {error}", peer=rank
            ) from error
        if facts.rank != rank:
            raise ProtocolError(
                f"cannot use the GPU description of rank {rank}: it names rank {facts.rank}",
                peer=rank,
            )
        return facts


@dataclass(frozen=True, kw_only=True)
class P2pSettings:
    """Settings that affect mappings."""

    cumem: int = -1
    p2p_disable: bool = False
    p2p_level: int = -1
    shm_disable: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> P2pSettings:
        return cls(
            cumem=params.CUMEM.read(environ),
            p2p_disable=params.P2P_DISABLE.read(environ) == 1,
            p2p_level=params.P2P_LEVEL.read(environ),
            shm_disable=params.SHM_DISABLE.read(environ),
        )


@dataclass(frozen=True, kw_only=True)
class GpuPaths:
    """Path types between GPUs by bus id, as one rank of the host detected them.

    Attributes:
        default_level: NCCL's default of P2P_LEVEL.
        note: Reason if there are none.
        machine, topology: Sources of the paths; not sent to other ranks.
    """

    types: Mapping[tuple[str, str], PathType]
    default_level: PathType = PathType.PXB
    note: str = ""
    machine: XmlNode | None = field(default=None, compare=False, repr=False)
    topology: Topology | None = field(default=None, compare=False, repr=False)

    def between(self, a: str, b: str) -> PathType | None:
        return PathType.LOC if a == b else self.types.get((min(a, b), max(a, b)))

    def to_json(self) -> bytes:
        rows = [[a, b, int(path)] for (a, b), path in self.types.items()]
        return json.dumps(
            {"types": rows, "level": int(self.default_level), "note": self.note}
        ).encode()

    @classmethod
    def from_json(cls, data: bytes) -> GpuPaths:
        record = json.loads(data)
        types = {(str(a), str(b)): PathType(path) for a, b, path in record["types"]}
        return cls(types=types, default_level=PathType(record["level"]), note=str(record["note"]))


@dataclass(frozen=True, kw_only=True)
class P2pChoice:
    """Mapping of a pair and its reason; ``kind`` is empty if there is none."""

    kind: str
    reason: str


def read_paths(bus_ids: Sequence[str]) -> GpuPaths:
    """Return the paths between these GPUs, from the topology file in the settings or this machine.

    Never raises: ``note`` has the reason.
    """
    # paths as they are, before any rules
    options = TopoOptions(paths=PathOptions(p2p_level=PathType.SYS, net_intra=False, pxn=False))
    types: dict[tuple[str, str], PathType] = {}
    level = PathType.PXB
    try:
        machine = load_topology().root
        topology = analyse_topology(machine, options)
        for domain in topology.domains:
            system, paths = domain.system, domain.paths
            level = p2p_level(system, PathOptions())
            place = {gpu.id & LOCAL_ID_MASK: position for position, gpu in enumerate(system.gpus)}
            for a in bus_ids:
                for b in bus_ids:
                    here, there = place.get(bus_number(a)), place.get(bus_number(b))
                    if a < b and here is not None and there is not None:
                        types[a, b] = max(
                            paths.gpu_gpu(here, there).type, paths.gpu_gpu(there, here).type
                        )
    except Exception as error:  # an unusual machine: the driver decides alone
        return GpuPaths(types={}, note=f"no topology: {error}")
    note = "" if types else "the topology lacks these GPUs"
    return GpuPaths(types=types, default_level=level, note=note, machine=machine, topology=topology)


def pair_of(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)


def uses_descriptors(
    facts: Sequence[GpuFacts], failed_mappings: FailedMappings
) -> tuple[bool, str]:
    """Return whether the communicator's memory is made by virtual memory management, and the
    reason.

    All ranks get the same answer, because memory made that way has no IPC handle. Raises
    ``InvalidUsage`` if a rank requires it and it is not possible.
    """
    insisting = [f.rank for f in facts if f.cumem == 1]
    unable = [f.rank for f in facts if not f.descriptors]
    failed = next(
        (
            f"ranks {pair[0]} and {pair[1]}: {text}"
            for (pair, kind), text in failed_mappings.items()
            if kind == VMM
        ),
        "",
    )
    declining = [f.rank for f in facts if f.cumem == 0]
    reason = ""
    if declining:
        reason = f"CUMEM is 0 on rank {declining[0]}"
    elif unable:
        reason = f"the GPU of rank {unable[0]} does not share memory as file descriptors"
    elif failed:
        reason = f"it failed between {failed}"
    if reason and insisting:
        text = f"rank {insisting[0]} insists on virtual memory management (CUMEM=1), but {reason}"
        raise InvalidUsage(text, peer=insisting[0], hint="set MIRACCL_CUMEM=auto, on all ranks")
    if reason:
        return False, reason
    if insisting:
        return True, f"rank {insisting[0]} asked for it (CUMEM=1)"
    if len({f.process for f in facts}) == 1:
        return False, "all ranks are threads of one process"
    return True, "all GPUs share memory as file descriptors"


def path_between(
    a: GpuFacts, b: GpuFacts, access: Sequence[Access], paths: GpuPaths
) -> PathType | None:
    """Return the path of a pair: the topology's, or NVL if the driver knows of a link it lacks."""
    path = paths.between(a.bus_id, b.bus_id)
    linked = all(answer == LINKED for answer in access)
    return PathType.NVL if linked and (path is None or path > PathType.NVL) else path


def peer_access(
    a: GpuFacts, b: GpuFacts, access: Sequence[Access], paths: GpuPaths
) -> tuple[bool, str]:
    """Return whether two ranks may use each other's device memory, and the reason.

    ``access``: the driver's answer to rank a for b's GPU, and to rank b for a's.
    """
    off = next((f.rank for f in (a, b) if f.p2p_disable), None)
    if off is not None:
        return False, f"P2P_DISABLE is 1 on rank {off}"
    path = path_between(a, b, access, paths)
    name = (
        path.name if path is not None else f"path unknown ({paths.note or 'not in the topology'})"
    )
    if NO_ACCESS in access:
        return False, f"{name}: the driver refuses peer access (nvidia-smi topo -p2p r)"
    asked = [f.p2p_level for f in (a, b) if f.p2p_level >= 0]
    level = PathType(min(asked)) if asked else paths.default_level
    if path is not None and path > level:
        return False, f"{name} is farther than P2P_LEVEL {level.name}"
    if path is None and asked and level < PathType.SYS:
        return False, f"{name}, and P2P_LEVEL is {level.name}"
    return True, name


def choose_mapping(
    a: GpuFacts,
    b: GpuFacts,
    access: Sequence[Access],
    paths: GpuPaths,
    descriptors: bool,
    failed: FailedMappings,
) -> P2pChoice:
    """Choose the mapping between two ranks, symmetric in them.

    ``descriptors`` is the result of ``uses_descriptors``.
    """
    if a.rank == b.rank:
        return P2pChoice(kind=SELF, reason="the rank itself")
    a, b = (a, b) if a.rank < b.rank else (b, a)
    pair = pair_of(a.rank, b.rank)
    allowed, why = peer_access(a, b, access, paths)
    if allowed:
        kind = VMM if descriptors else PROCESS if a.process == b.process else IPC
        if (pair, kind) not in failed:
            return P2pChoice(kind=kind, reason=why)
        why = f"{kind} failed: {failed[pair, kind]}"
    off = next((f.rank for f in (a, b) if f.shm_disable), None)
    if off is not None:
        return P2pChoice(kind="", reason=f"{why}; and SHM_DISABLE is 1 on rank {off}")
    if (pair, HOST) in failed:
        return P2pChoice(kind="", reason=f"{why}; and host memory failed: {failed[pair, HOST]}")
    return P2pChoice(kind=HOST, reason=why)


def choose_mappings(
    facts: Sequence[GpuFacts],
    access: Sequence[Sequence[Access]],
    paths: GpuPaths,
    failed: FailedMappings,
) -> dict[Pair, P2pChoice]:
    """Choose the mappings of all pairs (lower rank first).

    ``access[a][b]`` is the driver's answer to rank a for the GPU of rank b. Raises
    ``SystemFailure`` naming a pair without a mapping, on all ranks alike.
    """
    descriptors, _ = uses_descriptors(facts, failed)
    choices: dict[Pair, P2pChoice] = {}
    for a in facts:
        for b in facts[a.rank + 1 :]:
            views = (access[a.rank][b.rank], access[b.rank][a.rank])
            choice = choices[a.rank, b.rank] = choose_mapping(
                a, b, views, paths, descriptors, failed
            )
            if not choice.kind:
                text = f"ranks {a.rank} and {b.rank} cannot exchange GPU data: {choice.reason}"
                raise SystemFailure(
                    text,
                    peer=b.rank,
                    hint="allow peer access or shared memory, or set different MIRACCL_HOSTID",
                )
    return choices


def check_compatible(facts: Sequence[GpuFacts], rank: int) -> None:
    """Raise ``InvalidUsage`` if ranks cannot work together."""
    mine = facts[rank]
    for other in facts:
        if other.arch != mine.arch:
            text = f"the GPU of rank {other.rank} is sm_{other.arch}, this one sm_{mine.arch}"
            raise InvalidUsage(
                text,
                rank=rank,
                peer=other.rank,
                hint="all GPUs of a communicator must be of one kind",
            )
        if other.nbytes != mine.nbytes:
            raise InvalidUsage(
                f"rank {other.rank} has another version of miraccl", rank=rank, peer=other.rank
            )


def pid_namespace() -> int:
    """Return the PID namespace of this process, 0 if unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
