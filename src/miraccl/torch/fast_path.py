"""Fast path for common calls: contiguous strided tensors, built-in reductions, no observers.

Such calls skip the staging and the closures of ``collectives``, which cost more than the launch of
a small operation.  Other calls, and the first call of a group on a GPU, take the slow path in
``collectives``.  In CPU memory only ``allreduce`` has a fast path: DDP calls it for every bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from miraccl.runtime.core_access import mark_collective
from miraccl.runtime.group import group
from miraccl.torch.collectives import GroupCollectives
from miraccl.torch.mixed_backends import OtherBackends
from miraccl.torch.operators import plain_operator
from miraccl.torch.profiled import profiling
from miraccl.torch.streams import GroupStreams
from miraccl.torch.tensors import is_plain_gpu_tensor, plain_cpu_array
from miraccl.torch.work import Work, seconds
from miraccl.types import Collective

#: Types for which ``torch._foreach_copy_`` copies many tensors with one kernel.
_FOREACH_DTYPES = frozenset(
    (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    )
)


class FastPathCollectives(GroupCollectives):
    """GroupCollectives with one tensor, an output and an input, or a list with one per rank."""

    _streams: GroupStreams | None
    _other_backends: OtherBackends | None
    _batch: list[Work] | None
    _sequence: int
    _on_one_host: bool

    def _on_work_queue(
        self,
        name: str,
        tensors: Sequence[Any],
        action: Callable[[], Any],
        limit: float | None,
        asynchronous: bool,
    ) -> Work:
        """Run ``action`` in the work queue, in call order, with a deadline of its own."""
        raise NotImplementedError

    # ---- one tensor, or an output and an input

    def allreduce(self, tensors: Sequence[Any], *rest: Any, **named: Any) -> Work:
        if _is_common_call(c10d.AllreduceOptions, rest, tensors) and self._is_unobserved():
            x, opts = tensors[0], rest[0]
            if (op := plain_operator(opts.reduceOp)) is not None:
                if (array := plain_cpu_array(x)) is not None:
                    self._sequence += 1
                    return self._on_work_queue(
                        "all_reduce",
                        tensors,
                        functools.partial(self.communicator.all_reduce, array, None, op),
                        seconds(opts.timeout),
                        opts.asyncOp,
                    )
                if self._eligible_on_gpu(tensors):
                    return self._call(
                        "all_reduce", tensors, tensors, opts, self.communicator.all_reduce, x, x, op
                    )
        return super().allreduce(tensors, *rest, **named)

    def broadcast(self, tensors: Sequence[Any], *rest: Any, **named: Any) -> Work:
        if _is_common_call(c10d.BroadcastOptions, rest, tensors) and self._eligible_on_gpu(tensors):
            return self._call(
                "broadcast",
                tensors,
                tensors,
                rest[0],
                self.communicator.broadcast,
                tensors[0],
                rest[0].rootRank,
            )
        return super().broadcast(tensors, *rest, **named)

    def reduce(self, tensors: Sequence[Any], *rest: Any, **named: Any) -> Work:
        if _is_common_call(c10d.ReduceOptions, rest, tensors) and self._eligible_on_gpu(tensors):
            x, opts = tensors[0], rest[0]
            if (op := plain_operator(opts.reduceOp)) is not None:
                return self._call(
                    "reduce",
                    tensors,
                    tensors,
                    opts,
                    self.communicator.reduce,
                    x,
                    opts.rootRank,
                    None,
                    op,
                )
        return super().reduce(tensors, *rest, **named)

    def all_gather_single(self, output: Any, tensor: Any, *rest: Any) -> Work:
        memory = (output, tensor)
        if rest and self._eligible_on_gpu(memory):
            return self._call(
                "all_gather_into_tensor",
                [output],
                memory,
                rest[0],
                self.communicator.all_gather,
                tensor,
                output,
            )
        return super().all_gather_single(output, tensor, *rest)

    def reduce_scatter_single(self, output: Any, tensor: Any, *rest: Any) -> Work:
        memory = (output, tensor)
        if (
            rest
            and self._eligible_on_gpu(memory)
            and (op := plain_operator(rest[0].reduceOp)) is not None
        ):
            return self._call(
                "reduce_scatter_tensor",
                [output],
                memory,
                rest[0],
                self.communicator.reduce_scatter,
                tensor,
                output,
                op,
            )
        return super().reduce_scatter_single(output, tensor, *rest)

    def all_to_all_single(
        self, output: Any, tensor: Any, output_splits: Any, input_splits: Any, *rest: Any
    ) -> Work:
        memory, nranks = (output, tensor), self.communicator.nranks
        if (
            rest
            and type(output_splits) is list
            and type(input_splits) is list
            and self._eligible_on_gpu(memory)
        ):
            if not output_splits and not input_splits and tensor.shape[0] % nranks == 0:
                return self._call(
                    "all_to_all_single",
                    [output],
                    memory,
                    rest[0],
                    self.communicator.all_to_all,
                    tensor,
                    output,
                )
            sends, receives = (
                _split_counts(tensor, input_splits, nranks),
                _split_counts(output, output_splits, nranks),
            )
            if sends and receives:
                args = tensor, sends, receives, output
                return self._call(
                    "all_to_all_single",
                    [output],
                    memory,
                    rest[0],
                    self.communicator.all_to_all_v,
                    *args,
                )
        return super().all_to_all_single(output, tensor, output_splits, input_splits, *rest)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # ---- a list with a tensor for each rank

    def allgather(
        self, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], *rest: Any, **named: Any
    ) -> Work:
        usual = _is_common_call(c10d.AllgatherOptions, rest, inputs) and _is_single(output_lists)
        if (
            usual
            and self._eligible_on_gpu(inputs)
            and self._has_one_per_rank(output_lists[0], inputs[0])
        ):
            outputs, x = output_lists[0], inputs[0]
            result: list[Any] = []  # futures hold one stacked tensor (see ``Staged.stacked``)

            def action() -> None:
                whole = x.new_empty((len(outputs), *x.shape))
                result.append(whole)
                self.communicator.all_gather(x, whole)
                _copy_each(outputs, whole.unbind())

            return self._run("all_gather", result, (x, *outputs), rest[0], action)
        return super().allgather(output_lists, inputs, *rest, **named)

    def reduce_scatter(
        self, outputs: Sequence[Any], input_lists: Sequence[Sequence[Any]], *rest: Any, **named: Any
    ) -> Work:
        usual = _is_common_call(c10d.ReduceScatterOptions, rest, outputs) and _is_single(
            input_lists
        )
        if (
            usual
            and self._eligible_on_gpu(outputs)
            and self._has_one_per_rank(input_lists[0], outputs[0])
        ):
            inputs, out = input_lists[0], outputs[0]
            if (op := plain_operator(rest[0].reduceOp)) is not None:

                def action() -> None:
                    self.communicator.reduce_scatter(torch.stack(inputs), out, op)

                return self._run("reduce_scatter", outputs, (out, *inputs), rest[0], action)
        return super().reduce_scatter(outputs, input_lists, *rest, **named)

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], *rest: Any) -> Work:
        nranks = self.communicator.nranks
        usual = (
            len(rest) == 1
            and type(rest[0]) is c10d.AllToAllOptions
            and type(outputs) is list
            and type(inputs) is list
        )
        if (
            usual
            and len(outputs) == len(inputs) == nranks
            and self._eligible_on_gpu(together := (*outputs, *inputs))
        ):
            one_type = len({x.dtype for x in together}) == 1
            if one_type and self._runs_as_messages(outputs, inputs):
                return self._exchange(
                    "all_to_all",
                    outputs,
                    rest[0],
                    enumerate(inputs),
                    enumerate(outputs),
                    Collective.ALL_TO_ALL,
                )
        return super().alltoall(outputs, inputs, *rest)

    def gather(
        self, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], *rest: Any, **named: Any
    ) -> Work:
        if _is_common_call(c10d.GatherOptions, rest, inputs) and self._eligible_on_gpu(inputs):
            x, root = inputs[0], rest[0].rootRank
            if root != self.communicator.rank:
                return self._call("gather", [], inputs, rest[0], self.communicator.gather, x, root)
            if (
                _is_single(output_lists)
                and self._has_one_per_rank(output_lists[0], x)
                and self._runs_as_messages(output_lists[0], inputs)
            ):
                of = Collective.GATHER, root, x
                return self._exchange(
                    "gather", output_lists[0], rest[0], [(root, x)], enumerate(output_lists[0]), *of
                )
        return super().gather(output_lists, inputs, *rest, **named)

    def scatter(
        self, outputs: Sequence[Any], input_lists: Sequence[Sequence[Any]], *rest: Any, **named: Any
    ) -> Work:
        if _is_common_call(c10d.ScatterOptions, rest, outputs) and self._eligible_on_gpu(outputs):
            out, root = outputs[0], rest[0].rootRank
            if root != self.communicator.rank:
                return self._call(
                    "scatter", outputs, outputs, rest[0], self.communicator.scatter, None, root, out
                )
            if (
                _is_single(input_lists)
                and self._has_one_per_rank(input_lists[0], out)
                and self._runs_as_messages(outputs, input_lists[0])
            ):
                of = Collective.SCATTER, root, out
                return self._exchange(
                    "scatter", outputs, rest[0], enumerate(input_lists[0]), [(root, out)], *of
                )
        return super().scatter(outputs, input_lists, *rest, **named)

    # ---- running

    def _call(
        self,
        name: str,
        tensors: Sequence[Any],
        memory: Iterable[Any],
        opts: Any,
        operation: Callable[..., Any],
        *args: Any,
    ) -> Work:
        """Run one operation of the communicator.

        ``tensors`` receive the result; ``memory`` lists every tensor that the operation touches.
        """
        self._sequence += 1
        return self._gpu_streams.call(
            name, tensors, memory, operation, args, asynchronous=opts.asyncOp
        )

    def _run(
        self,
        name: str,
        tensors: Sequence[Any],
        memory: Iterable[Any],
        opts: Any,
        action: Callable[[], None],
    ) -> Work:
        """Run ``action``, an operation of the communicator between copies by PyTorch."""
        self._sequence += 1
        return self._gpu_streams.run(name, tensors, memory, action, asynchronous=opts.asyncOp)

    def _exchange(
        self,
        name: str,
        tensors: Sequence[Any],
        opts: Any,
        sends: Iterable[tuple[int, Any]],
        receives: Iterable[tuple[int, Any]],
        collective: Collective,
        root: int = 0,
        share: Any = None,
    ) -> Work:
        """Run a collective as one group of sends and receives.

        Args:
            sends: Pairs of destination rank and tensor.
            receives: Pairs of source rank and tensor.
            root: Root of a rooted collective.
            share: Of a rooted collective, the tensor that each rank contributes or receives.
        """
        outgoing, incoming = list(sends), list(receives)
        counts = () if share is None else (share.numel(),) * self.communicator.nranks

        def operation(stream: Any = None) -> None:
            with group():
                for rank, x in outgoing:
                    self.communicator.send(x, rank, stream=stream)
                for rank, x in incoming:
                    self.communicator.recv(x, rank, stream=stream)
                mark_collective(
                    self.communicator, collective, root, counts, len(outgoing) + len(incoming)
                )

        return self._call(name, tensors, [x for _, x in (*outgoing, *incoming)], opts, operation)

    @property
    def _gpu_streams(self) -> GroupStreams:
        assert self._streams is not None  # ``_eligible_on_gpu`` implies it
        return self._streams

    # ---- what is ordinary

    def _eligible_on_gpu(self, tensors: Iterable[Any]) -> bool:
        """Return True if the GPU fast path can take these tensors: plain, on this GPU, not
        observed.
        """
        streams = self._streams
        if streams is None or not self._is_unobserved():
            return False
        ordinal = streams.device.index
        # a generator expression is slower
        return all([is_plain_gpu_tensor(x, ordinal) for x in tensors])  # noqa: C419

    def _is_unobserved(self) -> bool:
        """Return True outside coalescing blocks and profilers, in a group without other
        backends.
        """
        return self._batch is None and self._other_backends is None and not profiling()

    def _has_one_per_rank(self, tensors: Any, one: Any) -> bool:
        """Return True if the list holds one eligible, writable tensor like ``one`` per rank."""
        if (
            type(tensors) is not list
            or len(tensors) != self.communicator.nranks
            or not self._eligible_on_gpu(tensors)
        ):
            return False
        shape, dtype = one.shape, one.dtype
        return all(
            [  # noqa: C419
                x.shape == shape and x.dtype is dtype and not x.is_inference() for x in tensors
            ]
        )

    def _runs_as_messages(self, outputs: Iterable[Any], inputs: Iterable[Any]) -> bool:
        """Return True if the exchange may run as messages between disjoint tensors.

        On one host every form of the call is messages, so a rank may decide alone.  Over several
        hosts all ranks must choose the same algorithm, so this is False there.
        """
        return self._on_one_host and _storages(outputs).isdisjoint(_storages(inputs))


def _is_single(things: Any) -> bool:
    return type(things) is list and len(things) == 1


def _is_common_call(options: type, rest: Sequence[Any], things: Any) -> bool:
    """Return True for a list of one item plus options, as ``torch.distributed`` passes them."""
    return len(rest) == 1 and type(rest[0]) is options and _is_single(things)


def _split_counts(tensor: Any, splits: list[int], nranks: int) -> list[int]:
    """Convert splits in rows to element counts per rank; empty if they need a full check."""
    rows = tensor.shape[0]
    if len(splits) != nranks or sum(splits) != rows:
        return []
    width = tensor.numel() // rows
    return splits if width == 1 else [count * width for count in splits]


def _copy_each(outputs: Sequence[Any], parts: Sequence[Any]) -> None:
    if outputs[0].dtype in _FOREACH_DTYPES:
        torch._foreach_copy_(outputs, parts)
    else:
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part)


def _storages(tensors: Iterable[Any]) -> set[int]:
    return {x.untyped_storage()._cdata for x in tensors}
