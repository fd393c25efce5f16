"""Fingerprints of the host, its network and the process, by which ranks recognise shared ones."""

from __future__ import annotations

import functools
import hashlib
import os
import socket

from miraccl import clock, params


@functools.cache
def network_fingerprint() -> str:
    """Return 16 hex digits that are equal exactly for processes that share a loopback interface.

    The kernel's boot id names the machine, the inode of the namespace the network on it. Where
    there is no boot id (some sandboxes) the host name and machine id stand in.
    """
    parts = [
        _read("/proc/sys/kernel/random/boot_id")
        or f"{socket.gethostname()} {_read('/etc/machine-id')}"
    ]
    try:
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    except OSError:
        parts.append("-")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def host_fingerprint() -> str:
    """Return 16 hex digits that name this host to the topology.

    As ``network_fingerprint``, or made from MIRACCL_HOSTID if that is set: ranks with different
    names count as ranks of different hosts.
    """
    name = params.HOSTID.read()
    return hashlib.sha256(name.encode()).hexdigest()[:16] if name else network_fingerprint()


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


_tokens: dict[int, bytes] = {}


def process_token() -> bytes:
    """Return 8 random bytes that name this process; a forked child has its own."""
    pid = os.getpid()
    token = _tokens.get(pid)
    if token is None:
        token = _tokens.setdefault(pid, clock.random_bytes(8))
    return token
