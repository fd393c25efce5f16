"""The methods of NIXL's ``nixl_agent`` that vLLM, SGLang, LMCache and Ray call, over ``Agent``.

    from miraccl.compat.nixl import nixl_agent, nixl_agent_config

Differences, all on the side of safety: the target checks key, range and rights; a deregistered
range is refused instead of written; a transfer has a deadline (``transfer_timeout``) and ends in
``ERR``; no progress thread polls. All agents need one secret: MIRACCL_SECRET. Memory types are DRAM
and VRAM; storage backends, listeners with etcd and telemetry export do not exist.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage, MiracclError
from miraccl.p2p.agent import Agent
from miraccl.p2p.arrays import Memory
from miraccl.p2p.descriptors import RemoteMemory
from miraccl.p2p.extents import Extents
from miraccl.p2p.registration import Registration
from miraccl.p2p.reshard.run import merge_rows
from miraccl.p2p.transfer import Transfer

DEFAULT_TIMEOUT_S = 30.0
_KINDS = ("DRAM", "VRAM")


@dataclass
class nixl_agent_config:  # noqa: N801 - NIXL's name
    """Options of an agent; those of NIXL's threads and backends are accepted and unused.

    Attributes:
        transfer_timeout: Seconds until a transfer ends in ``ERR``; not in NIXL.
    """

    enable_prog_thread: bool = True
    enable_listen_thread: bool = False
    listen_port: int = 0
    capture_telemetry: bool = False
    num_threads: int = 0
    backends: list[str] = field(default_factory=lambda: ["UCX"])
    sync_mode: Any = None
    transfer_timeout: float = DEFAULT_TIMEOUT_S


@dataclass(eq=False)
class Descriptors:
    """List of (address, bytes, device) of one memory type: NIXL's ``nixlXferDList``."""

    kind: str
    rows: Any

    def descCount(self) -> int:  # noqa: N802 - NIXL's name
        return len(self.rows)

    def getType(self) -> str:  # noqa: N802 - NIXL's name
        return self.kind

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(eq=False)
class PreparedList:
    """Descriptors of one side with the agent they belong to: ``prep_xfer_dlist``."""

    agent_name: str
    descriptors: Descriptors


@dataclass(eq=False)
class TransferHandle:
    """Transfer that can be started: ``initialize_xfer`` and ``make_prepped_xfer``."""

    prepared: list[Any]
    message: bytes
    transfers: list[Transfer] = field(default_factory=list)
    error: MiracclError | None = None


