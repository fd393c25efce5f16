"""Fault injection in every system call during the rendezvous: the ranks join, or learn why not."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from miraccl.bootstrap import (
    Session,
    UniqueId,
    connect,
    create_hub,
    dial,
    interfaces,
    join,
    runtime_file,
)
from miraccl.bootstrap.dial import ControlPlaneUnreachable, Dialer
from miraccl.bootstrap.launch import FileRendezvous, Launch, join_launch
from miraccl.errors import BootstrapError, InvalidUsage, MiracclError, PeerDied, SystemFailure
from miraccl.wire import framing
from miraccl.wire.auth import NONCE_BYTES, Challenge, Handshake, Hello
from miraccl.wire.framing import MAX_FRAME_BYTES, FrameReader, decode, encode, encode_frame
from tests.bootstrap.kit import PATIENCE, in_threads, job, raises_at_the_deadline, until
from tests.support.fault_injection import PARTIAL, FaultSweep, limit_descriptors, open_files

#: Accidents that pass: the ranks meet all the same.
PASSING = {
    "socket": [errno.EMFILE],
    "eventfd": [errno.EMFILE],
    "epoll": [errno.EMFILE],
    "thread": [errno.EAGAIN],
    "connect": [errno.EADDRNOTAVAIL, errno.ENETUNREACH],
    "accept": [errno.ECONNABORTED, errno.EMFILE],
    "getpeername": [errno.ENOTCONN],
    "send": [errno.ENOBUFS, errno.EAGAIN],
    "recv": [errno.EAGAIN, errno.ENOMEM, PARTIAL],
}
#: Accidents after which a rank counts as dead, unless they come before the hub knows it.
ENDING = {"send": [errno.ECONNRESET], "recv": [errno.ECONNRESET]}
_NOTHING = contextlib.nullcontext()


def _job(unique_id: UniqueId, patience: float = PATIENCE / 2) -> list[object]:
    """Return the results of two ranks of a small job: "done", or an error."""

    def rank(number: int) -> str:
        with connect(unique_id, number, 2, patience, session_timeout=patience) as session:
            assert session.all_gather(bytes([number]), "x") == [b"\0", b"\1"]
            session.barrier("end")
        return "done"

    return in_threads([lambda number=number: rank(number) for number in range(2)])


def _job_with(
    accident: contextlib.AbstractContextManager[object] = _NOTHING, patience: float = PATIENCE / 2
) -> list[object]:
    unique_id, root = create_hub(nranks=2, hosts=["127.0.0.1"])
    with root, accident:
        return _job(unique_id, patience)


@pytest.fixture
def nothing_is_left(caplog):
    """No file, no thread, and no error on one of our threads."""
    files, threads = open_files(), set(threading.enumerate())
    yield
    until(lambda: set(threading.enumerate()) <= threads and open_files() <= files)
    assert not [record for record in caplog.records if record.exc_info]


def test_ranks_join_through_transient_errors(monkeypatch, nothing_is_left):
    for accident in FaultSweep(monkeypatch).faults(PASSING, _job_with):
        assert _job_with(accident) == ["done", "done"], accident


def test_fatal_errors_are_reported_to_all_ranks(monkeypatch, nothing_is_left):
    for accident in FaultSweep(monkeypatch).faults(ENDING, _job_with):
        for result in _job_with(
            accident, 0.5
        ):  # of which a rank that has lost a hub that is gone uses all
            assert result == "done" or isinstance(result, MiracclError), (accident, result)


@pytest.mark.parametrize("error", [errno.ENOBUFS, errno.ENOMEM])
def test_temporary_memory_shortage_delays_no_rank(error, monkeypatch, nothing_is_left):
    """No socket takes anything at first, whatever it is for."""
    short = threading.Event()

    class Short(socket.socket):
        refusals = 3

        def send(self, *args):
            if short.is_set() and self.refusals:
                self.refusals -= 1
                raise OSError(error, os.strerror(error))
            return super().send(*args)

    def rank(session: Session) -> list[bytes]:
        result = session.all_gather(b"x", "short of memory", PATIENCE / 2)
        session.close()
        return result

    monkeypatch.setattr(socket, "socket", Short)
    with job(3) as sessions:
        start = time.monotonic()
        short.set()
        assert (
            in_threads([lambda session=session: rank(session) for session in sessions])
            == [[b"x"] * 3] * 3
        )
        assert time.monotonic() - start < PATIENCE / 4


def test_failed_hub_leaks_nothing(monkeypatch, nothing_is_left):
    def scenario() -> None:
        create_hub(hosts=["127.0.0.1"])[1].close()

    plan = {
        "socket": [errno.EMFILE],
        "eventfd": [errno.EMFILE],
        "epoll": [errno.EMFILE],
        "thread": [errno.EAGAIN],
    }
    for accident in FaultSweep(monkeypatch).faults(plan, scenario):
        with (
            accident,
            pytest.raises(SystemFailure, match=r"Too many open files|can't start new thread"),
        ):
            scenario()


def test_lasting_descriptor_shortage_is_reported(nothing_is_left):
    unique_id, root = create_hub(hosts=["127.0.0.1"])
    told = []
    with root:
        for more in range(8):  # the rank needs 4, and the hub one
            with limit_descriptors(more), pytest.raises(MiracclError) as caught:
                connect(unique_id, 0, 2, 0.1)
            told.append("Too many open files" in str(caught.value))
    assert told[:2] == [True, True]
    assert not told[-1]  # rank 1 is missing, and that is all


# --- the hub ---


@pytest.fixture
def fickle_hub():
    """(id, calls): a hub that proves itself, hears the proof of the rank, and hangs up; it counts
    how often.
    """
    secret, calls = b"s" * 32, []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = server.accept()
                    calls.append(sock.getpeername())
                    with sock, contextlib.suppress(OSError):
                        reader = FrameReader()
                        while (frame := reader.next_frame()) is None:
                            reader.feed(sock.recv(100))
                        nonce = bytes(NONCE_BYTES)
                        handshake = Handshake(secret, decode(frame, {Hello.KIND: Hello}), nonce)
                        sock.sendall(
                            encode_frame(
                                encode(Challenge(nonce=nonce, proof=handshake.hub_proof()))
                            )
                        )
                        sock.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield UniqueId(addresses=(server.getsockname()[:2],), secret=secret), calls
        server.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)


def test_hub_that_always_hangs_up_ends_at_the_deadline(fickle_hub, nothing_is_left):
    unique_id, calls = fickle_hub
    begun = time.monotonic()
    raises_at_the_deadline(
        "the control plane hung up before it had accepted this rank",
        lambda seconds: connect(unique_id, 0, 2, seconds),
        ControlPlaneUnreachable,
    )
    assert (
        len(calls) <= (time.monotonic() - begun) / join.RETRY_PAUSE + 4
    )  # it is not called without pause


@contextlib.contextmanager
def cutting(unique_id: UniqueId, frame: int, only_for_rank: bool = False) -> Iterator[UniqueId]:
    """Proxy in front of the hub that cuts its first connection at a frame of the hub.

    On both sides, or on the rank's side only.
    """
    ends: list[socket.socket] = []

    def pass_on(
        source: socket.socket, target: socket.socket, count: bool, cut: Sequence[socket.socket]
    ) -> None:
        reader, seen = FrameReader(MAX_FRAME_BYTES), 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                reader.feed(data)
                seen += sum(1 for _ in iter(reader.next_frame, None))
                if count and seen >= frame:
                    break
                target.sendall(data)
        for end in cut:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve(server: socket.socket) -> None:
        first = True
        with contextlib.suppress(OSError):
            while True:
                near = server.accept()[0]
                ends.append(near)
                try:
                    far = socket.create_connection(unique_id.addresses[0])
                except ConnectionRefusedError:  # so are those that come this way
                    server.close()
                    near.close()
                    break
                ends.append(far)
                cut = (near,) if only_for_rank and first else (near, far)
                for source, target, count in ((near, far, False), (far, near, first)):
                    threading.Thread(
                        target=pass_on, args=(source, target, count, cut), daemon=True
                    ).start()
                first = False

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        yield replace(unique_id, addresses=(server.getsockname()[:2],))
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)
    for end in ends:
        end.close()


@pytest.mark.parametrize("frame", ["challenge", "accepted", "welcome"])
def test_connection_cut_during_rendezvous(frame, nothing_is_left):
    number = ["challenge", "accepted", "welcome"].index(frame) + 1
    unique_id, root = create_hub(nranks=2, hosts=["127.0.0.1"])

    def rank(number: int, where: UniqueId) -> None:
        with connect(where, number, 2, PATIENCE / 2, session_timeout=PATIENCE / 2) as session:
            session.barrier("end")

    with root, cutting(unique_id, number) as through:
        start = time.monotonic()
        results = in_threads([lambda: rank(0, unique_id), lambda: rank(1, through)])
    if frame == "challenge":  # the hub knows nothing of the rank yet
        assert results == [None, None]
    else:
        assert time.monotonic() - start < PATIENCE / 4
        assert isinstance(results[0], PeerDied), results
        assert results[0].peer == 1
        assert isinstance(results[1], PeerDied | BootstrapError), results
        # The last one where the hub is still there when the rank calls again.
        ends = (
            "the control plane hung up before it had accepted this rank|"
            "control plane at .* died before all ranks had joined|rank 1 of 2 died before"
        )
        assert re.search(ends, str(results[1])), results
        assert "its process ended or closed the connection" in str(results[0])


@pytest.mark.parametrize("met", [False, True])
def test_one_sided_cut_during_rendezvous(met, nothing_is_left):
    """A firewall may forget a connection and reset one side."""
    came: list[int] = []

    class Ranks(dict[int, Any]):
        def __setitem__(self, rank: int, peer: Any) -> None:
            super().__setitem__(rank, peer)
            came.append(rank)

    unique_id, root = create_hub(nranks=2, hosts=["127.0.0.1"])
    root._machine._ranks = Ranks()

    def rank(number: int, where: UniqueId) -> None:
        if met and number == 1:
            until(lambda: 0 in came)
        if not met and number == 0:
            until(lambda: came == [1, 1])
        with connect(where, number, 2, PATIENCE / 2, session_timeout=PATIENCE / 2) as session:
            session.barrier("end")

    with root, cutting(unique_id, 2, only_for_rank=True) as through:
        start = time.monotonic()
        first, second = in_threads([lambda: rank(0, unique_id), lambda: rank(1, through)])
        assert time.monotonic() - start < PATIENCE / 4
    if not met:
        assert (first, second) == (None, None)
    else:
        assert isinstance(first, PeerDied)
        assert isinstance(second, PeerDied)
        assert "its connection was cut before the job formed" in str(first)
        assert "its connection was cut before the job formed" in str(second)


def test_stopped_process_uses_the_pending_answer(monkeypatch, nothing_is_left):
    """SIGSTOP, a debugger, a laptop's lid: the hub's answer is there, and the time to wait for it
    is over.
    """

    class Stopped(Dialer):
        def _advance(self, attempt):
            proved = super()._advance(attempt)
            if proved:
                attempt.give_up = 0.0
            return proved

    monkeypatch.setattr(join, "Dialer", Stopped)
    assert _job_with() == ["done", "done"]


def test_stopped_hub_does_not_answer(nothing_is_left):
    """Its kernel takes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = stopped.getsockname()[:2]
        unique_id = UniqueId(addresses=(address,), secret=b"s" * 32)
        raises_at_the_deadline(
            rf"127\.0\.0\.1:{address[1]}: no answer",
            lambda seconds: connect(unique_id, 1, 2, seconds),
            ControlPlaneUnreachable,
        )


