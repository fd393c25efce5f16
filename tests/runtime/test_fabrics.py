"""Both kinds of fabric pass the conformance kit; virtual ranks on many hosts."""

from __future__ import annotations

import numpy as np

from miraccl import Communicator
from miraccl.bootstrap.memory import InMemoryJob
from miraccl.runtime.fabric import ProcessFabric
from miraccl.runtime.memory_fabric import MemoryFabric
from miraccl.runtime.options import Options
from tests.bootstrap.kit import in_threads
from tests.runtime.fabric_conformance import FabricConformance


class TestProcessFabric(FabricConformance):
    factory = ProcessFabric
    transport = "shm"


class TestMemoryFabric(FabricConformance):
    factory = MemoryFabric
    transport = "memory"


def test_virtual_hosts_are_those_of_the_job() -> None:
    """The planner and the compiled engine of real ranks, on hosts that exist in the job only."""

    def work(comm: Communicator) -> tuple[float, int]:
        with comm:
            x = np.full(1000, comm.rank, np.float32)
            comm.all_reduce(x)
            return float(x[-1]), comm._core.fabric.hosts[comm.rank]

    with InMemoryJob(12, hosts=[f"host{rank // 4}" for rank in range(12)]) as job:
        results = in_threads(
            [
                lambda s=s: work(
                    Communicator.from_session(
                        s, Options.create(timeout=30), open_fabric=MemoryFabric
                    )
                )
                for s in job.sessions
            ]
        )
    assert results == [(66.0, rank // 4) for rank in range(12)]
