"""Driver side of groups of actors: creation, calls and destruction.

Actors need no base class: code runs in them through ``__ray_call__``, which Ray adds to every
actor. A group is created in two rounds.  In the first, every actor reports that it is alive and
free, and the actor of rank 0 starts to listen.  Only after all have answered do they join, because
an actor that is blocked in a rendezvous cannot be called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray

from miraccl import clock
from miraccl.errors import BootstrapError, InvalidUsage, MiracclError
from miraccl.ray import members
from miraccl.ray.members import DEFAULT
from miraccl.runtime.options import Options

#: Seconds the driver waits beyond the ranks' deadline, because their errors are more specific.
GRACE_SECONDS = 5.0
LEAVE_SECONDS = 30.0

_lock = threading.Lock()
_order = threading.Lock()
_created: dict[str, Group] = {}


class Group:
    """Handle of a group in the driver: its ``name``, and its ``actors`` in order of rank."""

    def __init__(self, name: str, actors: Sequence[Any]) -> None:
        self.name = name
        self.actors = tuple(actors)

    @property
    def nranks(self) -> int:
        return len(self.actors)

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> list[Any]:
        """Call ``function(comm, *args)`` in all actors at once.

        Args:
            function: Receives the actor's communicator first.
            timeout: Seconds to wait for the results; None waits without limit.

        Returns:
            The results in order of rank.

        Raises:
            Exception: The error of a rank, as Ray raises it; also an instance of its original
                class.
        """
        calls = _call_all(self.actors, _run_in_group, lambda _: (self.name, function, *args))
        results: list[Any] = ray.get(calls, timeout=timeout)
        return results

    def destroy(self, timeout: float = LEAVE_SECONDS) -> None:
        """Make all living actors leave the group, after their current call; idempotent.

        Raises:
            BootstrapError: Some actors were still busy after ``timeout`` seconds; they leave later.
        """
        with _lock:
            if _created.get(self.name) is self:
                del _created[self.name]
        calls = _call_all(self.actors, members.leave, lambda _: (self.name,))
        _, late = ray.wait(calls, num_returns=len(calls), timeout=timeout)
        if late:
            ranks = ", ".join(str(rank) for rank, call in enumerate(calls) if call in late)
            raise BootstrapError(
                f"group {self.name!r}: rank {ranks} did not leave within {timeout:g} s",
                hint="is the actor busy with another call?",
            )

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"<Group {self.name!r} of {self.nranks} actors>"


def create_group(
    actors: Iterable[Any], name: str = DEFAULT, *, meet_timeout: float | None = None, **options: Any
) -> Group:
    """Give ``actors`` a communicator: the i-th becomes rank i and finds it with
    ``get_group(name)``.

    Args:
        actors: Actor handles in order of rank.
        name: Name of the group.
        meet_timeout: Seconds from this call until all ranks must have joined, including the start
            of
            actors and calls they are busy with; default MIRACCL_BOOTSTRAP_TIMEOUT.
        options: Options of ``Communicator``, such as ``timeout`` of every operation.

    Raises:
        BootstrapError: An actor is missing, dies or cannot join; names the rank.
        InvalidUsage: An argument is wrong; raised before anything is sent.
    """
    actors = _handles(actors)
    members.check_name(name)
    deadline = clock.monotonic() + members.join_timeout(meet_timeout)
    Options.create(**options)
    nranks, ident = len(actors), ""
    undo: Callable[[Any, str], object] = (
        members.abandon
    )  # an existing group of this name belongs to someone else
    try:
        calls = _call_all(actors, members.prepare, lambda rank: (name, rank, nranks))
        ident = _results(calls, deadline, name, actors)[0]
        left, undo = max(0.001, deadline - clock.monotonic()), members.leave
        calls = _call_all(
            actors, members.join, lambda rank: (name, rank, nranks, ident, left, options)
        )
        _results(calls, deadline + GRACE_SECONDS, name, actors)
    except BaseException as error:
        _call_all(actors, undo, lambda _: (name,))
        if ident and isinstance(error, BootstrapError) and error.peer is not None:
            members.join_and_leave(ident, nranks, error.peer)
        raise
    group = Group(name, actors)
    with _lock:
        _created[name] = group
    return group


def destroy_group(name: str = DEFAULT) -> None:
    """Destroy a group in the process that created it; in an actor, leave it."""
    with _lock:
        group = _created.get(name)
    if group is not None:
        group.destroy()
    elif not members.leave(None, name):
        raise InvalidUsage(f"this process neither created a group {name!r} nor belongs to one")


def _handles(actors: Iterable[Any]) -> list[Any]:
    try:
        handles = list(actors)
    except TypeError:
        raise InvalidUsage(
            f"actors is a {type(actors).__name__}; pass a list of actor handles in order of rank"
        ) from None
    if not handles:
        raise InvalidUsage("create_group needs at least one actor")
    for rank, actor in enumerate(handles):
        if not isinstance(actor, ray.actor.ActorHandle):
            raise InvalidUsage(f"actors[{rank}] is a {type(actor).__name__}, not an actor handle")
    if len(set(handles)) < len(handles):
        raise InvalidUsage("create_group got the same actor twice; each actor is one rank")
    return handles


def _call_all(
    actors: Iterable[Any], function: Callable[..., Any], args: Callable[[int], tuple[Any, ...]]
) -> list[Any]:
    """Call ``function(actor, *args(rank))`` in every actor.

    Calls may wait for each other, so calls from several threads are sent to all actors in one
    order; otherwise they could wait crosswise.
    """
    with _order:
        return [
            actor.__ray_call__.remote(function, *args(rank)) for rank, actor in enumerate(actors)
        ]


def _results(calls: list[Any], deadline: float, name: str, actors: list[Any]) -> list[Any]:
    """Return the results in order of rank; the first failure ends the wait."""
    ranks = {call: rank for rank, call in enumerate(calls)}
    results: list[Any] = [None] * len(calls)
    while ranks:
        done, _ = ray.wait(list(ranks), timeout=max(0.0, deadline - clock.monotonic()))
        if not done:
            missing = sorted(ranks.values())
            ranks_text = ", ".join(map(str, missing))
            text = (
                f"group {name!r}: no reply from rank {ranks_text} of {len(calls)} by the deadline"
            )
            raise BootstrapError(
                text, hint=_busy_reason([(rank, actors[rank]) for rank in missing])
            )
        for call in done:
            rank = ranks.pop(call)
            try:
                results[rank] = ray.get(call)
            except ray.exceptions.RayError as error:
                raise _failure(name, rank, error) from getattr(error, "cause", None) or error
    return results


def _busy_reason(silent: list[tuple[int, Any]]) -> str:
    here = ray.get_runtime_context()
    for rank, actor in silent:
        if here.get_actor_id() is not None and actor == here.current_actor:
            return (
                f"rank {rank} is the actor that called create_group, so it is busy; "
                "actors without a driver use join_group"
            )
    return "has the actor started, or is it busy with another call?"


def _failure(name: str, rank: int, error: Exception) -> BootstrapError:
    cause = getattr(error, "cause", None) or error
    text = (
        str(cause)
        if isinstance(cause, MiracclError)
        else f"{type(cause).__name__}: {str(cause).strip()}"
    )
    return BootstrapError(
        f"cannot create group {name!r}: rank {rank} could not join: {text}", peer=rank
    )


def _run_in_group(_actor: Any, name: str, function: Callable[..., Any], *args: Any) -> Any:
    return function(members.get_group(name), *args)
