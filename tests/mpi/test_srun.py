"""Jobs under a real Slurm of two nodes, both on this host: controller and node daemons run as root
on ports of their own.

Without ``srun``, ``slurmctld`` and ``slurmd`` (Debian: slurm-client, slurmctld, slurmd), or without
root, these tests are skipped; tests/bootstrap/test_launch.py has what srun sets in any case.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from miraccl.bootstrap.nodelist import expand_nodelist
from tests.bootstrap.kit import free_port
from tests.mpi.launchers import MPIRUNS, PATIENCE, ROOT, Mpirun, environment, run_job

pytestmark = pytest.mark.multiprocess
CONFIG = """
ClusterName=scratch
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/builtin
KillWait=1
MailProg=/bin/true
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName={host}-second NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def _missing() -> str:
    programs = [
        name
        for name in ("srun", "salloc", "sinfo", "scontrol", "slurmctld", "slurmd")
        if shutil.which(name) is None
    ]
    if programs:
        return f"no {', '.join(programs)}"
    if os.getuid() != 0:
        return "Slurm's daemons need root"
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return f"the name of this host, {socket.gethostname()}, leads nowhere"
    return ""


def _host() -> str:
    return socket.gethostname().partition(".")[0]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which srun talks to a cluster of two nodes."""
    if reason := _missing():
        pytest.skip(reason)
    folder, host = tmp_path_factory.mktemp("slurm"), _host()
    (folder / "state").mkdir()
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(host=host, folder=folder, ports=[free_port() for _ in range(3)])
    )
    env = {"SLURM_CONF": str(config)}
    commands = [
        ["slurmctld", "-D", "-c"],
        *(["slurmd", "-D", "-N", name] for name in (host, f"{host}-second")),
    ]
    with open(folder / "log", "wb") as log:
        daemons = [
            subprocess.Popen(
                c, env={**os.environ, **env}, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
            for c in commands
        ]
    try:
        _wait_for_nodes(env, daemons, folder / "log")
        yield env
    finally:
        _end_jobs(env)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)


def _end_jobs(env: dict[str, str]) -> None:
    """Without this the keepers of steps that are just ending would stay behind, with nobody to
    report to.
    """
    give_up = time.monotonic() + 10.0
    subprocess.run(
        ["scancel", "-f", "-u", "root"],
        env={**os.environ, **env},
        capture_output=True,
        timeout=30,
        check=False,
    )
    while time.monotonic() < give_up:
        done = subprocess.run(
            ["squeue", "-h"],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if not done.stdout.strip():
            return
        time.sleep(0.1)


def _wait_for_nodes(env: dict[str, str], daemons: list[subprocess.Popen[bytes]], log: Path) -> None:
    give_up = time.monotonic() + 20.0
    while time.monotonic() < give_up and all(daemon.poll() is None for daemon in daemons):
        done = subprocess.run(
            ["sinfo", "-hN", "-o", "%t"],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if done.stdout.split() == ["idle", "idle"]:
            return
        time.sleep(0.1)
    pytest.skip(
        f"Slurm does not start here: {log.read_text(errors='replace').strip().splitlines()[-1:]}"
    )


@pytest.mark.parametrize(
    ("words", "nranks", "locals_"),
    [
        (["-N", "1", "-n", "2"], 2, [0, 1]),
        (["-N", "2", "-n", "3"], 3, [0, 1, 0]),
        (["-N", "2", "-n", "2", "--mpi=pmi2"], 2, [0, 0]),
        (["-N", "1", "-n", "2", "--mpi=pmix"], 2, [0, 1]),
    ],
    ids=["one node", "two nodes", "pmi2", "pmix"],
)
def test_srun(
    slurm: dict[str, str], words: list[str], nranks: int, locals_: list[int], tmp_path: Path
) -> None:
    if mode := next((word.partition("=")[2] for word in words if "mpi=" in word), ""):
        alone = ["srun", "-n", "1", f"--mpi={mode}", "true"]
        tried = subprocess.run(
            alone,
            env={**os.environ, **slurm},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if tried.returncode:
            pytest.skip(
                f"this Slurm starts nothing with --mpi={mode}: "
                f"{tried.stderr.strip().splitlines()[:1]}"
            )
    if words[:2] == [
        "-N",
        "1",
    ]:  # Slurm uses the second, fictitious node while the first ends a job
        words = [*words, "-w", _host()]
    results = run_job(["srun", *words], "world", tmp_path, **slurm)
    assert [r["rank"] for r in results] == list(range(nranks))
    for result in results:
        assert result["sums"][0] == sum(range(nranks))
        assert result["ranks"] == list(range(nranks))
        assert (result["launcher"], result["point"]) == (
            {"pmi2": "mpich", "pmix": "pmix"}.get(mode, "slurm"),
            "PortRendezvous",
        )
    if not mode:
        assert _slurm_local_ranks(slurm, words) == locals_


def _slurm_local_ranks(slurm: dict[str, str], words: list[str]) -> list[int]:
    """Return the local ranks that Slurm assigns, on which the test relies."""
    print_place = ["sh", "-c", "echo $SLURM_PROCID $SLURM_LOCALID"]
    done = subprocess.run(
        ["srun", *words, *print_place],
        env={**os.environ, **slurm},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return [int(line.split()[1]) for line in sorted(done.stdout.splitlines())]


def test_the_death_of_a_rank(slurm: dict[str, str], tmp_path: Path) -> None:
    assert run_job(["srun", "-N", "2", "-n", "2"], "death", tmp_path, **slurm) == [
        {"rank": 0, "peer": 1, "error": "PeerDied"}
    ]


def test_the_example(slurm: dict[str, str]) -> None:
    done = subprocess.run(
        ["srun", "-N", "2", "-n", "3", sys.executable, str(ROOT / "examples" / "22_slurm.py")],
        env=environment(**slurm), capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    lines = [
        f"rank {rank} of 3 is rank {rank} on node {node}" for rank, node in enumerate((0, 0, 1))
    ]
    assert done.stdout.splitlines() == lines, (
        done.stderr
    )  # both nodes are one host, so the third rank is its third


def test_steps_of_an_allocation_at_the_same_time(slurm: dict[str, str], tmp_path: Path) -> None:
    """Each is a job of its own."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    step = 'srun --exact -n 2 "$1" "$2" "$3" "$4/{}"'
    script = f"{step.format('a')} & first=$!; {step.format('b')} && wait $first"
    run_job(
        ["salloc", "-Q", "-N", "2", "-n", "4", "sh", "-c", script, "sh"], "world", tmp_path, **slurm
    )
    for name in ("a", "b"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["0.json", "1.json"]


@pytest.mark.parametrize("mpirun", [pytest.param(m, id=m.id) for m in MPIRUNS])
def test_mpirun_on_the_nodes_of_an_allocation(
    slurm: dict[str, str], mpirun: Mpirun, tmp_path: Path
) -> None:
    """Nothing says where to meet but the allocation: its first node has rank 0."""
    results = run_job(
        ["salloc", "-Q", "-N", "2", "-n", "4", *mpirun.command(4)], "world", tmp_path, **slurm
    )
    assert [r["ranks"] for r in results] == [[0, 1, 2, 3]] * 4
    if results[0]["point"] == "FileRendezvous":
        pytest.skip("this mpirun was built without Slurm and keeps all ranks on one node")
    assert [r["point"] for r in results] == ["PortRendezvous"] * 4


@pytest.mark.parametrize(
    "text", ["n[1-3]", "n[08-10,12],login", "r[1-2]n[01-02]", "a-b[1],d,n[099-101]"]
)
def test_host_lists_mean_what_slurm_means(slurm: dict[str, str], text: str) -> None:
    done = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env={**os.environ, **slurm},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert list(expand_nodelist(text)) == done.stdout.split()
