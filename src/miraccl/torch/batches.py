"""``torch.distributed.batch_isend_irecv`` for groups written in Python.

PyTorch starts a batch as one operation only where ``type(group) is ProcessGroup``, and else one call after the other.  On a GPU that would
be one kernel after the other on one stream, where a send waits for a receive that stands behind it.  So the function is wrapped: for
miraccl groups and tensors in GPU memory it opens a batch, for all others it is PyTorch's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from miraccl.torch.process_group import ProcessGroupMiraccl


def install() -> None:
    """Wrap the function, in both modules that have it."""
    original = distributed_c10d.batch_isend_irecv

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        tensor: Any = p2p_op_list[0].tensor if p2p_op_list else None
        group = _group_of(p2p_op_list)
        if not isinstance(group, ProcessGroupMiraccl) or not tensor.is_cuda or group.elsewhere_for([tensor]) is not None:
            works: list[Any] = original(p2p_op_list)
            return works
        distributed_c10d._check_p2p_op_list(p2p_op_list)
        with group.batch(tensor.device) as works:
            for item in p2p_op_list:
                peer = "group_dst" if item.op is distributed_c10d.isend else "group_src"
                item.op(item.tensor, group=item.group, tag=item.tag, **{peer: item.group_peer})
        return works

    distributed_c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv


def _group_of(p2p_op_list: list[Any]) -> Any:
    return (p2p_op_list[0].group if p2p_op_list else None) or distributed_c10d.GroupMember.WORLD
