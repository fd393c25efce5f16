"""Symmetric GPU memory: one allocation per rank of a host, reached by every other rank in the best way that works for the pair.

``SymmetricMemory`` is where kernels exchange data.  Rank p's data for this rank come to ``inboxes[p]``, this rank writes for p to
``outboxes[p]``; both have the same layout, which is the executor's business.  With peer access they lie in the receiver's device memory;
without, in a segment of pinned host memory that belongs to the receiver.  ``WindowMemory`` is a further allocation that peers address.

Both are made by all ranks together.  The ways of all pairs are computed by every rank from the same facts (``cuda_pairs``).  If a way fails
on any rank, all hear of it, give back what they have, and try the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from miraccl.deadline import Deadline
from miraccl.errors import MiracclError, SystemFailure
from miraccl.topo.records import PathType
from miraccl.transport import cuda_pairs as pairs
from miraccl.transport.base import machine
from miraccl.transport.cuda_fds import TIMEOUT_S, Address, Door, close_all
from miraccl.transport.cuda_pairs import (
    DIRECT,
    HOST,
    IPC,
    PROCESS,
    SELF,
    VMM,
    Facts,
    Pair,
    Paths,
    Settings,
)
from miraccl.transport.cuda_shm import Fills, HostSegment, PinningGpu
from miraccl.transport.cuda_vmm import Mapped, VmmGpu

Explanation = list[tuple[Pair, str, str]]
"""(pair, way, why) of each pair of ranks."""


class Stages(Protocol):
    """How the ranks make something together, with one deadline (``comm.stages``)."""

    @property
    def deadline(self) -> Deadline: ...
    def gather(self, name: str, data: bytes = b"") -> Sequence[bytes]:
        """Everybody's data in rank order."""

    def check(self) -> None:
        """Raise what has ended the stages."""


class GpuMemory(VmmGpu, PinningGpu, Protocol):
    """What is needed of a GPU (``executor.cuda.gpu.Gpu``)."""

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


