"""How a process group begins: rank 0 makes the unique id of a new communicator, the group's store carries it to the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from miraccl import params, trace
from miraccl.bootstrap import Root, Session, UniqueId, connect, create_root, solo
from miraccl.comm.communicator import Communicator
from miraccl.comm.fabric import NOTICE_FIRST_S
from miraccl.comm.lookout import Creation
from miraccl.comm.meeting import begin
from miraccl.comm.member import Options
from miraccl.comm.stages import Stages
from miraccl.deadline import Deadline
from miraccl.errors import BootstrapError, MiracclError, PeerDied
from miraccl.torch.channel import seat_of
from miraccl.torch.elsewhere import Elsewhere, devices_of_call
from miraccl.torch.failures import as_backend_errors
from miraccl.torch.process_group import ProcessGroupMiraccl
from miraccl.torch.tensors import DEVICES, NAME

KEY = "miraccl/unique_id"
_FAILED = "failed: "
#: Pauses of who waits for the id, in seconds.
NAP_FIRST_S, NAP_LAST_S = 1e-3, 0.05


def create(opts: Any, backend_options: Any = None) -> ProcessGroupMiraccl:
    """The group that ``init_process_group`` and ``new_group`` ask for; collective. Its ``timeout`` is the deadline of the meeting and
    of every operation.

    Raises ``BackendError`` when ranks cannot meet; a rank 0 that cannot open the meeting point says so to the others through the store.
    """
    store, rank, size, timeout = opts.store, opts.group_rank, opts.group_size, opts.timeout
    devices = devices_of_call(dict.fromkeys(DEVICES, NAME))
    creation = _NewGroup(opts)
    with as_backend_errors(), creation:
        deadline = begin(timeout.total_seconds())
        try:
            comm = _meet(store, rank, size, deadline, creation)
        except BootstrapError:
            creation.look_again()
            raise
        try:
            if rank == 0:  # all have read it by now, and none comes out of here before; a later group on the same store must not find it
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    store.delete_key(KEY)
            mail = comm.split_by(deadline, 0)
        except BaseException:
            comm.finalize()
            raise
    assert mail is not None
    seat_of(comm).usual_s = seat_of(mail).usual_s = creation.usual_s
    others = {device: name for device, name in devices.items() if name != NAME}
    elsewhere = None
    if others:
        place = dist.PrefixStore(f"{NAME}/elsewhere/", store)
        try:
            with as_backend_errors():
                elsewhere = Elsewhere(
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
            mail.finalize()
            comm.finalize()
            raise
    return ProcessGroupMiraccl(store, comm, mail, elsewhere)


class _NewGroup(Creation):
    """A group that is made: the default group knows the processes of its ranks, and which of them have left, so that they will not come."""

    def __init__(self, opts: Any) -> None:
        world = dist.group.WORLD
        self.name, self.usual_s = "world", opts.timeout.total_seconds()
        self._world, self._ranks, tokens, parent = None, [], [], ""
        if isinstance(world, ProcessGroupMiraccl):
            seat, self._world = seat_of(world.communicator), world.communicator._member.session
            self.name, self._ranks, parent = f"group {opts.group_id}", list(opts.global_ranks_in_group), seat.key
            if self.usual_s >= seat.usual_s:  # else the program may go on when it has waited in vain
                tokens = [self._world.tokens[rank] for rank in self._ranks]
            self.usual_s = max(self.usual_s, seat.usual_s)
        super().__init__(f"group {opts.group_id} of {parent}", tokens, "new_group", opts.group_rank)

    def look_again(self) -> None:
        """After a failure, which may be another rank's that was told more: raise that."""
        deadline = time.monotonic() + NOTICE_FIRST_S
        while self._world is not None and time.monotonic() < deadline:
            self.look()
            time.sleep(NAP_FIRST_S)

    def look(self) -> None:
        super().look()
        gone = self._world.gone() & {*self._ranks} if self._world is not None else ()
        if gone:
            peer = min(gone)
            raise PeerDied(f"rank {peer} has left the default group and will not come", rank=self._rank, peer=peer, op="new_group")


def _meet(store: Any, rank: int, size: int, deadline: Deadline, creation: _NewGroup) -> Communicator:
    trace.configure()
    options = Options.create(timeout=deadline.seconds, cta_policy="efficiency")
    if size == 1:
        session = solo(deadline.seconds)
    elif rank == 0:
        session = _host(store, size, deadline, creation.look)
    else:
        ident = UniqueId.parse(_wait_for(store, rank, deadline, creation.look))
        session = _connect(ident, rank, size, deadline, creation.look)
    session.name = creation.name
    return Communicator.from_session(session, options, stages=Stages(session, deadline))


def _host(store: Any, size: int, deadline: Deadline, look: Callable[[], None]) -> Session:
    """Rank 0's way: it opens the meeting point, and closes it if it gives up."""
    try:
        ident, root = create_root(nranks=size)
    except MiracclError as error:
        store.set(KEY, f"{_FAILED}{error}")
        raise
    try:
        store.set(KEY, str(ident))
        return _connect(ident, 0, size, deadline, look, root)
    except BaseException as error:
        root.close(f"rank 0 gave up: {type(error).__name__}")
        raise


def _connect(
    ident: UniqueId, rank: int, size: int, deadline: Deadline, look: Callable[[], None], root: Root | None = None
) -> Session:
    """Ranks may come as far apart as the group's timeout; one that cannot reach rank 0 knows it sooner."""
    dial = params.BOOTSTRAP_TIMEOUT.read()
    return connect(ident, rank, size, deadline, session_timeout=deadline.seconds, dial_timeout=dial, root=root, look=look)


def _wait_for(store: Any, rank: int, deadline: Deadline, look: Callable[[], None]) -> str:
    nap = NAP_FIRST_S
    try:
        while not store.check([KEY]):
            look()
            if not deadline.left:
                raise BootstrapError(f"rank 0 put no unique id into the store within {deadline.seconds:g} s", rank=rank, peer=0)
            time.sleep(nap)
            nap = min(2 * nap, NAP_LAST_S)
        text: str = store.get(KEY).decode()
    except RuntimeError as error:  # DistStoreError, but not of every store
        raise BootstrapError(f"rank 0 put no unique id into the store: {error}", rank=rank, peer=0) from error
    if text.startswith(_FAILED):
        raise BootstrapError(f"rank 0 could not open the meeting point: {text.removeprefix(_FAILED)}", rank=rank, peer=0)
    return text
