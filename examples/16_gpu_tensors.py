"""GPU memory: the same communicator accepts PyTorch's CUDA tensors.

    miraccl run -n 2 examples/16_gpu_tensors.py

Needs an NVIDIA GPU (one per rank, or one that the ranks share). An operation is one kernel in the
current stream: the host does not wait, and it may be captured in a CUDA graph.
"""

import torch

import miraccl

if not torch.cuda.is_available():
    raise SystemExit("no GPU that PyTorch can use here; miraccl doctor says what is missing")
with miraccl.init() as comm:
    torch.cuda.set_device(comm.local_rank % torch.cuda.device_count())
    x = torch.full((1 << 20,), float(comm.rank), device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    comm.all_reduce(x, y)  # the first one creates the GPU side and must not be captured
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(x, y)
        y *= 2
    for repetition in range(3):
        x.fill_(comm.rank + repetition)
        graph.replay()
        torch.cuda.synchronize()
        expected = 2 * sum(rank + repetition for rank in range(comm.nranks))
        assert (y == expected).all(), (y[0].item(), expected)

    pieces = comm.all_gather(torch.tensor([float(comm.rank)], device="cuda"))
    assert pieces.tolist() == list(range(comm.nranks))
    if comm.rank == 0:
        print(
            f"{comm.nranks} ranks on {torch.cuda.get_device_name()}: "
            f"the graph gave {y[0].item():g} at its last replay"
        )
