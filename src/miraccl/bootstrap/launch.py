"""Launch of a job: rank, job size and rendezvous, read from the launcher's environment variables.

``detect_launch`` is a pure function of a mapping; ``join_launch`` acts on its result. The first
launcher whose variables are present wins:

============ ========================================== ==========================================
launcher     numbers                                    rendezvous without MIRACCL_UNIQUE_ID and
                                                        MASTER_ADDR
============ ========================================== ==========================================
miraccl      MIRACCL_RANK, _NRANKS, _LOCAL_RANK         none: an error
torchrun     RANK, WORLD_SIZE, LOCAL_RANK               none: an error
openmpi      OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK   a file of this user on this host, or
                                                        Slurm's first node
mpich, intel PMI_RANK, PMI_SIZE, MPI_LOCALRANKID        a file, or Slurm's first node
pmix         PMIX_RANK, and MIRACCL_NRANKS or Slurm's   a file, or Slurm's first node
             number
slurm        SLURM_PROCID, SLURM_STEP_NUM_TASKS         the first node of the step, a port derived
                                                        from job and step
none         one rank alone                             not needed
============ ========================================== ==========================================

An empty variable counts as absent. A job size without a rank of its own (WORLD_SIZE in a batch
script, for example) must equal that of the launcher that is present.

The secret of a job that meets at a port is MIRACCL_SECRET, else it is derived from values that all
ranks share: run or job id, port, user id. A derived secret keeps out other jobs, stray services and
scanners, but not an attacker who can reach the port and guess or read these values: set
MIRACCL_SECRET on an untrusted network. The secret in a unique id or a file is random.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from miraccl import params, trace
from miraccl.bootstrap.hub import HubServer, create_hub
from miraccl.bootstrap.interfaces import is_local_host, is_loopback
from miraccl.bootstrap.join import connect, join_job
from miraccl.bootstrap.nodelist import expand_nodelist
from miraccl.bootstrap.runtime_file import job_of_parent, publish_id, remove_id, wait_for_id
from miraccl.bootstrap.session import LinkSession, single_rank_session
from miraccl.bootstrap.unique_id import UniqueId
from miraccl.deadline import Deadline
from miraccl.errors import BootstrapError, InvalidUsage, SystemFailure

_log = trace.logger("bootstrap")
#: Rank 0 listens at the first free port of MASTER_PORT..MASTER_PORT+32; torchrun's own store
#: usually has the first.
PORT_SPAN = 32
DEFAULT_MASTER_PORT = 29500  # torch.distributed.run's
#: Slurm jobs meet in this range, below the ephemeral ports of Linux (32768 and up).
SLURM_PORTS = (10000, 30000)
#: Steps that do not launch ranks: batch script, external, interactive, pending (slurm.h,
#: SLURM_BATCH_SCRIPT and neighbours).
SLURM_SPECIAL_STEPS = 0xFFFFFFF0


@dataclass(frozen=True, kw_only=True)
class PortRendezvous:
    """Rank 0 listens on ``host`` at one of ``ports``.

    ``derived``: the secret is derived from public values, see the module. ``listen_port``: port
    that reaches the others as the first of ``ports``, 0 if ports are not mapped.
    """

    host: str
    ports: range
    secret: bytes = field(repr=False)
    derived: bool
    listen_port: int = 0


@dataclass(frozen=True, kw_only=True)
class FileRendezvous:
    """Rank 0 publishes a unique id in a file for ranks of one user on one host.

    ``job`` names the job; if empty, the process that started the ranks does.
    """

    job: str


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Place of this process in its job.

    ``local_rank`` and ``local_nranks``: those on this host, None if the launcher does not give
    them. ``conflict``: text about variables of another launcher that contradict this one, else
    empty.
    """

    launcher: str
    rank: int = 0
    nranks: int = 1
    local_rank: int | None = None
    local_nranks: int | None = None
    rendezvous: UniqueId | PortRendezvous | FileRendezvous | None = None
    conflict: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.nranks:
            raise InvalidUsage(
                f"{self.launcher}: cannot be rank {self.rank} of {self.nranks}",
                hint=f"ranks are 0 to {self.nranks - 1}",
            )


