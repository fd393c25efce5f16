"""Unauthenticated connections at the hub: floods, garbage, other services."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from miraccl.bootstrap import Session, UniqueId, connect, create_hub
from miraccl.bootstrap.dial import Dialer
from miraccl.errors import BootstrapError
from miraccl.wire.auth import Hello
from miraccl.wire.framing import encode, encode_frame
from tests.bootstrap.kit import PATIENCE, free_port, in_threads


@contextlib.contextmanager
def strangers(
    address: tuple[str, int], count: int, says: bytes = b""
) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        socks: list[socket.socket] = []
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
            socks.append(sock)
            with contextlib.suppress(OSError):
                sock.sendall(says)
        yield socks


def _meets(unique_id: UniqueId, nranks: int) -> None:
    sessions = in_threads(
        [lambda r=r: connect(unique_id, r, nranks, PATIENCE) for r in range(nranks)]
    )
    for session in sessions:
        assert isinstance(session, Session), session
    assert (
        in_threads([lambda s=s: s.all_gather(b"x", "t") for s in sessions])
        == [[b"x"] * nranks] * nranks
    )
    for session in sessions:
        session.close()


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 4096,
        b"\xff" * 100_000,
        encode_frame(b""),
        encode_frame(encode(Hello(rank=0, nranks=2, nonce=bytes(32)))),
        encode_frame(encode(Hello(rank=0, nranks=2, nonce=bytes(32))))
        + encode_frame(bytes([3]) + bytes(32)),
    ],
    ids=["silent", "http", "zeros", "ones", "empty", "hello", "wrong proof"],
)
def test_ranks_join_among_unauthenticated_connections(says):
    unique_id, root = create_hub(hosts=["127.0.0.1"])
    with strangers(unique_id.addresses[0], 5, says):
        _meets(unique_id, 3)
    assert root.join(PATIENCE)


@pytest.mark.parametrize("says", [b"", b"garbage" * 100], ids=["silent", "garbage"])
def test_ranks_meet_in_a_flood(says):
    """200 connections before the ranks come and 200 more while they meet; the hub holds at most 128
    of them.
    """
    unique_id, root = create_hub(hosts=["127.0.0.1"])
    stop = threading.Event()

    def flood():
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(strangers(unique_id.addresses[0], 1, says))
            stop.wait(PATIENCE)

    with strangers(unique_id.addresses[0], 200, says):
        flooder = threading.Thread(target=flood, daemon=True)
        flooder.start()
        _meets(unique_id, 4)
        assert root.join(PATIENCE)
        stop.set()
        flooder.join(PATIENCE)
        assert not flooder.is_alive()


def test_pending_connections_are_bounded():
    unique_id, root = create_hub(hosts=["127.0.0.1"])
    with root, strangers(unique_id.addresses[0], 250) as socks:
        # the first 122 are hung up on by the time the last has been taken in
        for sock in socks[: 250 - 128]:
            assert sock.recv(1) == b""
        assert len(root._connections) <= 128


def test_garbage_gets_no_answer():
    unique_id, root = create_hub(hosts=["127.0.0.1"])
    with root, strangers(unique_id.addresses[0], 3, b"SSH-2.0-scanner\r\n") as socks:
        for sock in socks:
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(100) == b""


@contextlib.contextmanager
def odd_service(answer: bytes | None) -> Iterator[int]:
    """Something else that listens: it answers each connection with some bytes and hangs up, or
    (``None``) never says a word.
    """
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = server.accept()
                    if answer is None:
                        held.append(sock)
                        continue
                    with sock, contextlib.suppress(OSError):
                        sock.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE)
            for sock in held:
                sock.close()


ANSWERS = [
    None,
    b"",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\0" * 1000,
    encode_frame(bytes([2]) + bytes(64)),
    encode_frame(b"\x04\0\x07"),
]
ANSWER_IDS = ["silent", "hangs up", "http", "zeros", "a hub with another secret", "another version"]


@pytest.mark.parametrize("answer", ANSWERS, ids=ANSWER_IDS)
def test_probing_member_ignores_other_services(answer):
    with odd_service(answer) as odd:
        unique_id, root = create_hub(hosts=["127.0.0.1"])
        targets = [("127.0.0.1", odd), ("127.0.0.1", free_port()), *unique_id.addresses]
        with root:
            dialer = Dialer(
                targets,
                secret=unique_id.secret,
                rank=0,
                nranks=2,
                deadline=float("inf"),
                probing=True,
            )
            sock, _ = dialer.dial()
            assert sock.getpeername() == unique_id.addresses[0]
            sock.close()


@pytest.mark.parametrize("answer", ANSWERS[:4], ids=ANSWER_IDS[:4])
def test_other_service_is_named_at_the_deadline(answer):
    with odd_service(answer) as odd:
        unique_id = UniqueId(addresses=(("127.0.0.1", odd),), secret=b"s" * 32)
        with pytest.raises(
            BootstrapError, match=f"cannot reach the control plane.*127.0.0.1:{odd}"
        ):
            connect(unique_id, 1, 2, 0.15)


def test_member_proves_itself_at_one_address_only():
    unique_id, root = create_hub(hosts=["127.0.0.1", "::1"])
    _meets(unique_id, 3)  # two proofs of one rank would be a duplicate
    assert root.join(PATIENCE)
