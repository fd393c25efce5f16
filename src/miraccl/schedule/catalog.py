"""Which algorithms there are, for which collectives, and their schedules.

An algorithm is a function ``build(collective, nranks, root) -> Schedule`` under a name, with what a planner wants to know about
it.  The built-in ones are the modules of ``schedule.algos``, loaded on first use; ``register`` adds others.  Schedules are built
once per (name, collective, nranks, root).  Schedules of registered algorithms are proved right before they are handed out, and the
proof is kept; those of built-in ones are proved in the tests.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

from miraccl.errors import InvalidUsage, MiracclError, ScheduleError
from miraccl.registry import Registry
from miraccl.schedule.cost import compute_cost
from miraccl.schedule.ir import Schedule
from miraccl.schedule.passes import relabel
from miraccl.schedule.verify import FIFO_DEPTH, is_direct_safe, verify
from miraccl.types import Collective

T = TypeVar("T")
Build = Callable[[Collective, int, int], Schedule]
TOPOLOGY_ORDERED = (
    "ring",
    "chain",
    "double_binary_tree",
)  # their cost depends on which ranks are neighbours


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One way to do one or more collectives.

    ``rank_ordered``: contributions are added in the order of the ranks, whatever the size, so that results are reproducible; proved
    with the rest of a schedule (``provenance.add_in_rank_order``).
    ``rounds_once``: sums of 16- and 8-bit floats are rounded once, not at every hop; not proved.  (Both are true where nothing is added.)
    ``direct``, ``direct_in_place``: collectives whose receivers may read the sender's memory (``verify.is_direct_safe``).
    ``uneven``: collectives that work when blocks have different counts.
    ``condition``: whether there is a schedule for (collective, nranks).  ``root``: the only root that there is one for, None: any.
    ``latency``, ``wire``: the formulas of ``cost.Cost.latency_steps`` and ``cost.Cost.wire_blocks`` for (collective, nranks).
    """

    name: str
    collectives: frozenset[Collective]
    builder: Build
    description: str
    rank_ordered: bool = False
    rounds_once: bool = False
    direct: frozenset[Collective] = frozenset()
    direct_in_place: frozenset[Collective] = frozenset()
    needs_addressable_memory: bool = False
    uneven: frozenset[Collective] = frozenset()
    condition: Callable[[Collective, int], bool] | None = None
    root: int | None = None
    latency: Callable[[Collective, int], int] | None = None
    wire: Callable[[Collective, int], Fraction] | None = None
    builtin: bool = False

    def supports(self, collective: Collective, nranks: int, root: int | None = None) -> bool:
        """Whether there is a schedule for ``collective`` over ``nranks`` ranks, and for ``root`` if that is given."""
        if root is not None and collective.rooted and self.root not in (None, root):
            return False
        if nranks < 1 or collective not in self.collectives:
            return False
        condition = self.condition
        return condition is None or self._guarded_call(
            f"to say whether it has {collective.label}",
            nranks,
            lambda: condition(collective, nranks),
        )

    def build(self, collective: Collective, nranks: int, root: int = 0) -> Schedule:
        """The schedule, not cached. Raises ``InvalidUsage`` where ``supports`` says no or ``root`` is no rank, ``ScheduleError`` where the
        builder fails."""
        if not self.supports(collective, nranks):
            others = format_names_for(collective, nranks)
            raise InvalidUsage(
                f"algorithm {self.name!r} has no {collective.label} over {nranks} ranks",
                hint=f"these have: {others}",
            )
        if not 0 <= root < nranks:
            raise InvalidUsage(f"root {root} is not in 0..{nranks - 1}")
        root = root if collective.rooted else 0
        if not self.supports(collective, nranks, root):
            raise InvalidUsage(f"algorithm {self.name!r} is for root {self.root}, not {root}")
        hint = "register(condition=...) says for which collectives and numbers of ranks an algorithm is"
        schedule = self._guarded_call(
            f"to build {collective.label}",
            nranks,
            lambda: self.builder(collective, nranks, root),
            hint,
        )
        if not isinstance(schedule, Schedule):
            raise ScheduleError(
                f"algorithm {self.name!r} built a {type(schedule).__name__}, not a Schedule"
            )
        if (schedule.collective, schedule.nranks, schedule.root) != (collective, nranks, root):
            got = f"{schedule.collective.label} over {schedule.nranks} ranks, root {schedule.root}"
            raise ScheduleError(
                f"algorithm {self.name!r} built {got}; asked for: {collective.label} over {nranks}, root {root}"
            )
        return schedule

    def latency_steps(self, schedule: Schedule) -> int:
        """``cost.Cost.latency_steps`` of a schedule of this algorithm, by its formula if it has one."""
        if self.latency is None:
            return compute_cost(schedule).latency_steps
        formula, collective, nranks = self.latency, schedule.collective, schedule.nranks
        return self._guarded_call(
            f"to tell the latency of {collective.label}",
            nranks,
            lambda: int(formula(collective, nranks)),
        )

    def _guarded_call(
        self, action: str, nranks: int, function: Callable[[], T], hint: str | None = None
    ) -> T:
        """What the algorithm's own code answers, or ``ScheduleError`` that names it where that fails."""
        try:
            return function()
        except MiracclError:
            raise
        except Exception as error:
            text = f"algorithm {self.name!r} fails {action} over {nranks} ranks: {type(error).__name__}: {error}"
            raise ScheduleError(text, hint=hint) from error


_ALGORITHMS: Registry[Algorithm] = Registry("algorithm")
_BUILTIN = "miraccl.schedule.algos."


@lru_cache(maxsize=1)
def _load_builtins() -> None:
    package = importlib.import_module(_BUILTIN[:-1])
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(_BUILTIN + module.name)


