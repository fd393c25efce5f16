"""One rank in a network namespace: all collectives, then finalize. Started by ``test_network``."""

from __future__ import annotations

import sys

import numpy as np

import miraccl
from tests.runtime import cases
from tests.runtime.test_p2p import all_to_all_messages, ring


def main() -> None:
    with miraccl.init(timeout=30) as comm:
        names = {peer: choice.name for peer, choice in comm._core.fabric.choices.items()}
        rng = np.random.default_rng(11)
        for _ in range(12):
            case = cases.random_case(
                rng,
                comm.nranks,
                [0, 1, 7, 5000, 100_001],
                [*cases.EVEN, *cases.UNEVEN],
                ordered=lambda case: False,
            )
            cases.perform(comm, case)
        ring(comm, 600_000)
        all_to_all_messages(comm)
        addresses = comm._core.session.addresses
        print("fine", sorted(names.items()), addresses, flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
