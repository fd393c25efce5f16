"""Sums of sparse COO tensors in CPU memory, as DDP needs for gradients of sparse embeddings.

Indices and values go through ``Communicator.all_reduce_coo``: each rank owns a range of the rows,
adds those of all ranks in the order of ranks and returns them. ``sparse_hook`` is the DDP hook for
dense gradients that are mostly zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from miraccl.errors import InvalidUsage
from miraccl.torch.tensors import stage

if TYPE_CHECKING:
    from miraccl.api.communicator import Communicator


def is_sparse(tensor: Any) -> bool:
    return tensor.layout is torch.sparse_coo and tensor.device.type == "cpu"


def check_sum(op: Any, where: str) -> None:
    """Raise ``InvalidUsage`` unless the operator is SUM."""
    if op != dist.ReduceOp.SUM:
        raise InvalidUsage(
            f"{where}: sparse tensors support ReduceOp.SUM only",
            hint="use to_dense()",
        )


def all_reduce(comm: Communicator, tensor: Any, where: str) -> None:
    """Sum a sparse tensor over all ranks, in place."""
    own = tensor.detach().coalesce()
    shape = tuple(own.shape[: own.sparse_dim()])
    rows = math.prod(shape)
    if own.dtype is torch.bool or rows > 1 << 62:
        raise InvalidUsage(
            f"{where}: cannot sum a sparse tensor of {own.dtype} with {rows} rows; allowed are"
            " numbers and up to 2^62 rows",
            hint="use to_dense()",
        )
    flat = _linear(own.indices().numpy(), shape)
    values = stage(own.values().contiguous(), where)
    per_row = math.prod(own.shape[own.sparse_dim() :]) * (2 if own.dtype.is_complex else 1)
    union, sums = comm.all_reduce_coo(flat, values.array.reshape(len(flat), per_row), rows)
    whole = torch.empty((len(union), *own.values().shape[1:]), dtype=own.dtype, device=own.device)
    stage(whole, where).array.reshape(len(union), per_row)[:] = sums
    places = np.stack(np.unravel_index(union, shape)) if len(union) else np.empty((len(shape), 0))
    # passed explicitly, because PyTorch warns about the default
    checked = torch.sparse.check_sparse_tensor_invariants.is_enabled()
    total = torch.sparse_coo_tensor(
        torch.from_numpy(places.astype(np.int64)),
        whole,
        own.shape,
        device=own.device,
        check_invariants=checked,
    ).coalesce()
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        # not tensor.detach(): new entries of a detached tensor are invisible to the tensor
        tensor.copy_(total)


def _linear(indices: Any, shape: tuple[int, ...]) -> Any:
    """Return the numbers of the rows at ``indices[dimension, entry]``."""
    numbers = np.zeros(indices.shape[1], np.int64)
    for places, length in zip(indices, shape, strict=True):
        numbers = numbers * length + places
    return numbers


def sparse_hook(group: Any, bucket: Any) -> Any:
    """Average a DDP bucket whose gradients are mostly zero.

    Usage: ``model.register_comm_hook(None, miraccl.torch.sparse_hook)``. Buckets in GPU memory are
    averaged whole.

    Args:
        group: Process group of the backend ``miraccl``; None for the default one.
        bucket: Bucket of ``DistributedDataParallel``.
    """
    chosen = group if group is not None else dist.group.WORLD
    buffer = bucket.buffer().div_(chosen.size())
    if buffer.device.type != "cpu":
        work = dist.all_reduce(buffer, group=chosen, async_op=True)
    else:
        work = chosen._get_backend(buffer.device).all_reduce_sparse([buffer])
    return work.get_future().then(lambda future: future.value()[0])


# DDP compares these with the classes themselves, not with their names.
sparse_hook.__annotations__["bucket"] = dist.GradBucket
sparse_hook.__annotations__["return"] = torch.futures.Future[torch.Tensor]
