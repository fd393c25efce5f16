"""Requests to a software switch: a process that adds up for any job that has its secret.

A switch listens at one address. To ask for an aggregator, rank 0 of a communicator joins a job of
two at that address, in which the switch is rank 1, and both exchange one message. Strangers are
refused as by every job: both sides prove the secret. The answer says only that the switch starts an
aggregator; that process then joins the job of the communicator by its unique id.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

from miraccl import clock, params, trace
from miraccl.bootstrap.hub import create_hub
from miraccl.bootstrap.join import connect
from miraccl.bootstrap.link import RankTaken
from miraccl.bootstrap.session import LinkSession
from miraccl.bootstrap.unique_id import UniqueId
from miraccl.deadline import Deadline
from miraccl.errors import BootstrapError, InvalidUsage, MiracclError
from miraccl.wire.auth import MAX_RANKS

_log = trace.logger("aggregation")
#: Pause of a rank that finds another one asking (seconds).
BUSY_PAUSE = 0.01
#: Seconds in which a connected rank sends its request.
REQUEST_SECONDS = 10.0
_TAG = "switch"


@dataclass(frozen=True, kw_only=True)
class SwitchRequest:
    """Request for an aggregator.

    Attributes:
        unique_id: Text of the unique id of the job to join.
        rank: Rank of the aggregator in it, one of the last.
        nranks: Ranks and aggregators of the job.
        aggregators: Aggregators of the job.
    """

    unique_id: str
    rank: int
    nranks: int
    aggregators: int

    def __post_init__(self) -> None:
        UniqueId.parse(self.unique_id)
        first = self.nranks - self.aggregators
        if not 0 < first <= self.rank < self.nranks <= MAX_RANKS:
            raise InvalidUsage(
                f"cannot join as rank {self.rank} of {self.nranks} with {self.aggregators}"
                " aggregators: aggregators are the last of more ranks"
            )


def parse_address(text: str, lowest: int = 1) -> tuple[str, int]:
    """Return (host, port). Raises ``InvalidUsage`` if ``text`` is not HOST:PORT.

    ``lowest``: lowest port; 0 lets the listener choose one.
    """
    host, _, port = text.strip().rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not lowest <= int(port) < 65536:
        raise InvalidUsage(
            f"cannot use {text!r} as the address of a switch: expected HOST:PORT with a port of"
            " 1..65535"
        )
    return host, int(port)


def switch_id(host: str, port: int) -> UniqueId:
    """Return the unique id of the requests at an address: its secret is MIRACCL_SECRET's."""
    key = params.SECRET.read() or f"user {os.getuid()}"
    secret = hashlib.sha256(f"miraccl switch\0{key}".encode()).digest()
    return UniqueId(addresses=((host, port),), secret=secret)


def request_aggregator(address: str, request: SwitchRequest, timeout: float | Deadline) -> None:
    """Ask the switch at ``address`` (HOST:PORT) to join a job.

    Raises:
        BootstrapError: Nothing listens there in time, or the switch refuses.
        AuthenticationError: The switch has another secret.
    """
    ident, deadline = switch_id(*parse_address(address)), Deadline.after(timeout)
    while True:
        try:
            session = connect(ident, 0, 2, deadline)
            break
        except RankTaken:
            if deadline.left <= BUSY_PAUSE:
                raise
            clock.sleep(BUSY_PAUSE)
    with session:
        session.all_gather(json.dumps(asdict(request)).encode(), f"{_TAG} request", deadline)
        answer = session.all_gather(b"", _TAG, deadline)[1]
    if answer:
        raise BootstrapError(
            f"cannot use the switch at {address}: {answer.decode(errors='replace')}"
        )


class SwitchListener:
    """Listening side of a switch. One thread accepts; ``close`` may be called from any.

    Args:
        host: Numeric address to listen at; "" is all.
        port: Port; 0 chooses a free one.
    """

    def __init__(self, host: str, port: int) -> None:
        secret = switch_id("0.0.0.0", 1).secret
        ident, self._hub = create_hub(
            nranks=2, hosts=[host], port=port, secret=secret, reusable=True
        )
        self.address = ident.addresses[0]
        # From this process the hub is reached on loopback unless it has one address only.
        own = host if host not in ("", "::", "0.0.0.0") else "127.0.0.1"
        self._own = UniqueId(addresses=((own, self.address[1]),), secret=secret)

    def accept(
        self, refuse: Callable[[SwitchRequest], str], poll: Callable[[], None] = lambda: None
    ) -> SwitchRequest | None:
        """Wait for a request and answer it.

        Args:
            refuse: Returns why a request is refused; empty if it is not.
            poll: Called every 0.1 s while waiting; may raise to end the wait.

        Returns:
            The request; None if it was refused or its sender ended.
        """
        try:
            with connect(self._own, 1, 2, params.FOREVER, poll=poll) as session:
                return self._answer(session, refuse)
        except MiracclError as error:
            _log.info("a request failed: %s", error)
            clock.sleep(BUSY_PAUSE)
            return None

    @staticmethod
    def _answer(
        session: LinkSession, refuse: Callable[[SwitchRequest], str]
    ) -> SwitchRequest | None:
        # The request comes first: the answer depends on it.
        data = session.all_gather(b"", f"{_TAG} request", REQUEST_SECONDS)[0]
        request, reason = None, ""
        try:
            request = SwitchRequest(**json.loads(data))
            reason = refuse(request)
        except (ValueError, TypeError) as error:
            reason = f"the request cannot be read: {error}"
        session.all_gather(reason.encode(), _TAG, REQUEST_SECONDS)
        return None if reason else request

    def close(self) -> None:
        """Stop listening; requests in progress end."""
        self._hub.close("the switch ends")
