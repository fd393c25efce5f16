"""Rank functions of ``test_connections``: a TCP connection between two live ranks breaks."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np

import miraccl
from miraccl.deadline import Deadline
from miraccl.errors import MiracclError
from miraccl.proxy import Proxy, stream_engine
from miraccl.transport.connect_round import ConnectRound
from miraccl.transport.socket import SocketTransport
from miraccl.wire.stream import HandshakeState
from tests.diagnosis.fault_ranks import nobody_left, seen, together, wait_until
from tests.runtime.sweep_ranks import act_as_hosts


def _reported_error(comm: miraccl.Communicator) -> dict[str, Any]:
    """Run an operation that never completes and return its error and duration."""
    start = time.monotonic()
    try:
        while True:
            comm.all_reduce(np.ones(30_000))
    except MiracclError as error:
        return {**seen(error), "seconds": time.monotonic() - start}


def broken(how: str) -> Any:
    """Break the connection between ranks 0 and 1 of three; then let them continue together."""
    act_as_hosts(1)
    comm = miraccl.init(timeout=30)
    comm.barrier()
    together(comm)
    if comm.rank == 0:
        fabric: Any = comm._core.fabric
        sock = next(iter(fabric._proxies.values()))._peers[1].connection.streams[0]
        if how == "closed":
            sock.shutdown(socket.SHUT_RDWR)
        else:  # between two messages: the proxy is asleep
            sock.send(b"garbage." * 6)
    told = _reported_error(comm)
    nobody_left(comm)
    smaller = comm.shrink()
    total = smaller.all_reduce(np.full(70_000, comm.rank + 1.0))
    result = {**told, "shrunk": [smaller.rank, smaller.nranks, float(total[-1])]}
    smaller.finalize()
    comm.finalize()
    return result


def broken_early() -> Any:
    """Break the connection after its streams exist and before the communicator does."""
    act_as_hosts(1)
    connect = SocketTransport.connect

    def connect_and_break(transport: SocketTransport, infos: Any) -> Any:
        pairs = connect(transport, infos)
        for peer in pairs:
            link = transport._proxy._peers[peer]  # type: ignore[attr-defined]
            with contextlib.suppress(OSError):  # the peer was faster
                link.connection.streams[0].shutdown(socket.SHUT_RDWR)
            wait_until(lambda link=link: not link.alive)
        return pairs

    SocketTransport.connect = connect_and_break  # type: ignore[method-assign, assignment]
    start = time.monotonic()
    try:
        with miraccl.init(timeout=30) as comm:
            return _reported_error(comm)
    except MiracclError as error:  # the other one was late, and the communicator could not be made
        return {**seen(error), "seconds": time.monotonic() - start}


def cut_before_welcome() -> Any:
    """Cut the connection after mutual authentication, before rank 0's welcome reaches rank 1."""
    act_as_hosts(1)
    os.environ["MIRACCL_NSOCKS_PERTHREAD"] = "1"
    read = ConnectRound._read

    def cut(meeting: ConnectRound, approach: Any) -> None:
        if approach.machine.state is HandshakeState.WAIT_WELCOME:
            approach.sock.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError(errno.ECONNRESET, "for a test")
        read(meeting, approach)

    ConnectRound._read = cut  # type: ignore[method-assign, assignment]
    start = time.monotonic()
    try:
        miraccl.init(timeout=30)
    except MiracclError as error:
        return {**seen(error), "op": error.op, "seconds": time.monotonic() - start}
    return {"type": "none"}


def absent_while_connecting() -> Any:
    """Stop rank 1 while the others connect to it, until they have given up at the deadline."""
    act_as_hosts(1)
    connect = SocketTransport.connect

    def at_last(transport: SocketTransport, infos: Any) -> Any:
        assert isinstance(transport._timeout, Deadline)
        transport._timeout = replace(transport._timeout, at=time.monotonic() + 0.1)
        return connect(transport, infos)

    def stand_still(transport: SocketTransport, infos: Any) -> Any:
        while True:
            transport._check()
            time.sleep(0.01)

    SocketTransport.connect = stand_still if os.environ["MIRACCL_RANK"] == "1" else at_last  # type: ignore[method-assign, assignment]
    start = time.monotonic()
    try:
        miraccl.init(timeout=30)
    except MiracclError as error:
        return {**seen(error), "seconds": time.monotonic() - start}
    return {"type": "none"}


def slow() -> float:
    """Exchange messages over a network that stalls for a second."""
    act_as_hosts(1)
    # The proxy in Python, whose streams can be stalled.
    vars_of: Any = stream_engine
    vars_of.ProgressEngine = lambda control, **arguments: Proxy(**arguments)
    with miraccl.init(timeout=30) as comm:
        x, out, other = np.full(350_000, comm.rank + 1.0), np.zeros(350_000), 1 - comm.rank
        comm.sendrecv(x[:9], other, out[:9], other)
        together(comm)
        fabric: Any = comm._core.fabric
        streams = next(iter(fabric._proxies.values()))._peers[other].streams
        for stream in streams:
            stream.send = (
                itertools.repeat(0).__next__
            )  # no line of this file on the proxy's thread, where it would count as the program's

        def go_on() -> None:
            for stream in streams:
                del stream.send

        timer = threading.Timer(1.0, go_on)
        timer.name = "miraccl test"  # nor as a timer of the program's
        timer.start()
        comm.sendrecv(x, other, out, other)
        return float(out.min())