@dataclass(frozen=True, kw_only=True)
class _Launcher:
    """Variables of one launcher; several names for one number are alternatives.

    ``set_by_users``: people set them by hand as well.
    """

    name: str
    rank: str
    nranks: tuple[str, ...]
    local_rank: str = ""
    local_nranks: str = ""
    job: tuple[str, ...] = ()
    one_host: bool = False
    set_by_users: bool = False


_MPI_JOBS = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PMI_JOBID",
    "HYDRA_JOBID",
    "I_MPI_HYDRA_UUID",
    "PMI_PORT",
)
_LAUNCHERS = (
    _Launcher(
        name="miraccl",
        rank="MIRACCL_RANK",
        nranks=("MIRACCL_NRANKS",),
        local_rank="MIRACCL_LOCAL_RANK",
        local_nranks="MIRACCL_LOCAL_NRANKS",
        set_by_users=True,
    ),
    _Launcher(
        name="torchrun",
        rank="RANK",
        nranks=("WORLD_SIZE",),
        local_rank="LOCAL_RANK",
        local_nranks="LOCAL_WORLD_SIZE",
        set_by_users=True,
    ),
    _Launcher(
        name="openmpi",
        rank="OMPI_COMM_WORLD_RANK",
        nranks=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_nranks="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=_MPI_JOBS,
        one_host=True,
    ),
    _Launcher(
        name="mpich",
        rank="PMI_RANK",
        nranks=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_nranks="MPI_LOCALNRANKS",
        job=_MPI_JOBS,
        one_host=True,
    ),
    _Launcher(
        name="pmix",
        rank="PMIX_RANK",
        nranks=("MIRACCL_NRANKS", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        job=_MPI_JOBS,
        one_host=True,
    ),
)


# --- detection ---


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """Return this process's place in its job.

    Raises ``InvalidUsage`` if the variables contradict each other or give no rendezvous.
    """
    environ = {name: text for name, text in environ.items() if text.strip()}
    launch = _first_launch(environ)
    _check_sizes_without_rank(environ, launch)
    return replace(launch, conflict=_find_conflict(environ, launch))


def _first_launch(environ: Mapping[str, str]) -> Launch:
    for launcher in _LAUNCHERS:
        if launcher.rank in environ:
            return _from_launcher(environ, launcher)
    if _in_slurm_step(environ):
        return _from_slurm(environ)
    return Launch(launcher="none", rank=0, nranks=1, local_rank=0, local_nranks=1)


def _check_sizes_without_rank(environ: Mapping[str, str], launch: Launch) -> None:
    """Reject a job size without a rank that contradicts the launch.

    Sizes in MPI's variables count only if no launcher is complete, since they are not set by hand.
    """
    for launcher in _LAUNCHERS:
        name = launcher.nranks[0]
        nranks = _size(environ, name) if launcher.rank not in environ else None
        if nranks is None or nranks == launch.nranks:
            continue
        if launch.launcher == "none":
            raise InvalidUsage(
                f"cannot determine the rank: {name}={nranks} is set but {launcher.rank} is not",
                hint="a launcher sets both",
            )
        if launcher.set_by_users:
            raise InvalidUsage(
                f"cannot determine the job size: {name}={nranks} is set without {launcher.rank}, "
                f"but {launch.launcher} gives rank {launch.rank} of {launch.nranks}",
                hint=f"unset {name}, or set {launcher.rank} as well",
            )


def _find_conflict(environ: Mapping[str, str], launch: Launch) -> str:
    """Describe how another launcher contradicts RANK and WORLD_SIZE, which may be stale.

    The other launcher then has more ranks, or another rank of as many. Fewer are normal: ranks
    started by hand inside a launcher's.
    """
    if launch.launcher != "torchrun" or "TORCHELASTIC_RUN_ID" in environ:
        return ""
    others = {name: text for name, text in environ.items() if name not in ("RANK", "WORLD_SIZE")}
    try:
        other = _first_launch(others)
    except InvalidUsage:  # the other launcher is not the one in use
        return ""
    if other.nranks < launch.nranks or (other.nranks, other.rank) == (launch.nranks, launch.rank):
        return ""
    ours, theirs = (
        f"RANK={launch.rank} of WORLD_SIZE={launch.nranks}",
        f"rank {other.rank} of {other.nranks}",
    )
    return (
        f"{ours} is used, but {other.launcher}'s variables say {theirs}: "
        "unset RANK and WORLD_SIZE if they are stale"
    )


def _from_launcher(environ: Mapping[str, str], launcher: _Launcher) -> Launch:
    rank = _number(environ, launcher.rank)
    nranks = next((_size(environ, name) for name in launcher.nranks if name in environ), None)
    assert rank is not None, "its variable is present and not empty"
    if nranks is None:
        raise InvalidUsage(
            f"cannot determine the job size: {launcher.rank}={rank} is set "
            f"but {' or '.join(launcher.nranks)} is not",
            hint="a launcher sets both",
        )
    if rank >= nranks:
        raise InvalidUsage(
            f"cannot be rank {launcher.rank}={rank} of {nranks} ranks",
            hint=f"ranks are 0 to {nranks - 1}",
        )
    local_rank = _number(environ, launcher.local_rank)
    local_nranks = _number(environ, launcher.local_nranks)
    rendezvous = None if nranks == 1 else _rendezvous(environ, launcher, rank, nranks, local_nranks)
    return Launch(
        launcher=launcher.name,
        rank=rank,
        nranks=nranks,
        local_rank=local_rank,
        local_nranks=local_nranks,
        rendezvous=rendezvous,
    )


def _rendezvous(
    environ: Mapping[str, str],
    launcher: _Launcher,
    rank: int,
    nranks: int,
    local_nranks: int | None,
) -> UniqueId | PortRendezvous | FileRendezvous:
    given = _explicit_rendezvous(environ)
    if given is not None:
        return given
    if not launcher.one_host:
        raise InvalidUsage(
            f"cannot find the other ranks: {launcher.rank}={rank} of {nranks} ranks, "
            "but there is no rendezvous address",
            hint="set MASTER_ADDR and MASTER_PORT, or MIRACCL_UNIQUE_ID",
        )
    if (
        _in_slurm_step(environ)
        and _number(environ, "SLURM_PROCID") == rank
        and _slurm_size(environ) == nranks
    ):
        return _slurm_rendezvous(environ)
    job = next((environ[name] for name in launcher.job if environ.get(name)), "")
    if local_nranks is not None and local_nranks < nranks:
        if job and environ.get("SLURM_JOB_NODELIST"):
            return _allocation_rendezvous(environ, job)
        if _in_slurm_step(environ) and (_number(environ, "SLURM_STEP_NUM_NODES") or 1) > 1:
            return _slurm_rendezvous(environ)  # Hydra's proxies form one step on all nodes
        raise InvalidUsage(
            f"cannot find the other ranks: {nranks} ranks on several hosts ({local_nranks} here), "
            "but there is no rendezvous address",
            hint="set MASTER_ADDR (and MASTER_PORT) or MIRACCL_UNIQUE_ID for all ranks",
        )
    return FileRendezvous(job=f"{launcher.name} {job}" if job else "")


def _explicit_rendezvous(environ: Mapping[str, str]) -> UniqueId | PortRendezvous | None:
    """Return the rendezvous that the user gave; it holds under every launcher."""
    text = environ.get("MIRACCL_UNIQUE_ID", "").strip()
    if text:
        return UniqueId.parse(text)
    host = environ.get("MASTER_ADDR", "").strip().strip("[]")
    if not host:
        return None
    if host.count(":") == 1:
        raise InvalidUsage(
            f"cannot use MASTER_ADDR={host!r}: it is a name or an address without a port",
            hint="set the port in MASTER_PORT",
        )
    port = _number(environ, "MASTER_PORT")
    port = DEFAULT_MASTER_PORT if port is None else port
    if not 0 < port < 65536:
        raise InvalidUsage(f"cannot use MASTER_PORT={port}: a port is 1..65535")
    # torchrun's agent has its own store at MASTER_PORT; a probe there would only log a warning.
    first = min(
        65535,
        port
        + (1 if environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1") else 0),
    )
    parts = ["port", str(port), environ.get("TORCHELASTIC_RUN_ID", "")]
    return _port_rendezvous(environ, host, first, port + PORT_SPAN, parts)


def _port_rendezvous(
    environ: Mapping[str, str], host: str, first: int, last: int, parts: list[str]
) -> PortRendezvous:
    given = params.SECRET.read(environ)
    key = given if given else f"user {os.getuid()}"
    secret = hashlib.sha256("\0".join(["miraccl job secret", key, *parts]).encode()).digest()
    return PortRendezvous(
        host=host,
        ports=range(first, min(last, 65535) + 1),
        secret=secret,
        derived=not given,
        listen_port=params.LISTEN_PORT.read(environ),
    )


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return True under ``srun``, and not merely in a batch script or a shell of an allocation."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return (
        "SLURM_PROCID" in environ
        and re.fullmatch("[0-9]{1,10}", step) is not None
        and int(step) < SLURM_SPECIAL_STEPS
    )


def _slurm_size(environ: Mapping[str, str]) -> int | None:
    size = _size(environ, "SLURM_STEP_NUM_TASKS")
    return _size(environ, "SLURM_NTASKS") if size is None else size


def _from_slurm(environ: Mapping[str, str]) -> Launch:
    rank, nranks = _number(environ, "SLURM_PROCID"), _slurm_size(environ)
    if rank is None or nranks is None:
        raise InvalidUsage(
            "cannot determine the job size: SLURM_PROCID is set but SLURM_NTASKS is not",
            hint="srun sets both",
        )
    rendezvous = (
        None if nranks == 1 else _explicit_rendezvous(environ) or _slurm_rendezvous(environ)
    )
    return Launch(
        launcher="slurm",
        rank=rank,
        nranks=nranks,
        local_rank=_number(environ, "SLURM_LOCALID"),
        rendezvous=rendezvous,
    )


def _slurm_rendezvous(environ: Mapping[str, str]) -> PortRendezvous:
    nodes = (
        environ.get("SLURM_STEP_NODELIST")
        or environ.get("SLURM_NODELIST")
        or environ.get("SLURM_JOB_NODELIST")
        or ""
    )
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    return _first_node_rendezvous(environ, nodes, ["slurm", _slurm_job(environ), step])


def _allocation_rendezvous(environ: Mapping[str, str], mpi_job: str) -> PortRendezvous:
    """Return the rendezvous of ``mpirun`` on several nodes of an allocation.

    mpirun puts rank 0 on the first node by default. The step's variables are those of mpirun's own
    daemons, another step on each node; only the allocation's are the same everywhere.
    """
    return _first_node_rendezvous(
        environ, environ["SLURM_JOB_NODELIST"], ["slurm", _slurm_job(environ), "mpirun", mpi_job]
    )


def _slurm_job(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""


def _first_node_rendezvous(
    environ: Mapping[str, str], nodes: str, parts: list[str]
) -> PortRendezvous:
    host = next(expand_nodelist(nodes), "")
    if not host:
        raise InvalidUsage(
            "cannot find the first node: SLURM_STEP_NODELIST is empty",
            hint="set MASTER_ADDR and MASTER_PORT",
        )
    low, high = SLURM_PORTS
    port = low + int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:4], "big") % (
        high - low - PORT_SPAN
    )
    return _port_rendezvous(environ, host, port, port + PORT_SPAN, parts)


