"""Execution of a re-sharding plan, by agents or within a communicator."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from miraccl.deadline import Deadline
from miraccl.errors import InvalidUsage, TransferError, TransferTimeout
from miraccl.p2p.arrays import memory_of
from miraccl.p2p.descriptors import RemoteMemory
from miraccl.p2p.extents import Extents
from miraccl.p2p.reshard.mesh import volume
from miraccl.p2p.reshard.plan import ReshardPlan

if TYPE_CHECKING:
    from miraccl.p2p.agent import Agent
    from miraccl.p2p.notify import Notification

#: Notification of a source rank: magic, version, source rank, target rank.
_DONE = struct.Struct("<4sqII")
_MAGIC = b"MRS1"


@dataclass(frozen=True, kw_only=True)
class ShardTarget:
    """Memory of a target rank: its number and the descriptor of its part."""

    rank: int
    descriptor: bytes


def run_with_agent(
    plan: ReshardPlan,
    agent: Agent,
    tensor: Any,
    *,
    targets: Any = None,
    rank: int | None = None,
    version: int = 0,
    timeout: float | None = None,
) -> None:
    """Write the parts of a source rank to all target ranks, or wait for them as a target rank.

    Args:
        tensor: This rank's part, contiguous.
        targets: Source rank: descriptors by target rank. Target rank: None.
        rank: Number in the mesh of the source, or in that of the target.
        version: Number that sources and targets agree on.
        timeout: Seconds, default the agent's.

    Raises:
        InvalidUsage: The tensor is not the part of this rank, or a descriptor is missing.
        TransferError: A transfer failed; the target has an incomplete version.
    """
    if rank is None:
        raise InvalidUsage("cannot reshard with an agent: rank= is missing")
    deadline = Deadline.after(agent.timeout if timeout is None else timeout)
    if targets is None:
        _await_sources(plan, agent, rank, version, deadline)
    else:
        _write_parts(plan, agent, tensor, _by_rank(targets), rank, version, deadline)


def _by_rank(targets: Any) -> Mapping[int, bytes]:
    if isinstance(targets, Mapping):
        return targets
    return {target.rank: target.descriptor for target in targets}


def _write_parts(
    plan: ReshardPlan,
    agent: Agent,
    tensor: Any,
    targets: Mapping[int, bytes],
    rank: int,
    version: int,
    deadline: Deadline,
) -> None:
    if rank not in plan.src_boxes:
        raise InvalidUsage(f"cannot reshard: rank {rank} is not in the source mesh")
    memory = memory_of(tensor, "tensor", "reshard")
    expected = volume(plan.src_boxes[rank]) * plan.itemsize
    if memory.nbytes != expected:
        raise InvalidUsage(
            f"cannot reshard: the part of rank {rank} has {expected} bytes, the tensor "
            f"{memory.nbytes}"
        )
    missing = {move.dst for move in plan.moves_from(rank)} - set(targets)
    if missing:
        raise InvalidUsage(f"cannot reshard: no descriptors of target ranks {sorted(missing)}")
    transfers = []
    for target in dict.fromkeys(move.dst for move in plan.moves_from(rank)):
        remote = RemoteMemory.decode(targets[target])
        peer = agent.peer_of(remote)
        moved = _extents(plan, rank, target, memory.address, remote)
        done = _DONE.pack(_MAGIC, version, rank, target)
        prepared = peer.prepare_extents("write", moved, remote, memory.owner, memory.device)
        transfers.append(prepared.start(done, deadline))
    errors = [error for t in transfers if (error := t.exception()) is not None]
    if errors:
        raise errors[0]


def _extents(plan: ReshardPlan, src: int, dst: int, address: int, remote: RemoteMemory) -> Extents:
    """Return the extents of all moves between two ranks, sorted by target and merged."""
    rows = []
    for move in plan.moves_from(src):
        if move.dst == dst:
            here, there, nbytes = plan.offsets(move)
            rows.append(np.stack([here + address, there, np.full(len(here), nbytes)], axis=1))
    table = np.concatenate(rows)
    table = table[np.argsort(table[:, 1], kind="stable")]
    table = merge_rows(table)
    table[:, 1] += remote.offset
    return Extents(
        table=np.ascontiguousarray(table),
        total=int(table[:, 2].sum()),
        blocks=len(table),
        block_nbytes=max(1, plan.itemsize),
    )


def merge_rows(table: Any) -> Any:
    """Merge extents that continue each other on both sides."""
    if len(table) < 2:
        return table
    ends = table[:-1, :2] + table[:-1, 2:]
    starts = np.concatenate([[True], (ends != table[1:, :2]).any(axis=1)])
    merged = table[starts].copy()
    merged[:, 2] = np.add.reduceat(table[:, 2], np.flatnonzero(starts))
    return merged


def _await_sources(
    plan: ReshardPlan, agent: Agent, rank: int, version: int, deadline: Deadline
) -> None:
    """Wait for the notification of each source rank that writes to this one."""
    missing = {move.src for move in plan.moves_to(rank)}

    def is_ours(notification: Notification) -> bool:
        data = notification.data
        if len(data) != _DONE.size or data[:4] != _MAGIC:
            return False
        _, number, _, target = _DONE.unpack(data)
        return bool(number == version and target == rank)

    while missing:
        found = agent.wait_notification(deadline.left, match=is_ours)
        if found is None:
            raise TransferTimeout(
                f"cannot reshard version {version}: source ranks {sorted(missing)} have not "
                f"finished after {deadline.seconds:g} s",
                reason="deadline",
            )
        source = _DONE.unpack(found.data)[2]
        if found.error is not None:
            raise TransferError(
                f"cannot reshard version {version}: source rank {source} failed: {found.error}",
                agent=found.peer,
                block=found.error.block,
                reason=found.error.reason,
            )
        missing.discard(source)


def run_with_comm(plan: ReshardPlan, comm: Any, tensors: tuple[Any, Any]) -> None:
    """Move an array within a communicator that has the ranks of both meshes.

    Args:
        tensors: (part as a source, part as a target); None where the rank is not in that mesh.

    Raises:
        InvalidUsage: A part is missing.
    """
    source, target = tensors
    rank = comm.rank
    sends, receives = plan.moves_from(rank), plan.moves_to(rank)
    if (sends and source is None) or (receives and target is None):
        raise InvalidUsage(f"cannot reshard: rank {rank} has moves and passed no tensor for them")
    for move in sends:
        if move.dst == rank:
            here, there, nbytes = plan.offsets(move)
            _bytes(target)[_index(there, nbytes)] = _bytes(source)[_index(here, nbytes)]
    sends = [move for move in sends if move.dst != rank]
    receives = [move for move in receives if move.src != rank]
    packed = []
    for move in sends:
        here, _, nbytes = plan.offsets(move)
        packed.append(_bytes(source)[_index(here, nbytes)])
    arrived = [np.empty(volume(m.box) * plan.itemsize, np.uint8) for m in receives]
    works = [
        comm.send(data, move.dst, async_op=True) for data, move in zip(packed, sends, strict=True)
    ]
    works += [
        comm.recv(data, move.src, async_op=True)
        for data, move in zip(arrived, receives, strict=True)
    ]
    for work in works:
        work.wait()
    for data, move in zip(arrived, receives, strict=True):
        _, there, nbytes = plan.offsets(move)
        _bytes(target)[_index(there, nbytes)] = data


def _bytes(array: Any) -> Any:
    return array.reshape(-1).view(np.uint8)


def _index(offsets: Any, nbytes: int) -> Any:
    return (offsets[:, None] + np.arange(nbytes)).reshape(-1)
