"""Symmetric GPU memory: one allocation per rank of a host, mapped by every other rank.

Kernels exchange data in ``SymmetricMemory``. Data of rank p for this rank arrive in ``inboxes[p]``,
this rank writes for p to ``outboxes[p]``; both have the same layout, which is the executor's. With
peer access they lie in the receiver's device memory, otherwise in a segment of pinned host memory
of the receiver. ``WindowMemory`` is a further allocation that peers address.

All ranks make both together. Every rank computes the mappings of all pairs from the same facts
(``cuda_pairs``). If a mapping fails on any rank, all are informed, free their memory, and try the
next one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from miraccl import clock
from miraccl.deadline import Deadline
from miraccl.errors import InvalidUsage, MiracclError, SystemFailure
from miraccl.topo.records import PathType
from miraccl.transport import cuda_pairs as pairs
from miraccl.transport.base import machine_id
from miraccl.transport.cuda_fds import TIMEOUT_S, FdChannel, FdChannelAddress, close_all
from miraccl.transport.cuda_pairs import (
    DIRECT,
    HOST,
    IPC,
    PROCESS,
    SELF,
    VMM,
    GpuFacts,
    GpuPaths,
    P2pSettings,
    Pair,
)
from miraccl.transport.cuda_shm import Fills, HostSegment, PinningGpu
from miraccl.transport.cuda_vmm import VmmGpu, VmmMapping
from miraccl.transport.region import KEY_BYTES, MappedRegion, RegionDescriptor, Rights

Explanation = list[tuple[Pair, str, str]]
"""(pair, mapping, reason) for each pair of ranks."""


class SetupExchange(Protocol):
    """Exchange of data between all ranks during setup, with one deadline
    (``runtime.setup_phases``).
    """

    @property
    def deadline(self) -> Deadline: ...
    def gather(self, name: str, data: bytes = b"") -> Sequence[bytes]:
        """Return the data of all ranks in rank order."""

    def check(self) -> None:
        """Raise the error that has cancelled the setup, if any."""


class GpuMemory(VmmGpu, PinningGpu, Protocol):
    """Operations required of a GPU (``executor.cuda.gpu.Gpu``)."""

    arch: int
    ordinal: int

    @property
    def bus_id(self) -> str: ...
    @property
    def exports_descriptors(self) -> bool: ...
    def reaches(self, bus_id: str) -> int | None: ...
    def enable_peer(self, ordinal: int) -> None: ...
    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def fill(self, address: int, nbytes: int, word: int) -> None: ...
    def export(self, address: int) -> bytes: ...
    def map_peer(self, handle: bytes) -> int: ...
    def unmap_peer(self, address: int) -> None: ...


class _MappingAttempt:
    """One attempt to make memory of this rank and map that of its peers.

    ``mappings[peer]`` is the kind of mapping. Order: ``create``, send ``info`` to the others,
    ``map_peers`` with theirs; ``unmap_peers``, then ``free``.
    """

    def __init__(
        self,
        gpu: GpuMemory,
        rank: int,
        mappings: Mapping[int, str],
        ordinals: Sequence[int],
        fills: Fills = (),
    ) -> None:
        self.gpu, self.rank, self.mappings, self._fills = gpu, rank, mappings, fills
        self._ordinals = ordinals
        self.own = 0
        self.keys = {rank: clock.random_bytes(KEY_BYTES)}
        self.failures: list[tuple[int, str, str]] = []  # (peer, kind, reason)
        self.addresses: dict[int, int] = {rank: 0}  # local address of each rank's memory
        self.host: HostSegment | None = None
        self.hosts: dict[int, HostSegment] = {}
        self._vmm: VmmMapping | None = None
        self._imported: dict[int, VmmMapping] = {}
        self._ipc_peers: list[int] = []
        self._fd_channel: FdChannel | None = None

    def _peers(self, *kinds: str) -> list[int]:
        return [peer for peer, kind in self.mappings.items() if kind in kinds]

    def _record_failure(self, peers: Sequence[int], error: MiracclError) -> None:
        self.failures += [(peer, self.mappings[peer], error.message) for peer in peers]

    def create(self, nbytes: int) -> None:
        """Allocate and fill. Raises ``SystemFailure`` for plain memory; other failures are
        recorded.
        """
        try:
            self.allocate(nbytes)
        except SystemFailure as error:
            if not (vmm := self._peers(VMM)):
                raise
            self._record_failure(vmm, error)
        if self._peers(HOST):
            try:
                self.host = HostSegment.create(self.gpu, nbytes, self._fills)
            except SystemFailure as error:
                self._record_failure(self._peers(HOST), error)

    def allocate(self, nbytes: int) -> None:
        """Allocate and fill this rank's device memory. Raises ``SystemFailure``."""
        # Memory is plain unless a peer maps it by descriptor, whatever the other ranks use: a rank
        # in
        # no such pair could not report a failure to anyone.
        if self._peers(VMM):
            self._vmm = VmmMapping.create(self.gpu, nbytes)
            self.own = self._vmm.address
        else:
            self.own = self.gpu.allocate(nbytes)
        self.addresses[self.rank] = self.own
        self._fill(nbytes)

    def _fill(self, nbytes: int) -> None:
        self.gpu.fill(self.own, nbytes, 0)
        for offset, size, word in self._fills:
            self.gpu.fill(self.own + offset, size, word)

    def info(self) -> bytes:
        """Return the description of this rank's memory for its peers."""
        record: dict[str, Any] = {
            "address": self.own,
            "size": 0,
            "host_size": 0,
            "handle": "",
            "door": "",
            "key": self.keys[self.rank].hex(),
        }
        if self._vmm is not None:
            record["size"] = self._vmm.nbytes
        if self.host is not None:
            record["host_size"] = self.host.nbytes
        if ipc := self._peers(IPC):
            try:
                record["handle"] = self.gpu.export(self.own).hex()
            except SystemFailure as error:
                self._record_failure(ipc, error)
        if self._vmm is not None or self.host is not None:
            try:
                self._fd_channel = FdChannel(len(self.mappings), pairs.pid_namespace())
                record["door"] = self._fd_channel.address.to_json()
            except SystemFailure as error:
                self._record_failure(self._peers(VMM, HOST), error)
        return json.dumps(record).encode()

    def map_peers(self, infos: Sequence[bytes], stages: SetupExchange) -> None:
        """Map the memory of all peers; failures are recorded. Raises if the setup was cancelled."""
        records = [json.loads(info) for info in infos]
        self.keys = {p: bytes.fromhex(record["key"]) for p, record in enumerate(records)}
        for peer in self._peers(PROCESS, IPC):
            try:
                if self.mappings[peer] == PROCESS:
                    self.gpu.enable_peer(self._ordinals[peer])
                    self.addresses[peer] = int(records[peer]["address"])
                elif records[peer]["handle"]:
                    self.addresses[peer] = self.gpu.map_peer(bytes.fromhex(records[peer]["handle"]))
                    self._ipc_peers.append(peer)
            except SystemFailure as error:
                self._record_failure([peer], error)
        if self._fd_channel is not None:
            addresses = {
                p: FdChannelAddress.from_json(records[p]["door"])
                for p in self._peers(VMM, HOST)
                if records[p]["door"]
            }
            self._exchange_descriptors(self._fd_channel, addresses, records, stages)

    def _exchange_descriptors(
        self,
        fd_channel: FdChannel,
        addresses: Mapping[int, FdChannelAddress],
        records: Sequence[Mapping[str, Any]],
        stages: SetupExchange,
    ) -> None:
        exported, deadline = -1, stages.deadline.within(TIMEOUT_S)
        try:
            exported = self._vmm.export() if self._vmm is not None and self._peers(VMM) else -1
        except SystemFailure as error:
            self._record_failure(self._peers(VMM), error)
        try:
            for peer, address in addresses.items():
                descriptor = (
                    exported
                    if self.mappings[peer] == VMM
                    else self.host.descriptor
                    if self.host is not None
                    else -1
                )
                try:
                    fd_channel.send(
                        self.rank, address, [descriptor] if descriptor >= 0 else [], deadline
                    )
                except SystemFailure as error:
                    self._record_failure([peer], error)
            received = fd_channel.receive(addresses, deadline, stages.check)
        finally:
            close_all([exported] if exported >= 0 else [])
        for peer in addresses:
            self._import(peer, received.get(peer, []), records[peer])

    def _import(self, peer: int, descriptors: Sequence[int], record: Mapping[str, Any]) -> None:
        try:
            if len(descriptors) != 1:
                raise SystemFailure("cannot map its memory: its descriptor did not arrive")
            if self.mappings[peer] == VMM:
                self._imported[peer] = VmmMapping.from_descriptor(
                    self.gpu, descriptors[0], int(record["size"])
                )
                self.addresses[peer] = self._imported[peer].address
            else:
                self.hosts[peer] = HostSegment.from_descriptor(
                    self.gpu, descriptors[0], int(record["host_size"])
                )
        except SystemFailure as error:
            self._record_failure([peer], error)

    def unmap_peers(self) -> None:
        """Unmap the memory of peers; idempotent."""
        if self._fd_channel is not None:
            self._fd_channel.close()
        for peer in self._ipc_peers:
            self.gpu.unmap_peer(self.addresses[peer])
        for mapped in self._imported.values():
            mapped.close()
        for host in self.hosts.values():
            host.close()
        self._ipc_peers, self._imported, self.hosts = [], {}, {}

    def free(self) -> None:
        """Free this rank's memory, after all peers have unmapped it; idempotent."""
        own, self.own = self.own, 0
        if self._vmm is not None:
            self._vmm.close()
            self._vmm = None
        elif own:
            self.gpu.free(own)
        if self.host is not None:
            self.host.close()
            self.host = None

    def close(self) -> None:
        # A context that a failed kernel has broken frees its memory itself.
        with contextlib.suppress(MiracclError):
            self.unmap_peers()
            self.free()


