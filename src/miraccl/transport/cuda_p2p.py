"""Symmetric GPU memory: one allocation per rank, mapped by all ranks of the host (CUDA IPC over NVLink or PCIe).

It owns the allocation and the mappings; what lies where in it is the executor's business.  The bytes that ranks exchange are opaque to
everybody else; ``comm`` carries them.  Memory is allocated plainly: neither managed memory nor multicast objects are used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Protocol

from miraccl.errors import InvalidUsage, MiracclError, SystemFailure


class GpuMemory(Protocol):
    """What is needed of a GPU (``executor.cuda.driver.Gpu``)."""

    arch: int

    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def fill(self, address: int, nbytes: int, word: int) -> None: ...
    def export(self, address: int) -> bytes: ...
    def map_peer(self, handle: bytes) -> int: ...
    def unmap_peer(self, address: int) -> None: ...


class SymmetricMemory:
    """``nbytes`` on every rank; ``fills`` are (offset, bytes, word) that it begins with, over zeros.

    ``bases[r]`` is where rank r's memory lies in this process, after ``connect``.
    """

    def __init__(self, gpu: GpuMemory, rank: int, nbytes: int, fills: Sequence[tuple[int, int, int]] = ()) -> None:
        self.gpu, self.rank, self.nbytes = gpu, rank, nbytes
        self.bases: list[int] = []
        self._own = gpu.allocate(nbytes)
        gpu.fill(self._own, nbytes, 0)
        for offset, size, word in fills:
            gpu.fill(self._own + offset, size, word)

    def setup(self) -> bytes:
        """What the other ranks need to map this rank's memory."""
        record = {"handle": self.gpu.export(self._own).hex(), "pid": os.getpid(), "arch": self.gpu.arch, "nbytes": self.nbytes}
        return json.dumps(record).encode()

    def connect(self, infos: Sequence[bytes]) -> None:
        """Map everybody's memory; ``infos[r]`` is what ``setup`` gave rank r."""
        records = [json.loads(info) for info in infos]
        for peer, record in enumerate(records):
            if record["nbytes"] != self.nbytes or record["arch"] != self.gpu.arch:
                raise InvalidUsage(f"rank {peer} has another kind of GPU or another version of miraccl", rank=self.rank, peer=peer)
            if peer != self.rank and record["pid"] == os.getpid():
                raise InvalidUsage("two ranks of one process cannot share GPU memory", rank=self.rank, hint="start one process per GPU")
        for peer, record in enumerate(records):
            self.bases.append(self._own if peer == self.rank else self._map(peer, bytes.fromhex(record["handle"])))

    def _map(self, peer: int, handle: bytes) -> int:
        try:
            return self.gpu.map_peer(handle)
        except SystemFailure as error:
            hint = "the two GPUs need peer access (nvidia-smi topo -p2p r), and containers a shared IPC namespace"
            text = f"the memory of rank {peer} cannot be mapped: {error.message}"
            raise SystemFailure(text, rank=self.rank, peer=peer, hint=hint) from error

    def close(self) -> None:
        """Unmap and free; the caller has seen to it that no rank uses the memory any more. May be called twice."""
        bases, self.bases = self.bases, []
        own, self._own = self._own, 0
        try:
            for peer, address in enumerate(bases):
                if peer != self.rank:
                    self.gpu.unmap_peer(address)
            if own:
                self.gpu.free(own)
        except MiracclError:  # a context that a failed kernel broke frees its memory by itself
            pass
