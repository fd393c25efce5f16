"""Creation of the first communicator: from a launcher's environment or an MPI communicator."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Unpack

from miraccl import params, trace
from miraccl.api.communicator import Communicator
from miraccl.bootstrap.hub import HubServer, create_hub
from miraccl.bootstrap.join import connect
from miraccl.bootstrap.launch import detect_launch, join_launch
from miraccl.bootstrap.unique_id import UniqueId
from miraccl.errors import BootstrapError, InvalidUsage
from miraccl.runtime.options import CommunicatorOptions, Options, shows_options
from miraccl.runtime.rendezvous import start_deadline
from miraccl.runtime.setup_phases import SetupPhases

_FAILED = "failed: "


@shows_options
def init(mpi: Any = None, /, **options: Unpack[CommunicatorOptions]) -> Communicator:
    """Create the communicator of all ranks that a launcher started, or of an MPI communicator.

    Launchers are ``miraccl run``, torchrun, mpirun, srun, or any that sets RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT. Without a launcher the communicator has one rank.

    Args:
        mpi: Communicator of mpi4py, or any object with ``Get_rank``, ``Get_size`` and ``bcast``:
            its ranks in its order. The call is collective over it.
        timeout: Deadline of every operation, in seconds. Default: MIRACCL_TIMEOUT, 300.
        algo: Algorithm for every collective that has it, such as ``"ring"``. Default: MIRACCL_ALGO,
            chosen by the cost model.
        proto: Protocol: ``"simple"``, ``"ll"`` or, on GPU memory, ``"ll128"``. Default:
            MIRACCL_PROTO, chosen by the cost model.
        deterministic: Results depend on neither size, algorithm nor layout. Default:
            MIRACCL_DETERMINISTIC, False.
        buffsize: Bytes of all FIFOs of a CPU rank; 0 chooses. Default: MIRACCL_BUFFSIZE, 0.
        cta_policy: GPU resources of kernels: ``"default"``, ``"efficiency"`` or ``"zero"``.
            MIRACCL_CTA_POLICY takes precedence.

    Returns:
        The communicator; a context manager that finalizes it.

    Raises:
        InvalidUsage: An argument, option or setting is not allowed.
        PlanMismatch: Ranks passed different options.
        BootstrapError, PeerDied, CollectiveTimeout: The ranks could not connect in time
            (MIRACCL_BOOTSTRAP_TIMEOUT, 60 s).
    """
    trace.configure()
    if mpi is not None:
        return _init_over(mpi, options)
    opts = Options.create(**options)
    launch, deadline = detect_launch(os.environ), start_deadline()
    aggregators = params.AGGREGATORS.read()
    session = join_launch(launch, deadline, session_timeout=opts.timeout)
    setup = SetupPhases(session, deadline)
    if not aggregators:
        comm = Communicator.from_session(session, opts, setup=setup)
        if (switches := params.SWITCH.read()) and comm.nranks > 1:
            try:
                comm.use_switch(switches, params.AGGREGATION.read())
            except BaseException as error:
                comm.abort(f"init: {error}")
                raise
        return comm
    nranks = session.nranks - aggregators
    if not 0 <= session.rank < nranks:
        raise InvalidUsage(
            f"cannot be rank {session.rank}: of {session.nranks} processes the last {aggregators}"
            " are aggregators (MIRACCL_AGGREGATORS), which run `miraccl aggregator`"
        )
    wide = Communicator.from_session(session, Options.create(), setup=setup)
    ranks = session.subgroup(list(range(nranks)), f"{session.name}/ranks")
    comm = Communicator.from_session(ranks, opts, parent=wide, setup=SetupPhases(ranks, deadline))
    comm.use_aggregators(wide, aggregators, params.AGGREGATION.read())
    return comm


def serve_aggregator(on_sum: Callable[[int], None] = lambda nbytes: None) -> None:
    """Join the job of this process's environment as an aggregator and add up until the ranks leave.

    Args:
        on_sum: Called with the bytes of each sum.

    Raises:
        InvalidUsage: This process is not one of the last MIRACCL_AGGREGATORS of its job.
        PeerDied: A rank died.
        BootstrapError, CollectiveTimeout: The processes could not connect in time.
    """
    trace.configure()
    aggregators = params.AGGREGATORS.read()
    launch, deadline = detect_launch(os.environ), start_deadline()
    if launch.rank < launch.nranks - aggregators or aggregators < 1:
        raise InvalidUsage(
            f"cannot be an aggregator: this is process {launch.rank} of {launch.nranks}, and"
            f" MIRACCL_AGGREGATORS is {aggregators}",
            hint="miraccl run --aggregators starts them",
        )
    opts = Options.create(timeout=params.FOREVER)
    session = join_launch(launch, deadline, session_timeout=None)
    with Communicator.from_session(session, opts, setup=SetupPhases(session, deadline)) as comm:
        comm.serve_as_aggregator(aggregators, on_sum)


def _init_over(mpi: Any, options: CommunicatorOptions) -> Communicator:
    """Create a communicator over an MPI communicator, which carries rank 0's unique id or its
    error.
    """
    # Rank 0 broadcasts its failure as well, so that no rank is left waiting in ``bcast``.
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
    """Return (rank, size) in an MPI communicator."""
    if isinstance(mpi, type):
        raise InvalidUsage(
            f"init: mpi is the class {mpi.__name__}; allowed are communicators, such as COMM_WORLD"
        )
    missing = [
        name for name in ("Get_rank", "Get_size", "bcast") if not callable(getattr(mpi, name, None))
    ]
    if missing:
        raise InvalidUsage(
            f"init: mpi is a {type(mpi).__name__} without {', '.join(missing)}; allowed are "
            "communicators such as mpi4py's MPI.COMM_WORLD",
            hint="pass options by name, such as init(timeout=60)",
        )
    if not mpi:  # MPI.COMM_NULL in mpi4py
        raise InvalidUsage(
            "init: mpi is a null communicator: this process is not in its group, or has freed it"
        )
    if getattr(mpi, "Is_inter", bool)():
        raise InvalidUsage(
            "init: mpi is an intercommunicator, which has two groups",
            hint="pass mpi_comm.Merge()",
        )
    return int(mpi.Get_rank()), int(mpi.Get_size())
