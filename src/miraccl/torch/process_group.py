"""The process group: c10d's calls, each staged into flat arrays and given to the communicator.

PyTorch lets Python subclass ``ProcessGroup``, not ``Backend`` (``PyProcessGroup.hpp``): the object that this module makes *is* the group
of ``init_process_group``, for all devices.  C++ callers (DDP's reducer, the functional collectives) reach the methods that
``PyProcessGroup`` forwards; Python callers reach them all.

A call stages its arguments on the caller's thread, so that errors in them are raised there, and hands the rest to the lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from miraccl.comm.communicator import Communicator
from miraccl.errors import InvalidUsage
from miraccl.torch import operators
from miraccl.torch.failures import as_backend_errors
from miraccl.torch.operators import recipe
from miraccl.torch.tensors import Staged, stage, stage_list
from miraccl.torch.work import Lane, TransferWork, Work

NAME = "miraccl"
CLOSE_WAIT_S = 10.0

_ALL_REDUCE = c10d.AllreduceOptions()
_ALL_REDUCE_COALESCED = c10d.AllreduceCoalescedOptions()
_ALL_GATHER = c10d.AllgatherOptions()
_ALL_TO_ALL = c10d.AllToAllOptions()
_BARRIER = c10d.BarrierOptions()
_BROADCAST = c10d.BroadcastOptions()
_GATHER = c10d.GatherOptions()
_REDUCE = c10d.ReduceOptions()
_REDUCE_SCATTER = c10d.ReduceScatterOptions()
_SCATTER = c10d.ScatterOptions()


class ProcessGroupMiraccl(dist.ProcessGroup):
    """One communicator as a ``torch.distributed`` group; ``communicator`` is there for its own calls (explain, last_plan)."""

    def __init__(self, store: Any, communicator: Communicator) -> None:
        super().__init__(communicator.rank, communicator.nranks)  # the constructor with a store makes no object that can be overridden
        self._store = store
        self._group_name = self._group_desc = ""
        self.communicator = communicator
        self._lane = Lane(f"{NAME}-torch-{communicator.rank}")

    # The base class keeps its names in backends, of which this group has none.

    def name(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text

    @property
    def group_name(self) -> str:
        return self._group_name

    @property
    def group_desc(self) -> str:
        return self._group_desc

    def getBackendName(self) -> str:  # noqa: N802  (the trampoline asks under C++'s names)
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_desc

    def get_group_store(self) -> Any:
        return self._store

    # ---- collectives

    def allreduce(self, tensors: Sequence[Any], opts: Any = _ALL_REDUCE) -> Work:
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = _ALL_REDUCE_COALESCED) -> Work:
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: Sequence[Any], opts: Any) -> Work:
        with as_backend_errors():
            jobs = []
            for tensor in tensors:
                how = recipe(opts.reduceOp, tensor.dtype, name)
                jobs.append((stage(tensor, name, how.form), how))

        def action() -> None:
            for staged, how in jobs:
                operators.all_reduce(self.communicator, staged.array, how)
                staged.store()

        return self._go(name, tensors, action, opts)

    def broadcast(self, tensors: Sequence[Any], opts: Any = _BROADCAST) -> Work:
        with as_backend_errors():
            jobs = [stage(t, "broadcast") for t in tensors]

        def action() -> None:
            for staged in jobs:
                self.communicator.broadcast(staged.array, opts.rootRank)
                staged.store()

        return self._go("broadcast", tensors, action, opts)

    def reduce(self, tensors: Sequence[Any], opts: Any = _REDUCE) -> Work:
        tensor, root = _only(tensors, "reduce"), opts.rootRank
        with as_backend_errors():
            how = recipe(opts.reduceOp, tensor.dtype, "reduce")
            staged = stage(tensor, "reduce", how.form)

        def action() -> None:
            operators.reduce(self.communicator, staged.array, root, how)
            if self.communicator.rank == root:
                staged.store()

        return self._go("reduce", tensors, action, opts)

    def allgather(self, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = _ALL_GATHER) -> Work:
        return self._all_gather_lists("all_gather", output_lists, inputs, opts)

    def allgather_coalesced(self, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = _ALL_GATHER) -> Work:
        """``output_lists[r][i]`` becomes rank r's ``inputs[i]``."""
        by_input = [[of_rank[i] for of_rank in output_lists] for i in range(len(inputs))]
        return self._all_gather_lists("all_gather_coalesced", by_input, inputs, opts)

    def _all_gather_lists(self, name: str, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> Work:
        with as_backend_errors():
            jobs = []
            for outputs, tensor in zip(output_lists, inputs, strict=True):
                source = stage(tensor, name)
                target = stage_list(outputs, name, load=False)
                jobs.append((source, _counts(target), target))

        def action() -> None:
            for source, counts, target in jobs:
                if len(set(counts)) == 1:
                    self.communicator.all_gather(source.array, target.array)
                else:
                    self.communicator.all_gather_v(source.array, counts, target.array)
                target.store()

        return self._go(name, [t for outputs in output_lists for t in outputs], action, opts)

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = _ALL_GATHER) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = _ALL_GATHER) -> Work:
        name = "all_gather_into_tensor"
        with as_backend_errors():
            jobs = [(stage(x, name), stage(out, name)) for out, x in zip(outputs, inputs, strict=True)]

        def action() -> None:
            for source, target in jobs:
                self.communicator.all_gather(source.array, target.array)
                target.store()

        return self._go(name, outputs, action, opts)

    def reduce_scatter(self, outputs: Sequence[Any], input_lists: Sequence[Sequence[Any]], opts: Any = _REDUCE_SCATTER) -> Work:
        name = "reduce_scatter"
        with as_backend_errors():
            jobs = []
            for output, inputs in zip(outputs, input_lists, strict=True):
                how = recipe(opts.reduceOp, output.dtype, name)
                source = stage_list(inputs, name, how.form)
                jobs.append((source, _counts(source), stage(output, name, how.form), how))

        def action() -> None:
            for source, counts, target, how in jobs:
                if len(set(counts)) == 1:
                    operators.reduce_scatter(self.communicator, source.array, target.array, how)
                else:
                    operators.reduce_scatter_v(self.communicator, source.array, counts, target.array, how)
                target.store()

        return self._go(name, outputs, action, opts)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = _REDUCE_SCATTER) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = _REDUCE_SCATTER) -> Work:
        name = "reduce_scatter_tensor"
        with as_backend_errors():
            jobs = []
            for output, tensor in zip(outputs, inputs, strict=True):
                how = recipe(opts.reduceOp, output.dtype, name)
                jobs.append((stage(tensor, name, how.form), stage(output, name, how.form), how))

        def action() -> None:
            for source, target, how in jobs:
                operators.reduce_scatter(self.communicator, source.array, target.array, how)
                target.store()

        return self._go(name, outputs, action, opts)

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = _ALL_TO_ALL) -> Work:
        name = "all_to_all"
        with as_backend_errors():
            source = stage_list(inputs, name)
            target = stage_list(outputs, name, load=False)

        def action() -> None:
            self.communicator.all_to_all_v(source.array, _counts(source), _counts(target), target.array)
            target.store()

        return self._go(name, outputs, action, opts)

    def all_to_all_single(
        self, output: Any, tensor: Any, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = _ALL_TO_ALL
    ) -> Work:
        """Splits are in rows. Either none on all ranks (equal blocks) or some on all ranks: what the others gave cannot be seen here."""
        name = "all_to_all_single"
        with as_backend_errors():
            source, target = stage(tensor, name), stage(output, name)
            sends, receives = self._splits(source, input_splits), self._splits(target, output_splits)

        def action() -> None:
            if output_splits or input_splits:
                self.communicator.all_to_all_v(source.array, sends, receives, target.array)
            else:
                self.communicator.all_to_all(source.array, target.array)
            target.store()

        return self._go(name, [output], action, opts)

    def _splits(self, staged: Staged, rows: Sequence[int]) -> list[int]:
        """Counts of array elements per rank from counts of rows; equal shares where there are none."""
        tensor = staged.tensors[0]
        if not rows:
            return [staged.array.size // self.communicator.nranks] * self.communicator.nranks
        length = tensor.shape[0] if tensor.dim() else 1
        if sum(rows) != length:
            raise InvalidUsage(f"all_to_all_single: the splits {list(rows)} add up to {sum(rows)}, the tensor has {length} rows")
        per_row = staged.array.size // length if length else 0
        return [n * per_row for n in rows]

    def gather(self, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = _GATHER) -> Work:
        name, root = "gather", opts.rootRank
        outputs = _only(output_lists, name) if self.communicator.rank == root else []
        with as_backend_errors():
            source = stage(_only(inputs, name), name)
            target = stage_list(outputs, name, load=False) if outputs else None

        def action() -> None:
            self.communicator.gather(source.array, root, None if target is None else target.array)
            if target is not None:
                target.store()

        return self._go(name, outputs, action, opts)

    def scatter(self, outputs: Sequence[Any], input_lists: Sequence[Sequence[Any]], opts: Any = _SCATTER) -> Work:
        name, root = "scatter", opts.rootRank
        with as_backend_errors():
            target = stage(_only(outputs, name), name)
            source = stage_list(_only(input_lists, name), name) if self.communicator.rank == root else None

        def action() -> None:
            self.communicator.scatter(None if source is None else source.array, root, target.array)
            target.store()

        return self._go(name, outputs, action, opts)

    def barrier(self, opts: Any = _BARRIER) -> Work:
        return self._go("barrier", [], self.communicator.barrier, opts)

    # ---- point to point

    def send(self, tensors: Sequence[Any], dst: int, tag: int = 0) -> Work:
        return self._transfer("send", tensors, dst, tag, self.communicator.send)

    def recv(self, tensors: Sequence[Any], src: int, tag: int = 0) -> Work:
        return self._transfer("recv", tensors, src, tag, self.communicator.recv)

    def _transfer(self, name: str, tensors: Sequence[Any], peer: int, tag: int, call: Callable[..., Any]) -> Work:
        with as_backend_errors():
            if tag:
                raise InvalidUsage(f"{name}: tag is {tag}; messages between two ranks are matched by their order, without tags")
            staged = stage(_only(tensors, name), name)
            after = staged.store if name == "recv" else _nothing
            return TransferWork(name, tensors, self._lane, lambda: call(staged.array, peer, async_op=True), after)

    def recv_anysource(self, tensors: Sequence[Any], tag: int = 0) -> NoReturn:
        with as_backend_errors():
            raise InvalidUsage("recv: a receive names the rank it receives from; 'any source' is not supported")

    # ---- names that older callers use

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- life

    def shutdown(self) -> None:
        """From ``destroy_process_group``: end after what is pending."""
        if not self._lane.close(CLOSE_WAIT_S):
            self.communicator.abort("the process group was destroyed while an operation was pending")
            self._lane.close(CLOSE_WAIT_S)
        self.communicator.finalize()

    def abort(self) -> None:
        """End now, on all ranks."""
        self.communicator.abort("the process group was aborted")
        self.shutdown()

    def _go(self, name: str, tensors: Sequence[Any], action: Callable[[], Any], opts: Any) -> Work:
        if opts.asyncOp:
            return self._lane.submit(Work(name, tensors), action)
        self._lane.run(name, action)
        return Work.finished(name, tensors)


def _only(items: Sequence[Any], name: str) -> Any:
    if len(items) != 1:
        with as_backend_errors():
            raise InvalidUsage(f"{name}: one tensor (or list of tensors) a call, got {len(items)}")
    return items[0]


def _counts(staged: Staged) -> list[int]:
    """Array elements of each tensor of a list."""
    return [t.numel() * staged.width for t in staged.tensors]


def _nothing() -> None:
    pass
