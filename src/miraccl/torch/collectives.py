"""The collectives of c10d, staged into flat arrays and passed to the communicator.

Arguments are staged on the caller's thread, so errors in them are raised there; ``_start`` runs the
rest.  CPU and GPU memory share this code: a staged array is a NumPy array or a tensor, and the
communicator accepts both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch._C import _distributed_c10d as c10d

from miraccl.errors import InvalidUsage
from miraccl.ops.arguments import counts_of, peer_rank
from miraccl.torch import operators, sparse
from miraccl.torch.agreement import refuse_together
from miraccl.torch.failures import as_backend_errors
from miraccl.torch.forms import short_form
from miraccl.torch.operators import reduction_plan
from miraccl.torch.routing import by_device
from miraccl.torch.tensors import Staged, check_result, stage, stage_list

if TYPE_CHECKING:
    from miraccl.api.communicator import Communicator
    from miraccl.torch.work import Work, WorkQueue

_ALL_REDUCE = c10d.AllreduceOptions()
_ALL_REDUCE_COALESCED = c10d.AllreduceCoalescedOptions()
_ALL_GATHER = c10d.AllgatherOptions()
_ALL_TO_ALL = c10d.AllToAllOptions()
_BROADCAST = c10d.BroadcastOptions()
_GATHER = c10d.GatherOptions()
_REDUCE = c10d.ReduceOptions()
_REDUCE_SCATTER = c10d.ReduceScatterOptions()
_SCATTER = c10d.ScatterOptions()


class GroupCollectives:
    """GroupCollectives of a process group, under every name PyTorch has given them."""

    communicator: Communicator
    _work_queue: WorkQueue

    def _start(
        self,
        name: str,
        tensors: Sequence[Any],
        staged: Sequence[Staged],
        action: Callable[[], Any],
        opts: Any,
        value: Callable[[], Sequence[Any]] | None = None,
        inputs: Sequence[Any] | None = None,
    ) -> Work:
        """Run ``action`` on the thread or stream that serves the staged arrays.

        Args:
            name: Operation name for errors and the profiler.
            tensors: Tensors that receive the result.
            staged: Flat arrays that the operation reads and writes.
            action: The operation itself.
            opts: Options of c10d: ``timeout`` and ``asyncOp``.
            value: Builds the value of futures on GPUs where it differs from ``tensors``.
            inputs: Tensors that the profiler shows; default those of the first staged array.
        """
        raise NotImplementedError

    @by_device("allreduce")
    @short_form(c10d.AllreduceOptions, "op", "timeout", lead=1, tensor_at=0)
    def allreduce(self, tensors: Sequence[Any], opts: Any = _ALL_REDUCE) -> Work:
        single_item(tensors, "all_reduce")
        return self._all_reduce("all_reduce", tensors, opts)

    @by_device("allreduce_coalesced")
    def allreduce_coalesced(
        self, tensors: Sequence[Any], opts: Any = _ALL_REDUCE_COALESCED
    ) -> Work:
        if not tensors:
            with as_backend_errors():
                raise InvalidUsage("all_reduce_coalesced: the list has no tensors")
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: Sequence[Any], opts: Any) -> Work:
        with as_backend_errors():
            jobs, scattered = [], []
            for tensor in tensors:
                if sparse.is_sparse(tensor):
                    sparse.check_sum(opts.reduceOp, name)
                    scattered.append(tensor)
                else:
                    how = reduction_plan(opts.reduceOp, tensor.dtype, name)
                    jobs.append((stage(tensor, name, how.encoding), how))

        def action() -> None:
            for tensor in scattered:
                sparse.all_reduce(self.communicator, tensor, name)
            for staged, plan in jobs:
                operators.all_reduce(self.communicator, staged.array, plan)
                staged.store()

        arrays = [staged for staged, _ in jobs]
        return self._start(name, tensors, arrays, action, opts, inputs=tensors)

    def all_reduce_sparse(self, tensors: Sequence[Any], opts: Any = _ALL_REDUCE) -> Work:
        """Sum one tensor in CPU memory in which most blocks are zero."""
        name = "all_reduce_sparse"
        with as_backend_errors():
            staged = stage(single_item(tensors, name), name)

        def action() -> None:
            self.communicator.all_reduce_sparse(staged.array)
            staged.store()

        return self._start(name, tensors, [staged], action, opts)

    @by_device("broadcast")
    @short_form(c10d.BroadcastOptions, "root", "timeout", lead=1, tensor_at=0)
    def broadcast(self, tensors: Sequence[Any], opts: Any = _BROADCAST) -> Work:
        with as_backend_errors():
            staged, root = (
                stage(single_item(tensors, "broadcast"), "broadcast"),
                self._root(opts, "broadcast"),
            )

        def action() -> None:
            self.communicator.broadcast(staged.array, root)
            staged.store()

        return self._start("broadcast", tensors, [staged], action, opts)

    @by_device("reduce")
    @short_form(c10d.ReduceOptions, "root", "op", "timeout", lead=1, tensor_at=0)
    def reduce(self, tensors: Sequence[Any], opts: Any = _REDUCE) -> Work:
        with as_backend_errors():
            tensor, root = single_item(tensors, "reduce"), self._root(opts, "reduce")
            plan = reduction_plan(opts.reduceOp, tensor.dtype, "reduce")
            staged = stage(tensor, "reduce", plan.encoding)

        def action() -> None:
            operators.reduce(self.communicator, staged.array, root, plan)
            if self.communicator.rank == root:
                staged.store()

        return self._start("reduce", tensors, [staged], action, opts)

    @by_device("allgather")
    @short_form(c10d.AllgatherOptions, "timeout", lead=2, tensor_at=1)
    def allgather(
        self, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = _ALL_GATHER
    ) -> Work:
        single_item(inputs, "all_gather")
        return self._all_gather_lists("all_gather", output_lists, inputs, opts)

    @by_device("allgather_coalesced")
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = _ALL_GATHER
    ) -> Work:
        """Gather each of ``inputs`` from all ranks: ``output_lists[r][i]`` becomes rank r's
        ``inputs[i]``.

        Arguments that one rank refuses are refused on all ranks.
        """
        name = "all_gather_coalesced"
        error, by_input, jobs = None, [], []
        try:
            by_input = _by_input(output_lists, inputs, name)
            for output in itertools.chain.from_iterable(by_input):
                check_result(output, name)
            jobs = self._gather_jobs(name, by_input, inputs)
        except InvalidUsage as refused:
            error, by_input, jobs = refused, [], []

        def agree() -> None:
            refuse_together(self.communicator, error)

        if any(tensor.is_cuda for tensor in inputs):  # kernels cannot wait for the agreement
            self._work_queue.run(name, agree)
            return self._start_gathers(name, by_input, inputs, jobs, opts)
        return self._start_gathers(name, by_input, inputs, jobs, opts, agree)

    def _all_gather_lists(
        self, name: str, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any
    ) -> Work:
        with as_backend_errors():
            jobs = self._gather_jobs(name, output_lists, inputs)
        return self._start_gathers(name, output_lists, inputs, jobs, opts)

    def _gather_jobs(
        self, name: str, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any]
    ) -> list[tuple[Staged, Staged]]:
        nranks = self.communicator.nranks
        return [
            (stage(tensor, name), stage_list(outputs, name, load=False, nranks=nranks))
            for outputs, tensor in _paired(output_lists, inputs, name)
        ]

    def _start_gathers(
        self,
        name: str,
        output_lists: Sequence[Sequence[Any]],
        inputs: Sequence[Any],
        jobs: Sequence[tuple[Staged, Staged]],
        opts: Any,
        before: Callable[[], None] | None = None,
    ) -> Work:
        """Start the gathers of ``jobs``; ``before`` runs first, in the same place."""

        def action() -> None:
            if before is not None:
                before()
            for source, target in jobs:
                if len(set(target.counts)) == 1:
                    self.communicator.all_gather(source.array, target.array)
                else:
                    self.communicator.all_gather_v(source.array, target.counts, target.array)
                target.store()

        tensors, staged = (
            [t for outputs in output_lists for t in outputs],
            [s for job in jobs for s in job],
        )
        return self._start(
            name,
            tensors,
            staged,
            action,
            opts,
            lambda: [whole for _, target in jobs for whole in target.stacked],
            inputs,
        )

    @by_device("all_gather_single", "_allgather_base")
    def all_gather_single(self, output: Any, tensor: Any, opts: Any = _ALL_GATHER) -> Work:
        return self._all_gather_singles([output], [tensor], opts)

    @by_device("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = _ALL_GATHER
    ) -> Work:
        return self._all_gather_singles(outputs, inputs, opts)

    def _all_gather_singles(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Work:
        name = "all_gather_into_tensor"
        with as_backend_errors():
            jobs = [(stage(x, name), stage(out, name)) for out, x in _paired(outputs, inputs, name)]

        def action() -> None:
            for source, target in jobs:
                self.communicator.all_gather(source.array, target.array)
                target.store()

        staged = [s for job in jobs for s in job]
        return self._start(name, outputs, staged, action, opts, inputs=inputs)

    @by_device("reduce_scatter")
    @short_form(c10d.ReduceScatterOptions, "op", "timeout", lead=2, tensor_at=0)
    def reduce_scatter(
        self,
        outputs: Sequence[Any],
        input_lists: Sequence[Sequence[Any]],
        opts: Any = _REDUCE_SCATTER,
    ) -> Work:
        name = "reduce_scatter"
        with as_backend_errors():
            single_item(outputs, name)
            jobs = []
            for output, inputs in _paired(outputs, input_lists, name):
                plan = reduction_plan(opts.reduceOp, output.dtype, name)
                source = stage_list(inputs, name, plan.encoding, nranks=self.communicator.nranks)
                jobs.append((source, stage(output, name, plan.encoding), plan))

        def action() -> None:
            for source, target, how in jobs:
                if len(set(source.counts)) == 1:
                    operators.reduce_scatter(self.communicator, source.array, target.array, how)
                else:
                    operators.reduce_scatter_v(
                        self.communicator, source.array, source.counts, target.array, how
                    )
                target.store()

        return self._start(name, outputs, [s for job in jobs for s in job[:2]], action, opts)

    @by_device("reduce_scatter_single", "_reduce_scatter_base")
    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = _REDUCE_SCATTER) -> Work:
        return self._reduce_scatter_singles([output], [tensor], opts)

    @by_device("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = _REDUCE_SCATTER
    ) -> Work:
        return self._reduce_scatter_singles(outputs, inputs, opts)

    def _reduce_scatter_singles(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any
    ) -> Work:
        name = "reduce_scatter_tensor"
        with as_backend_errors():
            jobs = []
            for output, tensor in _paired(outputs, inputs, name):
                plan = reduction_plan(opts.reduceOp, output.dtype, name)
                jobs.append(
                    (stage(tensor, name, plan.encoding), stage(output, name, plan.encoding), plan)
                )

        def action() -> None:
            for source, target, how in jobs:
                operators.reduce_scatter(self.communicator, source.array, target.array, how)
                target.store()

        return self._start(name, outputs, [s for job in jobs for s in job[:2]], action, opts)

    @by_device("alltoall")
    def alltoall(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = _ALL_TO_ALL
    ) -> Work:
        name = "all_to_all"
        with as_backend_errors():
            source = stage_list(inputs, name, nranks=self.communicator.nranks)
            target = stage_list(outputs, name, load=False, nranks=self.communicator.nranks)

        def action() -> None:
            self.communicator.all_to_all_v(source.array, source.counts, target.counts, target.array)
            target.store()

        return self._start(name, outputs, [source, target], action, opts)

    @by_device("all_to_all_single", "alltoall_base")
    @short_form(c10d.AllToAllOptions, "timeout", lead=4)
    def all_to_all_single(
        self,
        output: Any,
        tensor: Any,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = _ALL_TO_ALL,
    ) -> Work:
        """Exchange blocks of rows; empty splits mean equal blocks.

        On CPU memory, ranks need not agree on whether they pass splits.
        """
        name = "all_to_all_single"
        with as_backend_errors():
            source, target = stage(tensor, name), stage(output, name)
            sends, receives = (
                self._element_counts(source, input_splits, name),
                self._element_counts(target, output_splits, name),
            )

        def action() -> None:
            # equal blocks are one kernel on a GPU; on the CPU the general form costs nothing
            if even_on_gpu:
                self.communicator.all_to_all(source.array, target.array)
            else:
                self.communicator.all_to_all_v(source.array, sends, receives, target.array)
            target.store()

        even_on_gpu = (
            tensor.is_cuda and not _has_splits(output_splits) and not _has_splits(input_splits)
        )
        return self._start(name, [output], [source, target], action, opts)

    def _element_counts(self, staged: Staged, splits: Sequence[int] | None, name: str) -> list[int]:
        """Convert splits in rows to element counts per rank; without splits, equal shares."""
        tensor, nranks = staged.tensors[0], self.communicator.nranks
        length = tensor.shape[0] if tensor.dim() else 1
        if not _has_splits(splits):
            if length % nranks:
                text = f"{name}: cannot split {length} rows evenly over {nranks} ranks"
                raise InvalidUsage(text, hint="pass splits")
            return [staged.count // nranks] * nranks
        rows = counts_of(splits, "a split", nranks, name)
        if sum(rows) != length:
            raise InvalidUsage(
                f"{name}: the splits {rows} add up to {sum(rows)}, the tensor has {length} rows"
            )
        per_row = staged.count // length if length else 0
        return [n * per_row for n in rows]

    @by_device("gather")
    @short_form(c10d.GatherOptions, "root", "timeout", lead=2, tensor_at=1)
    def gather(
        self, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = _GATHER
    ) -> Work:
        name = "gather"
        with as_backend_errors():
            root = self._root(opts, name)
            outputs = single_item(output_lists, name) if self.communicator.rank == root else []
            source = stage(single_item(inputs, name), name)
            target = (
                stage_list(outputs, name, load=False, nranks=self.communicator.nranks)
                if outputs
                else None
            )
            _check_equal_parts(target, source, name)

        return self._gather(name, outputs, source, target, root, opts)

    @by_device("gather_single")
    def gather_single(self, output: Any, tensor: Any, opts: Any = _GATHER) -> Work:
        """Gather into one tensor of the root (``dist.gather_single`` of PyTorch 2.15)."""
        name = "gather_single"
        with as_backend_errors():
            root = self._root(opts, name)
            source = stage(tensor, name)
            target = stage(output, name) if self.communicator.rank == root else None
        return self._gather(name, [output] if target else [], source, target, root, opts)

    def _gather(
        self,
        name: str,
        outputs: Sequence[Any],
        source: Staged,
        target: Staged | None,
        root: int,
        opts: Any,
    ) -> Work:
        def action() -> None:
            self.communicator.gather(source.array, root, None if target is None else target.array)
            if target is not None:
                target.store()

        return self._start(
            name, outputs, [source] if target is None else [source, target], action, opts
        )

    @by_device("scatter")
    @short_form(c10d.ScatterOptions, "root", "timeout", lead=2, tensor_at=0)
    def scatter(
        self, outputs: Sequence[Any], input_lists: Sequence[Sequence[Any]], opts: Any = _SCATTER
    ) -> Work:
        name = "scatter"
        with as_backend_errors():
            root = self._root(opts, name)
            target = stage(single_item(outputs, name), name)
            inputs = single_item(input_lists, name) if self.communicator.rank == root else []
            source = stage_list(inputs, name, nranks=self.communicator.nranks) if inputs else None
            _check_equal_parts(source, target, name)

        def action() -> None:
            self.communicator.scatter(None if source is None else source.array, root, target.array)
            target.store()

        return self._start(
            name,
            outputs,
            [target] if source is None else [source, target],
            action,
            opts,
            inputs=[] if source is None else source.tensors,
        )

    def _root(self, opts: Any, name: str) -> int:
        if getattr(opts, "rootTensor", 0) != 0:
            raise InvalidUsage(
                f"{name}: rootTensor is {opts.rootTensor}; allowed is 0: a rank has one tensor"
            )
        return peer_rank(opts.rootRank, "root", self.communicator.nranks, name)

    # ---- names that older and newer callers use

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _has_splits(splits: Sequence[int] | None) -> bool:
    """Return True if splits were given; an array of splits has no truth value."""
    return splits is not None and len(splits) > 0


def _check_equal_parts(whole: Staged | None, part: Staged, name: str) -> None:
    """Raise ``InvalidUsage`` unless each tensor of the root's list has as many elements as
    ``part``.
    """
    if whole is not None and any(count != part.count for count in whole.counts):
        sizes = [tensor.numel() for tensor in whole.tensors]
        text = (
            f"{name}: the tensors of the list have {sizes} elements; each must have "
            f"{part.tensors[0].numel()}, as every rank's tensor"
        )
        raise InvalidUsage(text, hint="all_to_all accepts different sizes")


def _paired(outputs: Sequence[Any], inputs: Sequence[Any], name: str) -> list[tuple[Any, Any]]:
    """Pair each output with its input."""
    if len(outputs) != len(inputs):
        raise InvalidUsage(
            f"{name}: got {len(outputs)} outputs for {len(inputs)} inputs; the numbers must match"
        )
    return list(zip(outputs, inputs, strict=True))


def _by_input(
    output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], name: str
) -> list[list[Any]]:
    """Return the outputs of each input, one per rank, from the lists of each rank."""
    by_rank = [_paired(of_rank, inputs, name) for of_rank in output_lists]
    for pairs in by_rank:
        for i, (output, tensor) in enumerate(pairs):
            if output.numel() != tensor.numel():
                raise InvalidUsage(
                    f"{name}: output {i} has {output.numel()} elements, "
                    f"but input {i} has {tensor.numel()}; the sizes must be equal"
                )
    return [[pairs[i][0] for pairs in by_rank] for i in range(len(inputs))]


def single_item(items: Sequence[Any], name: str) -> Any:
    """Return the only item of a list that c10d passes."""
    if len(items) != 1:
        with as_backend_errors():
            raise InvalidUsage(f"{name}: got {len(items)} tensors (or lists); pass one per call")
    return items[0]
