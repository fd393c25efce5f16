"""Cost of a call: all_reduce on one and two ranks, persistent operations, and baselines.

    python bench/call_overhead.py
    python bench/call_overhead.py --rounds 30 --out call-overhead
    python bench/call_overhead.py --devices cuda

``one rank`` is the cost of the call itself without communication: reading arguments, looking up the
plan, entering compiled code. Ranks are bound to cores if there are enough. The table shows the
median over rounds and the minimum.

On GPUs (``--devices cuda``, one GPU per rank, PyTorch tensors, and arrays of CuPy, Numba and JAX if
installed) it is the time of the calling thread: calls enqueue and return. ``launch alone`` is the
driver's part of it, for an ``all_reduce`` and for two messages. For arrays that only implement a
protocol, a row gives the time the array takes to answer, which is included in the rows after it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np
from gpu_ranks import need_gpus

import miraccl
from miraccl.tools import launch
from miraccl.tools.spawn import RankContext, Ranks


def time_calls(call: Callable[[], Any], calls: int) -> float:
    """Return microseconds per call, including the loop's own cost (about 0.01 us)."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def subjects(comm: Any) -> dict[str, Callable[[], Any]]:
    """Return the measured calls by name; 8 bytes of float32 unless the name says otherwise."""
    x, y = np.zeros(2, np.float32), np.zeros(2, np.float32)
    large = np.zeros(4096, np.float32)
    prepared, barrier = comm.all_reduce_init(x), comm.barrier
    all_reduce, add = comm.all_reduce, np.add
    return {
        "empty function": lambda: None,
        "numpy.add, two elements": lambda: add(x, y, out=y),
        "barrier": lambda: barrier(),
        "all_reduce in place": lambda: all_reduce(x),
        "all_reduce out of place": lambda: all_reduce(x, out=y),
        "prepared all_reduce": prepared,
        "all_reduce, 16 KiB": lambda: all_reduce(large),
    }


def gpu_subjects(comm: Any) -> dict[str, Callable[[], Any]]:
    """Return the measured calls on this rank's GPU by name."""
    import torch

    torch.cuda.set_device(comm.local_rank)
    x, y, z = (torch.zeros(8, device="cuda") for _ in range(3))
    whole, target = (torch.zeros(8 * comm.nranks, device="cuda") for _ in range(2))
    counts = [8] * comm.nranks
    unequal = [12, 4, *counts[2:]]
    share = torch.zeros(unequal[comm.rank], device="cuda")
    tables = np.random.default_rng(0).integers(1, 9, (4096, comm.nranks, comm.nranks))
    new = [(table[comm.rank].tolist(), table[:, comm.rank].tolist()) for table in tables]
    fresh = itertools.cycle(
        [(whole[: sum(sends)], sends, receives, target[: sum(receives)]) for sends, receives in new]
    )
    right, left = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
    comm.all_reduce(x)
    comm.sendrecv(x, right, y, left)
    side: Any = comm._device
    known, messages, address = (
        next(iter(side._launches.values())),
        next(iter(side._messages._patterns.values())),
        x.data_ptr(),
    )

    def nothing() -> None:
        with miraccl.group():
            pass

    def exchange(sent: Any = x, got: Any = y) -> None:
        with miraccl.group():
            comm.send(sent, right)
            comm.recv(got, left)

    def exchange_twice() -> None:
        with miraccl.group():
            comm.send(x, right)
            comm.recv(y, left)
            comm.send(x, right)
            comm.recv(y, left)

    def one_way() -> None:
        if comm.rank == 0:
            comm.send(x, 1)
        elif comm.rank == 1:
            comm.recv(x, 0)

    rows = {
        "empty function": lambda: None,
        "launch alone": lambda: known.run(address, address, 0),
        "launch alone of a sendrecv": lambda: messages.run(0, 0, 0),
        "all_reduce in place": lambda: comm.all_reduce(x),
        "reduce in place": lambda: comm.reduce(x, 0),
        "reduce out of place": lambda: comm.reduce(x, 0, z),
        "send from rank 0 to rank 1": one_way,
        "sendrecv": lambda: comm.sendrecv(x, right, y, left),
        "gather": lambda: comm.gather(x, 0, whole),
        "scatter": lambda: comm.scatter(whole, 0, z),
        "all_gather_v": lambda: comm.all_gather_v(x, counts, whole),
        "all_to_all_v": lambda: comm.all_to_all_v(whole, counts, counts, target),
        "all_to_all_v, new counts": lambda: comm.all_to_all_v(*next(fresh)),
        "reduce_scatter_v": lambda: comm.reduce_scatter_v(whole, counts, z),
        "reduce_scatter_v, unequal counts: a launch a rank": lambda: comm.reduce_scatter_v(
            whole, unequal, share
        ),
        "group of nothing": nothing,
        "group of a send and a recv": exchange,
        "group of 2 sends and 2 recvs": exchange_twice,
    }
    for library, (a, b, asked) in other_arrays(comm.local_rank, x, y).items():
        if asked is not None:
            rows[f"{library}: what the array takes to tell where it is"] = asked
        if library != "JAX":  # whose arrays never change
            rows[f"{library}: all_reduce in place"] = functools.partial(comm.all_reduce, a)
            rows[f"{library}: group of a send and a recv"] = functools.partial(exchange, a, b)
        rows[f"{library}: all_reduce out of place"] = functools.partial(comm.all_reduce, a, b)
        rows[f"{library}: sendrecv"] = functools.partial(comm.sendrecv, a, right, b, left)
    return rows


