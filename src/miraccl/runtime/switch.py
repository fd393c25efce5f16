"""Ranks' side of software switches: the communicator of ranks and the switches' aggregators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from miraccl import params
from miraccl.bootstrap.hub import HubServer, create_hub
from miraccl.bootstrap.join import connect
from miraccl.bootstrap.switch import SwitchRequest, parse_address, request_aggregator
from miraccl.bootstrap.unique_id import UniqueId
from miraccl.errors import BootstrapError, InvalidUsage, MiracclError
from miraccl.runtime.rendezvous import start_deadline

if TYPE_CHECKING:
    from miraccl.bootstrap.session import LinkSession
    from miraccl.deadline import Deadline
    from miraccl.runtime.core import CommunicatorCore

_FAILED = "failed: "


def check_switches(addresses: str, mode: str) -> tuple[str, ...]:
    """Return the addresses in a list separated by commas; raise ``InvalidUsage`` if not allowed."""
    try:
        params.AGGREGATION.parse(mode)
    except ValueError as error:
        raise InvalidUsage(f"cannot use a switch: mode is {mode!r}; {error}") from None
    found = tuple(part.strip() for part in addresses.split(",") if part.strip())
    if not found:
        raise InvalidUsage("cannot use a switch: no address is given; expected HOST:PORT")
    for address in found:
        parse_address(address)
    return found


def join_switches(core: CommunicatorCore, addresses: Sequence[str]) -> tuple[LinkSession, Deadline]:
    """Return the session of the ranks of ``core`` and of an aggregator per switch.

    Collective. Rank 0 asks the switches, in the order given; the aggregators are the last members.

    Raises:
        BootstrapError: A switch cannot be reached or refuses; on all ranks.
        AuthenticationError: A switch has another secret; a ``BootstrapError`` on other ranks.
    """
    deadline, nranks = start_deadline(), core.nranks + len(addresses)
    hub: HubServer | None = None
    message, error = "", None
    if core.rank == 0:
        try:
            ident, hub = create_hub(nranks=nranks)
            for number, address in enumerate(addresses):
                request = SwitchRequest(
                    unique_id=str(ident),
                    rank=core.nranks + number,
                    nranks=nranks,
                    aggregators=len(addresses),
                )
                request_aggregator(address, request, deadline)
            message = str(ident)
        except MiracclError as problem:
            message, error = f"{_FAILED}{problem.message}", problem
    try:
        text = core.session.all_gather(message.encode(), "switch", deadline)[0].decode()
        if error is not None:
            raise error
        if text.startswith(_FAILED):
            raise BootstrapError(text.removeprefix(_FAILED), rank=core.rank, peer=0)
        session = connect(
            UniqueId.parse(text),
            core.rank,
            nranks,
            deadline,
            session_timeout=core.session.timeout,
            hub=hub,
        )
    except BaseException as problem:
        if hub is not None:
            hub.close_after_error(problem)
        raise
    return session, deadline