class _Shared:
    """One attempt: memory of this rank, and that of its peers, as far as their way is direct; a host segment each where it is not.

    ``ways[peer]`` is the kind of the way.  ``make``, then ``info`` to the others, then ``reach`` with theirs; ``leave``, then ``free``.
    """

    def __init__(
        self,
        gpu: GpuMemory,
        rank: int,
        ways: Mapping[int, str],
        ordinals: Sequence[int],
        fills: Fills = (),
    ) -> None:
        self.gpu, self.rank, self.ways, self._fills = gpu, rank, ways, fills
        self._ordinals = ordinals
        self.own = 0
        self.failures: list[tuple[int, str, str]] = []  # (peer, kind, why)
        self.addresses: dict[int, int] = {rank: 0}  # of the peers' memory here
        self.host: HostSegment | None = None
        self.hosts: dict[int, HostSegment] = {}
        self._mapped: Mapped | None = None
        self._imported: dict[int, Mapped] = {}
        self._opened: list[int] = []
        self._door: Door | None = None

    def _peers(self, *kinds: str) -> list[int]:
        return [peer for peer, kind in self.ways.items() if kind in kinds]

    def _failed(self, peers: Sequence[int], error: MiracclError) -> None:
        self.failures += [(peer, self.ways[peer], error.message) for peer in peers]

    def make(self, nbytes: int) -> None:
        """Allocate and fill. Raises ``SystemFailure`` where plain memory cannot be had; other failures are for the report."""
        try:
            self.allocate(nbytes)
        except SystemFailure as error:
            if not (vmm := self._peers(VMM)):
                raise
            self._failed(vmm, error)
        if self._peers(HOST):
            try:
                self.host = HostSegment.create(self.gpu, nbytes, self._fills)
            except SystemFailure as error:
                self._failed(self._peers(HOST), error)

    def allocate(self, nbytes: int) -> None:
        """This rank's device memory, filled, or ``SystemFailure``. It is plain where no peer maps it by descriptor, whatever others have: a
        rank in no pair of that way could report to nobody that it failed."""
        if self._peers(VMM):
            self._mapped = Mapped.create(self.gpu, nbytes)
            self.own = self._mapped.address
        else:
            self.own = self.gpu.allocate(nbytes)
        self.addresses[self.rank] = self.own
        self._fill(nbytes)

    def _fill(self, nbytes: int) -> None:
        self.gpu.fill(self.own, nbytes, 0)
        for offset, size, word in self._fills:
            self.gpu.fill(self.own + offset, size, word)

    def info(self) -> bytes:
        """What peers need to reach this rank's memory."""
        record: dict[str, Any] = {
            "address": self.own,
            "size": 0,
            "host_size": 0,
            "handle": "",
            "door": "",
        }
        if self._mapped is not None:
            record["size"] = self._mapped.nbytes
        if self.host is not None:
            record["host_size"] = self.host.nbytes
        if ipc := self._peers(IPC):
            try:
                record["handle"] = self.gpu.export(self.own).hex()
            except SystemFailure as error:
                self._failed(ipc, error)
        if self._mapped is not None or self.host is not None:
            try:
                self._door = Door(len(self.ways), pairs.pid_namespace())
                record["door"] = self._door.address.to_json()
            except SystemFailure as error:
                self._failed(self._peers(VMM, HOST), error)
        return json.dumps(record).encode()

    def reach(self, infos: Sequence[bytes], stages: Stages) -> None:
        """Map everybody's memory; what fails is in ``failures``. Raises what has ended the stages."""
        records = [json.loads(info) for info in infos]
        for peer in self._peers(PROCESS, IPC):
            try:
                if self.ways[peer] == PROCESS:
                    self.gpu.enable_peer(self._ordinals[peer])
                    self.addresses[peer] = int(records[peer]["address"])
                elif records[peer]["handle"]:
                    self.addresses[peer] = self.gpu.map_peer(bytes.fromhex(records[peer]["handle"]))
                    self._opened.append(peer)
            except SystemFailure as error:
                self._failed([peer], error)
        if self._door is not None:
            doors = {
                p: Address.from_json(records[p]["door"])
                for p in self._peers(VMM, HOST)
                if records[p]["door"]
            }
            self._pass_descriptors(self._door, doors, records, stages)

    def _pass_descriptors(
        self,
        door: Door,
        doors: Mapping[int, Address],
        records: Sequence[Mapping[str, Any]],
        stages: Stages,
    ) -> None:
        exported, deadline = -1, stages.deadline.within(TIMEOUT_S)
        try:
            exported = (
                self._mapped.export() if self._mapped is not None and self._peers(VMM) else -1
            )
        except SystemFailure as error:
            self._failed(self._peers(VMM), error)
        try:
            for peer, address in doors.items():
                descriptor = (
                    exported
                    if self.ways[peer] == VMM
                    else self.host.descriptor
                    if self.host is not None
                    else -1
                )
                try:
                    door.push(self.rank, address, [descriptor] if descriptor >= 0 else [], deadline)
                except SystemFailure as error:
                    self._failed([peer], error)
            taken = door.take(doors, deadline, stages.check)
        finally:
            close_all([exported] if exported >= 0 else [])
        for peer in doors:
            self._import(peer, taken.get(peer, []), records[peer])

    def _import(self, peer: int, descriptors: Sequence[int], record: Mapping[str, Any]) -> None:
        try:
            if len(descriptors) != 1:
                raise SystemFailure("its descriptor did not come")
            if self.ways[peer] == VMM:
                self._imported[peer] = Mapped.from_descriptor(
                    self.gpu, descriptors[0], int(record["size"])
                )
                self.addresses[peer] = self._imported[peer].address
            else:
                self.hosts[peer] = HostSegment.from_descriptor(
                    self.gpu, descriptors[0], int(record["host_size"])
                )
        except SystemFailure as error:
            self._failed([peer], error)

    def leave(self) -> None:
        """Unmap what belongs to others. May be called twice."""
        if self._door is not None:
            self._door.close()
        for peer in self._opened:
            self.gpu.unmap_peer(self.addresses[peer])
        for mapped in self._imported.values():
            mapped.close()
        for host in self.hosts.values():
            host.close()
        self._opened, self._imported, self.hosts = [], {}, {}

    def free(self) -> None:
        """Give this rank's memory back, after all peers have left it. May be called twice."""
        own, self.own = self.own, 0
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        elif own:
            self.gpu.free(own)
        if self.host is not None:
            self.host.close()
            self.host = None

    def close(self) -> None:
        with contextlib.suppress(
            MiracclError
        ):  # a context that a failed kernel broke frees its memory by itself
            self.leave()
            self.free()


