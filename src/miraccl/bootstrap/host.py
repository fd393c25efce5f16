"""Fingerprints of this host and this process: who may meet over loopback, and whose process holds the hub."""

from __future__ import annotations

import functools
import hashlib
import os
import socket

from miraccl import params


@functools.cache
def _fingerprint(hostid: str) -> str:
    words = [hostid or socket.gethostname()]
    if not hostid:
        for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
            try:
                with open(path, encoding="ascii", errors="replace") as file:
                    words.append(file.read().strip())
            except OSError:
                continue
    # Two network namespaces of one machine do not share their loopback.
    try:
        words.append(str(os.stat("/proc/self/ns/net").st_ino))
    except OSError:
        words.append("-")
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def host_fingerprint() -> str:
    """16 hex digits, equal exactly for processes that share a loopback interface (and MIRACCL_HOSTID, when it is set)."""
    return _fingerprint(params.HOSTID.read())


_tokens: dict[int, bytes] = {}


def process_token() -> bytes:
    """8 random bytes of this process; a forked child has its own."""
    pid = os.getpid()
    token = _tokens.get(pid)
    if token is None:
        token = _tokens.setdefault(pid, os.urandom(8))
    return token
