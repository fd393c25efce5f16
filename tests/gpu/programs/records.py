"""Records of a program: buffers, communicators and steps, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from miraccl.types import DType


@dataclass(frozen=True)
class Buffer:
    """Array of every rank.

    ``window``: communicator in whose window memory it is. ``skews``: start in its allocation in
    elements, by rank.
    """

    number: int
    dtype: DType
    count: int
    on_gpu: bool
    window: int | None
    as_torch: bool
    skews: tuple[int, ...]


@dataclass(frozen=True)
class Comm:
    """Communicator ``number`` of these world ranks, in its order."""

    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """Parts of a buffer: first element and count by rank of a communicator; every ``step``-th
    element.
    """

    buffer: int
    spans: tuple[tuple[int, int], ...]
    step: int = 1

    def of(self, index: int) -> slice:
        first, count = self.spans[index]
        return slice(first, first + count * self.step, self.step)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Collective.

    Without ``out`` the result is in ``x``, or in an array that the library allocates (``makes``).
    ``counts``: elements of each rank's block; for ``all_to_all`` a row per rank. ``form``: "plain",
    "async" (``Wait`` has its number), "prepared", or a form of the API.
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
    """Message from rank ``src`` to rank ``dst`` of the communicator; ``source`` and ``target`` have
    one size.
    """

    src: int
    dst: int
    source: View
    target: View


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Messages, sent one after another ("plain"), by "sendrecv", in a "group", or in the background
    ("async").
    """

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
    """Calls and messages on disjoint memory that start together: a group, or PyTorch's coalescing
    manager.
    """

    number: int
    steps: tuple[Call | Messages, ...]


@dataclass(frozen=True)
class Wait:
    """Wait for the step of this number, in a stream or (``on_host``) on the host."""

    number: int
    stream: int
    on_host: bool
    names_stream: bool


@dataclass(frozen=True)
class Fill:
    """New values of a kind (``values.KINDS``) for a whole buffer."""

    buffer: int
    kind: str
    salt: int
    stream: int


@dataclass(frozen=True)
class Copy:
    """Copy between buffers of one type on each rank, without communication."""

    source: View
    target: View
    stream: int


@dataclass(frozen=True)
class Barrier:
    comm: int
    stream: int | None


@dataclass(frozen=True)
class Split:
    """Split of ``parent`` into ``comms``; ranks in none of them take part as well. ``keys``: of the
    parent's ranks.
    """

    parent: int
    comms: tuple[Comm, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Finalize:
    comm: int


@dataclass(frozen=True)
class Graph:
    """Capture of ``body`` in ``stream`` (without a GPU: recorded only), run by every ``Replay``."""

    number: int
    body: tuple[Step, ...]
    stream: int


@dataclass(frozen=True)
class Replay:
    graph: int
    stream: int


@dataclass(frozen=True)
class Beside:
    """Threads of every rank, one per list of steps, with disjoint memory and communicators."""

    bodies: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class Check:
    """Wait for all streams and compare all memory."""


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
    """Random program.

    ``device``: "cpu", "cuda", or "emulated", where calls name their stream. ``options``: of
    ``miraccl.init``.
    """

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
