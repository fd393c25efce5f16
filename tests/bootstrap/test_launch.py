"""Launch detection for every launcher; rendezvous at a free and a used port, and by a file."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miraccl.bootstrap import (
    FileRendezvous,
    HubServer,
    Launch,
    PortRendezvous,
    UniqueId,
    create_hub,
    detect_launch,
    join_launch,
    lifetime,
    runtime_file,
)
from miraccl.bootstrap.nodelist import expand_nodelist
from miraccl.bootstrap.runtime_file import job_of_parent, publish_id, remove_id, runtime_folder
from miraccl.bootstrap.session import LinkSession
from miraccl.errors import AuthenticationError, BootstrapError, InvalidUsage, SystemFailure
from tests.bootstrap.kit import (
    PATIENCE,
    free_port,
    in_threads,
    needs_ipv6,
    raises_at_the_deadline,
    until,
)

UNIQUE_ID = UniqueId(addresses=(("10.0.0.1", 1234),), secret=b"s" * 32)
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
_TORCH = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[08-10,12]",
}

TABLE: dict[str, tuple[dict[str, str], tuple[Any, ...], type]] = {
    "alone": ({}, ("none", 0, 1, 0), type(None)),
    "miraccl": (
        {
            "MIRACCL_RANK": "2",
            "MIRACCL_NRANKS": "4",
            "MIRACCL_LOCAL_RANK": "2",
            "MIRACCL_UNIQUE_ID": str(UNIQUE_ID),
        },
        ("miraccl", 2, 4, 2),
        UniqueId,
    ),
    "miraccl on hosts": (
        {"MIRACCL_RANK": "5", "MIRACCL_NRANKS": "8", "MIRACCL_LOCAL_RANK": "1", **MASTER},
        ("miraccl", 5, 8, 1),
        PortRendezvous,
    ),
    "torchrun": (
        {**_TORCH, **MASTER, "TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_USE_AGENT_STORE": "True"},
        ("torchrun", 5, 8, 1),
        PortRendezvous,
    ),
    "plain": ({"RANK": "1", "WORLD_SIZE": "2", **MASTER}, ("torchrun", 1, 2, None), PortRendezvous),
    "ours before torchrun": (
        {"RANK": "5", "WORLD_SIZE": "8", **MASTER, "MIRACCL_RANK": "0", "MIRACCL_NRANKS": "2"},
        ("miraccl", 0, 2, None),
        PortRendezvous,
    ),
    "world of one": ({"RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 0, 1, None), type(None)),
    "openmpi": ({**OMPI, "PMIX_NAMESPACE": "prterun-1"}, ("openmpi", 3, 8, 3), FileRendezvous),
    "openmpi with master": (
        {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", **MASTER},
        ("openmpi", 3, 8, 3),
        PortRendezvous,
    ),
    "openmpi with id": (
        {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MIRACCL_UNIQUE_ID": str(UNIQUE_ID)},
        ("openmpi", 3, 8, 3),
        UniqueId,
    ),
    "hydra": ({**HYDRA, "PMI_JOBID": "j"}, ("mpich", 1, 4, 1), FileRendezvous),
    "hydra in an allocation": ({**HYDRA, **SLURM}, ("mpich", 1, 4, 1), FileRendezvous),
    "srun with pmi2": (
        {**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"},
        ("mpich", 5, 8, None),
        PortRendezvous,
    ),
    "pmix with our number": (
        {"PMIX_RANK": "1", "PMIX_NAMESPACE": "n", "MIRACCL_NRANKS": "2"},
        ("pmix", 1, 2, None),
        FileRendezvous,
    ),
    "srun with pmix": (
        {**SLURM, "PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix"},
        ("pmix", 5, 8, 1),
        PortRendezvous,
    ),
    "srun": (SLURM, ("slurm", 5, 8, 1), PortRendezvous),
    "srun with a number of ranks from its script": (
        {**SLURM, **MASTER, "WORLD_SIZE": "8", "RANK": " "},
        ("slurm", 5, 8, 1),
        PortRendezvous,
    ),
    "mpirun with our number": (
        {**OMPI, "MIRACCL_NRANKS": "8", "PMI_SIZE": "3"},
        ("openmpi", 3, 8, 3),
        FileRendezvous,
    ),
    "variables that are empty": (
        {"RANK": "", "WORLD_SIZE": "", "MIRACCL_NRANKS": "", "PMIX_RANK": ""},
        ("none", 0, 1, 0),
        type(None),
    ),
    "srun with master": ({**SLURM, **MASTER}, ("slurm", 5, 8, 1), PortRendezvous),
    "batch script": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "1"},
        ("none", 0, 1, 0),
        type(None),
    ),
    "mpirun on nodes of an allocation": (
        {
            **OMPI,
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            "PMIX_NAMESPACE": "n",
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "a,b",
        },
        ("openmpi", 3, 8, 3),
        PortRendezvous,
    ),
    "interactive step": ({**SLURM, "SLURM_STEP_ID": "4294967290"}, ("none", 0, 1, 0), type(None)),
}


@pytest.mark.parametrize("case", TABLE)
def test_detection(case):
    environ, numbers, point = TABLE[case]
    launch = detect_launch(environ)
    assert (launch.launcher, launch.rank, launch.nranks, launch.local_rank) == numbers
    assert isinstance(launch.rendezvous, point)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "RANK=1 is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        ({"MIRACCL_NRANKS": "2"}, "MIRACCL_NRANKS=2 is set but MIRACCL_RANK is not"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0 is set but MIRACCL_NRANKS or SLURM"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "OMPI_COMM_WORLD_SIZE=2 is set but OMPI_COMM_WORLD_RANK is not",
        ),
        ({"PMI_SIZE": "2", "PMI_RANK": ""}, "PMI_SIZE=2 is set but PMI_RANK is not"),
        (
            {**SLURM, "WORLD_SIZE": "16"},
            (
                r"WORLD_SIZE=16 is set without RANK, but slurm gives rank 5 of 8 \(unset "
                r"WORLD_SIZE, or set RANK as well\)"
            ),
        ),
        (
            {**OMPI, "MIRACCL_NRANKS": "2"},
            "MIRACCL_NRANKS=2 is set without MIRACCL_RANK, but openmpi gives rank 3 of 8",
        ),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0: a job has at least one rank"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS=0: a job has"),
        ({"RANK": "9" * 5000, "WORLD_SIZE": "2"}, "RANK='9{40}': a number"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h:29500"},
            "MASTER_ADDR='h:29500': it is a name .*MASTER_PORT",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2", **MASTER}, r"RANK=2 of 2 ranks \(ranks are 0 to 1\)"),
        ({**SLURM, "SLURM_PROCID": "99"}, "slurm: cannot be rank 99 of"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x': a number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "a number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "there is no rendezvous address .*MASTER_ADDR"),
        (
            {"MIRACCL_RANK": "0", "MIRACCL_NRANKS": "2"},
            "there is no rendezvous address .*MIRACCL_UNIQUE_ID",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "70000"},
            "MASTER_PORT=70000",
        ),
        (
            {"MIRACCL_RANK": "0", "MIRACCL_NRANKS": "2", "MIRACCL_UNIQUE_ID": "nonsense"},
            "does not start with",
        ),
        (
            {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            r"several hosts \(4 here\).*MASTER_ADDR .*MIRACCL_UNIQUE_ID",
        ),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is empty"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[1-"}, "unbalanced"),
    ],
)
def test_invalid_environments_are_reported(environ, message):
    with pytest.raises(InvalidUsage, match=message):
        detect_launch(environ)


@pytest.mark.parametrize(
    ("environ", "other"),
    [
        (
            {**OMPI, "RANK": "0", "WORLD_SIZE": "1"},
            r"RANK=0 of WORLD_SIZE=1 is used, but openmpi's variables say rank 3 of 8",
        ),
        (
            {**SLURM, **MASTER, "RANK": "0", "WORLD_SIZE": "8"},
            r"slurm's variables say rank 5 of 8: unset RANK and WORLD_SIZE",
        ),
        ({**HYDRA, **MASTER, "RANK": "0", "WORLD_SIZE": "2"}, "mpich's variables say rank 1 of 4"),
    ],
)
def test_stale_variables_are_reported(environ, other, caplog):
    launch = detect_launch(environ)
    assert launch.launcher == "torchrun"
    with caplog.at_level("WARNING", logger="miraccl"):
        join_launch(replace(launch, rank=0, nranks=1))
    (line,) = caplog.messages
    assert re.search(other, line)


@pytest.mark.parametrize(
    "environ",
    [
        {
            **SLURM,
            **MASTER,
            "RANK": "0",
            "WORLD_SIZE": "8",
            "TORCHELASTIC_RUN_ID": "r",
        },  # torchrun on each node
        {**SLURM, **MASTER, "RANK": "5", "WORLD_SIZE": "8"},  # a script that repeats srun's numbers
        {
            **OMPI,
            **MASTER,
            "RANK": "30",
            "WORLD_SIZE": "32",
        },  # ranks that a script starts on each node
        {"RANK": "0", "WORLD_SIZE": "1", "PMI_RANK": "0", "PMI_SIZE": "x"},
        {**OMPI, "MIRACCL_RANK": "0", "MIRACCL_NRANKS": "1"},  # miraccl run under mpirun
    ],
)
def test_consistent_variables_are_accepted(environ):
    assert detect_launch(environ).conflict == ""


@given(
    st.dictionaries(
        st.sampled_from(
            sorted(
                {name for environ, *_ in TABLE.values() for name in environ}
                | {"PMI_SIZE", "SLURM_STEPID"}
            )
        ),
        st.sampled_from(
            [
                "",
                " ",
                "0",
                "1",
                "2",
                "8",
                "-1",
                "x",
                "²",
                "1e3",
                "9" * 5000,
                "n[1-2]",
                "n[1-",
                "10.0.0.1",
                "h:1",
            ]
        ),
    )
)
def test_any_environment_is_a_launch_or_a_usage_error(environ):
    try:
        launch = detect_launch(environ)
    except InvalidUsage:
        return
    assert 0 <= launch.rank < launch.nranks


def _point(environ: dict[str, str]) -> PortRendezvous:
    point = detect_launch(environ).rendezvous
    assert isinstance(point, PortRendezvous)
    return point


def test_ports_of_a_master():
    plain = {"RANK": "1", "WORLD_SIZE": "2", **MASTER}
    assert _point(plain).ports == range(29500, 29533)
    assert _point(plain).host == "10.0.0.1"
    assert _point({**plain, "TORCHELASTIC_USE_AGENT_STORE": "True"}).ports == range(29501, 29533)
    assert _point({**plain, "MASTER_ADDR": "[fd00::1]"}).host == "fd00::1"
    assert _point({**plain, "MASTER_PORT": "65530"}).ports == range(65530, 65536)
    assert _point(
        {**plain, "MASTER_PORT": "65535", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ).ports == range(65535, 65536)
    assert _point({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}).ports[0] == 29500


def test_secrets_differ_between_jobs():
    plain = {"RANK": "1", "WORLD_SIZE": "2", **MASTER}
    secrets = [
        _point(environ).secret
        for environ in (
            plain,
            {**plain, "MASTER_PORT": "29600"},
            {**plain, "TORCHELASTIC_RUN_ID": "a"},
            {**plain, "MIRACCL_SECRET": "a"},
            {**plain, "MIRACCL_SECRET": "b"},
            SLURM,
            {**SLURM, "SLURM_JOB_ID": "4712"},
            {**SLURM, "SLURM_STEP_ID": "1"},
        )
    ]
    assert len(set(secrets)) == len(secrets)
    assert all(len(secret) == 32 for secret in secrets)
    assert _point({**plain, "RANK": "0"}).secret == _point(plain).secret
    assert _point(plain).derived
    assert not _point({**plain, "MIRACCL_SECRET": "a"}).derived
    assert "secret" not in repr(_point(plain))


def test_slurm_meets_on_the_first_node_at_a_port_of_the_step():
    point = _point(SLURM)
    assert point.host == "gpu08"
    assert 10000 <= point.ports[0] < 30000
    assert point == _point({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert point.ports != _point({**SLURM, "SLURM_STEP_ID": "1"}).ports


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12]", ["n08", "n09", "n10", "n12"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("a-b[1]-c,d", ["a-b1-c", "d"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("login,gpu[1,3]x,z", ["login", "gpu1x", "gpu3x", "z"]),
        ("n[7].example.org", ["n7.example.org"]),
    ],
)
def test_node_lists(text, hosts):
    assert list(expand_nodelist(text)) == hosts


@pytest.mark.parametrize(
    "text", ["n[1", "n1]", "n[[1]]", "n[a-b]", "n[3-1]", "n[1-2-3]", "n[]", "n[1-99999999999]"]
)
def test_invalid_node_lists(text):
    with pytest.raises(InvalidUsage):
        list(expand_nodelist(text))


def test_mpirun_in_an_allocation_meets_on_its_first_node():
    """The daemons of mpirun are steps of their own: whatever differs between the nodes must not be
    looked at.
    """
    job = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "gpu[08-10]",
    }
    daemon = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_STEP_NODELIST": "gpu09",
    }
    first = _point({**job, "PMIX_NAMESPACE": "1", "OMPI_COMM_WORLD_RANK": "0"})
    assert first.host == "gpu08"
    assert first == _point({**job, **daemon, "PMIX_NAMESPACE": "1", "OMPI_COMM_WORLD_RANK": "3"})
    assert (
        first.secret != _point({**job, "PMIX_NAMESPACE": "2", "OMPI_COMM_WORLD_RANK": "0"}).secret
    )
    with pytest.raises(
        InvalidUsage, match="several hosts"
    ):  # no name of the job: another mpirun of the allocation could be met
        _point({**job, "OMPI_COMM_WORLD_RANK": "0"})


def test_hydra_in_an_allocation_meets_on_the_first_node_of_its_proxies():
    proxies = {**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}
    ranks = [
        {
            **proxies,
            "PMI_RANK": rank,
            "PMI_SIZE": "4",
            "MPI_LOCALNRANKS": here,
            "SLURM_PROCID": node,
        }
        for rank, here, node in (("0", "3", "0"), ("2", "3", "0"), ("3", "1", "1"))
    ]
    assert {_point(rank).host for rank in ranks} == {"gpu08"}
    assert len({_point(rank).secret for rank in ranks}) == 1
    with pytest.raises(InvalidUsage, match="several hosts"):
        _point({**ranks[0], "SLURM_STEP_NUM_NODES": "1"})


_WORDS = st.text("abn-", min_size=1, max_size=4)


@st.composite
def _groups(draw):
    """(compact form, host names) of one item of a list, made without the code under test."""
    text, hosts = "", [""]
    for _ in range(draw(st.integers(1, 2))):
        word, width = draw(_WORDS), draw(st.integers(1, 3))
        ranges, numbers = [], []
        for first in draw(st.lists(st.integers(0, 10**width - 4), min_size=1, max_size=3)):
            last = first + draw(st.integers(0, 3))
            ranges.append(
                f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}"
            )
            numbers += [f"{number:0{width}}" for number in range(first, last + 1)]
        text += f"{word}[{','.join(ranges)}]"
        hosts = [host + word + number for host in hosts for number in numbers]
    tail = draw(st.sampled_from(["", "x", ".example.org"]))
    return text + tail, [host + tail for host in hosts]


@given(st.lists(st.one_of(_groups(), _WORDS.map(lambda word: (word, [word]))), max_size=4))
def test_compact_node_lists_expand(items):
    assert list(expand_nodelist(",".join(text for text, _ in items))) == [
        host for _, hosts in items for host in hosts
    ]


@given(st.text("n[]-,0123", max_size=12))
def test_any_text_is_a_node_list_or_a_usage_error(text):
    try:
        for _, host in zip(range(100), expand_nodelist(text)):
            assert not set("[],") & set(host)
    except InvalidUsage:
        pass


def test_an_illegal_launch_cannot_be_made():
    with pytest.raises(InvalidUsage):
        Launch(launcher="x", rank=2, nranks=2)
    with pytest.raises(InvalidUsage, match="no rendezvous address"):
        join_launch(Launch(launcher="x", rank=0, nranks=2), 1.0)


# --- meetings ---


def _meet_all(environs: list[dict[str, str]], timeout: float = PATIENCE) -> list[LinkSession]:
    sessions = in_threads([lambda e=e: join_launch(detect_launch(e), timeout) for e in environs])
    for session in sessions:
        assert isinstance(session, LinkSession), session
    return sessions


def _close(sessions: list[LinkSession]) -> None:
    root = sessions[0].hub
    for session in sessions:
        session.close()
    assert root is None or root.join(PATIENCE)


def _ranks(nranks: int, **common: str) -> list[dict[str, str]]:
    return [
        {"RANK": str(rank), "WORLD_SIZE": str(nranks), "LOCAL_RANK": str(rank), **common}
        for rank in range(nranks)
    ]


def test_one_rank_alone():
    session = join_launch(detect_launch({}))
    assert (session.rank, session.nranks, session.hub) == (0, 1, None)


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6), "localhost"])
def test_ranks_meet_at_a_free_master_port(host):
    port = free_port()
    sessions = _meet_all(_ranks(3, MASTER_ADDR=host, MASTER_PORT=str(port)))
    assert sessions[0].hub is not None
    assert {p for _, p in sessions[0].hub.addresses} == {port}
    assert (
        in_threads([lambda s=s: s.all_gather(bytes([s.rank]), "x") for s in sessions])
        == [[b"\0", b"\1", b"\2"]] * 3
    )
    _close(sessions)


@pytest.mark.parametrize("answer", [None, b"", b"\0" * 100], ids=["silent", "hangs up", "garbage"])
def test_ranks_meet_next_to_an_occupied_master_port(answer):
    """torchrun's own store listens at MASTER_PORT."""
    from tests.bootstrap.test_strangers import odd_service

    with odd_service(answer) as port:
        sessions = _meet_all(_ranks(3, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)))
        assert sessions[0].hub is not None
        ((_, chosen),) = sessions[0].hub.addresses
        assert port < chosen <= port + 32
        _close(sessions)


