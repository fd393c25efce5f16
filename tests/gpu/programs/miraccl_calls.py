"""Steps of a program as calls of miraccl's API."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import miraccl
from miraccl.runtime.gpu.work import DeviceWork
from miraccl.types import PreMulSum, RedOp
from tests.gpu.programs import records
from tests.gpu.programs.memory import CpuMemory

TIMEOUT_S = 60.0


class MiracclCalls:
    """Communicators of one rank; ``works``: background operations."""

    leaves_behind = False

    def __init__(
        self,
        program: records.Program,
        rank: int,
        nranks: int,
        meeting: dict[str, Any],
        place: CpuMemory,
    ) -> None:
        self._place = place
        self.comms: dict[int, Any] = {0: miraccl.init(timeout=TIMEOUT_S, **program.options)}
        self.works: dict[int, list[Any]] = {}
        self._prepared: dict[records.Call, Any] = {}

    def empty(self, comm: int) -> Callable[..., Any]:
        make: Callable[..., Any] = self.comms[comm].empty
        return make

    def call(self, call: records.Call, index: int, stream: Any) -> Any:
        """Run a call and return the array that the library allocated, else None."""
        comm = self.comms[call.comm]
        name, args = self._arguments(call, index)
        named = {} if stream is None else {"stream": stream}
        if call.form == "prepared":
            key = replace(call, number=0, stream=0, names_stream=False)
            if key not in self._prepared:
                self._prepared[key] = getattr(comm, f"{name}_init")(*args)
            self._prepared[key](**named)
            return None
        if call.form.endswith("async"):
            self.works[call.number] = [getattr(comm, name)(*args, async_op=True, **named)]
            return None
        result = getattr(comm, name)(*args, **named)
        return result if call.makes else None

    def _arguments(self, call: records.Call, index: int) -> tuple[str, tuple[Any, ...]]:
        x = self._place.part(call.x, index)
        out = None if call.out is None else self._place.part(call.out, index)
        op: Any = PreMulSum(call.scalars[index]) if call.op == "PREMUL_SUM" else RedOp[call.op]
        is_root = index == call.root
        name = f"{call.name}_v" if call.uneven else call.name
        counts = [list(row) for row in call.counts]
        own = (counts[0],) if call.uneven and call.name != "all_to_all" else ()
        match call.name:
            case "all_reduce":
                return name, (x, out, op)
            case "reduce":
                return name, (x, call.root, out if is_root else None, op)
            case "broadcast":
                return name, (x, call.root)
            case "all_gather":
                return name, (x, *own, out)
            case "gather":
                return name, (x, *own, call.root, out if is_root else None)
            case "reduce_scatter":
                return name, (x, *own, out, op)
            case "scatter":
                return name, (x if is_root else None, *own, call.root, out)
        if call.uneven:
            return name, (x, counts[index], [row[index] for row in counts], out)
        return name, (x, out)

    def messages(self, step: records.Messages, index: int, stream: Any) -> None:
        comm, named = self.comms[step.comm], {} if stream is None else {"stream": stream}
        sent = [m for m in step.messages if m.src == index]
        got = [m for m in step.messages if m.dst == index]
        if step.form == "sendrecv":
            source, target = self._place.part(sent[0].source, 0), self._place.part(got[0].target, 0)
            comm.sendrecv(source, sent[0].dst, target, got[0].src, **named)
            return
        if step.form == "async":
            named["async_op"] = True
        works = []
        with miraccl.group() if step.form == "group" else contextlib.nullcontext():
            for message in step.messages:
                if message.src == index:
                    works.append(
                        comm.send(self._place.part(message.source, 0), message.dst, **named)
                    )
                if message.dst == index:
                    works.append(
                        comm.recv(self._place.part(message.target, 0), message.src, **named)
                    )
        if step.form == "async":
            self.works[step.number] = works

    def together(
        self, steps: list[Callable[[], None]], call: records.Call | records.Messages, index: int
    ) -> None:
        with miraccl.group():
            for step in steps:
                step()

    def wait(self, number: int, on_host: bool, stream: Any) -> Any:
        """Wait and return the result of the last operation."""
        result = None
        for work in self.works.pop(number, []):
            if not isinstance(work, DeviceWork):
                result = work.wait()
            elif on_host:
                result = work.synchronize()
            else:
                result = work.wait(**({} if stream is None else {"stream": stream}))
        return result

    def barrier(self, comm: int, stream: Any) -> None:
        self.comms[comm].barrier(**({} if stream is None else {"stream": stream}))

    def split(self, split: records.Split, index: int, world: int) -> None:
        color = next((i for i, comm in enumerate(split.comms) if world in comm.ranks), None)
        made = self.comms[split.parent].split(color, split.keys[index])
        if color is not None:
            self.comms[split.comms[color].number] = made

    def finalize(self, comm: int) -> None:
        self._prepared = {key: op for key, op in self._prepared.items() if key.comm != comm}
        self.comms.pop(comm).finalize()

    def check(self) -> None:
        for comm in self.comms.values():
            comm.synchronize()

    def close(self) -> None:
        self._prepared.clear()
        for comm in reversed(list(self.comms)):
            self.finalize(comm)
