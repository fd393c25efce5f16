"""Aggregators of a communicator: further members, or switches, that add up for the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from miraccl.errors import InvalidUsage
from miraccl.planning.nccl_hints import read_collnet
from miraccl.runtime.dispatch import Dispatcher
from miraccl.runtime.rendezvous import start_deadline
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.types import Collective

if TYPE_CHECKING:
    from miraccl.bootstrap.contract import Session


class Aggregators(Dispatcher):
    """Part of ``Communicator`` that hands sums to aggregators."""

    def _create_over(self, session: Session, setup: SetupPhases) -> Any:
        """Create a communicator with the options of the environment over a session."""
        raise NotImplementedError

    def use_aggregators(self, wide: Any, aggregators: int, mode: str) -> None:
        """Send sums through the last members of ``wide``, which this communicator owns from now on.

        Collective. ``NCCL_ALGO`` of rank 0 hands them the collectives for which it names CollNet.

        Args:
            wide: Communicator of these ranks and, after them, the aggregators.
            aggregators: Number of aggregators.
            mode: As MIRACCL_AGGREGATION.

        Raises:
            InvalidUsage: The mode names a schedule that does not fit.
        """
        from miraccl.runtime.aggregation import Aggregation  # late: few programs need it

        own = json.dumps({int(each): name for each, name in read_collnet().items()})
        first = self._core.session.all_gather(own.encode(), "aggregation", start_deadline())[0]
        requested = {Collective(int(each)): name for each, name in json.loads(first).items()}
        self._aggregation = Aggregation(self._core, wide._core, aggregators, mode, requested)

    def use_switch(self, addresses: str, mode: str = "auto") -> None:
        """Add an aggregator of each switch, for all_reduce, reduce_scatter and all_gather.

        Collective. A switch is a process `miraccl aggregator --listen HOST:PORT`, which may serve
        several communicators. Communicators that ``split`` or ``shrink`` make do without.

        Args:
            addresses: HOST:PORT of each switch, separated by commas; that of rank 0 counts.
            mode: As MIRACCL_AGGREGATION: ``auto`` measures and uses the aggregators where they are
                faster; ``always``, ``never``, or the name of a schedule. The same on all ranks.

        Raises:
            InvalidUsage: The communicator has aggregators already, or an argument is not allowed.
            BootstrapError: A switch cannot be reached, or refuses; the communicator is unchanged.
            AuthenticationError: A switch has another secret (MIRACCL_SECRET).
        """
        from miraccl.runtime.switch import check_switches, join_switches

        self._core.check(0, "use_switch")
        if self._aggregation is not None:
            raise InvalidUsage("cannot use a switch: the communicator has aggregators already")
        switches = check_switches(addresses, mode)
        session, deadline = join_switches(self._core, switches)
        setup = SetupPhases(session, deadline)
        wide = self._create_over(session, setup)
        self.use_aggregators(wide, len(switches), mode)

    def serve_as_aggregator(
        self, aggregators: int, on_sum: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Add up for the other members until they leave; this member is one of the aggregators.

        Args:
            aggregators: Number of aggregators, the last members.
            on_sum: Called with the bytes of each sum.

        Raises:
            PeerDied: A member died.
        """
        from miraccl.runtime.aggregation import serve

        serve(self._core, aggregators, on_sum)
