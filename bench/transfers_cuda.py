"""GPU cells of bench/transfers.py: two processes on one GPU, or on two.

    python bench/transfers.py --device cuda

A target process offers GPU memory of PyTorch, the initiator writes blocks of it by one kernel over
CUDA IPC, compares every byte, and measures the time until the completion is seen: 1,024 and 16,384
blocks of 16 KiB on all multiprocessors and on 8 (MIRACCL_SMS), and, beside them, one copy per block
by the copy engine. Staged cells write GPU memory to CPU memory of the target and read it back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import common

BLOCK = 16384
COUNTS = (1024, 16384)
#: Multiprocessors of the kernel: all, and few, which leaves the others to computation.
SMS = (-1, 8)
TARGET_GPU = 0


def target() -> None:
    """Offer memory and compare what was written, as JSON lines say."""
    import torch

    import miraccl

    torch.cuda.set_device(TARGET_GPU)
    agent = miraccl.Agent("target", secret="bench", timeout=60)
    memory = torch.zeros(max(COUNTS) * BLOCK, dtype=torch.uint8, device="cuda")
    host = agent.empty(max(COUNTS) * BLOCK)
    blobs = [
        agent.register(memory, block_nbytes=BLOCK).advertise().hex(),
        agent.register(host, block_nbytes=BLOCK).advertise().hex(),
    ]
    print(json.dumps([agent.address, blobs]), flush=True)
    for line in sys.stdin:
        order = torch.tensor(json.loads(line), device="cuda")
        expected = torch.arange(len(order) * BLOCK, device="cuda", dtype=torch.int64) % 253
        got = memory.view(-1, BLOCK)[order].reshape(-1)
        torch.cuda.synchronize()
        print(json.dumps(bool((got == expected).all())), flush=True)
        memory.zero_()  # the next cell has to write it again
        torch.cuda.synchronize()


def best_us(run: Any, seconds: float = 1.0) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def main(options: Any) -> None:
    import numpy as np
    import torch

    import miraccl
    from miraccl.p2p.descriptors import RemoteMemory

    process = subprocess.Popen(
        [sys.executable, __file__, "target"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    address, blobs = json.loads(process.stdout.readline())
    remote, remote_host = (RemoteMemory.decode(bytes.fromhex(b)) for b in blobs)
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    local = (torch.arange(max(COUNTS) * BLOCK, device="cuda", dtype=torch.int64) % 253).to(
        torch.uint8
    )
    torch.cuda.synchronize()
    rows: list[list[object]] = []
    with miraccl.Agent("initiator", secret="bench", timeout=60) as agent:
        peer = agent.connect(address)
        for count in COUNTS:
            order = np.random.default_rng(1).permutation(count).astype(np.int32)
            source = np.arange(count, dtype=np.int32)
            for sms in SMS:
                os.environ["MIRACCL_SMS"] = str(sms)  # read when a transfer is prepared
                prepared = peer.prepare(
                    "write", local, remote, local_blocks=source, remote_blocks=order
                )
                us = best_us(lambda p=prepared: p.start().wait())
                process.stdin.write(json.dumps(order.tolist()) + "\n")
                process.stdin.flush()
                right = json.loads(process.stdout.readline())
                name = f"kernel{'' if sms < 0 else f' on {sms} SMs'}, {count} x {BLOCK}"
                rows.append([name, f"{us:.1f}", f"{count * BLOCK / us / 1e3:.0f}", right])
            del os.environ["MIRACCL_SMS"]
            staged = peer.prepare(
                "write", local, remote_host, local_blocks=source, remote_blocks=order
            )
            us = best_us(lambda p=staged: p.start().wait())
            name = f"staged to CPU memory, {count} x {BLOCK}"
            rows.append([name, f"{us:.1f}", f"{count * BLOCK / us / 1e3:.0f}", ""])
            back = torch.zeros_like(local)
            reading = peer.prepare(
                "read", back, remote_host, local_blocks=source, remote_blocks=order
            )
            us = best_us(lambda p=reading: p.start().wait())
            torch.cuda.synchronize()
            same = bool((back[: count * BLOCK] == local[: count * BLOCK]).all())
            name = f"staged from CPU memory, {count} x {BLOCK}"
            rows.append([name, f"{us:.1f}", f"{count * BLOCK / us / 1e3:.0f}", same])
            copies = torch.empty_like(local)

            def per_block(count: int = count, order: Any = order, copies: Any = copies) -> None:
                views, outs = local.view(-1, BLOCK), copies.view(-1, BLOCK)
                for i in range(count):
                    outs[order[i]].copy_(views[i], non_blocking=True)
                torch.cuda.synchronize()

            us = best_us(per_block)
            name = f"one copy per block, {count} x {BLOCK}"
            rows.append([name, f"{us:.1f}", f"{count * BLOCK / us / 1e3:.0f}", ""])
    process.stdin.close()
    process.wait(20)
    machine = common.describe_machine() | {"gpu": torch.cuda.get_device_name()}
    text = common.heading(f"One-sided transfers of GPU memory, {machine['gpu']}", machine)
    text += "\n" + common.markdown_table(["cell", "us", "GB/s", "right bytes"], rows)
    common.save(options.out, {"machine": machine, "rows": rows}, text)


if __name__ == "__main__" and sys.argv[1:] == ["target"]:
    target()
