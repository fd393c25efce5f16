"""One MPTCP connection between two hosts of a lab with a subflow on each path: a peer of UDP.

The kernel's path manager opens the subflows: the receiver signals its other addresses, and the
sender connects to each one. A run fails unless every path has carried data. Needs a kernel with
MPTCP and iproute2's ``ip mptcp``.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support import netlab

IPPROTO_MPTCP = 262
PORT = 5301
BLOCK_BYTES, FIRST = 1 << 18, b"first"
#: Time within which all subflows open (a lost ARP request is repeated after a second), and time of
#: sending that does not count.
JOIN_S, WARM_UP_S = 5.0, 0.5
TIMEOUT_S = 30.0


def missing() -> str:
    """Return why this host has no MPTCP, "" if it has."""
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP).close()
        enabled = Path("/proc/sys/net/mptcp/enabled").read_text().strip() == "1"
    except OSError as error:
        return f"needs a kernel with MPTCP: {error.strerror}"
    return "" if enabled else "needs sysctl net.mptcp.enabled=1"


def prepare(lab: netlab.Lab) -> None:
    """Let the two hosts use all paths for one connection."""
    for host in range(2):
        words = ["ip", "-n", lab.host(host), "mptcp"]
        limits = ["subflows", str(lab.npaths), "add_addr_accepted", str(lab.npaths)]
        subprocess.run([*words, "endpoint", "flush"], check=True)
        subprocess.run([*words, "limits", "set", *limits], check=True)
    for path, address in enumerate(lab.addresses(0)[1:], 1):
        endpoint = ["mptcp", "endpoint", "add", address, "dev", f"p{path}", "signal"]
        subprocess.run(["ip", "-n", lab.host(0), *endpoint], check=True)


def _receive(lab: netlab.Lab, pipe: Connection) -> None:
    """Accept one connection and return Mbit/s after the warm-up."""
    netlab.enter(lab.host(0))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", PORT))  # a subflow to another address needs a listener there
    listener.listen(16)  # subflows count against the backlog
    pipe.send("listening")
    sock, _ = listener.accept()
    buffer, total, first = bytearray(BLOCK_BYTES), len(sock.recv(len(FIRST))), 0
    sock.recv_into(buffer, 1, socket.MSG_PEEK)
    last = time.monotonic()
    started = last + WARM_UP_S
    while got := sock.recv_into(buffer):
        last = time.monotonic()
        total += got
        if last <= started:
            first = total
    pipe.send((total - first) * 8 / (last - started) / 1e6)


def _send(lab: netlab.Lab, seconds: float, congestion: str, pipe: Connection) -> None:
    """Open a connection, wait for its subflows, and send for a time."""
    netlab.enter(lab.host(1))
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    sock.connect((lab.addresses(0)[0], PORT))
    sock.sendall(FIRST)  # subflows join once the connection is established
    pipe.send("connected")
    pipe.recv()
    block, end = bytes(BLOCK_BYTES), time.monotonic() + WARM_UP_S + seconds
    while time.monotonic() < end:
        sock.sendall(block)
    sock.close()


def subflows(lab: netlab.Lab) -> list[str]:
    """Return the congestion control of each subflow of the sender."""
    command = ["ip", "netns", "exec", lab.host(1), "ss", "-tinHO"]
    found = subprocess.run(
        [*command, "state", "established", "dport", f"= :{PORT}"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [line.partition(f":{PORT} ")[2] for line in found.splitlines()]
    return [line.split()[0] for line in lines if "tcp-ulp-mptcp" in line]


def sent_bytes(lab: netlab.Lab) -> list[int]:
    """Return the bytes that the sender's interfaces have sent, path by path."""
    command = ["ip", "-j", "-s", "-n", lab.host(1), "link", "show", "type", "veth"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [device["stats64"]["tx"]["bytes"] for device in json.loads(text)]


def mptcp_rate(lab: netlab.Lab, seconds: float, congestion: str) -> dict[str, Any]:
    """Stream over one connection; return Mbit/s received and the share of each path.

    Raises:
        RuntimeError: A path has no subflow with this congestion control, or has carried less than
            a tenth of its share.
    """
    prepare(lab)
    context = multiprocessing.get_context("fork")
    before = sent_bytes(lab)
    pipes, processes = [], []
    for target, arguments in ((_receive, ()), (_send, (seconds, congestion))):
        here, there = context.Pipe()
        process = context.Process(target=target, args=(lab, *arguments, there), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
        if not here.poll(TIMEOUT_S):
            raise TimeoutError("MPTCP does not start")
        here.recv()
    deadline = time.monotonic() + JOIN_S
    while len(flows := subflows(lab)) < lab.npaths and time.monotonic() < deadline:
        time.sleep(0.05)
    pipes[1].send("go")
    if not pipes[0].poll(seconds + TIMEOUT_S):
        raise TimeoutError("MPTCP does not end")
    mbps = pipes[0].recv()
    for process in processes:
        process.join(TIMEOUT_S)
    sent = [b - a for a, b in zip(before, sent_bytes(lab), strict=True)]
    shares = [count / sum(sent) for count in sent]
    if flows != [congestion] * lab.npaths or min(shares) < 0.1 / lab.npaths:
        raise RuntimeError(f"MPTCP does not use all paths: subflows {flows}, shares {shares}")
    return {"mbps": mbps, "share_by_path": shares}
