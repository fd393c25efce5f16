"""How a communicator begins: from the environment of a launcher, or from an MPI communicator."""

from __future__ import annotations

import os
from typing import Any

from miraccl import trace
from miraccl.api.communicator import Communicator
from miraccl.bootstrap import HubServer, UniqueId, connect, create_hub
from miraccl.bootstrap.launch import detect_launch, join_launch
from miraccl.errors import BootstrapError, InvalidUsage
from miraccl.runtime.options import Options
from miraccl.runtime.rendezvous import start_deadline
from miraccl.runtime.setup_phases import SetupPhases

_FAILED = "failed: "


def init(mpi: Any = None, /, **options: Any) -> Communicator:
    """The communicator of all ranks that a launcher started (miraccl run, torchrun, mpirun, srun, or RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT); one rank alone without a launcher.  With an MPI communicator of mpi4py (or any object with ``Get_rank``, ``Get_size`` and
    ``bcast``): the same ranks in the same order; collective over it.  Options are those of ``Communicator``."""
    trace.configure()
    if mpi is not None:
        return _init_over(mpi, options)
    opts = Options.create(**options)
    launch, deadline = detect_launch(os.environ), start_deadline()
    session = join_launch(launch, deadline, session_timeout=opts.timeout)
    return Communicator.from_session(session, opts, setup=SetupPhases(session, deadline))


def _init_over(mpi: Any, options: dict[str, Any]) -> Communicator:
    """MPI only carries the unique id of rank 0, or its failure: nobody waits in ``bcast`` for a rank 0 that has given up."""
    rank, nranks = _place_in(mpi)
    hub: HubServer | None = None
    if rank == 0:
        try:
            opts = Options.create(**options)
            ident, hub = create_hub(nranks=nranks)
        except BaseException as error:
            mpi.bcast(f"{_FAILED}{error}", root=0)
            raise
        mpi.bcast(str(ident), root=0)
    else:
        text = mpi.bcast(None, root=0)
        if not isinstance(text, str) or text.startswith(_FAILED):
            raise BootstrapError(
                f"rank 0 cannot open the rendezvous: {str(text).removeprefix(_FAILED)}",
                rank=rank,
                peer=0,
            )
        opts, ident = Options.create(**options), UniqueId.parse(text)
    deadline = start_deadline()
    try:
        session = connect(ident, rank, nranks, deadline, session_timeout=opts.timeout, hub=hub)
    except BaseException as error:
        if hub is not None:
            hub.close_after_error(error)
        raise
    return Communicator.from_session(session, opts, setup=SetupPhases(session, deadline))


def _place_in(mpi: Any) -> tuple[int, int]:
    """(rank, size) in an MPI communicator."""
    if isinstance(mpi, type):
        raise InvalidUsage(
            f"init() was given the class {mpi.__name__}; it takes a communicator, such as MPI.COMM_WORLD"
        )
    missing = [
        name for name in ("Get_rank", "Get_size", "bcast") if not callable(getattr(mpi, name, None))
    ]
    if missing:
        raise InvalidUsage(
            f"init() takes an MPI communicator such as mpi4py's MPI.COMM_WORLD; a {type(mpi).__name__} has no {', '.join(missing)}",
            hint="options are given by name, such as init(timeout=60)",
        )
    if not mpi:  # so does mpi4py say COMM_NULL
        raise InvalidUsage(
            "init() was given a null communicator: this process is not in the group, or has freed it"
        )
    if getattr(mpi, "Is_inter", bool)():
        raise InvalidUsage(
            "init() was given an intercommunicator, which has two groups",
            hint="pass mpi_comm.Merge()",
        )
    return int(mpi.Get_rank()), int(mpi.Get_size())
