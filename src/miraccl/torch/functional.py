"""Functional collectives whose C++ does not reach a group written in Python.

``PyProcessGroup.hpp`` forwards most calls to Python, but not ``all_gather_single``, which
``all_gather_into_tensor_out`` calls, nor ``startCoalescing``, which ``batch_p2p_ops`` calls.  Both
would end at a C++ backend that such a group does not have.  PyTorch registers these operators for
all devices at once; the kernels here are registered per device, so the dispatcher prefers them.
Calls of other groups are forwarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from miraccl.torch.process_group import ProcessGroupMiraccl

_KEYS = ("CPU", "CUDA")
_ALL_DEVICES = torch._C.DispatchKey.CompositeExplicitAutograd
_library = torch.library.Library("_c10d_functional", "IMPL")


def register() -> list[Any]:
    """Register the kernels for the operators that this PyTorch has; return them."""
    kernels: list[Any] = [_all_gather_into_tensor_out, _batch_p2p_ops]
    for kernel in kernels:
        name = kernel.__name__.removeprefix("_")
        operator = getattr(torch.ops._c10d_functional, name, None)
        if operator is not None:
            for key in _KEYS:
                _library.impl(name, functools.partial(kernel, operator.default), key)
    return kernels


def _all_gather_into_tensor_out(
    operator: Any, tensor: Any, group_size: int, group_name: str, *, out: Any
) -> Any:
    group = c10d._resolve_process_group(group_name)
    if not isinstance(group, ProcessGroupMiraccl):
        return operator._op_dk(_ALL_DEVICES, tensor, group_size, group_name, out=out)
    c10d._register_work(out, group.all_gather_single(out, tensor))
    return out


def _batch_p2p_ops(
    operator: Any,
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[Any],
    group_name: str,
) -> Any:
    """Start a batch of sends and receives; return one tensor per operation to wait on.

    A receive returns the tensor that it fills, a send an empty tensor.
    """
    group = c10d._resolve_process_group(group_name)
    if not isinstance(group, ProcessGroupMiraccl):
        return operator._op_dk(_ALL_DEVICES, op_list, peer_list, tag_list, tensors, group_name)
    calls: dict[str, Callable[..., Any]] = {"isend": group.send, "irecv": group.recv}
    device = tensors[0].device
    together = group._get_backend(device).supports_coalescing
    works = []
    if together:
        group._start_coalescing(device)
    try:
        for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True):
            works.append(calls[op]([tensor], peer, tag))
    finally:
        batch = group._end_coalescing(device) if together else None
    results = [
        t if op == "irecv" else torch.empty(0, dtype=t.dtype, device=device)
        for op, t in zip(op_list, tensors, strict=True)
    ]
    for result, work in zip(results, works, strict=True):
        c10d._register_work(result, work if batch is None else batch)
    return results