def test_too_long_message_is_rejected_alone(monkeypatch):
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 1 << 16)
    with job(2) as sessions:
        with pytest.raises(InvalidUsage, match="at most 65536"):
            sessions[0].notify({"text": "x" * (1 << 16)})
        assert (
            in_threads([lambda s=s: s.all_gather(b"x", "after it") for s in sessions])
            == [[b"x", b"x"]] * 2
        )


# --- names ---


@pytest.fixture
def silent_names(monkeypatch):
    """A name service that does not answer during the test; yields the queried names."""
    over, asked, numeric = threading.Event(), [], socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        if kwargs["flags"] & socket.AI_NUMERICHOST:
            return numeric(host, *args, **kwargs)
        asked.append(host)
        over.wait(PATIENCE)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield asked
    over.set()


def test_silent_name_server_ends_at_the_deadline(nothing_is_left, silent_names):
    targets = [("hub.example", port) for port in range(29500, 29533)]
    began = time.monotonic()
    with pytest.raises(
        ControlPlaneUnreachable, match=r"hub\.example: name resolution does not answer"
    ):
        join.join_job(targets, secret=b"s" * 32, rank=1, nranks=2, timeout=0.1)
    assert time.monotonic() - began < PATIENCE / 2
    until(lambda: bool(silent_names))
    assert silent_names == ["hub.example"]  # once, and not for every port


