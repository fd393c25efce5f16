"""How a communicator begins: from the environment of a launcher, or from a unique id that the user carries himself."""

from __future__ import annotations

import os
from typing import Any

from miraccl import params, trace
from miraccl.bootstrap import Root, UniqueId, create_root
from miraccl.bootstrap.launch import detect_launch, meet
from miraccl.comm.communicator import Communicator
from miraccl.comm.member import Options

_roots: list[Root] = []


def get_unique_id() -> UniqueId:
    """Start the meeting point of a new job in this process and give its id, which all ranks need (``str(id)`` fits in a variable)."""
    unique_id, root = create_root()
    _roots.append(root)
    return unique_id


def init(**options: Any) -> Communicator:
    """The communicator of all ranks that a launcher started (miraccl run, torchrun, mpirun, srun, or RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT); one rank alone without a launcher. Options are those of ``Communicator``."""
    trace.configure()
    opts = Options.create(**options)
    session = meet(detect_launch(os.environ), params.BOOTSTRAP_TIMEOUT.read(), session_timeout=opts.timeout)
    return Communicator.from_session(session, opts)