def register(
    name: str,
    *,
    collectives: Iterable[Collective],
    description: str,
    rank_ordered: bool = False,
    rounds_once: bool = False,
    direct: Iterable[Collective] = (),
    direct_in_place: Iterable[Collective] = (),
    needs_addressable_memory: bool = False,
    uneven: Iterable[Collective] = (),
    condition: Callable[[Collective, int], bool] | None = None,
    root: int | None = None,
    latency: Callable[[Collective, int], int] | None = None,
    wire: Callable[[Collective, int], Fraction] | None = None,
) -> Callable[[Build], Build]:
    """Decorator that makes a build function an algorithm; the fields are those of ``Algorithm``.

    >>> @register("mine", collectives=[Collective.BROADCAST], description="...")
    ... def build(collective, nranks, root): ...
    """

    def add(builder: Build) -> Build:
        builtin = builder.__module__.startswith(_BUILTIN)
        if not builtin:
            _load_builtins()  # whose names are taken
        has = frozenset(collectives)
        if wrong := [thing for thing in has if not isinstance(thing, Collective)]:
            raise InvalidUsage(
                f"algorithm {name!r}: collectives has {wrong[0]!r}; allowed are members of miraccl.Collective"
            )
        _ALGORITHMS.add(
            name,
            Algorithm(
                name=name,
                collectives=has,
                builder=builder,
                description=description,
                rank_ordered=rank_ordered,
                rounds_once=rounds_once,
                direct=frozenset(direct),
                direct_in_place=frozenset(direct_in_place),
                needs_addressable_memory=needs_addressable_memory,
                uneven=frozenset(uneven),
                condition=condition,
                root=root,
                latency=latency,
                wire=wire,
                builtin=builtin,
            ),
        )
        return builder

    return add


def register_schedule(schedule: Schedule, description: str = "A single schedule.") -> None:
    """Make one schedule, from a text perhaps, an algorithm for just its collective, ranks and root, under its name."""

    register(
        schedule.name,
        collectives=[schedule.collective],
        description=description,
        needs_addressable_memory=schedule.needs_addressable_memory,
        condition=lambda collective, nranks: nranks == schedule.nranks,
        root=schedule.root,
    )(lambda collective, nranks, root: schedule)


def unregister(name: str) -> None:
    """Forget an algorithm, its schedules and its proofs."""
    _load_builtins()
    _ALGORITHMS.remove(name)
    _built.cache_clear()
    _relabelled.cache_clear()
    _prove.cache_clear()
    _prove_direct.cache_clear()


def names() -> list[str]:
    """All names, sorted."""
    _load_builtins()
    return _ALGORITHMS.names()


def get(name: str) -> Algorithm:
    """The algorithm called ``name``, or ``InvalidUsage`` that lists the names."""
    _load_builtins()
    return _ALGORITHMS.get(name)


def algorithms_for(collective: Collective, nranks: int, root: int | None = None) -> list[Algorithm]:
    """The algorithms that have a schedule for ``collective`` over ``nranks`` ranks, and for ``root`` if that is given, by name. One whose
    condition fails is among them: what is wrong with it is told to who asks for its schedule."""

    def offers(algorithm: Algorithm) -> bool:
        try:
            return algorithm.supports(collective, nranks, root)
        except ScheduleError:
            return True

    return [algorithm for algorithm in map(get, names()) if offers(algorithm)]


def format_names_for(collective: Collective, nranks: int) -> str:
    """The names of ``algorithms_for``, for who asked for another one."""
    return ", ".join(algorithm.name for algorithm in algorithms_for(collective, nranks)) or "none"


def build(
    name: str,
    collective: Collective,
    nranks: int,
    root: int = 0,
    *,
    in_place: bool = False,
    order: Sequence[int] = (),
) -> Schedule:
    """The schedule of an algorithm, from the cache. Schedules that are not built in are proved right first (``ScheduleError``).

    ``order``: the ranks in the order of the machine's links, which built-in algorithms follow whose cost depends on neighbours.
    """
    root = root if collective.rooted else 0
    if not get(name).builtin:
        _prove(name, collective, nranks, root, in_place)
    elif order and name in TOPOLOGY_ORDERED:
        return _relabelled(name, collective, nranks, root, tuple(order))
    return _built(name, collective, nranks, root)


def supports_direct(
    name: str, collective: Collective, nranks: int, root: int = 0, *, in_place: bool = False
) -> bool:
    """Whether receivers may read the sender's memory; known for built-in algorithms, proved (and kept) for others."""
    algorithm = get(name)
    if algorithm.builtin:
        return collective in (algorithm.direct_in_place if in_place else algorithm.direct)
    return _prove_direct(name, collective, nranks, root if collective.rooted else 0, in_place)


@lru_cache(maxsize=256)
def _built(name: str, collective: Collective, nranks: int, root: int) -> Schedule:
    return get(name).build(collective, nranks, root)


@lru_cache(maxsize=256)
def _relabelled(
    name: str, collective: Collective, nranks: int, root: int, order: tuple[int, ...]
) -> Schedule:
    return relabel(
        _built(name, collective, nranks, order.index(root) if collective.rooted else 0), order
    )


@lru_cache(maxsize=1024)
def _prove(name: str, collective: Collective, nranks: int, root: int, in_place: bool) -> None:
    schedule = _built(name, collective, nranks, root)
    verify(schedule, in_place=in_place, fifo_depth=FIFO_DEPTH, rank_ordered=get(name).rank_ordered)


@lru_cache(maxsize=1024)
def _prove_direct(
    name: str, collective: Collective, nranks: int, root: int, in_place: bool
) -> bool:
    return is_direct_safe(_built(name, collective, nranks, root), in_place)
