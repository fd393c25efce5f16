"""MIRACCL as a backend of ``ray.util.collective`` (``register_collective_backend``).

Ray calls ``MiracclGroup(world_size, rank, group_name)`` in every process and passes tensors in
lists of one; its forms with several GPUs per process are rejected.  Operations are synchronous and
in place.  The interface has no options and no timeouts for backends other than Gloo, so
MIRACCL_TIMEOUT and MIRACCL_BOOTSTRAP_TIMEOUT of each process apply.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
)

from miraccl.api.communicator import Communicator
from miraccl.errors import InvalidUsage, MissingDependency
from miraccl.ops.host_arrays import Array, view
from miraccl.ray.members import rendezvous_by_store
from miraccl.runtime.options import Options
from miraccl.types import RedOp

NAME = "MIRACCL"
_OPS = {
    ReduceOp.SUM: RedOp.SUM,
    ReduceOp.PRODUCT: RedOp.PROD,
    ReduceOp.MIN: RedOp.MIN,
    ReduceOp.MAX: RedOp.MAX,
}


def register() -> None:
    """Implement ``miraccl.ray.register_backend``."""
    import ray.util.collective as collective

    if not hasattr(collective, "register_collective_backend"):
        raise MissingDependency(
            "this version of ray.util.collective does not accept custom backends",
            hint="pip install 'ray>=2.60'",
        )
    if not collective.is_backend_available(NAME):
        collective.register_collective_backend(NAME, MiracclGroup)


class MiracclGroup(BaseGroup):
    """A group of ``ray.util.collective`` on one process, over ``communicator``."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        # prefixed, so that it cannot collide with a group of create_group
        self.communicator: Communicator = rendezvous_by_store(
            world_size, rank, f"ray.util.collective/{group_name}", None, Options.create()
        )

    @classmethod
    def backend(cls) -> str:
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        self.communicator.finalize()

    def barrier(self, barrier_options: Any = BarrierOptions) -> None:
        self.communicator.barrier()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = AllReduceOptions) -> None:
        self.communicator.all_reduce(
            _only(tensor, "allreduce"), op=_op(allreduce_options, "allreduce")
        )

    def reduce(self, tensor: list[Any], reduce_options: Any = ReduceOptions) -> None:
        self.communicator.reduce(
            _only(tensor, "reduce"), reduce_options.root_rank, op=_op(reduce_options, "reduce")
        )

    def broadcast(self, tensor: list[Any], broadcast_options: Any = BroadcastOptions) -> None:
        self.communicator.broadcast(_only(tensor, "broadcast"), broadcast_options.root_rank)

    def allgather(
        self,
        tensor_list: list[list[Any]],
        tensor: list[Any],
        allgather_options: Any = AllGatherOptions,
    ) -> None:
        """Gather ``tensor`` of all ranks into the tensors of ``tensor_list``, through one
        temporary.
        """
        mine = _flat(_only(tensor, "allgather"), "tensor", "allgather", writes=False)
        targets = _row(tensor_list, mine, self.world_size, "allgather", writes=True)
        gathered = self.communicator.all_gather(mine)
        for target, part in zip(targets, np.split(gathered, self.world_size)):
            target[:] = part

    def reducescatter(
        self,
        tensor: list[Any],
        tensor_list: list[list[Any]],
        reducescatter_options: Any = ReduceScatterOptions,
    ) -> None:
        """Reduce the r-th tensor of every rank's list into ``tensor`` of rank r; the lists stay
        unchanged.
        """
        target = _flat(_only(tensor, "reducescatter"), "tensor", "reducescatter", writes=True)
        blocks = _row(tensor_list, target, self.world_size, "reducescatter", writes=False)
        self.communicator.reduce_scatter(
            np.concatenate(blocks), out=target, op=_op(reducescatter_options, "reducescatter")
        )

    def send(self, tensor: list[Any], send_options: Any) -> None:
        self.communicator.send(
            _part(_only(tensor, "send"), send_options.n_elements, "send"), send_options.dst_rank
        )

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        self.communicator.recv(
            _part(_only(tensor, "recv"), recv_options.n_elements, "recv"), recv_options.src_rank
        )


def _op(options: Any, where: str) -> RedOp:
    try:
        return _OPS[options.reduceOp]
    except (KeyError, TypeError):
        allowed = ", ".join(str(op) for op in _OPS)
        raise InvalidUsage(f"{where}: op is {options.reduceOp!r}; allowed are {allowed}") from None


def _only(tensors: list[Any], where: str) -> Any:
    if len(tensors) != 1:
        raise InvalidUsage(
            f"{where}: got {len(tensors)} tensors from one process; a miraccl rank has one",
            hint="use one actor per GPU",
        )
    return tensors[0]


def _flat(tensor: Any, name: str, where: str, *, writes: bool) -> Array:
    return view(tensor, name, writes=writes, where=where).array.reshape(-1)


def _row(
    lists: list[list[Any]], like: Array, nranks: int, where: str, *, writes: bool
) -> list[Array]:
    """Return the tensors of the only list, one per rank, checked to be like ``like``."""
    row = [
        _flat(tensor, f"tensor_list[{i}]", where, writes=writes)
        for i, tensor in enumerate(_only(lists, where))
    ]
    for i, array in enumerate(row):
        if array.size != like.size or array.dtype != like.dtype:
            text = (
                f"tensor_list[{i}] has {array.size} elements of {array.dtype}, "
                f"but tensor has {like.size} of {like.dtype}"
            )
            raise InvalidUsage(f"{where}: {text}")
    if len(row) != nranks:
        raise InvalidUsage(f"{where}: tensor_list has {len(row)} tensors for {nranks} ranks")
    return row


def _part(tensor: Any, count: int, where: str) -> Any:
    return tensor if count == 0 else _flat(tensor, "tensor", where, writes=where == "recv")[:count]
