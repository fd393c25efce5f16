"""Generator of a program from a seed: the sequence of steps, and the memory that each may access.

Rules: all ranks of a communicator make the same calls in the same order; memory of a background
operation is untouched until it is awaited; the first GPU operation of a communicator is a
collective outside of graphs; reduced floats are integers with exact results.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

from miraccl.types import DType
from tests.gpu.programs import records
from tests.gpu.programs.draw_messages import BatchDrawer
from tests.gpu.programs.values import bound_of

SIZES = {
    "small": (1, 70),
    "middle": (100, 6000),
    "large": (20_000, 120_000),
    "huge": (1 << 20, 3 << 20),
}


def draw(
    seed: int,
    api: str,
    nranks: int,
    device: str,
    *,
    nsteps: int = 40,
    huge: bool = False,
    plain: bool = False,
    dtypes: Sequence[str] = (),
) -> records.Program:
    """Return the program of a seed.

    ``plain``: without features that other PyTorch backends lack: strided tensors, 8-bit floats,
    unsigned integers.
    """
    chosen = [DType[name.upper()] for name in dtypes] or [
        d for d in DType if not plain or d in _EVERYWHERE
    ]
    return Drawer(seed, records.Program(seed, api, nranks, device), huge, plain).program_of(
        nsteps, chosen
    )


class Drawer(BatchDrawer):
    def __init__(self, seed: int, program: records.Program, huge: bool, plain: bool) -> None:
        super().__init__(random.Random(f"{program.api} {seed}"), program, plain)
        self.graphs: dict[int, DrawnGraph] = {}
        larger = ["large"] if program.device != "emulated" else []
        self._sizes = ["small", "small", "middle", "middle", *larger, *(["huge"] if huge else [])]

    def program_of(self, nsteps: int, dtypes: Sequence[DType]) -> records.Program:
        self._draw_options()
        self._draw_buffers(dtypes)
        if self.rng.random() < 0.7:
            self._split()
        kinds = {
            self._collective: 40,
            self._again: 16,
            self._messages: 12,
            self._batch: 8,
            self._wait: 8,
            self._copy: 5,
            self._fill: 4,
        }
        kinds |= {
            self._barrier: 3,
            self._split: 2,
            self._finalize: 1,
            self._check: 3,
            self._graph: 3,
            self._replay: 6,
            self._beside: 2,
        }
        while len(self.steps) < nsteps:
            self.rng.choices(list(kinds), list(kinds.values()))[0]()
        self._check()
        self.program.steps = self.steps
        return self.program

    def _draw_options(self) -> None:
        rng, wanted = self.rng, self.program.options
        match rng.choice(("", "", "", "algo", "algo", "proto", "deterministic", "buffsize")):
            case "algo":
                wanted["algo"] = rng.choice(_ON_GPUS if self.program.has_gpu else _ALGORITHMS)
            case "proto":
                wanted["proto"] = rng.choice(("ll", "ll128", "simple"))
            case "deterministic":
                wanted["deterministic"] = True
            case "buffsize":
                wanted["buffsize"] = 1  # the minimum: slots are reused

    def _draw_buffers(self, dtypes: Sequence[DType]) -> None:
        rng = self.rng
        for dtype in rng.sample(dtypes, min(3, len(dtypes))):
            for _ in range(4):
                on_gpu = self.program.has_gpu and rng.random() < 0.85
                count = rng.randint(*SIZES[rng.choice(self._sizes)])
                window = 0 if self.program.api == "own" and rng.random() < 0.25 else None
                skews = tuple(rng.choice((0, 0, 1, 3, 5)) for _ in range(self.program.nranks))
                buffer = records.Buffer(
                    number=len(self.program.buffers),
                    dtype=dtype,
                    count=count,
                    on_gpu=on_gpu,
                    window=window,
                    as_torch=self.program.device != "emulated"
                    and (on_gpu or self.program.api == "torch" or rng.random() < 0.3),
                    skews=skews if window is None else (skews[0],) * len(skews),
                )
                self.program.buffers.append(buffer)
                self.fill(buffer.number, rng.choice(("wild", "tame", "tame", "unit")))

    # ---- kinds of steps

    def _collective(self) -> None:
        self.collective(self.comm())

    def _again(self) -> None:
        """Repeat the previous call, which then takes the fast path."""
        for _ in range(self.rng.randint(1, 4)):
            if self.past:
                self.repeat(self.rng.choice(self.past[-3:]))

    def _messages(self) -> None:
        forms = (
            "plain",
            "plain",
            "group",
            "async",
            "sendrecv" if self.program.api == "own" else "functional",
        )
        self.messages(self.comm(), self.rng.choice(forms))

    def _batch(self) -> None:
        self.batch(self.comm())

    def _wait(self) -> None:
        if self.pending:
            self.wait(self.rng.choice(list(self.pending)))

    def _copy(self) -> None:
        target = self.rng.choice(self.program.buffers)
        sources = [
            b for b in self.program.buffers if b.dtype is target.dtype and b.number != target.number
        ]
        source = self.rng.choice(sources)
        if not self.free(source.number) or not self.free(target.number):
            return
        n, count = self.program.nranks, self.rng.randint(0, min(source.count, target.count))
        here, there = (
            records.View(b.number, ((self.rng.randint(0, b.count - count), count),) * n)
            for b in (source, target)
        )
        self.write(target.number, self.bounds[source.number])
        self.steps.append(records.Copy(here, there, self.stream()))

    def _fill(self) -> None:
        buffer = self.rng.choice(self.program.buffers)
        if self.free(buffer.number):
            self.fill(buffer.number, self.rng.choice(("wild", "tame", "unit")))

    def _barrier(self) -> None:
        comm = self.comm()
        on_gpu = self.program.has_gpu and self.program.api == "own" and self.rng.random() < 0.5
        if on_gpu:
            self.warm(comm)
        self.steps.append(records.Barrier(comm.number, self.stream() if on_gpu else None))

    def _check(self) -> None:
        for number in list(self.pending):
            self.wait(number)
        self.steps.append(records.Check())

    # ---- communicators

    def _split(self) -> None:
        parent = (
            self.rng.choice(list(self.comms.values()))
            if self.program.api == "own"
            else self.comms[0]
        )
        if len(self.comms) > 4 or parent.number in self.used_in_background():
            return
        colors = [self.rng.choice((0, 0, 1, None)) for _ in parent.ranks]
        keys = tuple(
            self.rng.randint(0, 3) if self.program.api == "own" else 0 for _ in parent.ranks
        )
        comms = []
        for color in (0, 1):
            places = sorted(
                (i for i, c in enumerate(colors) if c == color), key=lambda i: (keys[i], i)
            )
            if places:
                comms.append(records.Comm(self.number(), tuple(parent.ranks[i] for i in places)))
        self.comms |= {comm.number: comm for comm in comms}
        self.steps.append(records.Split(parent.number, tuple(comms), keys))

    def _finalize(self) -> None:
        used = {call.comm for graph in self.graphs.values() for call in graph.calls}
        ends = [c for c in self.comms if c and c not in self.used_in_background() and c not in used]
        if ends:
            number = self.rng.choice(ends)
            self.past = [call for call in self.past if call.comm != number]
            self._check()  # nothing of it is in any stream
            del self.comms[number]
            self.steps.append(records.Finalize(number))

    # ---- graphs and threads

    def _graph(self) -> None:
        buffers = [b.number for b in self.program.buffers if b.on_gpu or not self.program.has_gpu]
        buffers = [b for b in buffers if self.free(b)]
        buffers = self.rng.sample(buffers, min(len(buffers), 5))
        comms = self.rng.sample(list(self.comms.values()), min(len(self.comms), 2))
        if len(buffers) < 3 or self.pending:
            return
        for comm in comms:
            self.warm(comm)
        kinds = {b: self.rng.choice(("tame", "unit", "wild")) for b in buffers}
        dtypes = {b.number: b.dtype for b in self.program.buffers}
        for b, kind in kinds.items():
            self.bounds[b] = bound_of(dtypes[b], kind)
        body = self.apart(buffers, comms, self.rng.randint(2, 7), in_graph=True)
        number = self.number()
        self.graphs[number] = DrawnGraph(kinds, calls_in(body))
        self.steps.append(records.Graph(number, tuple(body), 1 + self.rng.randrange(2)))
        self.graphs[number].bounds = {b: self.bounds[b] for b in buffers}
        for b in buffers:
            self.bounds[b] = None  # the capture has written nothing
        for _ in range(self.rng.randint(1, 3)):
            self.replay(number)

    def _replay(self) -> None:
        if self.graphs:
            self.replay(self.rng.choice(list(self.graphs)))

    def replay(self, number: int) -> None:
        graph = self.graphs[number]
        if not all(self.free(b) for b in graph.kinds) or any(
            c.comm in self.used_in_background() for c in graph.calls
        ):
            return
        for buffer, kind in graph.kinds.items():
            self.fill(buffer, kind)
        self.steps.append(records.Replay(number, self.stream()))
        self.bounds |= graph.bounds

    def _beside(self) -> None:
        """Add threads: on CPU memory one for each of two communicators of the same ranks, else a
        single one.
        """
        if self.pending:
            return
        comms = list(self.comms.values())
        two = not self.program.has_gpu and self.program.api == "own" and len(comms) > 1
        chosen = self.rng.sample(comms, 2 if two else 1)
        buffers = [b.number for b in self.program.buffers]
        self.rng.shuffle(buffers)
        half = len(buffers) // len(chosen)
        if self.program.has_gpu:
            self.warm(chosen[0])
        bodies = [
            tuple(self.apart(buffers[i * half : (i + 1) * half], [c], self.rng.randint(2, 6)))
            for i, c in enumerate(chosen)
        ]
        self.steps.append(records.Beside(tuple(bodies)))

    def apart(
        self, buffers: list[int], comms: list[records.Comm], count: int, *, in_graph: bool = False
    ) -> list[records.Step]:
        """Return steps on these buffers and communicators, which await all they start."""
        outside = self.steps, self.comms, self.only, self.past, self.in_graph
        self.steps, self.comms, self.only, self.past, self.in_graph = (
            [],
            {c.number: c for c in comms},
            set(buffers),
            [],
            in_graph,
        )
        kinds = [
            self._collective,
            self._collective,
            self._collective,
            self._again,
            self._messages,
            self._wait,
            self._batch,
        ]
        for _ in range(count):
            self.rng.choice(kinds)()
        for number in list(self.pending):
            self.wait(number)
        body = [
            replace(s, on_host=False) if isinstance(s, records.Wait) and in_graph else s
            for s in self.steps
        ]
        self.steps, self.comms, self.only, self.past, self.in_graph = outside
        return body


class DrawnGraph:
    """Graph: how its buffers are filled before each replay, its calls, and the value bounds after
    it.
    """

    def __init__(self, kinds: dict[int, str], calls: list[records.Call | records.Messages]) -> None:
        self.kinds, self.calls = kinds, calls
        self.bounds: dict[int, int | None] = {}


def calls_in(steps: Iterable[records.Step]) -> list[records.Call | records.Messages]:
    return [
        part
        for s in steps
        for part in (s.steps if isinstance(s, records.Batch) else [s])
        if isinstance(part, records.Call | records.Messages)
    ]


_ON_GPUS = ("one_shot", "two_shot", "ring", "chain", "double_binary_tree")
_ALGORITHMS = (
    *_ON_GPUS,
    "recursive_doubling",
    "recursive_halving_doubling",
    "bruck",
    "pairwise",
    "pat",
)
_EVERYWHERE = (
    DType.INT8,
    DType.UINT8,
    DType.INT32,
    DType.INT64,
    DType.FLOAT16,
    DType.FLOAT32,
    DType.FLOAT64,
    DType.BFLOAT16,
)