class SymmetricMemory:
    """``nbytes`` on every rank, made by all ranks together.

    When the constructor returns, all memory is mapped and filled.

    Args:
        fills: (offset, bytes, 32-bit word) of its initial content, over zeros.

    Attributes:
        own: Address of this rank's device memory.
        inboxes, outboxes: Addresses per rank, including this one.
        kinds: Mapping of each rank.

    Raises:
        SystemFailure, InvalidUsage: A pair cannot be mapped; on all ranks alike where possible.
    """

    def __init__(
        self,
        gpu: GpuMemory,
        rank: int,
        nranks: int,
        nbytes: int,
        fills: Fills = (),
        *,
        stages: SetupExchange,
        settings: P2pSettings | None = None,
    ) -> None:
        self.gpu, self.rank, self.nranks, self.nbytes = gpu, rank, nranks, nbytes
        self.own, self.inboxes, self.outboxes, self.kinds = 0, [0], [0], [SELF]
        self.choices: dict[Pair, pairs.P2pChoice] = {}
        self.failed_mappings: dict[tuple[Pair, str], str] = {}
        self.descriptors, self.reason = False, "one rank"
        self.facts: list[GpuFacts] = []
        self.paths_read = GpuPaths(types={})  # on rank 0 with its sources
        self._fills = fills
        self._attempt_memory: _MappingAttempt | None = None
        if nranks > 1:
            self._exchange_facts(settings or P2pSettings.read(), stages)
            while not self._try_mappings(stages):
                pass

    def _exchange_facts(self, settings: P2pSettings, stages: SetupExchange) -> None:
        """Exchange the facts that mappings are chosen from."""
        mine = GpuFacts(
            rank=self.rank,
            process=f"{machine_id()}/{pairs.pid_namespace()}/{os.getpid()}",
            pid=os.getpid(),
            pid_namespace=pairs.pid_namespace(),
            ordinal=self.gpu.ordinal,
            bus_id=self.gpu.bus_id,
            arch=self.gpu.arch,
            nbytes=self.nbytes,
            descriptors=self.gpu.exports_descriptors,
            cumem=settings.cumem,
            p2p_disable=settings.p2p_disable,
            p2p_level=settings.p2p_level,
            shm_disable=settings.shm_disable,
        )
        blobs = stages.gather("gpu facts", mine.to_json())
        self.facts = [GpuFacts.from_json(blob, rank) for rank, blob in enumerate(blobs)]
        pairs.check_compatible(self.facts, self.rank)
        ids = sorted({facts.bus_id for facts in self.facts})
        paths = pairs.read_paths(ids) if self.rank == 0 and len(ids) > 1 else GpuPaths(types={})
        self.paths_read = paths
        view = {
            "access": [self.gpu.reaches(facts.bus_id) for facts in self.facts],
            "paths": paths.to_json().decode(),
        }
        views = [json.loads(blob) for blob in stages.gather("gpu views", json.dumps(view).encode())]
        self._access = [record["access"] for record in views]
        self._paths = GpuPaths.from_json(views[0]["paths"].encode())

    def _try_mappings(self, stages: SetupExchange) -> bool:
        """Try the best remaining mappings; False if one failed on any rank."""
        self.descriptors, self.reason = pairs.uses_descriptors(self.facts, self.failed_mappings)
        self.choices = pairs.choose_mappings(
            self.facts, self._access, self._paths, self.failed_mappings
        )
        mine = {
            p: self.choices[pairs.pair_of(self.rank, p)].kind
            for p in range(self.nranks)
            if p != self.rank
        }
        self.descriptors = self.descriptors and any(
            choice.kind == VMM for choice in self.choices.values()
        )
        shared = self._attempt_memory = _MappingAttempt(
            self.gpu, self.rank, mine, [f.ordinal for f in self.facts], self._fills
        )
        try:
            shared.create(self.nbytes)
            shared.map_peers(stages.gather("gpu memory", shared.info()), stages)
            reports = [
                json.loads(blob)
                for blob in stages.gather("gpu mapped", json.dumps(shared.failures).encode())
            ]
            failed = {
                (pairs.pair_of(rank, peer), kind): why
                for rank, report in enumerate(reports)
                for peer, kind, why in report
            }
            if failed:
                shared.unmap_peers()
                stages.gather("gpu unmapped")  # no rank frees memory that a peer still maps
                shared.free()
        except BaseException:
            shared.close()
            raise
        if failed:
            self.failed_mappings.update(failed)
            return False
        self.own = shared.own
        self.kinds = [mine.get(peer, SELF) for peer in range(self.nranks)]
        self.inboxes = [
            shared.host.on_gpu if kind == HOST and shared.host else shared.own
            for kind in self.kinds
        ]
        self.outboxes = [
            shared.hosts[p].on_gpu if kind == HOST else shared.addresses[p]
            for p, kind in enumerate(self.kinds)
        ]
        return True

    def path(self, a: int, b: int) -> PathType | None:
        """Return the path type between the GPUs of two ranks, None if neither topology nor driver
        know
        it.
        """
        views = (self._access[a][b], self._access[b][a])
        return pairs.path_between(self.facts[a], self.facts[b], views, self._paths)

    @property
    def all_direct(self) -> bool:
        """True if every rank addresses every other's device memory; the same on all ranks."""
        return all(choice.kind in DIRECT for choice in self.choices.values())

    def explain(self) -> Explanation:
        """Return the mapping of every pair of ranks and its reason."""
        return [(pair, choice.kind, choice.reason) for pair, choice in sorted(self.choices.items())]

    def window(self, nbytes: int, stages: SetupExchange) -> WindowMemory:
        """Allocate further ``nbytes`` on every rank, together with all ranks."""
        return WindowMemory(self, nbytes, stages)

    def host_bytes(self) -> int:
        """Return the bytes of pinned host memory that this rank owns."""
        return (
            self._attempt_memory.host.nbytes
            if self._attempt_memory is not None and self._attempt_memory.host is not None
            else 0
        )

    def close(self) -> None:
        """Unmap and free, after all ranks have stopped using it; idempotent."""
        if self._attempt_memory is not None:
            self._attempt_memory.close()
        self.own, self.inboxes, self.outboxes = 0, [], []


