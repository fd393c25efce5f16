"""Meshes of ranks and the part of an array that each of them holds.

The rules are those of DTensor (``torch.distributed.tensor``): each axis of the mesh shards one
dimension of the array or replicates it. A dimension of ``n`` elements over ``k`` ranks is cut into
pieces of ``ceil(n / k)``; the last ones may be smaller or empty. Several axes that shard one
dimension cut it one after the other, in the order of the axes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from miraccl.errors import InvalidUsage

Box = tuple[tuple[int, int], ...]
"""Part of an array: (start, stop) in each dimension."""


@dataclass(frozen=True)
class Shard:
    """Placement: the axis shards dimension ``dim``."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Placement: the ranks of the axis hold the same."""


def parse_placement(given: Any) -> Shard | Replicate:
    """Return a placement from one of DTensor's, ours, or a text such as ``shard0``.

    Raises:
        InvalidUsage: It is none of these; partial sums and strided shards are not supported.
    """
    if isinstance(given, Shard | Replicate):
        return given
    if isinstance(given, str):
        if given.lower() in ("r", "replicate"):
            return Replicate()
        if found := re.fullmatch(r"(?:shard|s)\(?(-?\d+)\)?", given.lower()):
            return Shard(int(found[1]))
    kind = type(given).__name__
    if kind == "Replicate":
        return Replicate()
    if kind == "Shard":
        return Shard(int(given.dim))
    raise InvalidUsage(
        f"cannot make a mesh: placement {given!r}; allowed are Shard(dim), Replicate(), 'shard0' "
        "and 'replicate'"
    )


@dataclass(frozen=True, init=False)
class Mesh:
    """Ranks in a grid, and the placement of an array along each axis.

    Args:
        shape: Number of ranks along each axis.
        placements: Placement for each axis: ``Shard``, ``Replicate``, DTensor's, or texts.
        ranks: Numbers of the ranks in row-major order; default from 0 on.

    Raises:
        InvalidUsage: The numbers do not fit together.
    """

    shape: tuple[int, ...]
    placements: tuple[Shard | Replicate, ...]
    ranks: tuple[int, ...]

    def __init__(
        self,
        shape: int | Sequence[int],
        placements: Any,
        ranks: Sequence[int] | None = None,
    ) -> None:
        dims = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        if isinstance(placements, str) or not isinstance(placements, Sequence):
            placements = (placements,)
        count = math.prod(dims)
        numbers = tuple(range(count)) if ranks is None else tuple(int(r) for r in ranks)
        if not dims or any(n < 1 for n in dims):
            raise InvalidUsage(f"cannot make a mesh: shape {dims} has an axis without ranks")
        if len(placements) != len(dims):
            raise InvalidUsage(
                f"cannot make a mesh: {len(dims)} axes and {len(placements)} placements"
            )
        if len(numbers) != count or len(set(numbers)) != count:
            raise InvalidUsage(
                f"cannot make a mesh: shape {dims} needs {count} different ranks, got {numbers}"
            )
        object.__setattr__(self, "shape", dims)
        object.__setattr__(self, "placements", tuple(parse_placement(p) for p in placements))
        object.__setattr__(self, "ranks", numbers)

    @classmethod
    def from_dtensor(cls, tensor: Any) -> Mesh:
        """Return the mesh of a DTensor: its device mesh and placements.

        Args:
            tensor: A ``torch.distributed.tensor.DTensor``.

        Raises:
            InvalidUsage: A placement is neither sharded nor replicated.
        """
        mesh = tensor.device_mesh.mesh
        return cls(tuple(mesh.shape), tuple(tensor.placements), mesh.flatten().tolist())

    @property
    def nranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def coordinates(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (rank, coordinate) in row-major order."""
        return zip(self.ranks, itertools.product(*map(range, self.shape)), strict=True)

    def check(self, shape: tuple[int, ...], name: str) -> None:
        """Check that an array has every dimension that is sharded.

        Args:
            shape: Shape of the array.
            name: Name of the mesh for the error.

        Raises:
            InvalidUsage: A dimension is missing.
        """
        for placement in self.placements:
            if isinstance(placement, Shard) and not -len(shape) <= placement.dim < len(shape):
                raise InvalidUsage(
                    f"cannot reshard: the {name} mesh shards dimension {placement.dim} of an array "
                    f"of {len(shape)} dimensions"
                )

    def box(self, coordinate: tuple[int, ...], shape: tuple[int, ...]) -> Box:
        """Return the part of an array of ``shape`` at a coordinate of the mesh."""
        box = [(0, n) for n in shape]
        for index, size, placement in zip(coordinate, self.shape, self.placements, strict=True):
            if isinstance(placement, Shard):
                start, stop = box[placement.dim]
                piece = -(-(stop - start) // size)
                first = min(start + index * piece, stop)
                box[placement.dim] = first, min(first + piece, stop)
        return tuple(box)

    def boxes(self, shape: tuple[int, ...]) -> dict[int, Box]:
        """Return the part of an array of ``shape`` that each rank holds, by rank."""
        return {rank: self.box(coordinate, shape) for rank, coordinate in self.coordinates()}


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def intersect(first: Box, second: Box) -> Box | None:
    """Return the common part of two boxes, None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return common if all(start < stop for start, stop in common) else None
