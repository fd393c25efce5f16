"""Message pipe between a tool and the ranks it has forked."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<Q")


class ProcessPipe:
    """Pickled messages over one end of a socket pair between a parent and a forked child.

    Both ends are trusted; never used over a network.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._pending = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Any:
        """Return the next message; block until it arrives. Raise ``EOFError`` if the peer has
        exited.
        """
        while True:
            for message in self._complete_messages():
                return message
            self._fill(0)

    def available(self) -> list[Any]:
        """Return the messages that have arrived, without blocking.

        Raise ``EOFError`` if the peer has exited and all messages were returned.
        """
        with contextlib.suppress(BlockingIOError):
            self._fill(socket.MSG_DONTWAIT)
        return list(self._complete_messages())

    def close(self) -> None:
        self._socket.close()

    def _fill(self, flags: int) -> None:
        try:
            data = self._socket.recv(1 << 20, flags)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        self._pending += data

    def _complete_messages(self) -> Iterator[Any]:
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            end = _LENGTH.size + length
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_LENGTH.size : end])
            del self._pending[:end]
            yield pickle.loads(body)
