"""How a process group begins: rank 0 makes the unique id of a new communicator, the group's store carries it to the others."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist

from miraccl import params, trace
from miraccl.bootstrap import UniqueId, connect
from miraccl.comm.communicator import Communicator
from miraccl.comm.member import Options
from miraccl.comm.start import get_unique_id
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
        ident = _publish(store) if rank == 0 else _wait_for(store, rank)
        comm = _meet(ident, rank, size, timeout.total_seconds())
        mail = comm.split(0)
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


def _meet(ident: str, rank: int, size: int, patience: float) -> Communicator:
    """Ranks may come as far apart as the group's timeout; one that cannot reach rank 0 knows it sooner."""
    trace.configure()
    dial = min(patience, params.BOOTSTRAP_TIMEOUT.read())
    session = connect(UniqueId.parse(ident), rank, size, patience, session_timeout=patience, dial_timeout=dial)
    return Communicator.from_session(session, Options.create(timeout=patience, cta_policy="efficiency"))


def _publish(store: Any) -> str:
    try:
        ident = str(get_unique_id())
    except MiracclError as error:
        store.set(KEY, f"{_FAILED}{error}")
        raise
    store.set(KEY, ident)
    return ident


def _wait_for(store: Any, rank: int) -> str:
    try:
        text: str = store.get(KEY).decode()
    except RuntimeError as error:  # DistStoreError, but not of every store
        raise BootstrapError(f"rank 0 put no unique id into the store: {error}", rank=rank, peer=0) from error
    if text.startswith(_FAILED):
        raise BootstrapError(f"rank 0 could not open the meeting point: {text.removeprefix(_FAILED)}", rank=rank, peer=0)
    return text
