"""One-sided transfers as a tensor transport of Ray (``ray.experimental``).

Ray calls a ``TensorTransportManager`` in the actor that has made tensors, in the one that needs
them, and in the driver. The owner registers its tensors; the other actor reads them with its agent
(``miraccl.Agent``) while the owner runs other methods. Each process has one agent, made at first
use.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
)

from miraccl import clock, params, trace
from miraccl.errors import InvalidUsage, MiracclError, TransferError, TransferTimeout
from miraccl.p2p.agent import Agent
from miraccl.p2p.descriptors import RemoteMemory
from miraccl.p2p.registration import Registration
from miraccl.p2p.transfer import Transfer
from miraccl.wire.auth import SECRET_BYTES

log = trace.logger("p2p")

NAME = "MIRACCL"
_STORE, _SECRET_KEY = b"miraccl", b"tensor-transport-secret"


@dataclass
class MiracclTensorMetadata(TensorTransportMetadata):
    """Tensors of one object: a descriptor for each, empty for one without elements."""

    descriptors: list[bytes] = field(default_factory=list)


@dataclass
class MiracclFetchRequest(FetchRequest):
    """Reads under way; they are cancelled if no caller waits for them."""

    transfers: list[Transfer] = field(default_factory=list)

    def __del__(self) -> None:
        for transfer in self.transfers:
            if not transfer.done():
                try:
                    transfer.cancel()
                except MiracclError as error:
                    log.warning("cannot cancel a read of object %s: %s", self.obj_id, error)


class MiracclTensorTransport(TensorTransportManager):  # type: ignore[misc,unused-ignore]
    """Tensor transport ``MIRACCL``; one instance per process."""

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._registered: dict[str, list[Registration]] = {}
        self._fetching: dict[str, list[Transfer]] = {}
        self._aborted: set[str] = set()
        self._lock = threading.RLock()

    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Return True if the actor's process can import miraccl."""

        def has_miraccl(self: Any) -> bool:
            import importlib.util

            return importlib.util.find_spec("miraccl") is not None

        call = actor.__ray_call__.options(concurrency_group="_ray_system")
        return bool(ray.get(call.remote(has_miraccl)))

    # ---- owner

    def extract_tensor_transport_metadata(
        self, obj_id: str, rdt_object: list[Any]
    ) -> MiracclTensorMetadata:
        """Register tensors for reading.

        Raises:
            InvalidUsage: A tensor is not contiguous, or they are on devices of different kinds.
        """
        kinds = sorted({tensor.device.type for tensor in rdt_object})
        if len(kinds) > 1:
            raise InvalidUsage(
                f"cannot offer the tensors of object {obj_id}: they are on {' and '.join(kinds)}"
            )
        if kinds == ["cuda"]:
            import torch

            for device in {tensor.device for tensor in rdt_object}:
                torch.cuda.synchronize(device)  # agents know no streams
        made: list[Registration] = []
        descriptors: list[bytes] = []
        try:
            for tensor in rdt_object:
                if tensor.numel():
                    made.append(self.agent.register(tensor.detach(), access="r"))
                    descriptors.append(made[-1].advertise())
                else:
                    descriptors.append(b"")
        except BaseException:
            for registration in made:
                registration.deregister()
            raise
        with self._lock:
            self._registered[obj_id] = made
        return MiracclTensorMetadata(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device=kinds[0] if kinds else None,
            descriptors=descriptors,
        )

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[Any]
    ) -> None:
        """End the registrations of an object; return when no actor reads it."""
        with self._lock:
            made = self._registered.pop(obj_id, [])
        for registration in made:
            registration.deregister()

    # ---- reader

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> MiracclFetchRequest:
        """Start to read the tensors of an object.

        Raises:
            InvalidUsage: ``target_buffers`` differ in number, shape or type.
            TransferError: The object was freed, or its owner cannot be reached.
        """
        assert isinstance(tensor_transport_metadata, MiracclTensorMetadata)
        tensors = _buffers(tensor_transport_metadata, target_buffers)
        request = MiracclFetchRequest(obj_id=obj_id, tensors=tensors)
        with self._lock:
            if obj_id in self._aborted:
                self._aborted.discard(obj_id)
                raise TransferError(f"the read of object {obj_id} was aborted", reason="cancelled")
            self._fetching[obj_id] = request.transfers
        for tensor, descriptor in zip(tensors, tensor_transport_metadata.descriptors, strict=True):
            if descriptor:
                remote = RemoteMemory.decode(descriptor)
                request.transfers.append(self.agent.peer_of(remote).read(tensor, remote))
        return request

    def wait_fetch_complete(self, fetch_request: FetchRequest, timeout: float = -1) -> list[Any]:
        """Return the tensors when they are there.

        Args:
            timeout: Seconds, -1 for the deadline of the transfers.

        Raises:
            TimeoutError: They are not there in time.
            TransferError: A read failed.
        """
        assert isinstance(fetch_request, MiracclFetchRequest)
        until = None if timeout < 0 else clock.monotonic() + timeout
        try:
            for transfer in fetch_request.transfers:
                transfer.wait(None if until is None else max(until - clock.monotonic(), 1e-6))
        except TransferTimeout as error:
            if error.reason != "wait":
                raise
            raise TimeoutError(str(error)) from error
        with self._lock:
            self._fetching.pop(fetch_request.obj_id, None)
        return list(fetch_request.tensors)

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Read the tensors of an object; errors as ``fetch_multiple_tensors``."""
        request = self.fetch_multiple_tensors(
            obj_id, tensor_transport_metadata, communicator_metadata, target_buffers
        )
        return self.wait_fetch_complete(request)

    def send_multiple_tensors(
        self,
        tensors: list[Any],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        raise NotImplementedError("the reader moves the tensors (is_one_sided)")

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Cancel the reads of an object; no byte is moved after the return."""
        with self._lock:
            transfers = self._fetching.pop(obj_id, None)
            if transfers is None and obj_id not in self._registered:
                self._aborted.add(obj_id)
        for transfer in transfers or ():
            transfer.cancel()

    # ---- this process

    @property
    def agent(self) -> Agent:
        """Agent of this process."""
        with self._lock:
            if self._agent is None:
                context = ray.get_runtime_context()
                name = context.get_actor_id() or f"driver-{context.get_job_id()}"
                host = params.P2P_HOST.read()
                if host == params.P2P_HOST.default:
                    host = ray.util.get_node_ip_address()
                secret = params.SECRET.read() or _cluster_secret()
                self._agent = Agent(name, secret=secret, host=host)
            return self._agent


def _buffers(metadata: MiracclTensorMetadata, given: list[Any] | None) -> list[Any]:
    """Return the tensors to read into: those given, or new ones."""
    import torch

    if not given:
        device = metadata.tensor_device
        return [
            torch.empty(shape, dtype=kind, device=device) for shape, kind in metadata.tensor_meta
        ]
    found = [(tensor.shape, tensor.dtype) for tensor in given]
    if found != [tuple(meta) for meta in metadata.tensor_meta]:
        raise InvalidUsage(
            f"cannot read into the target buffers: they are {found}, the object has "
            f"{metadata.tensor_meta}"
        )
    return list(given)


def _cluster_secret() -> bytes:
    """Return the secret of the agents of this cluster, from Ray's key-value store."""
    # Any program of the cluster can read it, and can run code in the actors anyway.
    internal_kv._internal_kv_put(
        _SECRET_KEY, clock.random_bytes(SECRET_BYTES), overwrite=False, namespace=_STORE
    )
    return bytes(internal_kv._internal_kv_get(_SECRET_KEY, namespace=_STORE))
