"""Tagged messages and the format of their headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miraccl.errors import MiracclError
from miraccl.executor.cpu.kernels import layout
from miraccl.ops.host_arrays import Array
from miraccl.runtime.exchange import TransferEntry
from miraccl.torch.tensors import array_at


@dataclass(eq=False, slots=True)
class TaggedMessage:
    """A send or receive of a contiguous tensor.

    ``peer`` of a receive from any source is None until a message has been matched.
    """

    name: str
    tag: int
    peer: int | None
    tensor: Any
    done: bool = False
    error: MiracclError | None = None
    #: Header of a send; reused for later messages.
    header: TransferEntry | None = None
    entries: Sequence[TransferEntry] = ()
    #: Buffer that receives the payload, if not ``array``.
    bounce: Array | None = None
    #: While waiting: messages received from its rank when none of them had completed this one.
    received_count: int | None = None

    @property
    def nbytes(self) -> int:
        return int(self.tensor.nbytes)

    @property
    def sends(self) -> bool:
        """True for a send that has started."""
        return bool(self.entries) and not self.entries[0].transfer.receives

    @property
    def array(self) -> Array:
        """Bytes of the tensor; shares its memory."""
        memory: Array = array_at(self.tensor.data_ptr(), self.nbytes, np.uint8, self.tensor)
        return memory


#: Shared handle of all sends that completed at once.
SENT = TaggedMessage("send", 0, None, None, done=True)


@dataclass(eq=False, kw_only=True)
class UnexpectedMessage:
    """A message that arrived before a matching receive was posted (MPI: unexpected message)."""

    peer: int
    tag: int
    payload: Array
    entries: list[TransferEntry]


def write_header(header: TransferEntry, tag: int, payload: Array) -> None:
    """Write tag and size into a header, and the payload if it fits (``layout.SHORT_BYTES``)."""
    memory = header.transfer.memory.array
    memory[: layout.HEADER_PAYLOAD].view(np.int64)[:] = tag, payload.nbytes
    if payload.nbytes <= layout.SHORT_BYTES:
        memory[layout.HEADER_PAYLOAD : layout.HEADER_PAYLOAD + payload.nbytes] = payload


def read_header(header: TransferEntry) -> tuple[int, int, Array]:
    """Return tag, payload size in bytes, and the payload if the header holds it."""
    memory = header.transfer.memory.array
    tag, nbytes = memory[: layout.HEADER_PAYLOAD].view(np.int64).tolist()
    return tag, nbytes, memory[layout.HEADER_PAYLOAD : layout.HEADER_PAYLOAD + nbytes]
