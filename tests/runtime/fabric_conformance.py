"""Conformance kit of ``runtime.fabric_contract.Fabric``: what communicators rely on.

A factory makes the fabric of one rank; the control plane is that of ``InMemoryJob``, so all ranks
are threads of this process, whatever the fabric is made for.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from miraccl import Communicator, DType
from miraccl.bootstrap.memory import InMemoryJob
from miraccl.errors import CommunicatorAborted, MiracclError, PeerDied, PlanMismatch
from miraccl.planning.cost_model import CpuConstants
from miraccl.runtime.fabric_contract import AgreedConfig, Fabric, FabricFactory
from miraccl.runtime.options import Options
from miraccl.runtime.setup_phases import SetupPhases
from tests.bootstrap.kit import in_threads
from tests.runtime import cases

TIMEOUT_S = 30.0
CONFIG = AgreedConfig(
    version="1",
    algo="",
    proto="",
    deterministic=False,
    buffsize=0,
    single_copy="",
    net="auto",
    constants=CpuConstants().to_json(),
)
Open = Callable[..., list[Any]]


class FabricConformance:
    """Tests of one kind of fabric; a subclass has its factory and the transport of its pairs."""

    factory: ClassVar[Any]
    transport: ClassVar[str]

    @pytest.fixture
    def jobs(self) -> Iterator[Callable[..., InMemoryJob]]:
        opened: list[InMemoryJob] = []

        def open_job(nranks: int, **options: Any) -> InMemoryJob:
            opened.append(InMemoryJob(nranks, timeout=TIMEOUT_S, **options))
            return opened[-1]

        yield open_job
        for job in opened:
            job.close()

    @pytest.fixture
    def open(self, jobs: Callable[..., InMemoryJob]) -> Iterator[Open]:
        """``open(nranks, configs)`` -> fabric or error by rank."""
        opened: list[Any] = []

        def open_fabrics(nranks: int, configs: Sequence[AgreedConfig] = ()) -> list[Any]:
            def make(rank: int) -> Any:
                return type(self).factory(
                    SetupPhases(jobs_sessions[rank]),
                    configs[rank] if configs else CONFIG,
                    timeout=TIMEOUT_S,
                    on_lost=lambda peer, loss: None,
                )

            jobs_sessions = jobs(nranks).sessions
            results = in_threads([lambda r=r: make(r) for r in range(nranks)])
            opened.extend(results)
            return results

        yield open_fabrics
        for fabric in opened:
            if not isinstance(fabric, BaseException):
                fabric.close()
                fabric.close()  # may be called twice

    def test_all_ranks_describe_the_same_communicator(self, open: Open) -> None:
        fabrics = open(3)
        for rank, fabric in enumerate(fabrics):
            assert isinstance(fabric, Fabric)
            assert (fabric.rank, fabric.nranks, fabric.timeout) == (rank, 3, TIMEOUT_S)
            assert set(fabric.choices) == set(fabric.pairs) == {0, 1, 2} - {rank}
            assert {choice.name for choice in fabric.choices.values()} == {self.transport}
            assert fabric.local == [0, 1, 2]
            assert fabric.shm_ranks[0] == rank
            assert set(fabric.shm_ranks) == {0, 1, 2}
            assert fabric.memory()["private"] > 0
        for name in ("hosts", "order", "slot_bytes", "addressable", "constants_text", "endpoints"):
            assert len({repr(getattr(fabric, name)) for fabric in fabrics}) == 1, name

    def test_a_single_rank_has_no_peers(self, open: Open) -> None:
        (fabric,) = open(1)
        assert fabric.choices == fabric.pairs == {}
        assert fabric.shm_ranks == [0]
        assert fabric.slot_bytes > 0

    def test_both_ends_of_a_pair_map_one_fifo(self, open: Open) -> None:
        fabrics = open(2)
        ctypes.c_int64.from_address(fabrics[0].pairs[1].send.slots).value = 4711
        assert ctypes.c_int64.from_address(fabrics[1].pairs[0].recv.slots).value == 4711

    def test_peers_address_the_window(self, open: Open) -> None:
        fabrics = open(2)
        x = fabrics[0].window.empty(8, np.int64)
        x[:] = range(8)
        assert fabrics[0].window.contains(x.ctypes.data, x.nbytes)
        offset = x.ctypes.data - fabrics[0].window.region.address
        there = (ctypes.c_int64 * 8).from_address(fabrics[1].pairs[0].window + offset)
        assert list(there) == list(range(8))
        assert fabrics[0].memory()["window"] >= x.nbytes

    def test_different_settings_are_named(self, open: Open) -> None:
        errors = open(3, [CONFIG, CONFIG, replace(CONFIG, buffsize=1 << 20)])
        for error in errors:
            assert isinstance(error, PlanMismatch)
            assert "buffsize" in str(error)
            assert "1048576 on rank 2" in str(error)

    def test_the_cost_model_of_rank_0_is_used(self, open: Open) -> None:
        other = replace(CpuConstants(), latency_us=77.0)
        fabrics = open(2, [CONFIG, replace(CONFIG, constants=other.to_json())])
        assert [fabric.constants_text for fabric in fabrics] == [CONFIG.constants] * 2

    def test_a_rank_that_dies_meanwhile_is_named(self, jobs: Callable[..., InMemoryJob]) -> None:
        job = jobs(2)
        session = job.sessions[0]
        threading.Timer(0.05, lambda: job.kill(1, "for a test")).start()
        with pytest.raises(PeerDied, match="for a test"):
            type(self).factory(
                SetupPhases(session), CONFIG, timeout=TIMEOUT_S, on_lost=lambda peer, loss: None
            )

    # ---- under a communicator

    def communicators(self, job: InMemoryJob, work: Callable[[Communicator], Any]) -> list[Any]:
        factory: FabricFactory = type(self).factory

        def run(session: Any) -> Any:
            comm = Communicator.from_session(
                session, Options.create(timeout=TIMEOUT_S), open_fabric=factory
            )
            with comm:
                return work(comm)

        return in_threads([lambda s=s: run(s) for s in job.sessions])

    def test_collectives_of_every_kind(self, jobs: Callable[..., InMemoryJob]) -> None:
        def work(comm: Communicator) -> str:
            for number, name in enumerate((*cases.EVEN, *cases.UNEVEN)):
                root = number % comm.nranks if name in cases.ROOTED else 0
                # one type: another reduction would be compiled for each
                case = cases.Case(
                    name=name, dtype=DType.FLOAT32, count=[7, 3001][number % 2], seed=1, root=root
                )
                cases.perform(comm, case)
            comm.barrier()
            return type(comm._core.fabric).__name__

        results = self.communicators(jobs(3), work)
        assert results == [type(self).factory.__name__] * 3, results

    def test_children_use_the_same_kind(self, jobs: Callable[..., InMemoryJob]) -> None:
        def work(comm: Communicator) -> tuple[str, float]:
            half = comm.split(comm.rank % 2)
            assert half is not None
            with half:
                x = np.full(5, comm.rank, np.float32)
                half.all_reduce(x)
                return type(half._core.fabric).__name__, float(x[0])

        name = type(self).factory.__name__
        assert self.communicators(jobs(4), work) == [(name, 2), (name, 4)] * 2

    def test_an_abort_ends_the_wait_of_a_peer(self, jobs: Callable[..., InMemoryJob]) -> None:
        def work(comm: Communicator) -> None:
            if comm.rank == 1:
                comm.abort("for a test")
            else:
                comm.barrier()

        waiting, _ = self.communicators(jobs(2), work)
        assert isinstance(waiting, CommunicatorAborted), waiting
        assert "for a test" in str(waiting)

    def test_the_death_of_a_peer_ends_a_wait(self, jobs: Callable[..., InMemoryJob]) -> None:
        job = jobs(2)

        def work(comm: Communicator) -> None:
            if comm.rank == 1:
                job.kill(1, "for a test")
            else:
                comm.barrier()

        waiting, _ = self.communicators(job, work)
        assert isinstance(waiting, MiracclError), waiting
        assert isinstance(waiting, PeerDied)
        assert "for a test" in str(waiting)
