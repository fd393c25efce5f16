"""Steps of a program as calls of ``torch.distributed``, on any backend."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import miraccl.torch
from tests.gpu.programs import records
from tests.gpu.programs.memory import CpuMemory

LIMIT = datetime.timedelta(seconds=60)
_OPS = {"PROD": "PRODUCT"}
_FUNCTIONAL_OPS = {"SUM": "sum", "AVG": "avg", "PROD": "product", "MIN": "min", "MAX": "max"}
JUNK = 77


class TorchCalls:
    """Process groups of one rank."""

    def __init__(
        self,
        program: records.Program,
        rank: int,
        nranks: int,
        meeting: dict[str, Any],
        place: CpuMemory,
    ) -> None:
        assert miraccl.torch.NAME
        self._place, self._rank, self._on_gpu = place, rank, place.on_gpu
        dist.init_process_group(
            meeting["backend"],
            init_method=f"file://{meeting['path']}",
            rank=rank,
            world_size=nranks,
            timeout=LIMIT,
        )
        self.comms: dict[int, Any] = {0: dist.group.WORLD}
        self._ranks: dict[int, tuple[int, ...]] = {0: tuple(range(nranks))}
        self.works: dict[int, list[Any]] = {}
        self._junk: list[Any] = []  # memory made where an operation's was let go of

    @property
    def leaves_behind(self) -> bool:
        """Return True if operations may be pending without a waiter."""
        return bool(self._junk)

    def empty(self, comm: int) -> Callable[..., Any]:
        raise NotImplementedError("PyTorch's groups make no windows")

    # ---- collectives

    def call(self, call: records.Call, index: int, stream: Any) -> Any:
        group, asynchronous = self.comms[call.comm], call.form.endswith("async")
        x = self._place.part(call.x, index)
        out = None if call.out is None else self._place.part(call.out, index)
        if "functional" in call.form:
            return functional.wait_tensor(self._functional(call, index, x, group))
        if "dropped" in call.form:
            return self._dropped(call, index, x, group)
        if call.form == "out":
            torch.ops._c10d_functional.all_gather_into_tensor_out(
                x, len(self._ranks[call.comm]), group.group_name, out=out
            )
            functional.wait_tensor(out)
            return None
        work = (
            self._list(call, index, x, out, asynchronous)
            if "list" in call.form
            else self._plain(call, index, x, out, asynchronous)
        )
        if asynchronous:
            self.works[call.number] = [work.get_future() if "future" in call.form else work]
        return None

    def _operator(self, call: records.Call, index: int) -> Any:
        if call.op == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(float(call.scalars[index]))
        return getattr(dist.ReduceOp, _OPS.get(call.op, call.op))

    def _plain(self, call: records.Call, index: int, x: Any, out: Any, asynchronous: bool) -> Any:
        more = {"group": self.comms[call.comm], "async_op": asynchronous}
        root = self._ranks[call.comm][call.root]
        match call.name:
            case "all_reduce":
                return dist.all_reduce(x, self._operator(call, index), **more)
            case "reduce":
                return dist.reduce(x, root, self._operator(call, index), **more)
            case "broadcast":
                return dist.broadcast(x, root, **more)
            case "all_gather":
                return dist.all_gather_into_tensor(out, x, **more)
            case "reduce_scatter":
                return dist.reduce_scatter_tensor(out, x, self._operator(call, index), **more)
            case "all_to_all":
                return dist.all_to_all_single(out, x, *self._splits(call, index), **more)
        raise ValueError(call.name)

    def _splits(self, call: records.Call, index: int) -> tuple[Any, Any]:
        """Return the splits of the output and of the input."""
        if not call.uneven:
            return None, None
        return [row[index] for row in call.counts], list(call.counts[index])

    def _list(self, call: records.Call, index: int, x: Any, out: Any, asynchronous: bool) -> Any:
        more = {"group": self.comms[call.comm], "async_op": asynchronous}
        counts, root = call.counts[0], self._ranks[call.comm][call.root]
        match call.name:
            case "all_gather":
                return dist.all_gather(list(out.split(counts)), x, **more)
            case "gather":
                return dist.gather(
                    x, list(out.split(counts)) if index == call.root else None, root, **more
                )
            case "reduce_scatter":
                return dist.reduce_scatter(
                    out, list(x.split(counts)), self._operator(call, index), **more
                )
            case "scatter":
                return dist.scatter(
                    out, list(x.split(counts)) if index == call.root else None, root, **more
                )
            case "all_to_all":
                outs = out.split([row[index] for row in call.counts])
                return dist.all_to_all(list(outs), list(x.split(call.counts[index])), **more)
        raise ValueError(call.name)

    def _functional(self, call: records.Call, index: int, x: Any, group: Any) -> Any:
        """Run a functional collective; PyTorch 2.11 rejects some strided tensors before any backend
        sees them.
        """
        match call.name:
            case "all_reduce":
                return functional.all_reduce(x, _FUNCTIONAL_OPS[call.op], group)
            case "broadcast":
                return functional.broadcast(x, call.root, group)
            case "all_gather":
                return functional.all_gather_tensor(x.contiguous(), 0, group)
            case "reduce_scatter":
                return functional.reduce_scatter_tensor(
                    x.contiguous(), _FUNCTIONAL_OPS[call.op], 0, group
                )
            case "all_to_all":
                return functional.all_to_all_single(
                    x.contiguous(), *self._splits(call, index), group
                )
        raise ValueError(call.name)

    def _dropped(self, call: records.Call, index: int, x: Any, group: Any) -> Any:
        """Run an operation on a copy that every other rank frees at once and reuses."""
        copy = x.clone()
        work = dist.all_reduce(copy, self._operator(call, index), group=group, async_op=True)
        if (index + call.number) % 2:
            del copy, work
            self._junk.append(
                torch.full(
                    (x.numel() * x.element_size(),), JUNK, dtype=torch.uint8, device=x.device
                )
            )
            return None
        work.wait()
        return copy

    # ---- messages and batches

    def messages(self, step: records.Messages, index: int, stream: Any) -> None:
        group, ranks = self.comms[step.comm], self._ranks[step.comm]
        mine = []  # (sends, memory, peer)
        for m in step.messages:
            mine += [(True, self._place.part(m.source, 0), ranks[m.dst])] if m.src == index else []
            mine += [(False, self._place.part(m.target, 0), ranks[m.src])] if m.dst == index else []
        if not mine:
            return
        if step.form == "group" or (
            step.form == "functional" and not hasattr(torch.ops._c10d_functional, "batch_p2p_ops")
        ):
            ops = [
                dist.P2POp(dist.isend if sends else dist.irecv, part, peer, group)
                for sends, part, peer in mine
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            return
        if step.form == "functional":
            self._functional_messages(mine, group)
            return
        calls = (dist.isend, dist.irecv) if step.form == "async" else (dist.send, dist.recv)
        works = [calls[0 if sends else 1](part, peer, group) for sends, part, peer in mine]
        if step.form == "async":
            self.works[step.number] = works

    def _functional_messages(self, mine: list[tuple[bool, Any, int]], group: Any) -> None:
        names = ["isend" if sends else "irecv" for sends, _, _ in mine]
        peers = [dist.get_group_rank(group, peer) for _, _, peer in mine]
        operator = (
            torch.ops._c10d_functional.batch_p2p_ops
        )  # PyTorch 2.13; else the form is "group"
        for tensor in operator(
            names, peers, [0] * len(mine), [part for _, part, _ in mine], group.group_name
        ):
            functional.wait_tensor(tensor)

    def together(
        self, steps: list[Callable[[], None]], call: records.Call | records.Messages, index: int
    ) -> None:
        assert isinstance(call, records.Call)
        device = self._place.part(call.x, index).device
        with dist._coalescing_manager(
            self.comms[call.comm], device=device, async_ops=call.number % 2 == 1
        ) as manager:
            for step in steps:
                step()
        if call.number % 2 == 1:
            manager.wait()

    def wait(self, number: int, on_host: bool, stream: Any) -> Any:
        for work in self.works.pop(number, []):
            if on_host and not isinstance(work, torch._C.Future):
                work.wait(LIMIT)
            else:
                work.wait()
        return None

    # ---- groups

    def barrier(self, comm: int, stream: Any) -> None:
        dist.barrier(self.comms[comm])

    def split(self, split: records.Split, index: int, world: int) -> None:
        for comm in split.comms:
            group = dist.new_group(list(comm.ranks), timeout=LIMIT)
            if world in comm.ranks:
                self.comms[comm.number], self._ranks[comm.number] = group, comm.ranks

    def finalize(self, comm: int) -> None:
        dist.destroy_process_group(self.comms.pop(comm))

    def check(self) -> None:
        for junk in self._junk:
            if not bool((junk == JUNK).all()):
                raise AssertionError(
                    "an operation has written to memory that was freed and allocated again"
                )
        self._junk.clear()

    def close(self) -> None:
        self._junk.clear()
        dist.destroy_process_group()
