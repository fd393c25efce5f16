"""Symmetric GPU memory: one allocation per rank, mapped by all ranks of the host (CUDA IPC over NVLink or PCIe).

It owns the allocation and the mappings.  The bytes that ranks exchange are opaque to everybody else; ``comm`` carries them.  Memory is
allocated plainly (cuMemAlloc): neither managed memory nor multicast objects are used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from miraccl.errors import InvalidUsage, MiracclError, SystemFailure
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.driver import Gpu

EMPTY = 0xFFFFFFFF  # what packets' memory is full of (source/packets.cuh)


class SymmetricMemory:
    """``bases[r]`` is where rank r's memory lies in this process, after ``connect``."""

    def __init__(self, gpu: Gpu, rank: int, nranks: int) -> None:
        self.gpu, self.rank, self.nranks = gpu, rank, nranks
        self.bases: list[int] = []
        self._own = gpu.allocate(layout.TOTAL_BYTES)
        gpu.fill(self._own, layout.TOTAL_BYTES, 0)
        gpu.fill(self._own + layout.PACKETS_OFFSET, 2 * layout.BANK_BYTES, EMPTY)

    @property
    def nbytes(self) -> int:
        return layout.TOTAL_BYTES

    def setup(self) -> bytes:
        """What the other ranks need to map this rank's memory."""
        record = {
            "handle": self.gpu.export(self._own).hex(),
            "pid": os.getpid(),
            "address": self._own,
            "arch": self.gpu.arch,
            "total": layout.TOTAL_BYTES,
        }
        return json.dumps(record).encode()

    def connect(self, infos: Sequence[bytes]) -> None:
        """Map everybody's memory; ``infos[r]`` is what ``setup`` gave rank r."""
        records = [json.loads(info) for info in infos]
        for peer, record in enumerate(records):
            if record["total"] != layout.TOTAL_BYTES or record["arch"] != self.gpu.arch:
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
            raise SystemFailure(f"the memory of rank {peer} cannot be mapped: {error.message}", rank=self.rank, peer=peer, hint=hint) from error

    def close(self) -> None:
        """Unmap and free; the caller has seen to it that no rank uses the memory any more. May be called twice."""
        bases, self.bases = self.bases, []
        try:
            for peer, address in enumerate(bases):
                if peer != self.rank:
                    self.gpu.unmap_peer(address)
            if self._own:
                self.gpu.free(self._own)
        except MiracclError:  # a context that a failed kernel broke frees its memory by itself
            pass
        self._own = 0
