"""Two processes on two hosts that measure the network between them.

The server opens the rendezvous of a job of two ranks and is its rank 0; the client joins as rank 1.
Authentication, the choice of addresses and the transports are those of any job. The two never use
shared memory, even on one host.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

from miraccl import params
from miraccl.api.communicator import Communicator
from miraccl.bootstrap import HubServer, UniqueId, connect, create_hub
from miraccl.bootstrap.interfaces import is_loopback
from miraccl.bootstrap.session import LinkSession
from miraccl.deadline import Deadline
from miraccl.errors import AuthenticationError, BootstrapError, InvalidUsage
from miraccl.runtime.core_access import core_access
from miraccl.runtime.options import Options
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.transport.registry import TransportChoice

DEFAULT_PORT = 29400
SERVER, CLIENT = 0, 1
Tool = Literal["probe", "bench"]
Announce = Callable[[str], None]


def announce_nothing(text: str) -> None:
    """Announce nothing."""


class HostPair:
    """One end of the two: a communicator of two ranks, and JSON over the control plane.

    Attributes:
        host: Name or address under which the client reaches the server; empty at the server.
    """

    def __init__(self, session: LinkSession, comm: Communicator, host: str) -> None:
        self.session, self.comm, self.host = session, comm, host
        self.rank, self.peer = comm.rank, 1 - comm.rank
        self.access = core_access(comm)

    @property
    def is_server(self) -> bool:
        return self.rank == SERVER

    @property
    def choice(self) -> TransportChoice:
        """Transport between the two, with the reason."""
        return self.access.transports[self.peer]

    def exchange(self, value: Any, tag: str, timeout: float | None = None) -> Any:
        """Give the other end a JSON value and return its value; both call it with one tag."""
        data = json.dumps(value).encode()
        return json.loads(self.session.all_gather(data, f"net {tag}", timeout)[self.peer])


def parse_target(text: str) -> tuple[str, int]:
    """Split ``HOST[:PORT]``; an IPv6 address with a port is in brackets."""
    host, port = text, ""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise InvalidUsage(
            f"cannot use {text!r}: expected HOST or HOST:PORT with a port of 1..65535"
        )
    return host, int(port or DEFAULT_PORT)


def pair_secret(local: bool) -> bytes:
    """Return the key of the pair, from MIRACCL_SECRET.

    Args:
        local: Both ends are on this host; the user's number is enough then.
    """
    given = params.SECRET.read()
    if not given and not local:
        raise InvalidUsage(
            "cannot measure to another host without MIRACCL_SECRET: set it to the same unguessable "
            "text on both hosts"
        )
    text = f"miraccl net secret\0{given or os.getuid()}"
    return hashlib.sha256(text.encode()).digest()


@contextlib.contextmanager
def serve(
    tool: Tool, port: int, *, timeout: float, net: str = "", announce: Announce = announce_nothing
) -> Iterator[HostPair]:
    """Listen for a client and yield the pair; without MIRACCL_SECRET on loopback only.

    Args:
        announce: Called with a line that says where the client is awaited.
    """
    local = not params.SECRET.read()
    _, hub = create_hub(
        nranks=2, hosts=["127.0.0.1" if local else ""], port=port, secret=pair_secret(local)
    )
    where = "of this host only, as MIRACCL_SECRET is not set" if local else "of all interfaces"
    announce(f"listening at port {port} {where}, for {timeout:g} s")
    with _joined(tool, ("127.0.0.1", port), SERVER, timeout, net, hub=hub) as pair:
        yield pair


@contextlib.contextmanager
def join(
    tool: Tool,
    host: str,
    port: int,
    *,
    timeout: float,
    net: str = "",
    announce: Announce = announce_nothing,
) -> Iterator[HostPair]:
    """Connect to a server and yield the pair; arguments as for ``serve``."""
    announce(f"connecting to {host} port {port}, for {timeout:g} s")
    with _joined(tool, (host, port), CLIENT, timeout, net) as pair:
        pair.host = host
        yield pair


@contextlib.contextmanager
def _joined(
    tool: Tool,
    address: tuple[str, int],
    rank: int,
    timeout: float,
    net: str,
    hub: HubServer | None = None,
) -> Iterator[HostPair]:
    local = is_loopback(address[0]) and (hub is None or not params.SECRET.read())
    with _environment(rank, net):
        deadline = Deadline.after(timeout)
        options = Options.create()
        try:
            unique_id = UniqueId(addresses=(address,), secret=pair_secret(local))
            session = connect(
                unique_id, rank, 2, deadline, session_timeout=options.timeout, hub=hub
            )
            _check_tool(session, tool)
        except BaseException as error:
            if hub is not None:
                hub.close_after_error(error)
            if isinstance(error, BootstrapError):
                raise _explain(error, tool, rank, timeout) from None
            raise
        # The deadline of the rendezvous may be far in the future; the set-up has its usual one.
        phases = SetupPhases(session, Deadline.after(params.BOOTSTRAP_TIMEOUT.read()))
        comm = Communicator.from_session(session, options, setup=phases)
        with comm:
            yield HostPair(session, comm, "")


def _check_tool(session: LinkSession, tool: Tool) -> None:
    """Raise if the other end measures something else: its messages would never match."""
    tools = [data.decode() for data in session.all_gather(tool.encode(), "net tool")]
    if tools != [tool, tool]:
        server, client = tools
        raise InvalidUsage(
            f"cannot measure: the server runs miraccl net {server}, the client miraccl net {client}"
        )


def _explain(error: BootstrapError, tool: Tool, rank: int, timeout: float) -> BootstrapError:
    """Return an error that does not speak of the ranks of a job."""
    if isinstance(error, AuthenticationError):
        return AuthenticationError(
            "cannot connect: the other end has another secret",
            hint="give both ends the same MIRACCL_SECRET",
        )
    if rank == SERVER:
        # "...did not join within...; a connection from HOST did not know the secret"
        _, _, notes = error.message.partition("; ")
        return BootstrapError(f"no client came within {timeout:g} s" + f"; {notes}" * bool(notes))
    _, _, reason = error.message.rpartition("before the deadline: ")
    option = {"probe": "--listen", "bench": "--server"}[tool]
    return BootstrapError(
        f"cannot reach the other end within {timeout:g} s: {reason}",
        hint=f"miraccl net {tool} {option} must run there, and firewalls let its port pass",
    )


@contextlib.contextmanager
def _environment(rank: int, net: str) -> Iterator[None]:
    """Set the host name that keeps the two from shared memory, and MIRACCL_NET."""
    changes = {"MIRACCL_HOSTID": f"net-{('server', 'client')[rank]}"}
    if net:
        changes["MIRACCL_NET"] = net
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