class Described:
    """Array with ``__cuda_array_interface__`` only."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self._told = {"shape": tuple(tensor.shape), "typestr": "<f4", "strides": None, "version": 3}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._told, "data": (self._tensor.data_ptr(), False)}


class Packed:
    """Tensor with DLPack only."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)


def other_arrays(
    ordinal: int, x: Any, y: Any
) -> dict[str, tuple[Any, Any, Callable[[], Any] | None]]:
    """Return input, output and protocol query of each installed array library."""
    found: dict[str, tuple[Any, Any, Callable[[], Any] | None]] = {}
    with contextlib.suppress(ImportError):
        import cupy

        cupy.cuda.Device(ordinal).use()
        found["CuPy"] = cupy.zeros(8, cupy.float32), cupy.zeros(8, cupy.float32), None
    with contextlib.suppress(ImportError):
        from numba import cuda

        if cuda.is_available():
            cuda.select_device(ordinal)
            arrays = [cuda.to_device(np.zeros(8, np.float32)) for _ in range(2)]
            found["Numba"] = *arrays, lambda: arrays[0].__cuda_array_interface__
    described = Described(x)
    found["__cuda_array_interface__"] = (
        described,
        Described(y),
        lambda: described.__cuda_array_interface__,
    )
    packed = Packed(x)
    found["DLPack"] = packed, Packed(y), lambda: packed.__dlpack__(stream=1, max_version=(1, 0))
    with contextlib.suppress(ImportError, RuntimeError):  # which is JAX without a GPU
        os.environ.setdefault(
            "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
        )  # PyTorch and the communicator need memory, too
        import jax

        constant = jax.device_put(np.zeros(8, np.float32), jax.devices("gpu")[ordinal])
        found["JAX"] = constant, y, lambda: constant.__dlpack__(stream=1)
    return found


def rank_main(
    context: RankContext, devices: str, rounds: int, calls: int
) -> dict[str, list[float]]:
    with miraccl.init() as comm:
        times: dict[str, list[float]] = {}
        chosen = gpu_subjects(comm) if devices == "cuda" else subjects(comm)
        for _ in range(rounds):
            for name, call in chosen.items():
                call()
                comm.synchronize()  # a full queue of the GPU would be in the figures
                comm.barrier()
                times.setdefault(name, []).append(time_calls(call, calls))
        return times


def measure(devices: str, nranks: int, rounds: int, calls: int) -> dict[str, list[float]]:
    with (
        launch.local_job(nranks) as environ,
        Ranks(rank_main, nranks, (devices, rounds, calls), environ=environ) as ranks,
    ):
        ranks.wait(time.monotonic() + 600)
        failure = ranks.first_failure()
        if failure:
            raise SystemExit(f"{failure.describe()}\n{failure.error}")
        result: dict[str, list[float]] = ranks.outcomes[0].value
        return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--calls",
        type=int,
        help="in a row, in a round: 20000 by default; 400 on GPUs, whose queue has room for 1024",
    )
    parser.add_argument("--ranks", help="numbers of ranks, 1,2 by default; on GPUs 2")
    common.add_output_option(parser)
    args = parser.parse_args()
    machine = common.describe_machine()
    launch.warm_up()
    on_gpus = args.devices == "cuda"
    if on_gpus:
        need_gpus()
    counts = [int(n) for n in (args.ranks or ("2" if on_gpus else "1,2")).split(",")]
    calls = args.calls or (400 if on_gpus else 20000)
    results = {n: measure(args.devices, n, args.rounds, calls) for n in counts}
    columns = ["call", *(f"{n} rank{'s' * (n > 1)}: median (smallest) us" for n in counts)]
    rows = [
        [
            name,
            *(
                f"{common.median(results[n][name]):.3f} ({min(results[n][name]):.3f})"
                for n in counts
            ),
        ]
        for name in results[counts[0]]
    ]
    text = (
        common.heading("What a call costs" + " on GPUs" * on_gpus, machine)
        + "\n"
        + common.markdown_table(columns, rows)
    )
    common.save(args.out, {"machine": machine, "us": {str(n): r for n, r in results.items()}}, text)


if __name__ == "__main__":
    main()
