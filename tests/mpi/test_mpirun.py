"""Jobs under real ``mpirun``: of Open MPI 4 and 5 and MPICH where they are, by their environment
alone and over mpi4py.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.bootstrap.kit import free_port
from tests.mpi.launchers import MPIRUNS, Mpirun, lacks, run_job

NO_MPIRUN = pytest.param(
    None, marks=pytest.mark.skip("no mpirun on PATH, and MIRACCL_TEST_MPIRUN names none"), id="none"
)
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.parametrize("mpirun", [pytest.param(m, id=m.id) for m in MPIRUNS] or [NO_MPIRUN]),
]
LAUNCHERS = {"ompi4": "openmpi", "ompi5": "openmpi", "mpich": "mpich"}


@pytest.mark.parametrize("nranks", [2, 3])
def test_the_environment_is_enough(mpirun: Mpirun, nranks: int, tmp_path: Path) -> None:
    results = run_job(mpirun.command(nranks), "world", tmp_path)
    assert [r["rank"] for r in results] == [r["local_rank"] for r in results] == list(range(nranks))
    for result in results:
        assert result["nranks"] == nranks
        assert result["sums"] == [sum(range(nranks)), sum(range(nranks)) + 10.0 * nranks]
        assert result["ranks"] == list(range(nranks))
        assert result["launcher"] == LAUNCHERS.get(mpirun.library, result["launcher"])
        assert result["point"] == "FileRendezvous"


def test_ranks_that_share_no_memory_over_udp(mpirun: Mpirun, tmp_path: Path) -> None:
    results = run_job(mpirun.command(2), "over_udp", tmp_path)
    assert [r["totals"] for r in results] == [[3.0]] * 2
    assert [r["transports"].split(" (")[0] for r in results] == ["udp to 1", "udp to 0"]


def test_jobs_at_the_same_time_do_not_meet(mpirun: Mpirun, tmp_path: Path) -> None:
    found: dict[int, list[Any]] = {}
    threads = [
        threading.Thread(
            target=lambda job=job: found.update(
                {job: run_job(mpirun.command(2), "world", tmp_path / str(job))}
            )
        )
        for job in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[r["ranks"] for r in found[job]] for job in range(2)] == [[[0, 1], [0, 1]]] * 2


def test_a_port_instead_of_a_file(mpirun: Mpirun, tmp_path: Path) -> None:
    results = run_job(
        mpirun.command(2), "world", tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
    )
    assert [(r["point"], r["ranks"]) for r in results] == [("PortRendezvous", [0, 1])] * 2


def test_the_death_of_a_rank(mpirun: Mpirun, tmp_path: Path) -> None:
    results = run_job(mpirun.command(2), "death", tmp_path)
    assert results == [{"rank": 0, "peer": 1, "error": "PeerDied"}]


def test_over_a_communicator_of_mpi4py(mpirun: Mpirun, tmp_path: Path) -> None:
    if reason := lacks(mpirun.python, "mpi4py.MPI"):
        pytest.skip(reason)
    results = run_job(mpirun.command(3), "over_mpi", tmp_path, python=mpirun.python)
    assert [r["rank"] for r in results] == [0, 1, 2]
    for result in results:
        assert result["nranks"] == 3
        assert result["sum"] == result["mpi_sum"] == 3.0
        assert result["half"] == [[0, 2], [1]][result["rank"] % 2]
        assert result["turned"] == [2, 1, 0]
        null, other = result["refused"]
        assert "null communicator" in null
        assert "a object without Get_rank, Get_size, bcast" in other
