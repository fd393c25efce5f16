"""Functions of ``torch.distributed`` patched for groups written in Python.

- ``batch_isend_irecv`` starts a batch as one operation only if ``type(group) is ProcessGroup``,
  else call by call.  On a GPU that is one kernel after another on one stream, where a send can wait
  for a receive enqueued behind it.  The same holds for NCCL inside a miraccl group.
- ``monitored_barrier`` accepts Gloo groups only.
- ``_set_pg_timeout`` knows the Gloo and NCCL backends only, and warns otherwise.
- ``split_group`` accepts groups bound to a GPU only.  Other groups are split as ``new_group`` does,
  by the ranks of each new group.  They meet under a name derived from the parent: names from
  ``_process_group_name`` count the groups of a rank, which differs between ranks.
- DDP's built-in FP16 hook reads the C++ type of a future's value, which a future made in Python
  does not have; the Python version of the hook does not need it.
- ``ShardedTensor.gather`` uses CPU memory for backends named Gloo, and otherwise the first non-CPU
  device of the backend.
- ``_symmetric_memory.rendezvous`` asks the C++ group for its store, which a group written in Python
  lacks, and terminates the process; the call is rejected.
- ``_jit_internal._extract_tensors`` pickles a future's value to find its tensors, which takes
  longer than a small operation; DDP calls it twice per bucket.  A list of tensors is returned
  directly. ``Future.set_exception`` makes the error the value; DDP's C++ takes its first tensor
  unchecked and terminates the process if there is none, so miraccl errors are raised here.
- ``_maybe_attach_flight_recorder`` (PyTorch 2.15) skips groups without devices, which it takes for
  groups written in Python; it would fail on one that has devices.
- ``Join.notify_join_context`` hands its work to DDP's reducer, which keeps only the C++ half alone;
  the module keeps a reference to the Python half.

Other groups, and other values of futures, get PyTorch's own behaviour.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from miraccl.errors import InvalidUsage
from miraccl.torch.failures import BackendError, as_backend_errors
from miraccl.torch.process_group import ProcessGroupMiraccl
from miraccl.torch.work import Work

_name_of_split: contextvars.ContextVar[str] = contextvars.ContextVar(
    "name of the group that is split off", default=""
)


def install() -> list[Any]:
    """Install the patched functions in the modules that export them; return them."""
    remaps = getattr(
        sys.modules.get("torch.distributed._functional_collectives"),
        "traceable_collective_remaps",
        {},
    )
    new = []
    for name, wrap in _WRAPPERS.items():
        original = getattr(distributed_c10d, name, None)
        if original is not None:
            wrapped = functools.wraps(original)(wrap(original))
            setattr(distributed_c10d, name, wrapped)
            if hasattr(dist, name):
                setattr(dist, name, wrapped)
            if original in remaps:  # torch.compile identifies functions by object identity
                remaps[wrapped] = remaps[original]
            new.append(wrapped)
    builtin = DistributedDataParallel._register_builtin_comm_hook
    DistributedDataParallel._register_builtin_comm_hook = functools.wraps(builtin)(
        _builtin_comm_hook(builtin)
    )
    notify = Join.notify_join_context
    Join.notify_join_context = staticmethod(functools.wraps(notify)(_notify_join_context(notify)))
    with contextlib.suppress(ImportError):  # to be replaced by DTensor in PyTorch
        from torch.distributed._shard.sharded_tensor import ShardedTensor

        chosen = ShardedTensor._get_preferred_device
        ShardedTensor._get_preferred_device = functools.wraps(chosen)(_preferred_device(chosen))
    extract = torch._jit_internal._extract_tensors
    torch._jit_internal._extract_tensors = functools.wraps(extract)(_extract_tensors(extract))
    if torch.backends.cuda.is_built():
        from torch.distributed import _symmetric_memory

        meet = _symmetric_memory.rendezvous
        _symmetric_memory.rendezvous = functools.wraps(meet)(_symmetric_memory_rendezvous(meet))
    return new


def _batch_isend_irecv(original: Callable[..., Any]) -> Callable[..., Any]:
    def batch_isend_irecv(p2p_op_list: list[Any]) -> Any:
        first = p2p_op_list[0] if isinstance(p2p_op_list, list) and p2p_op_list else None
        tensor: Any = getattr(first, "tensor", None)
        group = _group(getattr(first, "group", None))
        if not isinstance(group, ProcessGroupMiraccl) or not isinstance(tensor, torch.Tensor):
            return original(p2p_op_list)
        mixed = group.other_group_for([tensor]) is not None
        together = (
            group._get_backend(tensor.device).supports_coalescing if mixed else tensor.is_cuda
        )
        if not together:
            return original(p2p_op_list)
        distributed_c10d._check_p2p_op_list(p2p_op_list)
        if mixed:
            with distributed_c10d._coalescing_manager(
                group, tensor.device, async_ops=True
            ) as manager:
                _start_all(p2p_op_list)
            return manager.works
        return group.run_batch(tensor.device, lambda: _start_all(p2p_op_list))

    return batch_isend_irecv


def _start_all(p2p_op_list: list[Any]) -> None:
    for item in p2p_op_list:
        peer = "group_dst" if item.op is distributed_c10d.isend else "group_src"
        item.op(item.tensor, group=item.group, tag=item.tag, **{peer: item.group_peer})


def _monitored_barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        chosen = _group(group)
        if not isinstance(chosen, ProcessGroupMiraccl):
            return original(group, timeout, wait_all_ranks)
        limit = datetime.timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        return chosen.monitored_barrier(limit, wait_all_ranks)

    return monitored_barrier


def _set_pg_timeout(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_pg_timeout(timeout: datetime.timedelta, group: Any = None) -> None:
        chosen = _group(group)
        if isinstance(chosen, ProcessGroupMiraccl):
            chosen.set_timeout(timeout)
        else:
            original(timeout, group)

    return set_pg_timeout


def _split_group(original: Callable[..., Any]) -> Callable[..., Any]:
    form = inspect.signature(original)
    keeps_order = (
        {"sort_ranks": False}
        if "sort_ranks" in inspect.signature(dist.new_group).parameters
        else {}
    )

    def split_group(*args: Any, **kwargs: Any) -> Any:
        given = form.bind(*args, **kwargs).arguments
        parent, split_ranks = _group(given.get("parent_pg")), given.get("split_ranks")
        if (
            not isinstance(parent, ProcessGroupMiraccl)
            or parent.bound_device_id is not None
            or not split_ranks
        ):
            return original(*args, **kwargs)
        _check_parts(split_ranks, parent.size())
        number = parent.count_split()
        mine = next((sorted(ranks) for ranks in split_ranks if parent.rank() in ranks), None)
        if mine is None:
            return None
        token = _name_of_split.set(parent.name_of_split(number, mine))
        try:
            return dist.new_group(
                [dist.get_global_rank(parent, rank) for rank in mine],
                timeout=given.get("timeout"),
                backend=given.get("backend") or dist.get_backend(parent),
                use_local_synchronization=True,
                group_desc=given.get("group_desc"),
                **keeps_order,
            )
        finally:
            _name_of_split.reset(token)

    return split_group


def _check_parts(split_ranks: Sequence[Sequence[int]], nranks: int) -> None:
    """Raise ``ValueError`` unless the lists are disjoint, non-empty subsets of the ranks.

    All ranks pass the same lists, so all of them raise.
    """
    together = [rank for ranks in split_ranks for rank in ranks]
    if (
        not all(split_ranks)
        or len(set(together)) < len(together)
        or not {*together} <= {*range(nranks)}
    ):
        raise ValueError(
            f"split_group: {list(map(list, split_ranks))} must be disjoint, non-empty subsets "
            f"of ranks 0 to {nranks - 1}"
        )


def _process_group_name(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_group_name(*args: Any, **kwargs: Any) -> Any:
        return _name_of_split.get() or original(*args, **kwargs)

    return process_group_name


def _maybe_attach_flight_recorder(original: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_attach_flight_recorder(pg: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(pg, ProcessGroupMiraccl):
            original(pg, *args, **kwargs)

    return maybe_attach_flight_recorder


def _builtin_comm_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    def register(self: Any, comm_hook_type: Any) -> None:
        if comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS and isinstance(
            self.process_group, ProcessGroupMiraccl
        ):
            self.register_comm_hook(self.process_group, default_hooks.fp16_compress_hook)
            if self.logger is not None:  # under the name that other backends log
                self.logger._set_comm_hook_name(str(comm_hook_type))
        else:
            original(self, comm_hook_type)

    return register


def _notify_join_context(original: Callable[..., Any]) -> Callable[..., Any]:
    def notify_join_context(joinable: Any) -> Any:
        work = original(joinable)
        if isinstance(work, Work):
            joinable._miraccl_join_work = work
        return work

    return notify_join_context


def _preferred_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def preferred_device(self: Any) -> Any:
        on_cpu = all(
            shard.placement.device().type == "cpu" for shard in self.metadata().shards_metadata
        )
        return (
            torch.device("cpu")
            if on_cpu and isinstance(self._process_group, ProcessGroupMiraccl)
            else original(self)
        )

    return preferred_device


def _extract_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    def extract_tensors(value: Any) -> Any:
        # a list is faster than a generator expression here
        if type(value) is list and all([type(x) is torch.Tensor for x in value]):  # noqa: C419
            return value.copy()
        if isinstance(value, BackendError):
            raise value
        return original(value)

    return extract_tensors


def _symmetric_memory_rendezvous(original: Callable[..., Any]) -> Callable[..., Any]:
    def rendezvous(tensor: Any, group: Any) -> Any:
        known = distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
        if isinstance(known, ProcessGroupMiraccl):
            hint = (
                "pass dist.new_group(backend='gloo') of the same ranks, "
                "and its name to torch.ops.symm_mem"
            )
            with as_backend_errors():
                raise InvalidUsage(
                    "symmetric memory: PyTorch cannot use a process group written in Python",
                    hint=hint,
                )
        return original(tensor, group)

    return rendezvous


def _group(given: Any) -> Any:
    return distributed_c10d.GroupMember.WORLD if given is None else given


_WRAPPERS = {
    "batch_isend_irecv": _batch_isend_irecv,
    "monitored_barrier": _monitored_barrier,
    "_set_pg_timeout": _set_pg_timeout,
    "split_group": _split_group,
    "_process_group_name": _process_group_name,
    "_maybe_attach_flight_recorder": _maybe_attach_flight_recorder,
}