class nixl_agent:  # noqa: N801 - NIXL's name
    """Agent with NIXL's methods.

    Args:
        agent_name: Name of the agent.
        nixl_conf: Options.
        secret: Secret of the job, default MIRACCL_SECRET; not in NIXL.
    """

    def __init__(
        self,
        agent_name: str,
        nixl_conf: nixl_agent_config | None = None,
        instantiate_all: bool = False,
        *,
        secret: Any = None,
    ) -> None:
        self.nixl_conf = nixl_conf or nixl_agent_config()
        self.name = agent_name
        self.agent = Agent(
            agent_name,
            secret=secret,
            timeout=self.nixl_conf.transfer_timeout,
            port=self.nixl_conf.listen_port if self.nixl_conf.enable_listen_thread else 0,
        )
        self.backends = dict.fromkeys(self.nixl_conf.backends)
        self._registrations: dict[tuple[int, int], Registration] = {}
        self._remotes: dict[str, list[tuple[int, RemoteMemory]]] = {}
        self._addresses: dict[str, str] = {}
        self._numbers = itertools.count(1)

    # ---- memory

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> Descriptors:
        """Return descriptors of tensors, (address, bytes, device, text), or an N x 3 array."""
        return self._descriptors(descs, mem_type)

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> Descriptors:
        """Return descriptors of tensors, of (address, bytes, device), or of an N x 3 array."""
        return self._descriptors(descs, mem_type)

    def _descriptors(self, descs: Any, mem_type: str | None) -> Descriptors:
        if isinstance(descs, Descriptors):
            return descs
        if hasattr(descs, "data_ptr"):
            descs = [descs]
        if isinstance(descs, Sequence) and len(descs) and hasattr(descs[0], "data_ptr"):
            kind = "VRAM" if descs[0].is_cuda else "DRAM"
            rows = [
                (t.data_ptr(), t.numel() * t.element_size(), max(t.get_device(), 0)) for t in descs
            ]
        else:
            kind = {"cpu": "DRAM", "cuda": "VRAM"}.get(str(mem_type), str(mem_type))
            rows = [row[:3] for row in descs]
        if kind not in _KINDS:
            raise InvalidUsage(f"memory type {mem_type!r} is not supported; allowed are {_KINDS}")
        return Descriptors(kind, np.array(rows, np.int64).reshape(-1, 3))

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> Descriptors:
        """Register memory for reads and writes of other agents."""
        made = self.get_reg_descs(reg_list, mem_type)
        for address, nbytes, device in made.rows.tolist():
            memory = Memory(
                address=address,
                nbytes=nbytes,
                shape=(nbytes,),
                dtype="uint8",
                writable=True,
                device=device if made.kind == "VRAM" else -1,
                owner=reg_list,
            )
            key = (address, nbytes)
            if key not in self._registrations:
                self._registrations[key] = self.agent.register_memory(memory, "rw", block_nbytes=1)
        return made

    def deregister_memory(self, dereg_list: Descriptors, backends: Sequence[str] = ()) -> None:
        """End registrations; returns when no further access can come."""
        for address, nbytes, _ in dereg_list.rows.tolist():
            found = self._registrations.pop((address, nbytes), None)
            if found is not None:
                found.deregister()

    def get_serialized_descs(self, descs: Descriptors) -> bytes:
        return json.dumps([descs.kind, descs.rows.tolist()]).encode()

    def deserialize_descs(self, serialized_descs: bytes) -> Descriptors:
        kind, rows = json.loads(serialized_descs)
        return self._descriptors([tuple(row) for row in rows], kind)

    # ---- other agents

    def get_agent_metadata(self) -> bytes:
        """Return name, address and all registrations, for ``add_remote_agent``."""
        regions = [[r.memory.address, r.advertise().hex()] for r in self._registrations.values()]
        return json.dumps([self.name, self.agent.address, regions]).encode()

    def get_partial_agent_metadata(self, *unused: Any, **options: Any) -> bytes:
        return self.get_agent_metadata()

    def add_remote_agent(self, metadata: bytes) -> str:
        """Remember another agent and its registrations; return its name."""
        name, address, regions = json.loads(metadata)
        self._addresses[name] = address
        self._remotes[name] = sorted(
            ((start, RemoteMemory.decode(bytes.fromhex(blob))) for start, blob in regions),
            key=lambda item: item[0],
        )
        return str(name)

    def remove_remote_agent(self, agent: str) -> None:
        self._remotes.pop(agent, None)
        self._addresses.pop(agent, None)

    def check_remote_metadata(self, agent: str, descs: Any = None) -> bool:
        return agent in self._remotes

    def make_connection(self, remote_agent: str, backends: Sequence[str] = ()) -> None:
        self._peer(remote_agent)

    def _peer(self, name: str) -> Any:
        if name not in self._addresses:
            raise InvalidUsage(f"agent {name!r} is not known; call add_remote_agent first")
        return self.agent.peer_named(name, self._addresses[name])

    # ---- transfers

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: str | None = None, backends: Any = ()
    ) -> PreparedList:
        """Prepare one side; ``agent_name`` is empty or ``NIXL_INIT_AGENT`` for the local one."""
        return PreparedList(agent_name, self.get_xfer_descs(xfer_list, mem_type))

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: PreparedList,
        local_indices: Any,
        remote_xfer_side: PreparedList,
        remote_indices: Any,
        notif_msg: bytes = b"",
        backends: Any = (),
        skip_desc_merge: bool = False,
    ) -> TransferHandle:
        """Return a transfer of the descriptors with these indices."""
        here = local_xfer_side.descriptors.rows[np.asarray(local_indices, np.int64)]
        there = remote_xfer_side.descriptors.rows[np.asarray(remote_indices, np.int64)]
        return self._handle(operation, here, there, remote_xfer_side.agent_name, notif_msg)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: Descriptors,
        remote_descs: Descriptors,
        remote_agent: str,
        notif_msg: bytes = b"",
        backends: Any = (),
    ) -> TransferHandle:
        """Return a transfer between two lists of descriptors; ``operation``: READ or WRITE."""
        return self._handle(operation, local_descs.rows, remote_descs.rows, remote_agent, notif_msg)

    def _handle(
        self, operation: str, here: Any, there: Any, remote: str, message: bytes | str
    ) -> TransferHandle:
        if operation not in ("READ", "WRITE"):
            raise InvalidUsage(f"operation {operation!r}; allowed are READ and WRITE")
        if len(here) != len(there) or (here[:, 1] != there[:, 1]).any():
            raise InvalidUsage("local and remote descriptors differ in number or bytes")
        peer, kind = self._peer(remote), operation.lower()
        by_region: dict[int, list[int]] = defaultdict(list)
        for index, (address, nbytes, _) in enumerate(there.tolist()):
            by_region[self._region(remote, address, nbytes)].append(index)
        prepared = []
        for region, indices in by_region.items():
            start, memory = self._remotes[remote][region]
            rows = np.stack([here[indices, 0], there[indices, 0] - start, here[indices, 1]], axis=1)
            moved = _extents(rows, kind == "write")
            prepared.append(peer.prepare_extents(kind, moved, memory, None))
        if isinstance(message, str):
            message = message.encode()
        return TransferHandle(prepared, message)

    def _region(self, remote: str, address: int, nbytes: int) -> int:
        """Return the index of the registration that contains a range."""
        for index, (start, memory) in enumerate(self._remotes.get(remote, [])):
            if start <= address and address + nbytes <= start + memory.nbytes:
                return index
        raise InvalidUsage(
            f"agent {remote!r} has not registered bytes {address} to {address + nbytes}"
        )

    def transfer(self, handle: TransferHandle, notif_msg: bytes = b"") -> str:
        """Start a transfer; return its state: DONE, PROC or ERR."""
        message = notif_msg or handle.message
        handle.error = None
        last = len(handle.prepared) - 1
        try:
            handle.transfers = []
            for index, prepared in enumerate(handle.prepared):
                if index == last:  # the notification follows the data of all regions
                    for earlier in handle.transfers:
                        earlier.wait()
                note = message if message and index == last else None
                handle.transfers.append(prepared.start(note))
        except MiracclError as error:
            handle.error = error
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: TransferHandle) -> str:
        if handle.error is not None:
            return "ERR"
        for transfer in handle.transfers:
            if not transfer.done():
                return "PROC"
            if transfer.exception() is not None:
                handle.error = transfer.exception()
                return "ERR"
        return "DONE"

    def release_xfer_handle(self, handle: TransferHandle) -> None:
        """Cancel a transfer under way; no byte is moved after the return."""
        for transfer in handle.transfers:
            transfer.cancel()

    def release_dlist_handle(self, handle: PreparedList) -> None:
        """Nothing to release."""

    def estimate_xfer_cost(self, handle: TransferHandle) -> tuple[int, int, int]:
        """Return (predicted us, margin of error in us, method); the method is 0, analytical."""
        us = sum(prepared.explain().predicted_us for prepared in handle.prepared)
        return int(us), int(us), 0

    # ---- notifications

    def send_notif(self, remote_agent_name: str, notif_msg: bytes, backend: Any = None) -> None:
        data = notif_msg.encode() if isinstance(notif_msg, str) else bytes(notif_msg)
        self._peer(remote_agent_name).notify(data)

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """Return the notifications that have arrived, by the name of the sender; those of failed
        transfers are left out, as in NIXL.
        """
        found: dict[str, list[bytes]] = defaultdict(list)
        for notification in self.agent.notifications():
            if notification.error is None:
                found[notification.peer].append(notification.data)
        return dict(found)

    def close(self) -> None:
        self.agent.close()


def _extents(rows: Any, writes: bool) -> Extents:
    """Return (local address, offset, bytes) sorted by target and merged."""
    key = rows[:, 1] if writes else rows[:, 0]
    table = merge_rows(rows[np.argsort(key, kind="stable")])
    return Extents(
        table=np.ascontiguousarray(table, np.int64),
        total=int(table[:, 2].sum()),
        blocks=len(rows),
        block_nbytes=max(1, int(rows[0, 2])) if len(rows) else 1,
    )


__all__ = ["Descriptors", "nixl_agent", "nixl_agent_config"]
