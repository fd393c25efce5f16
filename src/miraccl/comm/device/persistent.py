"""Prepared operations on GPU memory, and what an operation returns before it has run (groups ask for that, too)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miraccl.comm.device.memory import device_view, empty_like, lies_on_gpu

#: operations -> where in the arguments of the public methods the array for the result stands, and the root
_PLACE_OF_OUT = {
    "all_reduce": 1,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "reduce": 2,
    "gather": 2,
    "scatter": 2,
    "all_gather_v": 2,
    "reduce_scatter_v": 2,
    "all_to_all_v": 3,
    "gather_v": 3,
    "scatter_v": 3,
}
_PLACE_OF_ROOT = {"reduce": 1, "gather": 1, "scatter": 1, "gather_v": 2, "scatter_v": 2}


def result_of(name: str, args: Sequence[Any], gpu: Any) -> tuple[Any, tuple[Any, ...]]:
    """(what an operation of ``gpu`` returns, its arguments with an array for the result), where the operation has not run yet.

    ``args`` are in the order of the public methods, all of them.  Arrays that cannot be used are refused now.
    """
    rank, nranks = gpu.rank, gpu.nranks
    unused = None  # by ranks that are not the root
    if name in _PLACE_OF_ROOT and args[_PLACE_OF_ROOT[name]] != rank:
        unused = 0 if name.startswith("scatter") else _PLACE_OF_OUT[name]
    for place, x in enumerate(args):
        if place != unused and lies_on_gpu(x):
            device_view(x, "out" if place == _PLACE_OF_OUT.get(name) else "x", name, gpu=gpu.gpu)
    if name == "barrier":
        return None, ()
    given = list(args)
    at, root = _PLACE_OF_OUT.get(name), given[_PLACE_OF_ROOT[name]] if name in _PLACE_OF_ROOT else rank
    if at is None:  # broadcast
        return given[0], tuple(given)
    if name in ("all_reduce", "reduce"):
        return given[0] if given[at] is None or rank != root else given[at], tuple(given)
    if name in ("gather", "gather_v") and rank != root:
        return None, tuple(given)
    if given[at] is None and given[0] is not None:
        count = _count_of(name, device_view(given[0], "x", name).count, given, rank, nranks)
        given[at] = empty_like(given[0], count, name)
    return given[at], tuple(given)


def _count_of(name: str, count: int, given: Sequence[Any], rank: int, nranks: int) -> int:
    """Elements of the result for an input of ``count``."""
    match name:
        case "all_gather" | "gather":
            return count * nranks
        case "reduce_scatter" | "scatter":
            return count // nranks
        case "all_gather_v" | "gather_v":
            return sum(given[1])
        case "reduce_scatter_v" | "scatter_v":
            return int(given[1][rank])
        case "all_to_all_v":
            return sum(given[2])
    return count


class DevicePersistent:
    """A prepared operation on GPU memory: ``op()`` enqueues it in the current stream, ``op(stream=...)`` in another. Buffers are bound."""

    def __init__(self, gpu: Any, name: str, args: Sequence[Any], cpu_plan: Any) -> None:
        """``cpu_plan`` is the word that names the last plan on CPU memory."""
        self.name, self._gpu = name, gpu
        self.result, bound = result_of(name, args, gpu)
        self._method, self._args, self._cpu_plan = getattr(gpu, name), bound, cpu_plan

    def __call__(self, *, stream: Any = None) -> Any:
        self._cpu_plan[0] = 0
        self._method(*self._args, stream=stream)
        return self.result

    def __repr__(self) -> str:
        return f"<DevicePersistent {self.name}>"
