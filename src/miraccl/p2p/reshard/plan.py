"""Plan of a re-sharding: which source rank gives which box to which target rank."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.p2p.reshard.mesh import Box, Mesh, intersect, volume

if TYPE_CHECKING:
    from miraccl.p2p.agent import Agent
    from miraccl.p2p.reshard.run import ShardTarget
    from miraccl.schedule.reshard_schedule import ReshardSchedule

#: Rates of the prediction, if the caller gives none: GB/s of a rank in one direction, and us of a
#: transfer (``bench/transfers.py``, TCP on loopback).
GB_S, TRANSFER_US = 5.0, 20.0


@dataclass(frozen=True, kw_only=True)
class Move:
    """One box that a source rank gives to a target rank."""

    src: int
    dst: int
    box: Box

    def __str__(self) -> str:
        part = ", ".join(f"{start}:{stop}" for start, stop in self.box)
        return f"rank {self.src} -> rank {self.dst}: [{part}]"


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """Moves from a source mesh to a target mesh.

    The ranks of the two meshes are numbered independently: they may be different processes.

    Attributes:
        moves: All moves, by target rank.
    """

    src: Mesh
    dst: Mesh
    shape: tuple[int, ...]
    itemsize: int
    dtype: str
    moves: tuple[Move, ...]

    @cached_property
    def src_boxes(self) -> dict[int, Box]:
        return self.src.boxes(self.shape)

    @cached_property
    def dst_boxes(self) -> dict[int, Box]:
        return self.dst.boxes(self.shape)

    def moves_from(self, rank: int) -> list[Move]:
        return [move for move in self.moves if move.src == rank]

    def moves_to(self, rank: int) -> list[Move]:
        return [move for move in self.moves if move.dst == rank]

    # ---- proof

    @cached_property
    def schedule(self) -> ReshardSchedule:
        """The plan as a schedule: the source ranks, then the target ranks, in the order of their
        meshes.

        Raises:
            InvalidUsage: The array has no elements, or the parts cut it into too many pieces.
        """
        from miraccl.schedule.reshard_schedule import build  # 20 ms, for proofs and pictures only

        source = {rank: number for number, rank in enumerate(self.src.ranks)}
        target = {rank: number for number, rank in enumerate(self.dst.ranks)}
        return build(
            self.shape,
            self.itemsize,
            list(self.src_boxes.values()),
            list(self.dst_boxes.values()),
            [(source[move.src], target[move.dst], move.box) for move in self.moves],
        )

    def verify(self) -> None:
        """Prove that each target element is written exactly once, from a rank that holds it.

        The boxes of a target rank lie within its part, do not overlap, and have together its
        volume: so they cover it exactly. Both sides use the same global indices, so an element
        comes from its own place in the array. Then the verifier of collectives proves the
        ``schedule``, unless the parts cut the array into too many pieces.

        Raises:
            ScheduleError: A move breaks the proof; the message names it.
        """
        self._verify_boxes()
        if math.prod(self.shape):
            with contextlib.suppress(InvalidUsage):  # too many pieces
                self.schedule.verify()

    def _verify_boxes(self) -> None:
        for rank, part in self.dst_boxes.items():
            moves = self.moves_to(rank)
            for move in moves:
                self._check_within(move, self.src_boxes[move.src], "the source")
                self._check_within(move, part, "the target")
            self._check_disjoint(moves)
            moved = sum(volume(move.box) for move in moves)
            if moved != volume(part):
                raise ScheduleError(
                    f"rank {rank} gets {moved} elements, its part has {volume(part)}"
                )

    def _check_within(self, move: Move, part: Box, name: str) -> None:
        if intersect(move.box, part) != move.box:
            raise ScheduleError(f"{move}: {name} holds {part} only")

    def _check_disjoint(self, moves: list[Move]) -> None:
        # Sorted by the first dimension, a box overlaps only boxes that begin before its end.
        ordered = sorted(moves, key=lambda move: move.box)
        for i, move in enumerate(ordered):
            for other in ordered[i + 1 :]:
                if self.shape and other.box[0][0] >= move.box[0][1]:
                    break
                if not self.shape or intersect(move.box, other.box):
                    raise ScheduleError(f"{move}, and {other}: both write the same elements")

    # ---- cost

    def load(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the bytes that each source rank sends and each target rank receives."""
        sent: dict[int, int] = dict.fromkeys(self.src.ranks, 0)
        received: dict[int, int] = dict.fromkeys(self.dst.ranks, 0)
        for move in self.moves:
            nbytes = volume(move.box) * self.itemsize
            sent[move.src] += nbytes
            received[move.dst] += nbytes
        return sent, received

    def predicted_us(self, gb_s: float = GB_S, transfer_us: float = TRANSFER_US) -> float:
        """Return the time if each rank sends and receives at ``gb_s``, in us."""
        sent, received = self.load()
        peers = max((len({m.dst for m in self.moves_from(r)}) for r in self.src.ranks), default=0)
        largest = max([*sent.values(), *received.values(), 0])
        return peers * transfer_us + largest / (gb_s * 1e3)

    def bound_us(self, gb_s: float = GB_S) -> float:
        """Return a time that no plan between these meshes can beat, in us.

        A target rank receives its part; the parts that only some source ranks hold leave through
        these.
        """
        _, received = self.load()
        groups: dict[Box, list[int]] = defaultdict(list)
        for rank, box in self.src_boxes.items():
            groups[box].append(rank)
        share = 0.0
        for box, ranks in groups.items():
            wanted = sum(
                volume(common)
                for part in self.dst_boxes.values()
                if (common := intersect(box, part)) is not None
            )
            share = max(share, wanted * self.itemsize / len(ranks))
        return max([share, *received.values(), 0.0]) / (gb_s * 1e3)

    def explain(self) -> str:
        """Return moves, balance, and the predicted time beside its bound, as text."""
        sent, received = self.load()
        total = sum(sent.values())
        busy = [n for n in sent.values() if n]
        balance = max(busy) * len(sent) / total if total else 1.0
        lines = [
            f"{self.shape} of {self.dtype} from {self.src.shape} {list(self.src.placements)} to "
            f"{self.dst.shape} {list(self.dst.placements)}",
            f"{len(self.moves)} moves, {total} bytes; a source rank sends {min(sent.values())} to "
            f"{max(sent.values())}, {balance:.2f} x the mean at most; a target rank receives "
            f"{min(received.values())} to {max(received.values())}",
            f"predicted {self.predicted_us():.0f} us at {GB_S:g} GB/s per rank; no plan takes less "
            f"than {self.bound_us():.0f} us",
        ]
        shown = [f"  {move}" for move in self.moves[:16]]
        more = len(self.moves) - len(shown)
        return "\n".join([*lines, *shown, *([f"  and {more} more"] if more > 0 else [])])

    # ---- memory

    def offsets(self, move: Move) -> tuple[Any, Any, int]:
        """Return (offsets in the source's part, offsets in the target's part, bytes) of the
        contiguous pieces of a move; offsets are int64 arrays in bytes.
        """
        return contiguous_pieces(
            move.box, self.src_boxes[move.src], self.dst_boxes[move.dst], self.itemsize
        )

    def interpret(self, tensors: Mapping[int, Any]) -> dict[int, Any]:
        """Return the part of each target rank, by NumPy indices: the meaning of the plan."""
        out = {}
        for rank, part in self.dst_boxes.items():
            out[rank] = np.zeros([b - a for a, b in part], next(iter(tensors.values())).dtype)
            for move in self.moves_to(rank):
                source = tensors[move.src][_indices(move.box, self.src_boxes[move.src])]
                out[rank][_indices(move.box, part)] = source
        return out

    # ---- run

    def run(
        self,
        agent_or_comm: Agent | Any,
        tensors: Any,
        *,
        targets: Sequence[ShardTarget] | Mapping[int, bytes] | None = None,
        rank: int | None = None,
        version: int = 0,
        timeout: float | None = None,
    ) -> Any:
        """Move this process's share; see ``reshard.run.run_with_agent`` and ``run_with_comm``."""
        from miraccl.p2p.reshard import run

        if hasattr(agent_or_comm, "all_gather"):
            return run.run_with_comm(self, agent_or_comm, tensors)
        return run.run_with_agent(
            self,
            agent_or_comm,
            tensors,
            targets=targets,
            rank=rank,
            version=version,
            timeout=timeout,
        )


