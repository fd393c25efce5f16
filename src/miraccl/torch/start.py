"""Creation of a process group: its communicators, and the backends of other device types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from miraccl import trace
from miraccl.api.communicator import Communicator
from miraccl.errors import BootstrapError
from miraccl.runtime.core_access import core_access
from miraccl.runtime.gpu.launch_order import program_launch_orders
from miraccl.runtime.options import Options
from miraccl.runtime.rendezvous import start_deadline
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.torch.failures import as_backend_errors
from miraccl.torch.group_creation import GroupCreation
from miraccl.torch.mixed_backends import OtherBackends, devices_of_call
from miraccl.torch.process_group import ProcessGroupMiraccl
from miraccl.torch.store_join import join_by_store
from miraccl.torch.tensors import DEVICES, NAME

if TYPE_CHECKING:
    from miraccl.deadline import Deadline


def create(opts: Any, backend_options: Any = None) -> ProcessGroupMiraccl:
    """Create the group for ``init_process_group`` or ``new_group``; collective.

    ``opts.timeout`` bounds the rendezvous and every later operation.

    Raises:
        BackendError: The ranks could not meet. A rank 0 that cannot listen reports its reason to
            the others through the store.
    """
    store, rank, size, timeout = opts.store, opts.group_rank, opts.group_size, opts.timeout
    devices = devices_of_call(dict.fromkeys(DEVICES, NAME))
    creation = GroupCreation(opts)
    with as_backend_errors(), creation:
        deadline = start_deadline(timeout.total_seconds())
        try:
            comm = _rendezvous(store, rank, size, deadline, creation)
        except BootstrapError:
            creation.look_again()
            raise
        try:
            p2p_comm = comm.split_within(deadline, 0)
        except BaseException:
            comm.finalize()
            raise
    assert p2p_comm is not None
    for each in (comm, p2p_comm):
        core_access(each).wait_state.default_timeout_s = creation.usual_s
    others = {device: name for device, name in devices.items() if name != NAME}
    other_backends = None
    if others:
        place = dist.PrefixStore(f"{NAME}/elsewhere/", store)
        try:
            with as_backend_errors():
                other_backends = OtherBackends(
                    others,
                    place,
                    rank,
                    size,
                    timeout=timeout,
                    options=backend_options,
                    global_ranks=opts.global_ranks_in_group,
                    name=opts.group_id,
                )
        except BaseException:
            p2p_comm.finalize()
            comm.finalize()
            raise
    return ProcessGroupMiraccl(store, comm, p2p_comm, other_backends)


def _rendezvous(
    store: Any, rank: int, size: int, deadline: Deadline, creation: GroupCreation
) -> Communicator:
    trace.configure()
    options = Options.create(timeout=deadline.seconds, cta_policy="efficiency")
    session = join_by_store(store, rank, size, deadline, creation.look)
    session.name = creation.name
    return Communicator.from_session(
        session,
        options,
        setup=SetupPhases(session, deadline),
        launch_orders=program_launch_orders(session),
    )