def test_silent_name_server_delays_no_other_address(nothing_is_left, silent_names, monkeypatch):
    monkeypatch.setattr(interfaces, "ROUTE_SECONDS", 0.01)
    unique_id, root = create_hub(hosts=["127.0.0.1"])
    with root:
        assert _job(
            UniqueId(addresses=(("hub.example", 1), *unique_id.addresses), secret=unique_id.secret)
        ) == ["done", "done"]


def test_unknown_name_is_resolved_again(monkeypatch):
    monkeypatch.setattr(dial, "RESOLVE_SECONDS", 0.01)
    known, asked = socket.getaddrinfo, []

    def getaddrinfo(host, *args, **kwargs):
        if host != "hub.example" or kwargs["flags"] & socket.AI_NUMERICHOST:
            return known(host, *args, **kwargs)
        asked.append(host)
        if len(asked) <= 3:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return known("127.0.0.1", *args, **kwargs)

    unique_id, root = create_hub(hosts=["127.0.0.1"])
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with root:
        assert _job(
            UniqueId(
                addresses=(("hub.example", unique_id.addresses[0][1]),), secret=unique_id.secret
            )
        ) == ["done", "done"]


def test_invalid_host_name_is_reported():
    unique_id = UniqueId(addresses=(("a..b", 1),), secret=b"s" * 32)
    raises_at_the_deadline(
        r"a\.\.b: not a valid host name",
        lambda seconds: connect(unique_id, 1, 2, seconds),
        ControlPlaneUnreachable,
    )


# --- the meeting file ---


def test_failed_rendezvous_file_leaks_nothing(monkeypatch, tmp_path, nothing_is_left):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(
            SystemFailure, match=r"cannot write the rendezvous file .*: File too large"
        ):
            join_launch(
                Launch(launcher="mpich", rank=0, nranks=2, rendezvous=FileRendezvous(job="j")), 1.0
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(runtime_file.runtime_folder()) == []


def test_no_folder_for_the_rendezvous_file(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "gone too"))
    with pytest.raises(SystemFailure, match=r"cannot make the folder .* No such file or directory"):
        join_launch(
            Launch(launcher="mpich", rank=1, nranks=2, rendezvous=FileRendezvous(job="j")), 0.1
        )
