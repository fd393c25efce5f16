"""What a program is made of: buffers, communicators and steps. Records alone, alike on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from miraccl.types import DType


@dataclass(frozen=True)
class Buffer:
    """An array of every rank. ``window``: the communicator in whose window memory it lies; ``skews``: where it begins in its allocation,
    in elements, rank by rank."""

    number: int
    dtype: DType
    count: int
    on_gpu: bool
    window: int | None
    as_torch: bool
    skews: tuple[int, ...]


@dataclass(frozen=True)
class Comm:
    """Communicator ``number`` of these ranks of the world, in its order."""

    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """Parts of a buffer: first element and count for each rank of a communicator; every ``step``-th element."""

    buffer: int
    spans: tuple[tuple[int, int], ...]
    step: int = 1

    def of(self, index: int) -> slice:
        first, count = self.spans[index]
        return slice(first, first + count * self.step, self.step)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective. Without ``out`` the result goes to ``x``, or to an array that the library ``makes``.

    ``counts``: elements of each rank's block; of ``all_to_all`` a row for each rank.  ``form`` is how it is called: "plain", "async" (then
    ``Wait`` has its number), "prepared", and what a dialect has besides.
    """

    number: int
    comm: int
    name: str
    x: View
    out: View | None = None
    op: str = "SUM"
    scalars: tuple[int, ...] = ()
    root: int = 0
    counts: tuple[tuple[int, ...], ...] = ()
    uneven: bool = False
    makes: bool = False
    form: str = "plain"
    stream: int = 0
    names_stream: bool = False

    @property
    def views(self) -> list[View]:
        return [self.x] if self.out is None else [self.x, self.out]


@dataclass(frozen=True)
class Message:
    """``source`` and ``target`` have one span: what rank ``src`` of the communicator sends and rank ``dst`` receives."""

    src: int
    dst: int
    source: View
    target: View


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Messages that are sent one after another ("plain"), each with "sendrecv", in a "group", or in the background ("async")."""

    number: int
    comm: int
    messages: tuple[Message, ...]
    form: str = "plain"
    stream: int = 0
    names_stream: bool = False

    @property
    def views(self) -> list[View]:
        return [view for m in self.messages for view in (m.source, m.target)]


@dataclass(frozen=True)
class Batch:
    """Calls and messages that start together, of different memory: a group, or PyTorch's coalescing manager."""

    number: int
    steps: tuple[Call | Messages, ...]


@dataclass(frozen=True)
class Wait:
    """For the step of this number, in a stream or (``on_host``) on the host."""

    number: int
    stream: int
    on_host: bool
    names_stream: bool


@dataclass(frozen=True)
class Fill:
    """New values of a kind (``values.KINDS``) for the whole buffer."""

    buffer: int
    kind: str
    salt: int
    stream: int


@dataclass(frozen=True)
class Copy:
    """Between buffers of one type, on each rank, without communication."""

    source: View
    target: View
    stream: int


@dataclass(frozen=True)
class Barrier:
    comm: int
    stream: int | None


@dataclass(frozen=True)
class Split:
    """``comms`` come out of ``parent``; whoever is in none of them takes part without getting one. ``keys``: of the parent's ranks."""

    parent: int
    comms: tuple[Comm, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Finalize:
    comm: int


@dataclass(frozen=True)
class Graph:
    """``body`` is captured in ``stream`` (without a GPU: only remembered) and runs with every ``Replay``."""

    number: int
    body: tuple[Step, ...]
    stream: int


@dataclass(frozen=True)
class Replay:
    graph: int
    stream: int


@dataclass(frozen=True)
class Beside:
    """Threads of every rank, one for each list of steps: these have neither memory nor communicators in common."""

    bodies: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class Check:
    """Wait for everything that is in streams, and compare all memory."""


Step = (
    Call
    | Messages
    | Batch
    | Wait
    | Fill
    | Copy
    | Barrier
    | Split
    | Finalize
    | Graph
    | Replay
    | Beside
    | Check
)


@dataclass
class Program:
    """``device``: "cpu", "cuda", or "emulated", a GPU without a GPU, where calls name their stream. ``options`` are those of
    ``miraccl.init``."""

    seed: int
    api: str
    nranks: int
    device: str
    buffers: list[Buffer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        return self.device != "cpu"
