"""Options of a communicator, with the environment as their defaults."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar

import numpy as np

from miraccl import params
from miraccl.errors import InvalidUsage, did_you_mean
from miraccl.planning import nccl_hints
from miraccl.types import Collective

F = TypeVar("F", bound=Callable[..., Any])


class CommunicatorOptions(TypedDict, total=False):
    """Keyword options of ``init`` and ``Communicator``; None and a missing one mean the default.

    Attributes:
        timeout: Deadline of every operation, in seconds.
        algo: Algorithm for every collective that has it, such as ``"ring"``.
        proto: Protocol: ``"simple"``, ``"ll"`` or, on GPU memory, ``"ll128"``.
        deterministic: Results depend on neither size, algorithm nor layout.
        buffsize: Bytes of all FIFOs of a CPU rank; 0 chooses.
        cta_policy: GPU resources of kernels: ``"default"``, ``"efficiency"`` or ``"zero"``.
    """

    timeout: float | None
    algo: str | None
    proto: str | None
    deterministic: bool | None
    buffsize: int | None
    cta_policy: Literal["default", "efficiency", "zero"] | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Resolved options of a communicator; all ranks must pass the same.

    Attributes:
        timeout: Deadline of operations, in seconds.
        algo, proto: Required algorithm and protocol; empty leaves the choice to the planner.
        deterministic: Results depend on neither size, algorithm nor layout.
        buffsize: Bytes of all FIFOs of a rank; 0 chooses.
        single_copy: Size from which private memory is read directly, "never", or empty (measured).
        cta_policy: One of ``params.CTA_POLICIES``, or empty; the environment takes precedence.
        algo_hints: Algorithms that NCCL_ALGO suggests, by collective.
        proto_hints: Protocols that NCCL_PROTO suggests; ``proto`` has the one that CPU ranks
            follow.
    """

    timeout: float
    algo: str
    proto: str
    deterministic: bool
    buffsize: int
    single_copy: str = ""
    cta_policy: str = ""
    algo_hints: tuple[tuple[Collective, str], ...] = ()
    proto_hints: tuple[tuple[Collective, str], ...] = ()

    @classmethod
    def create(
        cls,
        *,
        timeout: float | None = None,
        algo: str | None = None,
        proto: str | None = None,
        deterministic: bool | None = None,
        buffsize: int | None = None,
        cta_policy: str | None = None,
        **unknown: Any,
    ) -> Options:
        for name in unknown:
            raise InvalidUsage(
                f"unknown option {name!r}; known are {', '.join(_NAMES)}",
                hint=did_you_mean(name, _NAMES),
            )
        if timeout is not None and (
            isinstance(timeout, bool)
            or not isinstance(timeout, int | float)
            or not 0 < timeout < math.inf
        ):
            raise InvalidUsage(
                f"timeout is {timeout!r}; it must be a finite number of seconds greater than 0"
            )
        for name, text in (("algo", algo), ("proto", proto)):
            if text is not None and not isinstance(text, str):
                raise InvalidUsage(
                    f"{name} is {text!r}; it must be a name, such as "
                    f"{'ring' if name == 'algo' else 'simple'}"
                )
        if deterministic is not None and not isinstance(deterministic, bool | np.bool_):
            raise InvalidUsage(f"deterministic is {deterministic!r}; it must be True or False")
        if buffsize is not None and (
            isinstance(buffsize, bool) or not isinstance(buffsize, int) or buffsize < 0
        ):
            raise InvalidUsage(
                f"buffsize is {buffsize!r}; it must be a number of bytes, or 0 for the default"
            )
        if cta_policy is not None and cta_policy not in params.CTA_POLICIES:
            raise InvalidUsage(
                f"cta_policy is {cta_policy!r}; allowed are {', '.join(params.CTA_POLICIES)}"
            )
        algorithm, algo_hints = nccl_hints.read_algorithms() if algo is None else (algo.lower(), {})
        protocol, proto_hints = (
            nccl_hints.read_protocols() if proto is None else (proto.lower(), {})
        )
        if protocol not in ("", *params.PROTOCOLS):
            source = "MIRACCL_PROTO: " if proto is None else ""
            raise InvalidUsage(
                f"{source}unknown protocol {protocol!r}; allowed are simple, ll and, on GPU "
                "memory, ll128"
            )
        return cls(
            timeout=params.TIMEOUT.read()
            if timeout is None
            else float(min(timeout, params.FOREVER)),
            algo=algorithm,
            algo_hints=tuple(algo_hints.items()),
            proto_hints=tuple(proto_hints.items()),
            proto=protocol or nccl_hints.cpu_protocol(proto_hints),
            deterministic=params.DETERMINISTIC.read()
            if deterministic is None
            else bool(deterministic),
            buffsize=params.BUFFSIZE.read() if buffsize is None else buffsize,
            single_copy=params.SINGLE_COPY.read(),
            cta_policy=cta_policy or "",
        )


_NAMES = tuple(CommunicatorOptions.__annotations__)


def shows_options(function: F) -> F:
    """Decorate a function so that ``help()`` and ``inspect`` name the options it takes.

    Type checkers and editors read ``Unpack[CommunicatorOptions]``.
    """
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, kind in CommunicatorOptions.__annotations__.items():
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=getattr(kind, "__forward_arg__", kind),
            )
        )
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function