def reshard(*, src: Mesh, dst: Mesh, shape: Sequence[int], dtype: Any) -> ReshardPlan:
    """Plan the moves of an array from one mesh to another, balanced over replicas.

    Args:
        src: Mesh that holds the array.
        dst: Mesh that gets it; any shape and placements.
        shape: Shape of the whole array.
        dtype: Element type, a NumPy or PyTorch type or a name.

    Raises:
        InvalidUsage: A mesh shards a dimension that the array does not have.
    """
    dims = tuple(int(n) for n in shape)
    if any(n < 0 for n in dims):
        raise InvalidUsage(f"cannot reshard: shape {dims} has a negative dimension")
    src.check(dims, "source")
    dst.check(dims, "target")
    name, itemsize = _element(dtype)
    return ReshardPlan(
        src=src,
        dst=dst,
        shape=dims,
        itemsize=itemsize,
        dtype=name,
        moves=tuple(_choose_moves(src.boxes(dims), dst.boxes(dims), dims)),
    )


def _element(dtype: Any) -> tuple[str, int]:
    """Return name and bytes of an element type."""
    if hasattr(dtype, "itemsize") and not isinstance(dtype, np.dtype):  # torch.dtype
        return str(dtype).removeprefix("torch."), int(dtype.itemsize)
    try:
        kind = np.dtype(dtype)
    except TypeError:
        try:
            import ml_dtypes

            kind = np.dtype(getattr(ml_dtypes, str(dtype)))
        except (AttributeError, TypeError):
            raise InvalidUsage(f"cannot reshard: dtype {dtype!r} is not known") from None
    return str(kind), kind.itemsize


