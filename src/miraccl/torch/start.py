"""How a process group begins: rank 0 makes the unique id of a new communicator, the group's store carries it to the others."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist

from miraccl import params, trace
from miraccl.bootstrap import Root, Session, UniqueId, connect, create_root, solo
from miraccl.comm.communicator import Communicator
from miraccl.comm.member import Options
from miraccl.errors import BootstrapError, MiracclError
from miraccl.torch.elsewhere import Elsewhere, devices_of_call
from miraccl.torch.failures import as_backend_errors
from miraccl.torch.process_group import NAME, ProcessGroupMiraccl
from miraccl.torch.tensors import DEVICES

KEY = "miraccl/unique_id"
_FAILED = "failed: "


def create(opts: Any, backend_options: Any = None) -> ProcessGroupMiraccl:
    """The group that ``init_process_group`` and ``new_group`` ask for; collective. Its ``timeout`` is the deadline of the meeting and
    of every operation.

    Raises ``BackendError`` when ranks cannot meet; a rank 0 that cannot open the meeting point says so to the others through the store.
    """
    store, rank, size, timeout = opts.store, opts.group_rank, opts.group_size, opts.timeout
    devices = devices_of_call(dict.fromkeys(DEVICES, NAME))
    with as_backend_errors():
        comm = _meet(store, rank, size, timeout.total_seconds())
        try:
            mail = comm.split(0)
        except BaseException:
            comm.finalize()
            raise
    assert mail is not None
    if rank == 0:  # all have read it by now; a later group on the same store must not find it
        with contextlib.suppress(RuntimeError, NotImplementedError):
            store.delete_key(KEY)
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


def _meet(store: Any, rank: int, size: int, patience: float) -> Communicator:
    trace.configure()
    options = Options.create(timeout=patience, cta_policy="efficiency")
    if size == 1:
        session = solo(patience)
    elif rank == 0:
        session = _host(store, size, patience)
    else:
        session = _connect(UniqueId.parse(_wait_for(store, rank)), rank, size, patience)
    return Communicator.from_session(session, options)


def _host(store: Any, size: int, patience: float) -> Session:
    """Rank 0's way: it opens the meeting point, and closes it if it gives up."""
    try:
        ident, root = create_root(nranks=size)
    except MiracclError as error:
        store.set(KEY, f"{_FAILED}{error}")
        raise
    try:
        store.set(KEY, str(ident))
        return _connect(ident, 0, size, patience, root)
    except BaseException as error:
        root.close(f"rank 0 gave up: {type(error).__name__}")
        raise


def _connect(ident: UniqueId, rank: int, size: int, patience: float, root: Root | None = None) -> Session:
    """Ranks may come as far apart as the group's timeout; one that cannot reach rank 0 knows it sooner."""
    dial = min(patience, params.BOOTSTRAP_TIMEOUT.read())
    return connect(ident, rank, size, patience, session_timeout=patience, dial_timeout=dial, root=root)


def _wait_for(store: Any, rank: int) -> str:
    try:
        text: str = store.get(KEY).decode()
    except RuntimeError as error:  # DistStoreError, but not of every store
        raise BootstrapError(f"rank 0 put no unique id into the store: {error}", rank=rank, peer=0) from error
    if text.startswith(_FAILED):
        raise BootstrapError(f"rank 0 could not open the meeting point: {text.removeprefix(_FAILED)}", rank=rank, peer=0)
    return text
