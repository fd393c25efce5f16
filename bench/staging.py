"""Cost of staging GPU data between hosts without a GPU: from ``ready`` to ``done``.

    python bench/staging.py
    python bench/staging.py --sizes 1K,64K --rounds 9 --out staging
    python bench/staging.py --messages [--through-proxy]

Two processes that are separate hosts (MIRACCL_HOSTID), over TCP on loopback. The main thread acts
as the stream: it copies to the slot, writes ``ready`` and waits for ``done`` without the GIL, as a
GPU would. ``alone`` is a prepared all_reduce of the same size on the staging thread's CPU
communicator; ``ready to done`` is the time of one segment; ``operation`` the whole, with copies by
the processor. With ``--messages`` each rank sends one message of that size to the other and
receives one, instead of all_reduce. Every result is checked. Processes beyond the number of cores
(two, and their proxies) affect all columns.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np
from numba import njit

from miraccl import params
from miraccl.api.communicator import Communicator
from miraccl.native.intrinsics import load32, pause, sched_yield
from miraccl.ops.device_arrays import DeviceMemory
from miraccl.proxy.kernels.staging_layout import READY_OFFSET, SLOT_STRIDE
from miraccl.runtime.core_access import core_access
from miraccl.runtime.gpu.operations import DeviceTransfer
from miraccl.runtime.multinode.direct import DirectStreams
from miraccl.runtime.multinode.message_rounds import run_on_communicator, split_transfers
from miraccl.runtime.multinode.messages import MessageNetwork, MessageStreams
from miraccl.runtime.multinode.network import StagedCollective
from miraccl.runtime.multinode.node_layout import NodeLayout
from miraccl.runtime.multinode.segments import StagedShape, split_segments
from miraccl.runtime.multinode.staging import STAGING_THREADS, StagedJob, Staging
from miraccl.runtime.options import Options
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.tools import launch
from miraccl.tools.spawn import RankContext, Ranks
from miraccl.types import Collective, DType, RedOp

SIZES = "1K,64K,1M,64M"


@njit(nogil=True)
def wait_for(address: int, value: int) -> None:
    """Wait without the GIL, yielding the core."""
    while load32(address) != value:
        for _ in range(50):
            pause()
        sched_yield()


class Processor:
    """The part of ``executor.cuda.gpu.Gpu`` that staging needs, executed at once by the caller."""

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self.sent = 0.0  # when the last ``ready`` was written
        self.answers: list[float] = []  # seconds until the stream went on
        one = ctypes.c_int64(1)
        wait_for(ctypes.addressof(one), 1)  # compiles it

    def relaxed_capture(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def pin(self, address: int, nbytes: int) -> int:
        return address

    def unpin(self, address: int) -> None: ...

    def free_host(self, address: int) -> None: ...

    def host_words(self, nbytes: int) -> tuple[Any, int, int]:
        self._maps.append(mmap.mmap(-1, nbytes))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._maps[-1]))
        return self._maps[-1], address, address

    def copy_to_host(self, host: int, device: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(host, device, nbytes)

    def copy_from_host(self, device: int, host: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(device, host, nbytes)

    def write_word(self, address: int, value: int, stream: int) -> None:
        if address % SLOT_STRIDE == READY_OFFSET:
            self.sent = time.perf_counter()
        ctypes.c_uint32.from_address(address).value = value

    def wait_word(self, address: int, value: int, stream: int) -> None:
        wait_for(address, value)
        self.answers.append(time.perf_counter() - self.sent)


Make = Callable[[int], tuple[StagedJob, Callable[[], Any]]]
"""``make(count)``: the job of an operation on so many float32, and the same alone."""


def rank_main(
    context: RankContext,
    sizes: list[int],
    rounds: int,
    slot_bytes: int,
    through_proxy: bool,
    messages: bool,
) -> dict[int, dict[str, Any]]:
    os.environ["MIRACCL_HOSTID"] = f"host-{os.environ['MIRACCL_RANK']}"
    from miraccl.bootstrap.launch import detect_launch, join_launch

    with join_launch(detect_launch(os.environ)) as world:
        cpus = [
            Communicator.from_session(world.subgroup(range(2), f"lane {lane}"), Options.create())
            for lane in range(STAGING_THREADS)
        ]
        gpu: Any = Processor()
        staging = Staging(
            gpu, slot_bytes, on_fault=lambda error: print(f"fault: {error}"), name="bench"
        )
        streams: list[Any] = []
        if messages and not through_proxy:
            streams = [
                MessageStreams(
                    SetupPhases(world), core_access(cpus[0]), NodeLayout.of(world.rank, "ab")
                )
            ]
        elif not through_proxy:
            streams = [
                DirectStreams(
                    SetupPhases(world.subgroup(range(2), f"direct {i}")), core_access(cpu)
                )
                for i, cpu in enumerate(cpus)
            ]

        def all_reduce(count: int) -> tuple[StagedJob, Callable[[], Any]]:
            shape = StagedShape.even(Collective.ALL_REDUCE, 4, world.rank, 2, 0, count)
            network = StagedCollective(
                cpus, shape, DType.FLOAT32, RedOp.SUM, staging.slots, streams
            )
            job = staging.job(
                split_segments(shape, staging.slots.nbytes),
                staging.slots,
                network,
                False,
                STAGING_THREADS,
            )
            return job, cpus[0].all_reduce_init(np.zeros(count, np.float32))

        def sendrecv(count: int) -> tuple[StagedJob, Callable[[], Any]]:
            memory = DeviceMemory(4096, count, DType.FLOAT32)
            transfers = [
                DeviceTransfer(receives=receives, peer=1 - world.rank, memory=memory)
                for receives in (False, True)
            ]
            parts, need = split_transfers(transfers, staging.slots.nbytes, 1)
            slots = staging.slots_for(need)
            network = (
                MessageNetwork(streams[0], parts, slots)
                if streams
                else run_on_communicator(cpus[0], parts, slots)
            )
            x, y = np.zeros(count, np.float32), np.zeros(count, np.float32)
            job = staging.job([part.segment for part in parts], slots, network, False)
            return job, lambda: cpus[0].sendrecv(x, 1 - world.rank, y, 1 - world.rank)

        rows = {
            nbytes: measure(
                world, sendrecv if messages else all_reduce, gpu, staging, nbytes, rounds
            )
            for nbytes in sizes
        }
        world.barrier("end")
        staging.close()
        for each in streams:
            each.close()
        for cpu in cpus:
            cpu.finalize()
    return rows


def measure(
    world: Any, make: Make, gpu: Any, staging: Staging, nbytes: int, rounds: int
) -> dict[str, Any]:
    count = max(1, nbytes // 4)
    x, y = np.ones(count, np.float32), np.zeros(count, np.float32)
    job, alone = make(count)
    buffers = (x.ctypes.data, y.ctypes.data)
    calls = 200 if nbytes <= 1 << 16 else 40 if nbytes <= 1 << 20 else 3
    times: dict[str, list[float]] = {"alone": [], "operation": [], "answer": []}
    for _ in range(rounds + 1):
        world.barrier("alone")
        start = time.perf_counter()
        for _ in range(calls):
            alone()
        times["alone"].append((time.perf_counter() - start) / calls)
        y[:] = 0.0
        gpu.answers.clear()
        world.barrier("operation")
        start = time.perf_counter()
        for _ in range(calls):
            staging.enqueue(job, buffers, 0)
        times["operation"].append((time.perf_counter() - start) / calls)
        times["answer"].append(common.median(gpu.answers))
        assert (y == (2 if make.__name__ == "all_reduce" else 1)).all(), "wrong result"
    return {
        "segments": job.nsegments,
        **{name: [t * 1e6 for t in found[1:]] for name, found in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--slot",
        type=params.parse_size,
        default=params.GPU_STAGING.read(),
        help="bytes of a piece at most",
    )
    parser.add_argument(
        "--messages", action="store_true", help="a send and a receive instead of all_reduce"
    )
    parser.add_argument(
        "--through-proxy", action="store_true", help="every piece through the CPU communicator"
    )
    common.add_output_option(parser)
    args = parser.parse_args()
    machine = common.describe_machine()
    launch.warm_up()
    sizes = [params.parse_size(size) for size in args.sizes.split(",")]
    more = (sizes, args.rounds, args.slot, args.through_proxy, args.messages)
    with launch.local_job(2) as environ, Ranks(rank_main, 2, more, environ=environ) as ranks:
        ranks.wait(time.monotonic() + 300)
        failure = ranks.first_failure()
        if failure:
            raise SystemExit(f"{failure.describe()}\n{failure.error}")
        rows = ranks.outcomes[0].value
    columns = [
        "bytes",
        "segments",
        "alone us",
        "ready to done us",
        "operation us",
        "operation GB/s",
    ]
    table = []
    for nbytes, row in rows.items():
        alone, answer, whole = (
            common.median(row[name]) for name in ("alone", "answer", "operation")
        )
        cells = [
            common.show_us(alone),
            common.show_us(answer) if row["segments"] == 1 else "",
            common.show_us(whole),
        ]
        table.append([nbytes, row["segments"], *cells, f"{nbytes / whole / 1e3:.2f}"])
    text = (
        common.heading("The way of GPU data between hosts, without GPUs", machine)
        + "\n"
        + common.markdown_table(columns, table)
    )
    common.save(args.out, {"machine": machine, "rows": rows}, text)


if __name__ == "__main__":
    main()
