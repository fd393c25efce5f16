"""Generator of messages, and of calls that start together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.gpu.programs import records
from tests.gpu.programs.draw_calls import REDUCES, Calls


class BatchDrawer(Calls):
    """Part of ``draw.Drawer`` for messages and batches."""

    # ---- messages

    def messages(self, comm: records.Comm, form: str) -> None:
        step = self._draw_messages(comm, form)
        if step is not None:
            self._account(step)
            self.steps.append(step)
            if step.form == "async":
                self.pending[step.number] = step

    def _draw_messages(self, comm: records.Comm, form: str) -> records.Messages | None:
        rng, n = self.rng, len(comm.ranks)
        first = rng.choice(self.program.buffers)
        usable = self._usable(first.dtype, first.on_gpu)
        if (
            len(usable) < 2
            or (n == 1 and form != "group")
            or (self.in_graph and not first.on_gpu and self.program.has_gpu)
        ):
            return None
        if self.program.api == "torch" and n == 1:
            return None
        if (self.in_graph and form == "async") or (self.plain and form == "functional"):
            form = "group"
        if first.on_gpu:
            self.warm(comm)
        source, target = rng.sample(usable, 2)
        if form == "sendrecv":
            shift, count = rng.randrange(1, n), self._count(min(source.count, target.count))
            pairs = [(r, (r + shift) % n, count) for r in range(n)]
            taken = dict.fromkeys(range(n), 0)
        else:
            pairs, taken = [], dict.fromkeys(range(n), 0)
            for _ in range(rng.randint(1, 5)):
                src, dst = rng.randrange(n), rng.randrange(n)
                if src == dst and (form != "group" or self.program.api == "torch"):
                    dst = (src + 1) % n
                pairs.append((src, dst, self._count(min(source.count, target.count) // 5)))
        messages = []
        for src, dst, count in pairs:
            place = (rng.randint(0, source.count - count), count)
            messages.append(
                records.Message(
                    src,
                    dst,
                    records.View(source.number, (place,)),
                    records.View(target.number, ((taken[dst], count),)),
                )
            )
            taken[dst] += count
        on_gpu = source.on_gpu
        return records.Messages(
            number=self.number(),
            comm=comm.number,
            messages=tuple(messages),
            form=form,
            **self._in_a_stream(on_gpu),
        )

    # ---- several at once

    def batch(self, comm: records.Comm) -> None:
        """Emit a group: miraccl's with messages and collectives, or PyTorch's with one kind of
        collective.

        On GPUs a group of several communicators has collectives only, since ranks must start
        communicators in one order.
        """
        outer, one = self.only, self.program.api == "torch" or self.rng.random() < 0.7
        parts: list[records.Call | records.Messages] = []
        self.only = {b.number for b in self.program.buffers if self.free(b.number)}
        for _ in range(0 if self.plain else self.rng.randint(2, 4)):
            talks = self.program.api == "own" and (one or not self.program.has_gpu)
            step = self._part(comm if one else self.comm(), talks, parts)
            if step is not None:
                parts.append(step)
                self.only -= {view.buffer for view in step.views}
        self.only = outer
        parts.sort(key=lambda step: isinstance(step, records.Call))
        for step in parts:
            self._account(step)
        if parts:
            self.steps.append(records.Batch(self.number(), tuple(parts)))

    def _part(
        self, comm: records.Comm, talks: bool, others: Sequence[records.Call | records.Messages]
    ) -> records.Call | records.Messages | None:
        if talks and self.rng.random() < 0.4:
            return self._draw_messages(comm, "group")
        call = self._draw(comm)
        first = others[0] if others else call
        if (
            call is None
            or call.makes
            or (
                self.program.api == "torch"
                and not (isinstance(first, records.Call) and self._coalesces(call, first))
            )
        ):
            return None
        dtype = self.program.buffers[call.x.buffer].dtype
        call = replace(call, form="plain")
        if call.name in REDUCES:
            like = (
                first
                if self.program.api == "torch" and isinstance(first, records.Call) and others
                else None
            )
            call = (
                self._with_operator(call, len(comm.ranks), dtype)
                if like is None
                else replace(call, op=like.op)
            )
            if self.program.api == "torch" and call.op not in ("SUM", "MIN", "MAX", "PROD"):
                call = replace(call, op="SUM", scalars=())
        self._make_exact(call, dtype)
        return call

    def _coalesces(self, call: records.Call, first: records.Call) -> bool:
        on_gpu = [self.program.buffers[c.x.buffer].on_gpu for c in (call, first)]
        alike = call.name == first.name and on_gpu[0] == on_gpu[1]
        return (
            alike
            and call.name in ("all_reduce", "all_gather", "reduce_scatter")
            and not call.uneven
            and "list" not in call.form
        )
