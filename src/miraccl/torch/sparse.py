"""Sums of sparse COO tensors in CPU memory, as DDP needs for gradients of sparse embeddings.

Ranks exchange indices and values, and each rank adds all of them, as Gloo does.
"""

from __future__ import annotations

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
    counts = comm.all_gather(np.array([own._nnz()])).tolist()
    indices = _gathered(comm, own.indices().t(), counts, where)
    values = _gathered(comm, own.values(), counts, where)
    # passed explicitly, because PyTorch warns about the default
    checked = torch.sparse.check_sparse_tensor_invariants.is_enabled()
    total = torch.sparse_coo_tensor(
        indices.t(), values, own.shape, device=own.device, check_invariants=checked
    ).coalesce()
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        # not tensor.detach(): new entries of a detached tensor are invisible to the tensor
        tensor.copy_(total)


def _gathered(comm: Communicator, rows: Any, counts: list[int], where: str) -> Any:
    """Gather the rows of all ranks, ``counts[r]`` of rank r, in order of rank."""
    rows = rows.contiguous()
    whole = torch.empty(sum(counts), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    source, target = stage(rows, where), stage(whole, where)
    per_row = target.count // max(1, sum(counts))
    comm.all_gather_v(source.array, [n * per_row for n in counts], target.array)
    return whole