def _size(environ: Mapping[str, str], name: str) -> int | None:
    size = _number(environ, name)
    if size == 0:
        raise InvalidUsage(f"cannot use {name}=0: a job has at least one rank")
    return size


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip() if name else ""
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,18}", text):
        raise InvalidUsage(f"cannot parse {name}={text[:40]!r}: a number is expected")
    return int(text)


# --- joining ---


def join_launch(
    launch: Launch, timeout: float | Deadline | None = None, session_timeout: float | None = None
) -> LinkSession:
    """Join the other ranks of this launch; ``timeout`` and errors as ``connect``."""
    deadline = Deadline.after(params.BOOTSTRAP_TIMEOUT.read() if timeout is None else timeout)
    session_timeout = params.TIMEOUT.read() if session_timeout is None else session_timeout
    if launch.conflict:
        _log.warning("%s", launch.conflict)
    if launch.nranks == 1:
        return single_rank_session(session_timeout)
    if isinstance(launch.rendezvous, UniqueId):
        return connect(
            launch.rendezvous, launch.rank, launch.nranks, deadline, session_timeout=session_timeout
        )
    if isinstance(launch.rendezvous, PortRendezvous):
        return _join_at_port(launch, launch.rendezvous, deadline, session_timeout)
    if isinstance(launch.rendezvous, FileRendezvous):
        return _join_by_file(launch, launch.rendezvous, deadline, session_timeout)
    raise InvalidUsage(
        "cannot find the other ranks: this launch has no rendezvous address", rank=launch.rank
    )