class SymmetricMemory:
    """``nbytes`` on every rank; ``fills`` are (offset, bytes, 32-bit word) that it begins with, over zeros. Made by all ranks together.

    ``own`` is this rank's device memory, ``inboxes`` and ``outboxes`` have an address per rank, this rank's own among them, and ``kinds``
    the ways.  When the constructor returns, everybody's memory is mapped and filled.  Raises ``SystemFailure`` or ``InvalidUsage``
    naming the pair, on all ranks alike where they all can know.
    """

    def __init__(
        self,
        gpu: GpuMemory,
        rank: int,
        nranks: int,
        nbytes: int,
        fills: Fills = (),
        *,
        stages: Stages,
        settings: Settings | None = None,
    ) -> None:
        self.gpu, self.rank, self.nranks, self.nbytes = gpu, rank, nranks, nbytes
        self.own, self.inboxes, self.outboxes, self.kinds = 0, [0], [0], [SELF]
        self.ways: dict[Pair, pairs.Choice] = {}
        self.refused: dict[tuple[Pair, str], str] = {}
        self.descriptors, self.reason = False, "one rank"
        self.facts: list[Facts] = []
        self.read = Paths(types={})  # on rank 0, with what they were read from
        self._fills = fills
        self._shared: _Shared | None = None
        if nranks > 1:
            self._look(settings or Settings.read(), stages)
            while not self._attempt(stages):
                pass

    def _look(self, settings: Settings, stages: Stages) -> None:
        """Exchange what ways are decided from."""
        mine = Facts(
            rank=self.rank,
            process=f"{machine()}/{pairs.pid_namespace()}/{os.getpid()}",
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
        self.facts = [Facts.from_json(blob, rank) for rank, blob in enumerate(blobs)]
        pairs.check_alike(self.facts, self.rank)
        ids = sorted({facts.bus_id for facts in self.facts})
        paths = pairs.read_paths(ids) if self.rank == 0 and len(ids) > 1 else Paths(types={})
        self.read = paths
        view = {
            "access": [self.gpu.reaches(facts.bus_id) for facts in self.facts],
            "paths": paths.to_json().decode(),
        }
        views = [json.loads(blob) for blob in stages.gather("gpu views", json.dumps(view).encode())]
        self._access = [record["access"] for record in views]
        self._paths = Paths.from_json(views[0]["paths"].encode())

    def _attempt(self, stages: Stages) -> bool:
        """Try the ways that are left; False if something failed somewhere and the next ones are to be tried."""
        self.descriptors, self.reason = pairs.uses_descriptors(self.facts, self.refused)
        self.ways = pairs.choose_ways(self.facts, self._access, self._paths, self.refused)
        mine = {
            p: self.ways[pairs.pair_of(self.rank, p)].kind
            for p in range(self.nranks)
            if p != self.rank
        }
        self.descriptors = self.descriptors and any(
            choice.kind == VMM for choice in self.ways.values()
        )
        shared = self._shared = _Shared(
            self.gpu, self.rank, mine, [f.ordinal for f in self.facts], self._fills
        )
        try:
            shared.make(self.nbytes)
            shared.reach(stages.gather("gpu memory", shared.info()), stages)
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
                shared.leave()
                stages.gather("gpu unmapped")  # nobody frees what another one still maps
                shared.free()
        except BaseException:
            shared.close()
            raise
        if failed:
            self.refused.update(failed)
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
        """How far the GPUs of two ranks are from each other; None where neither topology nor driver know."""
        views = (self._access[a][b], self._access[b][a])
        return pairs.path_between(self.facts[a], self.facts[b], views, self._paths)

    @property
    def all_direct(self) -> bool:
        """Whether every rank addresses every other's device memory; the same on all ranks."""
        return all(choice.kind in DIRECT for choice in self.ways.values())

    def explain(self) -> Explanation:
        """The way of every pair of ranks, and why."""
        return [(pair, choice.kind, choice.why) for pair, choice in sorted(self.ways.items())]

    def window(self, nbytes: int, stages: Stages) -> WindowMemory:
        """A further allocation of ``nbytes`` on every rank, made by all ranks together."""
        return WindowMemory(self, nbytes, stages)

    def host_bytes(self) -> int:
        """Pinned host memory that this rank owns."""
        return (
            self._shared.host.nbytes
            if self._shared is not None and self._shared.host is not None
            else 0
        )

    def close(self) -> None:
        """Unmap and free; the caller has seen to it that no rank uses the memory any more. May be called twice."""
        if self._shared is not None:
            self._shared.close()
        self.own, self.inboxes, self.outboxes = 0, [], []


class WindowMemory:
    """An allocation of ``nbytes`` on every rank that peers address, by the ways that ``base`` has found.

    ``addresses[p]`` is where rank p's lies for kernels of this rank, 0 where the pair has no peer access; ``addressable`` says whether
    every rank reaches every other's, and is the same on all.  It begins as zeros.  Close it on all ranks, when no rank uses it any more,
    before ``base``.
    """

    def __init__(self, base: SymmetricMemory, nbytes: int, stages: Stages) -> None:
        self.nbytes = nbytes = -(-nbytes // 4) * 4  # it is filled word by word
        self._base = base
        direct = {p: kind for p, kind in enumerate(base.kinds) if kind in DIRECT}
        ordinals = [f.ordinal for f in base.facts] if base.nranks > 1 else []
        shared = self._shared = _Shared(base.gpu, base.rank, direct, ordinals)
        try:
            self._make(nbytes, stages)
            if base.nranks > 1:
                self._connect(stages)
        except BaseException:
            shared.close()
            raise
        self.own = shared.own
        self.addresses = [shared.addresses.get(p, 0) for p in range(base.nranks)]
        self.addressable = all(choice.kind in DIRECT for choice in base.ways.values())

    def _make(self, nbytes: int, stages: Stages) -> None:
        """Raises ``SystemFailure`` on all ranks where one has no memory."""
        mine: SystemFailure | None = None
        try:
            self._shared.allocate(nbytes)
        except SystemFailure as error:
            mine = error
        lacks = [
            blob.decode()
            for blob in stages.gather("gpu window made", mine.message.encode() if mine else b"")
        ]
        if mine is not None:
            raise mine
        for rank, lack in enumerate(lacks):
            if lack:
                raise SystemFailure(
                    f"rank {rank} has no window memory: {lack}", rank=self._base.rank, peer=rank
                )

    def _connect(self, stages: Stages) -> None:
        base, shared = self._base, self._shared
        shared.reach(stages.gather("gpu window", shared.info()), stages)
        reports = [
            json.loads(blob)
            for blob in stages.gather("gpu window mapped", json.dumps(shared.failures).encode())
        ]
        failed = [
            (rank, peer, why) for rank, report in enumerate(reports) for peer, _, why in report
        ]
        if failed:
            shared.leave()
            stages.gather("gpu window unmapped")
            rank, peer, why = failed[0]
            raise SystemFailure(
                f"window memory of rank {peer} could not be mapped by rank {rank}: {why}",
                rank=base.rank,
                peer=peer,
            )

    def close(self) -> None:
        """May be called twice."""
        self._shared.close()
        self.own, self.addresses = 0, []
