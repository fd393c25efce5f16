"""Generator of one operation: its form, its memory, and values that make the result exact."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from miraccl.types import DType
from tests.gpu.programs import records
from tests.gpu.programs.values import bound_of, exact

NSTREAMS = 3
#: Forms of each operation; suffix "async": awaited later; prefix "makes": allocates its result.
FORMS: dict[str, dict[str, tuple[str, ...]]] = {
    "own": dict.fromkeys(
        (
            "all_reduce",
            "reduce",
            "broadcast",
            "all_gather",
            "gather",
            "reduce_scatter",
            "scatter",
            "all_to_all",
        ),
        ("plain", "plain", "plain", "async", "prepared", "makes", "makes async"),
    ),
    "torch": {
        "all_reduce": ("plain", "async", "future async", "makes functional", "makes dropped"),
        "reduce": ("plain", "async"),
        "broadcast": ("plain", "async", "makes functional"),
        "all_gather": ("plain", "async", "list", "list async", "makes functional", "out"),
        "reduce_scatter": ("plain", "async", "list", "list async", "makes functional"),
        "all_to_all": ("plain", "async", "list", "list async", "makes functional"),
        "gather": ("list", "list async"),
        "scatter": ("list", "list async"),
    },
}
REDUCES = ("all_reduce", "reduce", "reduce_scatter")
_ROOTED = ("reduce", "broadcast", "gather", "scatter")
_CANNOT_MAKE = ("broadcast", "scatter")  # not on every rank
_IN_PLACE = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
)
_NO_UNEVEN = ("all_reduce", "reduce", "broadcast")
_UNEVEN_LISTS = ("all_gather", "reduce_scatter")
_SIGNED = (DType.INT8, DType.INT32, DType.INT64)


class Calls:
    """Part of ``draw.Drawer``: state of memory, communicators and pending operations."""

    def __init__(self, rng: random.Random, program: records.Program, plain: bool) -> None:
        self.rng, self.program, self.plain = rng, program, plain
        self.steps: list[records.Step] = []
        self.comms = {0: records.Comm(0, tuple(range(program.nranks)))}
        self.bounds: dict[
            int, int | None
        ] = {}  # of a buffer's values: whole numbers up to this, or None
        self.pending: dict[int, records.Call | records.Messages] = {}
        self.only: set[int] | None = None  # buffers that may be used
        self.past: list[records.Call] = []
        self.in_graph = False
        self._warm: set[int] = set()
        self._numbers = itertools.count(1)

    # ---- available memory and streams

    def number(self) -> int:
        return next(self._numbers)

    def comm(self) -> records.Comm:
        return self.rng.choice(list(self.comms.values()))

    def stream(self) -> int:
        return self.rng.randrange(NSTREAMS)

    def _in_a_stream(self, on_gpu: bool) -> dict[str, Any]:
        """Return a stream, and whether the call names it or it is current."""
        if not on_gpu:
            return {}
        stream, names = self.stream(), self.program.api == "own" and self.rng.random() < 0.5
        if self.program.device == "emulated":
            names = names or stream != 0 or self.in_graph
        return {"stream": stream, "names_stream": names}

    def used_in_background(self) -> set[int]:
        return {step.comm for step in self.pending.values()}

    def free(self, buffer: int) -> bool:
        busy = {view.buffer for step in self.pending.values() for view in step.views}
        return buffer not in busy and (self.only is None or buffer in self.only)

    def _usable(self, dtype: DType, on_gpu: bool, but: Sequence[int] = ()) -> list[records.Buffer]:
        fitting = [
            b
            for b in self.program.buffers
            if b.dtype is dtype and b.on_gpu is on_gpu and b.number not in but
        ]
        return [b for b in fitting if self.free(b.number)]

    def fill(self, buffer: int, kind: str) -> None:
        self.steps.append(records.Fill(buffer, kind, self.number(), self.stream()))
        self.bounds[buffer] = bound_of(self.program.buffers[buffer].dtype, kind)

    def write(self, buffer: int, bound: int | None) -> None:
        before = self.bounds[buffer]
        self.bounds[buffer] = None if before is None or bound is None else max(before, bound)

    def warm(self, comm: records.Comm) -> None:
        """Return the first GPU operation of all ranks; None if no GPU memory is free or a barrier
        does
        it.
        """
        if not self.program.has_gpu or comm.number in self._warm:
            return
        found = [b for b in self.program.buffers if b.on_gpu and self.free(b.number)]
        if not found:
            return
        self._warm.add(comm.number)
        buffer = min(found, key=lambda b: self.plain and b.dtype is DType.UINT8)
        view = records.View(buffer.number, ((0, min(buffer.count, 5)),) * len(comm.ranks))
        self.steps.append(
            records.Call(
                number=self.number(),
                comm=comm.number,
                name="broadcast",
                x=view,
                names_stream=self.program.device == "emulated",
            )
        )

    # ---- a collective

    def collective(self, comm: records.Comm) -> None:
        call = self._draw(comm)
        if call is not None:
            self._emit(call)

    def _draw(self, comm: records.Comm) -> records.Call | None:
        rng, n = self.rng, len(comm.ranks)
        forms = FORMS[self.program.api]
        name = rng.choice(
            [name for name in forms if name != "reduce" or not self.plain]
        )  # Gloo's writes to every rank's memory
        form = rng.choice(forms[name])
        first = rng.choice(self.program.buffers)
        usable = self._usable(first.dtype, first.on_gpu)
        if not usable or (self.in_graph and (not first.on_gpu and self.program.has_gpu)):
            return None
        if self.in_graph and form.startswith(("makes", "prepared")):
            form = "plain"
        if form.startswith("makes") and (name in _CANNOT_MAKE and "functional" not in form):
            form = "plain"
        if (
            form.startswith("makes")
            and self.program.api == "own"
            and (name in ("all_reduce", "reduce") or self._emulates(first))
        ):
            form = "plain"  # these work in place, and only tensors are made
        if first.on_gpu:
            self.warm(comm)
        uneven = self._may_be_uneven(name, form) and rng.random() < 0.4
        if uneven and self.program.api == "torch" and name in _UNEVEN_LISTS:
            form = rng.choice(("list", "list async"))
        root = rng.randrange(n)
        in_place = (
            name in _IN_PLACE
            and not form.startswith(("makes", "list", "out"))
            and rng.random() < 0.4
        )
        if name == "broadcast" or (
            self.program.api == "torch" and name in ("all_reduce", "reduce")
        ):
            in_place = True
        larger = rng.choice(usable)
        small, large = (name in ("reduce_scatter", "scatter"), name in ("all_gather", "gather"))
        other = self._usable(first.dtype, first.on_gpu, [larger.number])
        if not in_place and not form.startswith("makes") and not other:
            return None
        partner = rng.choice(other) if other else larger
        makes = form.startswith("makes")
        return self._placed(
            comm, name, form, uneven, root, in_place, makes, larger, partner, small, large
        )

    def _emulates(self, buffer: records.Buffer) -> bool:
        return buffer.on_gpu and self.program.device == "emulated"

    def _may_be_uneven(self, name: str, form: str) -> bool:
        if name in _NO_UNEVEN or form == "prepared":
            return False
        if self.program.api == "torch":
            return (name == "all_to_all" and not (self.plain and "list" in form)) or (
                name in _UNEVEN_LISTS and not self.plain
            )
        return True

    def _placed(
        self,
        comm: records.Comm,
        name: str,
        form: str,
        uneven: bool,
        root: int,
        in_place: bool,
        makes: bool,
        buffer: records.Buffer,
        partner: records.Buffer,
        shares: bool,
        stacks: bool,
    ) -> records.Call:
        """Return views of ``buffer``, on the larger side, and of ``partner``."""
        n = len(comm.ranks)
        whole, part = buffer.count, buffer.count if makes or in_place else partner.count
        if name == "all_to_all":
            most = min(whole, part) // n
            rows = (
                [self._counts(most, n, uneven) for _ in range(n)]
                if uneven
                else [(self._count(most),) * n] * n
            )
            sends, receives = (
                [sum(row) for row in rows],
                [sum(row[r] for row in rows) for r in range(n)],
            )
            x, out = self._view(buffer, sends), None if makes else self._view(partner, receives)
        elif shares or stacks:
            most = min(whole // n, part)
            rows = [self._counts(most, n, uneven) if uneven else (self._count(most),) * n]
            full = self._view(buffer, [sum(rows[0])] * n, strided=not in_place)
            blocks = (
                self._inside(full, rows[0])
                if in_place
                else self._view(buffer if makes else partner, rows[0])
            )
            x, out = (full, blocks) if shares else (blocks, full)
            out = None if makes else out
        else:
            rows = []
            counts = [self._count(min(whole, part))] * n
            x = self._view(buffer, counts)
            out = None if in_place or makes else self._view(partner, counts)
        on_gpu = buffer.on_gpu
        return records.Call(
            number=self.number(),
            comm=comm.number,
            name=name,
            x=x,
            out=out,
            root=root if name in _ROOTED else 0,
            counts=tuple(rows),
            uneven=uneven,
            makes=makes,
            form=form,
            **self._in_a_stream(on_gpu),
        )

    def _count(self, most: int) -> int:
        choices = (
            0,
            1,
            2,
            3,
            7,
            64,
            1000,
            most,
            most,
            most - 1,
            self.rng.randint(0, max(0, most)),
            self.rng.randint(0, max(0, most)),
        )
        return max(0, min(most, self.rng.choice(choices)))

    def _counts(self, most: int, n: int, uneven: bool) -> tuple[int, ...]:
        return tuple(self._count(most) if self.rng.random() < 0.8 else 0 for _ in range(n))

    def _view(
        self, buffer: records.Buffer, counts: Sequence[int], strided: bool = True
    ) -> records.View:
        step = (
            2
            if strided and self._may_be_strided() and all(2 * c <= buffer.count for c in counts)
            else 1
        )
        starts = [
            self.rng.choice((0, self.rng.randint(0, buffer.count - c * step))) for c in counts
        ]
        if (
            buffer.window is not None or self.rng.random() < 0.3
        ):  # engines want the same place on all ranks
            starts = [min(min(starts), buffer.count - step * max(counts))] * len(counts)
        return records.View(buffer.number, tuple(zip(starts, counts, strict=True)), step)

    def _may_be_strided(self) -> bool:
        return self.program.api == "torch" and not self.plain and self.rng.random() < 0.15

    @staticmethod
    def _inside(full: records.View, counts: Sequence[int]) -> records.View:
        firsts = itertools.accumulate(counts[:-1], initial=0)
        spans = [
            (start + first, count)
            for (start, _), first, count in zip(full.spans, firsts, counts, strict=True)
        ]
        return records.View(full.buffer, tuple(spans))

    def _emit(self, call: records.Call) -> None:
        """Emit a call with an operator and suitable values."""
        n, dtype = len(self.comms[call.comm].ranks), self.program.buffers[call.x.buffer].dtype
        if call.name in REDUCES:
            call = self._with_operator(call, n, dtype)
        self._make_exact(call, dtype)
        self._run(call)

    def _account(self, step: records.Call | records.Messages) -> None:
        """Update the value bounds after a step."""
        if isinstance(step, records.Messages):
            for message in step.messages:
                self.write(message.target.buffer, self.bounds[message.source.buffer])
        elif not step.makes:
            bound = self.bounds[step.x.buffer]
            if step.name in REDUCES:
                bound = _after(
                    step,
                    self.program.buffers[step.x.buffer].dtype,
                    bound,
                    len(self.comms[step.comm].ranks),
                )
            self.write((step.out or step.x).buffer, bound)

    def _run(self, call: records.Call) -> None:
        self._account(call)
        self.steps.append(call)
        if call.form.endswith("async"):
            self.pending[call.number] = call
        else:
            self.past.append(call)

    def _with_operator(self, call: records.Call, n: int, dtype: DType) -> records.Call:
        rng = self.rng
        ops = [
            "SUM",
            "SUM",
            "SUM",
            "PROD",
            "MIN",
            "MAX",
            *([] if self.plain else ["AVG", "PREMUL_SUM"]),
        ]
        if self.program.api == "torch":
            ops += [] if dtype.is_float else ["BAND", "BOR", "BXOR"]
            if "functional" in call.form:
                ops = [op for op in ops if op in ("SUM", "AVG", "MIN", "MAX", "PROD")]
        op = rng.choice(ops)
        scalars: tuple[int, ...] = ()
        if op == "PREMUL_SUM":
            allowed = (
                (0, 1, 2, 3)
                if not dtype.is_float
                else (0, 1, -1)
                if dtype.itemsize == 1
                else (0, 1, 2, -1)
            )
            scalars = tuple(rng.choice(allowed) for _ in range(n))
        return replace(call, op=op, scalars=scalars)

    def _make_exact(self, call: records.Call, dtype: DType) -> None:
        if (
            call.name not in REDUCES
            or not dtype.is_float
            or (call.op in ("MIN", "MAX") and not self.plain)
        ):
            return  # NaN spreads through these; not with Gloo
        n, buffer = len(self.comms[call.comm].ranks), call.x.buffer
        for kind in ("as it is", "tame", "unit"):
            if kind != "as it is":
                self.fill(buffer, kind)
            bound = self.bounds[buffer]
            if bound is not None and exact(dtype, _largest(call, bound, n)):
                return

    def repeat(self, call: records.Call) -> None:
        if all(self.free(view.buffer) for view in call.views) and call.comm in self.comms:
            if self.rng.random() < 0.3:
                call = replace(
                    call, **self._in_a_stream(self.program.buffers[call.x.buffer].on_gpu)
                )
            again = replace(call, number=self.number())
            self._make_exact(again, self.program.buffers[call.x.buffer].dtype)
            self._run(again)

    def wait(self, number: int) -> None:
        del self.pending[number]
        names = self.program.device == "emulated" or (
            self.program.api == "own" and self.rng.random() < 0.5
        )
        self.steps.append(
            records.Wait(
                number, self.stream(), not self.in_graph and self.rng.random() < 0.3, names
            )
        )


def _largest(call: records.Call, bound: int, n: int) -> int:
    """Return the maximum magnitude of a reduction of values up to ``bound``."""
    if call.op == "PROD":
        return bound if bound <= 1 else bound**n
    if call.op == "PREMUL_SUM":
        return bound * sum(map(abs, call.scalars))
    return bound * n


def _after(call: records.Call, dtype: DType, bound: int | None, n: int) -> int | None:
    if not dtype.is_float:
        return 0
    if bound is None or call.op == "AVG":
        return None
    return bound if call.op in ("MIN", "MAX") else _largest(call, bound, n)
