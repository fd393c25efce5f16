"""File descriptors from rank to rank of a host, over Unix sockets.

Each rank opens an ``FdChannel``: a listening socket with a random name in the abstract namespace,
which leaves nothing behind. Name and a random token are exchanged over the authenticated control
plane. Each rank then connects to its peers and sends its descriptors (SCM_RIGHTS, unix(7)); the
kernel queues them until the peer accepts, so that no rank waits for another's accept and no thread
is needed. A sender must be the process that the control plane named, of the same user
(SO_PEERCRED), and know the token; all others are dropped.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import json
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from miraccl import clock
from miraccl.deadline import Deadline
from miraccl.errors import SystemFailure, as_system_failure

TOKEN_BYTES = 16
TIMEOUT_S = 20.0
#: Interval between calls of ``check``.
CHECK_INTERVAL_S = 0.1
#: Shortest timeout of a connection attempt; 0 would make the socket non-blocking.
MIN_CONNECT_TIMEOUT_S = 0.01
#: Time in which an accepted peer must identify itself.
IDENTIFY_TIMEOUT_S = 1.0
# token of the channel, rank of the sender, number of descriptors
_HEAD = struct.Struct(f"<{TOKEN_BYTES}sII")
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid
MAX_DESCRIPTORS = 8
#: Pause after an accept failed.
ACCEPT_RETRY_S = 0.01


@dataclass(frozen=True, kw_only=True)
class FdChannelAddress:
    """Address of a rank's channel; ``pid`` is compared only within one ``pid_namespace``."""

    name: str
    token: str
    pid: int
    pid_namespace: int

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> FdChannelAddress:
        return cls(**json.loads(text))


class FdChannel:
    """Listening socket of a rank, open until ``close``."""

    def __init__(self, npeers: int, pid_namespace: int) -> None:
        self._token = clock.random_bytes(TOKEN_BYTES)
        self._namespace = pid_namespace
        name = f"miraccl-{os.getpid()}-{clock.random_bytes(8).hex()}"
        with (
            as_system_failure("cannot listen on a Unix socket"),
            contextlib.ExitStack() as unless_it_listens,
        ):
            self._socket = unless_it_listens.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            )
            self._socket.bind("\0" + name)
            self._socket.listen(npeers + 16)
            unless_it_listens.pop_all()
        self.address = FdChannelAddress(
            name=name, token=self._token.hex(), pid=os.getpid(), pid_namespace=pid_namespace
        )

    def close(self) -> None:
        self._socket.close()

    def send(
        self,
        rank: int,
        peer: FdChannelAddress,
        descriptors: Sequence[int],
        timeout: float | Deadline = TIMEOUT_S,
    ) -> None:
        """Send descriptors to the rank behind ``peer``; they stay open here. Raises
        ``SystemFailure``.
        """
        deadline = Deadline.after(timeout)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(max(deadline.left, MIN_CONNECT_TIMEOUT_S))
                sock.connect("\0" + peer.name)
                self._check_credentials(sock, peer)
                head = _HEAD.pack(bytes.fromhex(peer.token), rank, len(descriptors))
                socket.send_fds(sock, [head], list(descriptors))
        except OSError as error:
            if isinstance(error, SystemFailure):
                raise
            text = f"cannot send descriptors to process {peer.pid}: {error.strerror or error}"
            raise SystemFailure(
                text, hint="ranks of a host must share its network namespace"
            ) from error

    def receive(
        self,
        peers: Mapping[int, FdChannelAddress],
        timeout: float | Deadline = TIMEOUT_S,
        check: Callable[[], None] = lambda: None,
    ) -> dict[int, list[int]]:
        """Return the descriptors that these ranks have sent (close-on-exec).

        A rank whose descriptors have not arrived in time is missing from the result. ``check`` is
        called every ``CHECK_INTERVAL_S``; its exceptions end the wait.
        """
        deadline = Deadline.after(timeout)
        got: dict[int, list[int]] = {}
        try:
            self._receive_all(peers, deadline, check, got)
        except BaseException:
            close_all([descriptor for descriptors in got.values() for descriptor in descriptors])
            raise
        return got

    def _receive_all(
        self,
        peers: Mapping[int, FdChannelAddress],
        deadline: Deadline,
        check: Callable[[], None],
        got: dict[int, list[int]],
    ) -> None:
        while len(got) < len(peers) and (left := deadline.left) > 0:
            check()
            self._socket.settimeout(min(left, CHECK_INTERVAL_S))
            try:
                sock, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # the peer closed again, or no descriptor is free yet
                clock.sleep(min(ACCEPT_RETRY_S, left))
                continue
            with sock:
                sock.settimeout(min(left, IDENTIFY_TIMEOUT_S))
                found = self._receive_from(sock, peers)
            if found is not None and found[0] not in got:
                got[found[0]] = found[1]
            elif found is not None:
                close_all(found[1])

    def _receive_from(
        self, sock: socket.socket, peers: Mapping[int, FdChannelAddress]
    ) -> tuple[int, list[int]] | None:
        """Return rank and descriptors of a sender, None if it is not authenticated."""
        received: list[int] = []
        try:
            if _credentials(sock)[1] != os.geteuid():
                # Names in the abstract namespace are public: do not wait for other users.
                return None
            data, received, flags = _receive(sock)
            if len(data) == _HEAD.size and not flags & socket.MSG_CTRUNC:
                token, rank, count = _HEAD.unpack(data)
                if (
                    hmac.compare_digest(token, self._token)
                    and rank in peers
                    and count == len(received)
                ):
                    self._check_credentials(sock, peers[rank])
                    accepted, received = received, []
                    return rank, accepted
        except OSError:  # the peer closed again, or is another process
            pass
        finally:
            close_all(received)
        return None

    def _check_credentials(self, sock: socket.socket, peer: FdChannelAddress) -> None:
        pid, uid = _credentials(sock)
        if uid != os.geteuid() or (peer.pid_namespace == self._namespace and pid != peer.pid):
            raise SystemFailure(
                f"cannot trust process {pid} of user {uid}: expected process {peer.pid} of user "
                f"{os.geteuid()}"
            )


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """Return (process, user) of the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def _receive(sock: socket.socket) -> tuple[bytes, list[int], int]:
    """Receive one message: bytes, descriptors (close-on-exec) and flags."""
    # ``socket.recv_fds`` drops its flags argument in Python 3.11.
    flags = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
    data, extra, got, _ = sock.recvmsg(_HEAD.size, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS), flags)
    descriptors = array.array("i")
    for level, kind, value in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(
                value[: len(value) // descriptors.itemsize * descriptors.itemsize]
            )
    return data, list(descriptors), got


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
