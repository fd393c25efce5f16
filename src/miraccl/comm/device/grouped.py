"""Operations on GPU memory inside ``miraccl.group()``: they are noted and run at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from miraccl.comm.device.work import result_of, stream_of
from miraccl.comm.group import Group
from miraccl.executor.cuda.doors.table import Doors

_POINT_TO_POINT = ("send", "recv", "sendrecv")


class Grouped:
    """The methods of ``gpu`` for a group: all sends and receives are run in one launch, then the collectives in their order.

    Operations in several streams become one in the stream of the first; the other streams wait before and after.
    """

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._items: list[tuple[int, Any]] = []  # (stream, transfer or what runs a collective) in the order of the calls
        self._arrays: list[Any] = []  # of the transfers: users may let go of them before the end

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _POINT_TO_POINT:
            transferring: Callable[..., Any] = getattr(self, f"_{name}")
            return transferring

        def note(*args: Any, stream: Any = None, **more: Any) -> Any:
            number, method = stream_of(self._gpu, stream), getattr(self._gpu, name)
            result, args = result_of(name, args, self._gpu)
            self._items.append((number, lambda: method(*args, stream=number, **more)))
            return result

        return note

    def _send(self, x: Any, dst: int, *, stream: Any = None) -> None:
        self._add(stream_of(self._gpu, stream), x, self._gpu.transfer(x, dst, False, "send", stream))

    def _recv(self, x: Any, src: int, *, stream: Any = None) -> Any:
        self._add(stream_of(self._gpu, stream), x, self._gpu.transfer(x, src, True, "recv", stream))
        return x

    def _sendrecv(self, x: Any, dst: int, out: Any, src: int, *, stream: Any = None) -> Any:
        sent, got = (self._gpu.transfer(*part, "sendrecv", stream) for part in ((x, dst, False), (out, src, True)))
        self._gpu._apart(sent.memory, got.memory, "sendrecv")
        number = stream_of(self._gpu, stream)
        self._add(number, x, sent)
        self._add(number, out, got)
        return out

    def add(self, stream: int, messages: Sequence[Any]) -> None:
        """Sends and receives, which are right: array, peer, whether it is received, and so on."""
        for place in range(0, len(messages), 3):
            x, peer, receives = messages[place : place + 3]
            self._add(stream, x, self._gpu.transfer(x, peer, receives, "recv" if receives else "send", stream))

    def _add(self, stream: int, array: Any, transfer: Any) -> None:
        self._items.append((stream, transfer))
        self._arrays.append(array)

    def run(self) -> None:
        """The end of the group."""
        transfers = [(number, item) for number, item in self._items if not callable(item)]
        if transfers:
            streams = list(dict.fromkeys(number for number, _ in transfers))
            first = streams[0]
            for other in streams[1:]:
                self._gpu.gpu.order_streams(other, first)
            self._gpu.exchange([transfer for _, transfer in transfers], stream=first)
            for other in streams[1:]:
                self._gpu.gpu.order_streams(first, other)
        for _, item in self._items:
            if callable(item):
                item()

    def drop(self) -> None:
        """An exception has left the group."""


class Noted:
    """A group that has nothing but sends and receives that doors have noted: a door launches them. The first other call makes it a
    ``Grouped``."""

    def __init__(self, gpu: Any, doors: Doors) -> None:
        self._gpu, self._doors = gpu, doors
        self._launch = doors.door("exchange")

    def begin(self, group: Group | None) -> bool:
        """A door has begun to note; False where that is not for ``group``, since this thread has none open."""
        if group is None:
            self.drop()
            return False
        part = group.parts.setdefault(self._gpu, self)
        if part is self:
            self._doors.keep_notes()
        else:  # which has other calls already
            part.add(*self._doors.take_notes())
        return True

    def grouped(self, group: Group) -> Grouped:
        """What takes other calls of ``group``, after those that are noted."""
        part: Any = group.parts.get(self._gpu)
        if isinstance(part, Grouped):
            return part
        other = group.parts[self._gpu] = Grouped(self._gpu)
        if part is self:
            other.add(*self._doors.take_notes())
        elif self._doors.has_notes_of(threading.get_ident()):
            self.drop()  # of a group that an exception left between two lines of ours
        return other

    def run(self) -> None:
        if self._launch():
            rest = Grouped(self._gpu)
            rest.add(*self._doors.take_notes())
            rest.run()
        else:
            self._doors.clear_notes()

    def drop(self) -> None:
        self._doors.clear_notes()
