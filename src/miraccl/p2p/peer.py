"""Another agent, as this one sees it: reads, writes and notifications."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from miraccl.deadline import Deadline
from miraccl.errors import AgentLost, InvalidUsage, MiracclError
from miraccl.p2p import extents
from miraccl.p2p import segment_layout as layout
from miraccl.p2p.arrays import Memory, memory_of
from miraccl.p2p.descriptors import RemoteMemory
from miraccl.p2p.extents import Extents
from miraccl.p2p.local_path import LocalPath
from miraccl.p2p.registration import Registration
from miraccl.p2p.transfer import Transfer
from miraccl.p2p.transfer_plan import TransferPlan

if TYPE_CHECKING:
    from miraccl.p2p.agent import Agent

#: Longest notification, in bytes.
MAX_NOTIFICATION = layout.MAX_NOTIFICATION
#: Transfers of whole memories whose checks are remembered.
MAX_RECENT = 128


class Peer:
    """Connection to another agent, made by ``Agent.connect``.

    Transfers may be started from several threads.

    Attributes:
        name: Name of the other agent.
        agent: Random identifier of the other agent; a restarted one has another.
        address: Its host:port.
        method: ``local`` within a host, ``tcp`` otherwise.
    """

    def __init__(self, owner: Agent, name: str, agent: bytes, address: str, path: Any) -> None:
        self._owner, self._path = owner, path
        self.name, self.agent, self.address = name, agent, address
        self._numbers = itertools.count(1)
        self._closed = False
        self._decoded: dict[bytes, RemoteMemory] = {}
        self._recent: dict[tuple[Any, ...], Prepared] = {}

    @property
    def method(self) -> str:
        return "local" if isinstance(self._path, LocalPath) else "tcp"

    @property
    def lost(self) -> MiracclError | None:
        """Reason why the agent can no longer be reached, or None."""
        error: MiracclError | None = self._path.lost
        return error

    # ---- transfers

    def write(
        self,
        local: Any,
        remote: RemoteMemory | bytes,
        *,
        notify: bytes | None = None,
        deadline: float | None = None,
    ) -> Transfer:
        """Write local memory to the memory of the agent.

        Args:
            local: Array, or a ``Registration`` of this agent; unchanged until the end.
            remote: Descriptor of as many bytes.
            notify: Data of a notification that the agent gets after the last byte.
            deadline: Seconds until the transfer fails, default the agent's timeout.

        Returns:
            The transfer, which may have ended already.

        Raises:
            InvalidUsage: Sizes or rights do not permit it; nothing was written.
            StaleDescriptor: The owner has deregistered the memory; nothing was written.
            AgentLost: The agent cannot be reached.
        """
        return self._start("write", local, remote, True, notify, deadline)

    def read(
        self,
        local: Any,
        remote: RemoteMemory | bytes,
        *,
        notify: bytes | None = None,
        deadline: float | None = None,
    ) -> Transfer:
        """Read the memory of the agent to local memory; arguments and errors as ``write``."""
        return self._start("read", local, remote, False, notify, deadline)

    def writev(
        self,
        local: Any,
        remote: RemoteMemory | bytes,
        *,
        src_blocks: Any,
        dst_blocks: Any,
        notify: bytes | None = None,
        deadline: float | None = None,
    ) -> Transfer:
        """Write blocks of local memory to blocks of the agent's memory.

        Args:
            local: Array whose rows are blocks, of the size of the remote ones.
            remote: Descriptor; ``block_nbytes`` is the size of its blocks.
            src_blocks: Local blocks: int32 array, range or slice.
            dst_blocks: Remote blocks, as many; none occurs twice.

        Raises as ``write``.
        """
        prepared = self.prepare(
            "write", local, remote, local_blocks=src_blocks, remote_blocks=dst_blocks
        )
        return prepared.start(notify, deadline)

    def readv(
        self,
        local: Any,
        remote: RemoteMemory | bytes,
        *,
        src_blocks: Any,
        dst_blocks: Any,
        notify: bytes | None = None,
        deadline: float | None = None,
    ) -> Transfer:
        """Read blocks of the agent's memory (``src_blocks``) to local blocks (``dst_blocks``);
        errors as ``writev``.
        """
        prepared = self.prepare(
            "read", local, remote, local_blocks=dst_blocks, remote_blocks=src_blocks
        )
        return prepared.start(notify, deadline)

    def prepare(
        self,
        kind: str,
        local: Any,
        remote: RemoteMemory | bytes,
        *,
        local_blocks: Any = None,
        remote_blocks: Any = None,
    ) -> Prepared:
        """Check a transfer once, to start it many times.

        Args:
            kind: ``"write"`` or ``"read"``.
            local: Array or registration.
            remote: Descriptor.
            local_blocks, remote_blocks: Blocks as in ``writev``; None for the whole memory.

        Raises as ``write``.
        """
        if kind not in ("read", "write"):
            raise InvalidUsage(f"cannot prepare: kind is {kind!r}; allowed are 'read' and 'write'")
        writes = kind == "write"
        name = kind if local_blocks is None else kind + "v"
        target = self._remote(remote, name)
        memory = self._local(local, name, writes)
        if local_blocks is None and remote_blocks is None:
            moved = self._whole(memory, target, name)
        else:
            moved = self._blocks(memory, target, local_blocks, remote_blocks, writes, name)
        return Prepared(self, name, moved, target, writes, memory)

    def explain_write(
        self,
        local: Any,
        remote: RemoteMemory | bytes,
        *,
        src_blocks: Any = None,
        dst_blocks: Any = None,
    ) -> TransferPlan:
        """Return what ``write`` or, with blocks, ``writev`` would do; nothing is moved.

        The plan has method, merged extents, calls and predicted time, and the transfer as a
        schedule. Arguments and errors as ``writev``.
        """
        return self.prepare(
            "write", local, remote, local_blocks=src_blocks, remote_blocks=dst_blocks
        ).explain()

    def explain_read(
        self,
        local: Any,
        remote: RemoteMemory | bytes,
        *,
        src_blocks: Any = None,
        dst_blocks: Any = None,
    ) -> TransferPlan:
        """Return what ``read`` or, with blocks, ``readv`` would do, as ``explain_write``."""
        return self.prepare(
            "read", local, remote, local_blocks=dst_blocks, remote_blocks=src_blocks
        ).explain()

    def prepare_extents(
        self, kind: str, moved: Extents, remote: RemoteMemory, owner: Any, device: int = -1
    ) -> Prepared:
        """Prepare a transfer of extents that the caller has made; ``owner`` keeps their memory,
        which is on the GPU ``device`` or, for -1, in CPU memory.
        """
        memory = Memory(
            address=0, nbytes=0, shape=(), dtype="", writable=True, device=device, owner=owner
        )
        return Prepared(self, kind, moved, remote, kind == "write", memory)

    def notify(self, data: bytes, *, deadline: float | None = None) -> None:
        """Send a notification without a transfer, after those of all transfers that have ended.

        Raises:
            InvalidUsage: It is too long.
            TransferTimeout: The agent does not read its notifications.
            AgentLost: The agent cannot be reached.
        """
        path = self._path
        if path.lost is None and path.post(data):
            return
        path.notify(_checked_notification(data), 0, self._deadline(deadline))

    def close(self) -> None:
        """Close the connection; transfers under way fail. Idempotent."""
        if not self._closed:
            self._closed = True
            self._owner.forget_peer(self)
            self._path.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    # ---- arguments

    def _start(
        self,
        kind: str,
        local: Any,
        remote: RemoteMemory | bytes,
        writes: bool,
        notify: bytes | None,
        deadline: float | None,
    ) -> Transfer:
        target = self._remote(remote, kind)
        memory = self._local(local, kind, writes)
        key = (kind, memory.address, memory.nbytes, memory.device, id(target))
        prepared = self._recent.get(key)
        if prepared is None:
            moved = self._whole(memory, target, kind)
            prepared = Prepared(self, kind, moved, target, writes, replace(memory, owner=None))
            if len(self._recent) >= MAX_RECENT:
                self._recent.clear()
            self._recent[key] = prepared  # it keeps ``target``, so the id stays its own
        transfer = prepared.start(notify, deadline)
        if not transfer._done:
            transfer.keep = memory.owner
        return transfer

    def _deadline(self, seconds: float | Deadline | None) -> Deadline:
        return Deadline.after(self._owner.timeout if seconds is None else seconds)

    def _remote(self, remote: RemoteMemory | bytes, op_name: str) -> RemoteMemory:
        if not isinstance(remote, RemoteMemory):
            found = self._decoded.get(remote)
            if found is None:
                found = RemoteMemory.decode(remote)
                if len(self._decoded) > 256:
                    self._decoded.clear()
                self._decoded[bytes(remote)] = found
            remote = found
        if remote.agent != self.agent:
            raise AgentLost(
                f"cannot {op_name}: the descriptor is of agent {remote.name!r} in another process "
                f"than {self.name!r} is connected to",
                agent=remote.name,
                reason="other agent",
                hint="connect to its address; after a restart, get a new descriptor",
            )
        return remote

    def _local(self, local: Any, op_name: str, writes: bool) -> Memory:
        if isinstance(local, Registration):
            return local.memory
        memory = memory_of(local, "local", op_name)
        if not writes and not memory.writable:
            raise InvalidUsage(f"cannot {op_name}: local is read-only")
        return memory

    def _whole(self, memory: Memory, target: RemoteMemory, op_name: str) -> Extents:
        if memory.nbytes != target.nbytes:
            raise InvalidUsage(
                f"cannot {op_name}: local has {memory.nbytes} bytes, remote {target.nbytes}",
                hint="select a part with rows() of the descriptor",
            )
        return extents.single(memory.address, target.offset, memory.nbytes)

    def _blocks(
        self,
        memory: Memory,
        target: RemoteMemory,
        local_blocks: Any,
        remote_blocks: Any,
        writes: bool,
        op_name: str,
    ) -> Extents:
        block = target.block_nbytes
        local_count = memory.nbytes // block
        made = extents.from_blocks(
            local=memory.address,
            local_blocks=extents.block_list(local_blocks, "local blocks", local_count, op_name),
            local_count=local_count,
            remote_blocks=extents.block_list(
                remote_blocks, "remote blocks", target.nblocks, op_name
            ),
            remote_count=target.nblocks,
            block_nbytes=block,
            writes=writes,
            op_name=op_name,
        )
        if target.offset:
            made.table[:, 1] += target.offset
        return made


class Prepared:
    """Transfer with checked arguments, which can be started any number of times."""

    def __init__(
        self,
        peer: Peer,
        kind: str,
        moved: Extents,
        remote: RemoteMemory,
        writes: bool,
        memory: Memory,
    ) -> None:
        self._peer, self._kind, self._owner = peer, kind, memory.owner
        self._remote, self._extents, self._writes = remote, moved, writes
        self._device = memory.device
        job = self._make_job()
        self._jobs: list[Any] = [job]
        self._is_short: bool = getattr(job, "is_short", False)
        self._finished = FinishedTransfer(self, peer.name, moved)

    def _make_job(self) -> Any:
        path, remote = self._peer._path, self._remote
        name = f"{self._kind} {self._extents.total} bytes"
        if self._device < 0 and remote.device < 0:
            return path.job(remote, self._extents, self._writes, name)
        from miraccl.p2p.device import make_job  # loads the CUDA driver

        return make_job(path, remote, self._extents, self._writes, self._device, name)

    def start(
        self, notify: bytes | None = None, deadline: float | Deadline | None = None
    ) -> Transfer:
        """Start the transfer; arguments and errors as ``Peer.write``."""
        peer = self._peer
        if notify is not None:
            _checked_notification(notify)
        try:
            job = self._jobs.pop()
        except IndexError:  # each transfer under way has a job of its own
            job = self._make_job()
        if self._is_short:
            number = peer._path.try_fast(job, notify, peer._numbers)
            if number:
                self._jobs.append(job)
                if notify is None:
                    return self._finished
                return FinishedTransfer(self, peer.name, self._extents, number)
        begin = job.start if hasattr(job, "start") else functools.partial(peer._path.start, job)
        transfer: Transfer = begin(
            kind=self._kind,
            number=next(peer._numbers),
            deadline=peer._deadline(deadline),
            notify=notify,
            release=self._jobs.append,
        )
        if self._owner is not None:
            transfer.keep = self._owner
        return transfer

    def explain(self) -> TransferPlan:
        """Return the method, the steps as a schedule, and the predicted time."""
        job = self._jobs[-1] if self._jobs else self._make_job()  # all may be under way
        if not hasattr(job, "explain"):  # stripes of a path by TCP
            made: TransferPlan = self._peer._path.explain(self._kind, self._extents)
            return made
        plan: TransferPlan = job.explain(self._kind)
        return plan


_NO_DEADLINE = Deadline(seconds=0.0, at=0.0)  # nothing is left to wait for


class FinishedTransfer(Transfer):
    """Transfer that had succeeded when ``start`` returned; those without a notification share
    one.
    """

    def __init__(self, prepared: Prepared, peer: str, moved: Extents, number: int = 0) -> None:
        super().__init__(
            kind=prepared._kind, peer=peer, number=number, extents=moved, deadline=_NO_DEADLINE
        )
        self._prepared, self._done = prepared, True

    def explain(self) -> TransferPlan:
        return self._prepared.explain()


def _checked_notification(data: bytes) -> bytes:
    if not isinstance(data, bytes) or len(data) > MAX_NOTIFICATION:
        size = f"{len(data)} bytes" if isinstance(data, bytes) else f"a {type(data).__name__}"
        raise InvalidUsage(f"cannot notify with {size}: allowed are up to {MAX_NOTIFICATION} bytes")
    return data
