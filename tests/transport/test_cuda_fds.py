"""Descriptors over Unix sockets: who gets what, and who is sent away."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator

import pytest

from miraccl.errors import SystemFailure
from miraccl.transport.cuda_fds import FdChannel, FdChannelAddress, close_all
from miraccl.transport.cuda_pairs import pid_namespace
from tests.support.fault_injection import limit_descriptors
from tests.support.ranks import run_ranks


@pytest.fixture
def channels() -> Iterator[list[FdChannel]]:
    made = [FdChannel(2, pid_namespace()) for _ in range(3)]
    yield made
    for door in made:
        door.close()


def file_with(text: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, text)
    return fd


def text_of(fd: int) -> bytes:
    return os.pread(fd, 100, 0)


def test_everybody_pushes_before_anybody_takes(channels: list[FdChannel]) -> None:
    files = [file_with(f"rank {rank}".encode()) for rank in range(3)]
    for rank, door in enumerate(channels):
        for peer in range(3):
            if peer != rank:
                door.send(rank, channels[peer].address, [files[rank]] * 2)
    for rank, door in enumerate(channels):
        got = door.receive({p: channels[p].address for p in range(3) if p != rank})
        assert {peer: [text_of(fd) for fd in fds] for peer, fds in got.items()} == {
            p: [f"rank {p}".encode()] * 2 for p in range(3) if p != rank
        }
        assert not any(os.get_inheritable(fd) for fds in got.values() for fd in fds)
        for fds in got.values():
            close_all(fds)
    close_all(files)


def test_a_rank_that_does_not_connect_is_missing(channels: list[FdChannel]) -> None:
    channels[1].send(1, channels[0].address, [])
    for _ in range(1000):  # the time may be over before it looks at who has come
        if got := channels[0].receive({1: channels[1].address, 2: channels[2].address}, 0.02):
            break
    assert got == {1: []}


def test_a_peer_is_accepted_once_a_descriptor_is_free(
    channels: list[FdChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    channels[1].send(1, channels[0].address, [])
    with contextlib.ExitStack() as shortage:
        shortage.enter_context(limit_descriptors(0))
        monkeypatch.setattr("miraccl.clock.sleep", lambda seconds: shortage.close())
        assert channels[0].receive({1: channels[1].address}) == {1: []}


def test_a_channel_that_cannot_be_opened_is_a_system_failure() -> None:
    with (
        limit_descriptors(0),
        pytest.raises(SystemFailure, match="cannot listen on a Unix socket: Too many open files"),
    ):
        FdChannel(1, 0)


@pytest.mark.parametrize("how", ["token", "rank", "silent", "junk", "process"])
def test_unauthenticated_peers_are_dropped(channels: list[FdChannel], how: str) -> None:
    here, there = channels[0].address, channels[1].address
    fd = file_with(b"evil")
    if how == "token":
        channels[1].send(1, dataclasses.replace(here, token="00" * 16), [fd])
    elif how == "rank":
        channels[1].send(7, here, [fd])
    # the right token, but the control plane said that rank 1 is another process
    elif how == "process":
        channels[1].send(1, here, [fd])
        there = dataclasses.replace(there, pid=1)
    with socket.socket(socket.AF_UNIX) as sock:
        if how in ("silent", "junk"):
            sock.connect("\0" + here.name)
            sock.sendall(b"" if how == "silent" else b"x" * 200)
            sock.shutdown(socket.SHUT_WR)
        peers = {1: there}
        before = len(os.listdir("/proc/self/fd"))
        assert channels[0].receive(peers, 0.3) == {}
        assert len(os.listdir("/proc/self/fd")) == before, "descriptors of strangers are closed"
    channels[1].send(1, here, [fd])
    got = channels[0].receive({1: channels[1].address})
    assert [text_of(f) for f in got[1]] == [b"evil"]
    close_all([fd, *got[1]])


def test_closed_and_foreign_channels_are_reported(channels: list[FdChannel]) -> None:
    gone = dataclasses.replace(channels[1].address, name="miraccl-nobody")
    with pytest.raises(SystemFailure, match="cannot send descriptors to process"):
        channels[0].send(0, gone, [])
    with pytest.raises(SystemFailure, match="expected process 1 of user"):
        channels[0].send(0, dataclasses.replace(channels[1].address, pid=1), [])
    # numbers of another namespace mean nothing
    channels[0].send(0, dataclasses.replace(channels[1].address, pid=1, pid_namespace=-1), [])


def test_addresses_travel_as_text(channels: list[FdChannel]) -> None:
    assert FdChannelAddress.from_json(channels[0].address.to_json()) == channels[0].address


def pass_around() -> list[str]:
    from miraccl.bootstrap.launch import detect_launch, join_launch

    session = join_launch(detect_launch(os.environ))
    door, mine = (
        FdChannel(session.nranks, pid_namespace()),
        file_with(f"from {session.rank}".encode()),
    )
    addresses = [
        FdChannelAddress.from_json(blob.decode())
        for blob in session.all_gather(door.address.to_json().encode(), "channels")
    ]
    peers = {p: a for p, a in enumerate(addresses) if p != session.rank}
    for address in peers.values():
        door.send(session.rank, address, [mine])
    got = door.receive(peers)
    texts = [text_of(got[p][0]).decode() for p in sorted(got)]
    session.barrier("read")
    if session.rank == 0:
        for fds in got.values():
            os.write(fds[0], b" seen by 0")
    session.barrier("written")
    texts.append(text_of(mine).decode())
    session.close()
    return texts


@pytest.mark.multiprocess
def test_between_processes() -> None:
    assert run_ranks(pass_around, 3) == [
        ["from 1", "from 2", "from 0"],
        ["from 0", "from 2", "from 1 seen by 0"],
        ["from 0", "from 1", "from 2 seen by 0"],
    ]
