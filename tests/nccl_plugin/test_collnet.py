"""CollNet tables: our own, which has no device, and a foreign plugin that adds in this process."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miraccl import nccl_plugin
from miraccl.errors import InvalidUsage, SystemFailure
from miraccl.native import elf, nccl_collnet_abi, nccl_net_abi
from miraccl.native.nccl_collnet_abi import DataType, NcclRedOp, Part
from miraccl.native.nccl_collnet_plugin import CollNetPlugin
from miraccl.transport.fifo import memory_at

VERSIONS = nccl_net_abi.VERSIONS
NAMES = {
    "getProperties": "get_properties",
    "reduceSupport": "reduce_support",
    "regMr": "register",
    "deregMr": "deregister",
    "closeColl": "close",
    "closeListen": "close",
}


def test_table_sizes() -> None:
    # sizeof(ncclCollNet_vN_t) and offsets, from a C compiler over NCCL 2.30's headers
    sizes = [nccl_collnet_abi.table_bytes(v) for v in sorted(VERSIONS)]
    assert sizes == [120, 120, 136, 144, 144, 152, 152]
    assert nccl_collnet_abi.entries(12).index("finalize") == 144 // 8 - 1
    assert nccl_collnet_abi.entries(8).index("ireducescatter") == 96 // 8 - 1
    assert nccl_collnet_abi.entries(12).index("test") == 112 // 8 - 1
    assert {ctypes.sizeof(kind) for kind in nccl_collnet_abi.PARTS.values()} == {24}


@pytest.mark.parametrize("version", nccl_plugin.EXPORTED)
def test_exported_table_has_no_device(version: int) -> None:
    plugin = CollNetPlugin(nccl_plugin.export(set_environment=False).path, version)
    assert plugin.name == "miraccl"
    assert plugin.devices() == []
    assert not plugin.reduce_support(DataType.FLOAT32, NcclRedOp.SUM)
    with pytest.raises(SystemFailure, match="failed in listen: SYSTEM_ERROR"):
        plugin.listen(0)
    with pytest.raises(SystemFailure, match="failed in iallreduce: SYSTEM_ERROR"):
        plugin.iallreduce(0, 0, 0, 1, DataType.FLOAT32, NcclRedOp.SUM, 0, 0)


def test_file_is_removed_when_the_process_ends() -> None:
    code = (
        "from miraccl import nccl_plugin\n"
        "import os\n"
        "path = nccl_plugin.export().path\n"
        "assert os.path.exists(path)\n"
        "if os.fork() == 0: raise SystemExit\n"
        "os.wait()\n"
        "assert os.path.exists(path)\n"
        "print(path)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).parent.exists()


class Foreign:
    """A CollNet plugin of two ranks in one process: float32 sums, float32 and int8 gathers."""

    def __init__(self, folder: Path, version: int) -> None:
        self.version = version
        self.path = str(folder / "libnccl-net-foreign.so")
        symbol = nccl_collnet_abi.symbol(version)
        size = nccl_collnet_abi.table_bytes(version)
        Path(self.path).write_bytes(elf.data_object({symbol: size}, "libnccl-net-foreign.so"))
        self.name = ctypes.create_string_buffer(b"foreign")
        self.library = ctypes.CDLL(self.path)
        self.kept = []
        words = [ctypes.addressof(self.name)]
        for entry in nccl_collnet_abi.entries(version):
            function = getattr(self, NAMES.get(entry, entry), None)
            nargs = nccl_collnet_abi.arguments(version, entry)
            if function is None:
                words.append(0)
                continue
            kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * nargs)
            self.kept.append(kind(self.guarded(function)))
            words.append(ctypes.cast(self.kept[-1], ctypes.c_void_p).value or 0)
        table = ctypes.addressof(ctypes.c_char.in_dll(self.library, symbol))
        memory_at(table, size)[:] = np.array(words, "u8").tobytes()
        self.posted: dict[str, dict[int, Any]] = {}
        self.requests: list[int] = []

    @staticmethod
    def guarded(function: Any) -> Any:
        def call(*args: int) -> int:
            try:
                function(*args)
            except Exception:
                return 3
            return 0

        return call

    @staticmethod
    def put(address: int, value: int, nbytes: int = 8) -> None:
        memory_at(address, nbytes)[:] = value.to_bytes(nbytes, "little")

    def init(self, *args: int) -> None:
        if self.version >= 11:
            self.put(args[0], 77)

    def devices(self, count: int) -> None:
        self.put(count, 1, 4)

    def get_properties(self, dev: int, address: int) -> None:
        p = nccl_net_abi.PROPERTIES[self.version].from_address(address)
        p.name, p.speed = ctypes.cast(self.name, ctypes.c_char_p), 100_000

    def listen(self, *args: int) -> None:
        if self.version >= 11:
            assert args[0] == 77
        memory_at(args[-2], 128)[:] = b"h" * 128
        self.put(args[-1], 5)

    def connect(self, handles: int, nranks: int, rank: int, listening: int, comm: int) -> None:
        pointers = memory_at(handles, 16).cast("Q")
        assert nranks == 2
        assert all(bytes(memory_at(p, 128)) == b"h" * 128 for p in pointers)
        self.put(comm, 1000 + rank)

    def reduce_support(self, dtype: int, op: int, supported: int) -> None:
        self.put(supported, int((dtype, op) == (DataType.FLOAT32, NcclRedOp.SUM)), 4)

    def register(self, comm: int, data: int, size: int, kind: int, mhandle: int) -> None:
        self.put(mhandle, data)

    def deregister(self, comm: int, mhandle: int) -> None:
        pass

    def both(self, name: str, comm: int, row: Any, request: int) -> list[Any] | None:
        rows = self.posted.setdefault(name, {})
        rows[comm - 1000] = row
        self.requests.append(0)
        self.put(request, len(self.requests))
        return [rows[0], rows[1]] if len(rows) == 2 else None

    def finish(self, nbytes: int) -> None:
        self.requests = [nbytes] * len(self.requests)
        self.posted.clear()

    def iallreduce(self, comm: int, send: int, recv: int, count: int, *rest: int) -> None:
        count &= (1 << 64 if self.version >= 9 else 1 << 32) - 1
        if rows := self.both("all", comm, (send, recv), rest[-1]):
            a, b = (np.frombuffer(memory_at(s, 4 * count), "f4") for s, _ in rows)
            for _, target in rows:
                memory_at(target, 4 * count)[:] = (a + b).tobytes()
            self.finish(4 * count)

    def iallgather(self, comm: int, send: int, n: int, parts: int, *rest: int) -> None:
        per_rank, _, nbytes = rest[:3]
        (part,) = nccl_collnet_abi.decode_parts(self.version, parts, n)
        if rows := self.both("gather", comm, (send, part), rest[-1]):
            for _, target in rows:
                assert target.mhandle == target.address
                for rank, (source, _) in enumerate(rows):
                    data = bytes(memory_at(source, per_rank))
                    memory_at(target.address + rank * per_rank, per_rank)[:] = data
            self.finish(nbytes)

    def ireducescatter(self, comm: int, n: int, parts: int, recv: int, *rest: int) -> None:
        per_rank, _, nbytes = rest[:3]
        (part,) = nccl_collnet_abi.decode_parts(self.version, parts, n)
        if rows := self.both("scatter", comm, (part, recv), rest[-1]):
            a, b = (np.frombuffer(memory_at(p.address, nbytes), "f4") for p, _ in rows)
            total = a + b
            for rank, (_, target) in enumerate(rows):
                memory_at(target, per_rank)[:] = total.tobytes()[rank * per_rank :][:per_rank]
            self.finish(per_rank)

    def iflush(self, comm: int, data: int, size: int, mhandle: int, request: int) -> None:
        self.put(request, 0)

    def test(self, request: int, done: int, size: int) -> None:
        nbytes = self.requests[request - 1]
        self.put(done, int(nbytes > 0), 4)
        self.put(size, nbytes, 4)

    def close(self, comm: int) -> None:
        pass


@pytest.mark.parametrize("version", VERSIONS)
def test_foreign_plugin(tmp_path: Path, version: int) -> None:
    foreign = Foreign(tmp_path, version)
    plugin = CollNetPlugin(foreign.path)
    assert (plugin.name, plugin.version) == ("foreign", version)
    assert [d.speed_mbps for d in plugin.devices()] == [100_000]
    assert plugin.reduce_support(DataType.FLOAT32, NcclRedOp.SUM)
    assert not plugin.reduce_support(DataType.INT8, NcclRedOp.SUM)
    listens = [plugin.listen(0) for _ in range(2)]
    handles = [handle for handle, _ in listens]
    comms = [plugin.connect(handles, rank, listens[rank][1]) for rank in range(2)]
    arrays = [np.arange(8, dtype="f4") + rank for rank in range(2)]
    outs = [np.zeros(16, "f4") for _ in range(2)]

    def addresses(rank: int) -> tuple[int, int, int, int]:
        send, recv = arrays[rank].ctypes.data, outs[rank].ctypes.data
        comm = comms[rank]
        return send, recv, plugin.register(comm, send, 32), plugin.register(comm, recv, 64)

    requests = []
    for rank, comm in enumerate(comms):
        send, recv, hs, hr = addresses(rank)
        requests.append(
            plugin.iallreduce(comm, send, recv, 8, DataType.FLOAT32, NcclRedOp.SUM, hs, hr)
        )
        assert (plugin.test(requests[0] or 0) is None) == (rank == 0)
    assert [plugin.test(r or 0) for r in requests] == [32, 32]
    for out in outs:
        assert out[:8].tolist() == (arrays[0] + arrays[1]).tolist()
    if version < 8:
        with pytest.raises(SystemFailure, match="has no iallgather"):
            plugin._call("iallgather")
        return
    for rank, comm in enumerate(comms):
        send, recv, hs, hr = addresses(rank)
        part = Part(mhandle=hr, address=recv, nbytes=64)
        plugin.iallgather(comm, send, [part], 32, (0, 64), hs)
    for out in outs:
        assert out.tolist() == [*arrays[0].tolist(), *arrays[1].tolist()]
    for rank, comm in enumerate(comms):
        send, recv, hs, hr = addresses(rank)
        part = Part(mhandle=hs, address=send, nbytes=32)
        plugin.ireducescatter(comm, [part], recv, 16, (0, 32), DataType.FLOAT32, NcclRedOp.SUM, hr)
    total = (arrays[0] + arrays[1]).tolist()
    assert [out[:4].tolist() for out in outs] == [total[:4], total[4:]]
    assert plugin.iflush(comms[0], outs[0].ctypes.data, 16, 0) is None
    for comm, (_, listening) in zip(comms, listens, strict=True):
        plugin.close(comm)
        plugin.close_listen(listening)


def test_bad_input() -> None:
    with pytest.raises(InvalidUsage, match="ncclCollNetPlugin_v12"):
        CollNetPlugin("libm.so.6")
    two = (Part(mhandle=1, address=1, nbytes=1),) * 2
    with pytest.raises(ValueError, match="one part, not 2"):
        nccl_collnet_abi.encode_parts(8, two)
    assert len(nccl_collnet_abi.encode_parts(9, two)) == 2