@needs_ipv6
@pytest.mark.parametrize("taken", ["127.0.0.1", "::1"])
def test_port_taken_in_one_address_family(taken):
    with socket.create_server(
        (taken, 0), family=socket.AF_INET6 if ":" in taken else socket.AF_INET
    ) as server:
        port = server.getsockname()[1]
        sessions = _meet_all(_ranks(2, MASTER_ADDR="localhost", MASTER_PORT=str(port)))
        assert sessions[0].hub is not None
        assert [host for host, _ in sessions[0].hub.addresses] == ["127.0.0.1", "::1"]
        assert port not in {chosen for _, chosen in sessions[0].hub.addresses}
        _close(sessions)


def test_two_jobs_of_one_master_port_do_not_mix():
    port = str(free_port())
    jobs = [
        _ranks(2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID=name)
        for name in "ab"
    ]
    sessions = _meet_all([*jobs[0], *jobs[1]])
    gathered = in_threads(
        [
            lambda s=s, n=n: s.all_gather(n, "job")
            for s, n in zip(sessions, [b"a", b"a", b"b", b"b"])
        ]
    )
    assert gathered == [[b"a"] * 2] * 2 + [[b"b"] * 2] * 2
    _close(sessions[:2])
    _close(sessions[2:])


def test_earlier_job_of_the_same_port_is_skipped():
    """The same command runs again while the first job still runs: the second job uses the next
    port.
    """
    environs = _ranks(2, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    first = _meet_all(environs)
    second = _meet_all(environs[::-1])[::-1]
    assert first[0].hub is not None
    assert second[0].hub is not None
    assert first[0].hub.addresses[0][1] < second[0].hub.addresses[0][1]
    assert in_threads([lambda s=s: s.all_gather(b"2", "x") for s in second]) == [[b"2"] * 2] * 2
    assert isinstance(
        in_threads([lambda: join_launch(detect_launch(environs[1]), 0.2)])[0], BootstrapError
    )
    _close(second)
    _close(first)


def test_rank_0_reports_the_taken_port():
    """Two ranks 0 each wait at a port of their own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        first = _ranks(2, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))[0]
        told = (
            rf"rank 1 of 2 did not join .* port \d+ because {port} was taken; is there "
            r"another rank 0\?"
        )
        raises_at_the_deadline(told, lambda seconds: join_launch(detect_launch(first), seconds))


def test_rank_0_reports_its_port():
    port = free_port()
    environ = _ranks(2, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))[0]
    told = rf"did not join .* port {port} of 127\.0\.0\.1; do the others connect there\?"
    raises_at_the_deadline(told, lambda seconds: join_launch(detect_launch(environ), seconds))
    environ["MASTER_ADDR"] = "192.0.2.77"  # for documentation (RFC 5737)
    told = r"did not join .* to 192\.0\.2\.77, which is not an address of this host"
    raises_at_the_deadline(told, lambda seconds: join_launch(detect_launch(environ), seconds))


def test_wrong_secret_is_reported_on_both_sides(patience_of_the_hub):
    port = str(free_port())
    environs = _ranks(3, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    environs[1]["MIRACCL_SECRET"] = "another"
    refused = threading.Event()

    def hubs():
        return [
            root
            for root in list(lifetime.hubs)
            if isinstance(root, HubServer) and root.addresses[0][1] == int(port)
        ]

    def stranger():
        until(lambda: bool(hubs()))
        raises_at_the_deadline(
            (
                rf"cannot join the job at 127\.0\.0\.1:{port}: the control plane there has "
                r"another secret"
            ),
            lambda seconds: join_launch(detect_launch(environs[1]), seconds),
            AuthenticationError,
        )
        refused.set()

    def impatient():
        assert refused.wait(PATIENCE)
        until(lambda: 0 in hubs()[0]._machine._ranks)
        return join_launch(detect_launch(environs[2]), patience_of_the_hub(0.2))

    first, second, third = in_threads(
        [lambda: join_launch(detect_launch(environs[0]), PATIENCE), stranger, impatient]
    )
    for error in (first, third):
        assert isinstance(error, BootstrapError)
        assert "rank 1 of 3 did not join" in str(error)
        assert "did not know the secret (it claimed to be rank 1 of 3)" in str(error)
    assert second is None


def test_another_secret_outweighs_later_refusals() -> None:
    """The control plane has ended when the deadline comes: its secret is still the reason."""
    port = free_port()
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    _, hub = create_hub(nranks=2, hosts=["127.0.0.1"], port=port, secret=b"o" * 32)
    threading.Timer(0.3, hub.close).start()
    with pytest.raises(AuthenticationError, match=f"127.0.0.1:{port}: .* another secret") as caught:
        join_launch(detect_launch(environ), 1.0)
    assert "set MASTER_PORT to the number outside of the container where it is mapped" in str(
        caught.value
    )


def test_master_port_that_is_mapped_to_another_number() -> None:
    """The port is part of the derived secret, and ranks that disagree on it are told so."""
    port = free_port()
    base = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    inside = {**base, "RANK": "0", "MASTER_PORT": str(port)}
    outside = {**base, "RANK": "1", "MASTER_PORT": str(port - 1)}
    first, second = in_threads(
        [lambda e=e: join_launch(detect_launch(e), 1.5) for e in (inside, outside)]
    )
    assert isinstance(first, BootstrapError)
    assert isinstance(second, AuthenticationError)
    assert "MASTER_PORT" in str(second)


@contextlib.contextmanager
def port_mapping(outside: int, inside: int) -> Iterator[None]:
    """Forward connections to port ``outside`` to port ``inside``, as ``docker -p`` does."""
    server = socket.create_server(("127.0.0.1", outside))

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                try:
                    target = socket.create_connection(("127.0.0.1", inside))
                except OSError:  # rank 0 does not listen yet
                    client.close()
                    continue
                for ends in ((client, target), (target, client)):
                    threading.Thread(target=copy, args=ends, daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def test_ranks_meet_at_a_mapped_master_port() -> None:
    """All have the number outside; rank 0 listens at the one inside, which nobody else knows."""
    inside, outside = free_port(), free_port()
    environs = _ranks(3, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(outside))
    environs[0]["MIRACCL_LISTEN_PORT"] = str(inside)
    with port_mapping(outside, inside):
        sessions = _meet_all(environs)
        assert sessions[0].hub is not None
        assert {port for _, port in sessions[0].hub.addresses} == {inside}
        assert (
            in_threads([lambda s=s: s.all_gather(bytes([s.rank]), "x") for s in sessions])
            == [[b"\0", b"\1", b"\2"]] * 3
        )
        _close(sessions)


def test_rank_0_reports_a_mapping_that_is_missing() -> None:
    """Both numbers are in the hint."""
    inside, outside = free_port(), free_port()
    environ = _ranks(2, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(outside))[0]
    environ["MIRACCL_LISTEN_PORT"] = str(inside)
    with pytest.raises(BootstrapError) as caught:
        join_launch(detect_launch(environ), 0.3)
    assert f"rank 0 listened at port {inside} (LISTEN_PORT)" in str(caught.value)
    assert f"port {outside}, where the others connect, mapped to it?" in str(caught.value)


def test_all_ports_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        point = PortRendezvous(
            host="127.0.0.1", ports=range(port, port + 1), secret=bytes(32), derived=False
        )
        with pytest.raises(SystemFailure, match=rf"none of the ports {port}\.\.{port} is free"):
            join_launch(Launch(launcher="x", rank=0, nranks=2, rendezvous=point), 1.0)


def test_ranks_meet_with_a_given_id():
    unique_id, root = create_hub(hosts=["127.0.0.1"])
    environs = [
        {"MIRACCL_RANK": str(r), "MIRACCL_NRANKS": "2", "MIRACCL_UNIQUE_ID": str(unique_id)}
        for r in range(2)
    ]
    _close(_meet_all(environs))
    assert root.join(PATIENCE)


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return str(tmp_path / f"miraccl-{os.getuid()}")


def _mpi(nranks: int, **common: str) -> list[dict[str, str]]:
    return [
        {"OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_SIZE": str(nranks), **common}
        for r in range(nranks)
    ]


@pytest.mark.parametrize("job", [{"PMIX_NAMESPACE": "job-1"}, {}], ids=["named", "by parent"])
def test_mpi_ranks_use_a_private_file(private, job):
    sessions = _meet_all(_mpi(3, **job))
    assert stat.S_IMODE(os.stat(private).st_mode) == 0o700
    assert os.listdir(private) == []
    _close(sessions)


def test_stale_rendezvous_file_is_ignored(private):
    stale = UniqueId(addresses=(("127.0.0.1", free_port()),), secret=b"old!" * 8)
    publish_id("openmpi j", stale)
    waiting = threading.Event()
    read = runtime_file._read_id

    def watched(path):
        waiting.set()
        return read(path)

    runtime_file._read_id = watched
    try:
        environs = _mpi(2, PMIX_NAMESPACE="j")

        def rank0():
            assert waiting.wait(PATIENCE)
            return join_launch(detect_launch(environs[0]), PATIENCE)

        sessions = in_threads([rank0, lambda: join_launch(detect_launch(environs[1]), PATIENCE)])
    finally:
        runtime_file._read_id = read
    _close(sessions)


def test_missing_rendezvous_file(private):
    with pytest.raises(
        BootstrapError,
        match=r"it wrote no rendezvous file within 0\.05 s .*several hosts need MASTER_ADDR",
    ):
        join_launch(detect_launch(_mpi(2, PMIX_NAMESPACE="j")[1]), 0.05)


def test_files_are_private(private):
    path = publish_id("j", UNIQUE_ID)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    os.chmod(path, 0o644)
    with pytest.raises(SystemFailure, match="mode 0600"):
        join_launch(Launch(launcher="x", rank=1, nranks=2, rendezvous=FileRendezvous(job="j")), 1.0)
    remove_id(path)
    remove_id(path)
    os.symlink("/etc/passwd", path)
    with pytest.raises(BootstrapError, match="no rendezvous file"):
        join_launch(
            Launch(launcher="x", rank=1, nranks=2, rendezvous=FileRendezvous(job="j")), 0.02
        )


def test_shared_folder_is_rejected(private):
    runtime_folder()
    os.chmod(private, 0o777)
    with pytest.raises(SystemFailure, match="mode 0700"):
        runtime_folder()
    os.rmdir(private)
    os.symlink("/tmp", private)
    with pytest.raises(SystemFailure):
        runtime_folder()


def test_the_parent_names_the_job():
    assert job_of_parent() == job_of_parent()
    assert job_of_parent(lambda pid: None) == f"parent {os.getppid()} "


def test_launcher_among_the_ancestors_names_the_job():
    """Ranks started by a wrapper script have different parents and one launcher."""
    parent = os.getppid()
    table = {
        parent: ("bash", 50, "7"),
        50: ("env", 40, "6"),
        40: ("hydra_pmi_proxy", 30, "5"),
        30: ("mpiexec.hydra", 1, "4"),
    }
    assert job_of_parent(table.get) == "parent 40 5"
    del table[40]
    assert job_of_parent(table.get) == f"parent {parent} 7"
    assert (
        job_of_parent(lambda pid: ("bash", pid, "3")) == f"parent {parent} 3"
    )  # a chain without end