def _join_at_port(
    launch: Launch, rendezvous: PortRendezvous, deadline: Deadline, session_timeout: float
) -> LinkSession:
    if rendezvous.derived and not is_loopback(rendezvous.host) and launch.rank == 0:
        _log.info(
            "the job's secret is derived from its id; set MIRACCL_SECRET on an untrusted network"
        )
    hub: HubServer | None = None
    targets = [(rendezvous.host, port) for port in rendezvous.ports]
    if launch.rank == 0:
        hub = _listen_in_range(rendezvous, launch.nranks)
        targets = [
            (host if host not in ("::", "0.0.0.0") else "127.0.0.1", port)
            for host, port in hub.addresses
        ]
    try:
        return join_job(
            targets,
            secret=rendezvous.secret,
            rank=launch.rank,
            nranks=launch.nranks,
            timeout=deadline,
            session_timeout=session_timeout,
            probing=True,
            hub=hub,
            route_to=rendezvous.host,
        )
    except BaseException as error:
        if hub is not None:
            hub.close_after_error(error)
            if isinstance(error, BootstrapError) and error.hint is None:
                error.hint = _rank_0_hint(rendezvous, hub.addresses[0][1])
        raise


def _rank_0_hint(rendezvous: PortRendezvous, port: int) -> str:
    if is_local_host(rendezvous.host) is False:
        return (
            f"the others connect to {rendezvous.host}, which is not an address of this host, "
            "where rank 0 runs"
        )
    if rendezvous.listen_port:
        return (
            f"rank 0 listened at port {port} (LISTEN_PORT); is {rendezvous.host} port"
            f" {rendezvous.ports.start}, where the others connect, mapped to it?"
        )
    if port != rendezvous.ports.start:
        return (
            f"rank 0 listened at port {port} because {rendezvous.ports.start} was taken; "
            "is there another rank 0?"
        )
    return f"rank 0 listened at port {port} of {rendezvous.host}; do the others connect there?"


