"""CuPy: arrays in GPU memory are used in place.

    miraccl run -n 2 examples/25_cupy.py

Needs an NVIDIA GPU (one per rank, or one that the ranks share). An operation is enqueued in CuPy's
current stream, after the program's earlier work in it: the host does not wait.
"""

import cupy

import miraccl

if not cupy.cuda.is_available():
    raise SystemExit("no GPU that CuPy can use here; miraccl doctor says what is missing")
with miraccl.init() as comm:
    cupy.cuda.Device(comm.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    x = cupy.full(1 << 20, comm.rank + 1.0, dtype=cupy.float32)
    comm.all_reduce(x)  # in place
    total = comm.nranks * (comm.nranks + 1) / 2
    assert bool((x == total).all())

    with cupy.cuda.Stream(non_blocking=True) as stream:
        y = cupy.arange(4, dtype=cupy.float32) + comm.rank
        pieces = comm.all_gather(y)
        stream.synchronize()
    assert pieces.reshape(comm.nranks, 4)[:, 0].tolist() == list(range(comm.nranks))
    if comm.rank == 0:
        print(f"{comm.nranks} ranks: every element is {float(x[0]):g}")