class WindowMemory:
    """Zeroed allocation of ``nbytes`` on every rank that peers address, by the mappings of
    ``base``.

    Close it on all ranks, when no rank uses it any longer, before ``base``.

    Attributes:
        addresses: Address of rank p's memory for kernels of this rank, 0 without peer access.
        addressable: True if every rank addresses every other's; the same on all ranks.
    """

    def __init__(self, base: SymmetricMemory, nbytes: int, stages: SetupExchange) -> None:
        self.nbytes = nbytes = -(-nbytes // 4) * 4  # filled word by word
        self._base = base
        direct = {p: kind for p, kind in enumerate(base.kinds) if kind in DIRECT}
        ordinals = [f.ordinal for f in base.facts] if base.nranks > 1 else []
        shared = self._shared = _MappingAttempt(base.gpu, base.rank, direct, ordinals)
        try:
            self._make(nbytes, stages)
            if base.nranks > 1:
                self._connect(stages)
        except BaseException:
            shared.close()
            raise
        self.own = shared.own
        self.addresses = [shared.addresses.get(p, 0) for p in range(base.nranks)]
        self.addressable = all(choice.kind in DIRECT for choice in base.choices.values())

    def _make(self, nbytes: int, stages: SetupExchange) -> None:
        """Allocate. Raises ``SystemFailure`` on all ranks if one has no memory."""
        mine: SystemFailure | None = None
        try:
            self._shared.allocate(nbytes)
        except SystemFailure as error:
            mine = error
        failures = [
            blob.decode()
            for blob in stages.gather("gpu window made", mine.message.encode() if mine else b"")
        ]
        if mine is not None:
            raise mine
        for rank, lack in enumerate(failures):
            if lack:
                raise SystemFailure(
                    f"rank {rank} cannot allocate window memory: {lack}",
                    rank=self._base.rank,
                    peer=rank,
                )

    def _connect(self, stages: SetupExchange) -> None:
        base, shared = self._base, self._shared
        shared.map_peers(stages.gather("gpu window", shared.info()), stages)
        reports = [
            json.loads(blob)
            for blob in stages.gather("gpu window mapped", json.dumps(shared.failures).encode())
        ]
        failed = [
            (rank, peer, why) for rank, report in enumerate(reports) for peer, _, why in report
        ]
        if failed:
            shared.unmap_peers()
            stages.gather("gpu window unmapped")
            rank, peer, why = failed[0]
            raise SystemFailure(
                f"rank {rank} cannot map window memory of rank {peer}: {why}",
                rank=base.rank,
                peer=peer,
            )

    def region(
        self, rank: int, copy: Callable[[int, int, int], None], flush: Callable[[], None]
    ) -> MappedRegion:
        """Return the memory of ``rank`` as a region, valid until ``close``.

        Args:
            copy: ``copy(target, source, nbytes)`` between addresses of this rank's GPU.
            flush: Waits for these copies.

        Raises:
            InvalidUsage: This rank's GPU has no peer access to the memory.
        """
        if not self.addresses[rank]:
            raise InvalidUsage(
                f"cannot address window memory of rank {rank}: there is no peer access",
                rank=self._base.rank,
                peer=rank,
            )
        descriptor = RegionDescriptor(
            provider="cuda",
            key=self._shared.keys[rank],
            generation=0,
            nbytes=self.nbytes,
            rights=Rights.READ | Rights.WRITE,
        )
        return MappedRegion(
            descriptor,
            self.addresses[rank],
            generation=lambda: 0 if self.addresses else -1,
            copy=copy,
            flush=flush,
            memory=self,
        )

    def close(self) -> None:
        """Unmap and free; regions of it become stale. Idempotent."""
        self._shared.close()
        self.own, self.addresses = 0, []