def _listen_in_range(rendezvous: PortRendezvous, nranks: int) -> HubServer:
    """Start a hub at the first free port, or at that which is mapped.

    A loopback name is listened on as such, any other on all addresses of this host.
    """
    hosts = [""]
    mapped = rendezvous.listen_port
    ports = range(mapped, mapped + 1) if mapped else rendezvous.ports
    if is_loopback(rendezvous.host) and not mapped:
        hosts = ["127.0.0.1", "::1"] if rendezvous.host == "localhost" else [rendezvous.host]
    problem = ""
    for port in ports:
        try:
            return create_hub(nranks=nranks, hosts=hosts, port=port, secret=rendezvous.secret)[1]
        except SystemFailure as error:
            problem = error.message
    raise SystemFailure(
        f"cannot start rank 0's control plane: none of the ports "
        f"{ports.start}..{ports.stop - 1} is free: {problem}",
        rank=0,
    )


def _join_by_file(
    launch: Launch, rendezvous: FileRendezvous, deadline: Deadline, session_timeout: float
) -> LinkSession:
    job = rendezvous.job or job_of_parent()
    if launch.rank != 0:
        return wait_for_id(
            job,
            deadline,
            lambda unique_id, dial: connect(
                unique_id,
                launch.rank,
                launch.nranks,
                deadline,
                session_timeout=session_timeout,
                dial_timeout=dial,
            ),
        )
    unique_id, hub = create_hub(nranks=launch.nranks)
    path = ""
    try:
        path = publish_id(job, unique_id)
        return connect(
            unique_id, 0, launch.nranks, deadline, session_timeout=session_timeout, hub=hub
        )
    except BaseException as error:
        hub.close_after_error(error)
        raise
    finally:
        remove_id(path)