def _choose_moves(
    sources: Mapping[int, Box], targets: Mapping[int, Box], shape: tuple[int, ...]
) -> list[Move]:
    """Choose a replica for each common box: the least loaded, the largest boxes first."""
    groups: dict[Box, list[int]] = defaultdict(list)
    for rank, box in sources.items():
        if volume(box):
            groups[box].append(rank)
    wanted = [
        (volume(common), rank, common, replicas)
        for rank, part in targets.items()
        for box, replicas in groups.items()
        if (common := intersect(box, part)) is not None
    ]
    load: dict[int, int] = defaultdict(int)
    moves = []
    mean = sum(item[0] for item in wanted) / max(1, len(sources))
    for size, rank, box, replicas in sorted(wanted, key=lambda item: (-item[0], item[1], item[2])):
        # A box that alone is more than a rank's share is cut among its replicas.
        pieces = min(len(replicas), max(1, math.ceil(size / mean))) if mean else 1
        for piece in cut(box, pieces):
            source = min(replicas, key=lambda r: (load[r], r))
            load[source] += volume(piece)
            moves.append(Move(src=source, dst=rank, box=piece))
    return sorted(moves, key=lambda move: (move.dst, move.box, move.src))


def cut(box: Box, pieces: int) -> list[Box]:
    """Cut a box into up to ``pieces`` along its first long dimension."""
    if pieces <= 1:
        return [box]
    dim = next((d for d, (a, b) in enumerate(box) if b - a >= pieces), None)
    if dim is None:
        return [box]
    start, stop = box[dim]
    bounds = [start + (stop - start) * i // pieces for i in range(pieces + 1)]
    return [(*box[:dim], (a, b), *box[dim + 1 :]) for a, b in itertools.pairwise(bounds)]


def _indices(box: Box, part: Box) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, part, strict=True))


def contiguous_pieces(box: Box, src: Box, dst: Box, itemsize: int) -> tuple[Any, Any, int]:
    """Return byte offsets of the contiguous pieces of ``box`` in two row-major parts, and the
    bytes of a piece.
    """
    ndim = len(box)
    # Trailing dimensions that the box covers wholly on both sides are one run.
    inner = ndim
    while inner > 0 and (inner == ndim or (box[inner] == src[inner] == dst[inner])):
        inner -= 1
    run = math.prod(b - a for a, b in box[inner:])
    offsets = []
    for part in (src, dst):
        sizes = [b - a for a, b in part]
        strides = [math.prod(sizes[d + 1 :]) for d in range(ndim)]
        total = np.array([sum((box[d][0] - part[d][0]) * strides[d] for d in range(ndim))])
        for d in range(inner):
            steps = np.arange(box[d][1] - box[d][0], dtype=np.int64) * strides[d]
            total = (total[:, None] + steps).reshape(-1)
        offsets.append(total.astype(np.int64) * itemsize)
    return offsets[0], offsets[1], run * itemsize
