"""Catalog of algorithms: registration, lookup and cached schedules.

An algorithm is a function ``build(collective, nranks, root) -> Schedule`` with a name and the
properties a planner needs. Built-in algorithms are the modules of ``schedule.algos``, imported on
first use; ``register`` adds others. Schedules are built once per (name, collective, nranks, root).
Schedules of registered algorithms are verified before first use and the result is cached; the test
suite verifies built-in ones.
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
#: built-in algorithms whose cost depends on the ranks that are neighbours
TOPOLOGY_ORDERED = (
    "ring",
    "chain",
    "double_binary_tree",
    "distance_doubling",
    "staggered_ring",
    "staggered_distance_doubling",
)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm for one or more collectives.

    - ``name``, ``description``: identifier and one-line summary for ``miraccl schedule list``.
    - ``collectives``: collectives it implements.
    - ``builder``: function that builds the schedule for (collective, nranks, root).
    - ``rank_ordered``: contributions are added in rank order at every size, so results are
      reproducible. Verified (``provenance.add_in_rank_order``). True for algorithms that do not
      reduce.
    - ``rounds_once``: 16- and 8-bit float sums are rounded once instead of at every hop. Not
      verified.
    - ``direct``, ``direct_in_place``: collectives in which receivers may read the sender's memory
      (``verify.is_direct_safe``).
    - ``needs_addressable_memory``: schedules use PUT, GET or REDUCE_FROM_PEERS.
    - ``uneven``: collectives that accept blocks with different counts.
    - ``condition``: predicate on (collective, nranks); None accepts all.
    - ``root``: the only supported root, None for any.
    - ``latency``, ``wire``: closed forms of ``cost.Cost.latency_steps`` and
      ``cost.Cost.wire_blocks`` for (collective, nranks).
    - ``network``: made for ranks on several hosts; not chosen by itself for those of one.
    - ``builtin``: defined in ``schedule.algos``.
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
    network: bool = False
    builtin: bool = False

    def supports(self, collective: Collective, nranks: int, root: int | None = None) -> bool:
        """Return True if there is a schedule for ``collective``, ``nranks`` and, if given,
        ``root``.
        """
        if root is not None and collective.rooted and self.root not in (None, root):
            return False
        if nranks < 1 or collective not in self.collectives:
            return False
        condition = self.condition
        return condition is None or self._guarded_call(
            f"to evaluate its condition for {collective.label}",
            nranks,
            lambda: condition(collective, nranks),
        )

    def build(self, collective: Collective, nranks: int, root: int = 0) -> Schedule:
        """Build the schedule without caching.

        Raise ``InvalidUsage`` if ``supports`` is false or ``root`` is out of range,
        ``ScheduleError`` if the builder fails or returns a schedule for other arguments.
        """
        if not self.supports(collective, nranks):
            others = format_names_for(collective, nranks)
            raise InvalidUsage(
                f"algorithm {self.name!r} has no {collective.label} over {nranks} ranks",
                hint=f"available: {others}",
            )
        if not 0 <= root < nranks:
            raise InvalidUsage(f"root {root} is not in 0..{nranks - 1}")
        root = root if collective.rooted else 0
        if not self.supports(collective, nranks, root):
            raise InvalidUsage(
                f"algorithm {self.name!r} supports root {self.root} only, not {root}"
            )
        hint = (
            "restrict the algorithm to supported collectives and numbers of ranks with"
            " register(condition=...)"
        )
        schedule = self._guarded_call(
            f"to build {collective.label}",
            nranks,
            lambda: self.builder(collective, nranks, root),
            hint,
        )
        if not isinstance(schedule, Schedule):
            raise ScheduleError(
                f"algorithm {self.name!r} returned a {type(schedule).__name__}, not a Schedule"
            )
        if schedule.shards:
            raise ScheduleError(
                f"algorithm {self.name!r} returned a re-sharding, which is no"
                f" {collective.label}: its schedule has shards"
            )
        if (schedule.collective, schedule.nranks, schedule.root) != (collective, nranks, root):
            got = f"{schedule.collective.label} over {schedule.nranks} ranks, root {schedule.root}"
            raise ScheduleError(
                f"algorithm {self.name!r} returned a schedule for {got}; requested:"
                f" {collective.label} over {nranks} ranks, root {root}"
            )
        return schedule

    def latency_steps(self, schedule: Schedule) -> int:
        """Return ``cost.Cost.latency_steps`` of ``schedule``, by the closed form if given."""
        if self.latency is None:
            return compute_cost(schedule).latency_steps
        formula, collective, nranks = self.latency, schedule.collective, schedule.nranks
        return self._guarded_call(
            f"to compute the latency of {collective.label}",
            nranks,
            lambda: int(formula(collective, nranks)),
        )

    def _guarded_call(
        self, action: str, nranks: int, function: Callable[[], T], hint: str | None = None
    ) -> T:
        """Call user code; wrap exceptions in a ``ScheduleError`` that names the algorithm."""
        try:
            return function()
        except MiracclError:
            raise
        except Exception as error:
            text = (
                f"algorithm {self.name!r} failed {action} over {nranks} ranks:"
                f" {type(error).__name__}: {error}"
            )
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
    network: bool = False,
) -> Callable[[Build], Build]:
    """Return a decorator that registers a build function as an algorithm.

    The parameters are the fields of ``Algorithm``. Raise ``InvalidUsage`` for a name in use.

    >>> @register("mine", collectives=[Collective.BROADCAST], description="...")
    ... def build(collective, nranks, root): ...
    """

    def add(builder: Build) -> Build:
        builtin = builder.__module__.startswith(_BUILTIN)
        if not builtin:
            _load_builtins()  # reserves their names
        has = frozenset(collectives)
        if wrong := [thing for thing in has if not isinstance(thing, Collective)]:
            raise InvalidUsage(
                f"algorithm {name!r}: {wrong[0]!r} is not a member of miraccl.Collective"
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
                network=network,
                builtin=builtin,
            ),
        )
        return builder

    return add


def register_schedule(schedule: Schedule, description: str = "A single schedule.") -> None:
    """Register one schedule, for example one read from text, under its own name.

    The algorithm supports exactly the schedule's collective, number of ranks and root.
    """

    register(
        schedule.name,
        collectives=[schedule.collective],
        description=description,
        needs_addressable_memory=schedule.needs_addressable_memory,
        condition=lambda collective, nranks: nranks == schedule.nranks,
        root=schedule.root,
    )(lambda collective, nranks, root: schedule)


def unregister(name: str) -> None:
    """Remove an algorithm with its cached schedules and proofs."""
    _load_builtins()
    _ALGORITHMS.remove(name)
    _built.cache_clear()
    _relabelled.cache_clear()
    _prove.cache_clear()
    _prove_direct.cache_clear()


def names() -> list[str]:
    """Return the names of all algorithms, sorted."""
    _load_builtins()
    return _ALGORITHMS.names()


def get(name: str) -> Algorithm:
    """Return the algorithm called ``name``; raise ``InvalidUsage`` with the known names."""
    _load_builtins()
    return _ALGORITHMS.get(name)


def algorithms_for(collective: Collective, nranks: int, root: int | None = None) -> list[Algorithm]:
    """Return the algorithms with a schedule for the arguments, sorted by name.

    Includes algorithms whose ``condition`` raises; the error is reported when their schedule is
    requested.
    """

    def offers(algorithm: Algorithm) -> bool:
        try:
            return algorithm.supports(collective, nranks, root)
        except ScheduleError:
            return True

    return [algorithm for algorithm in map(get, names()) if offers(algorithm)]


def format_names_for(collective: Collective, nranks: int) -> str:
    """Return the names of ``algorithms_for`` as text for error messages."""
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
    """Return the schedule of an algorithm from the cache.

    Schedules that are not built in are verified first (``ScheduleError``). ``order``: ranks in the
    order of the machine's links; built-in algorithms whose cost depends on neighbours are
    relabelled to follow it.
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
    """Return True if receivers may read the sender's memory.

    Declared by built-in algorithms; verified once, and cached, for others.
    """
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
