"""State of TCP streams as the kernel reports it: ``struct tcp_info`` (linux/tcp.h)."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence

from miraccl.transport.base import PathStatus

TCP_ESTABLISHED = 1
#: Fields of ``struct tcp_info`` by byte offset; a kernel that knows fewer returns a shorter record.
_FIELDS = {
    "retransmits": (2, "B"),
    "backoff": (4, "B"),
    "lost": (32, "I"),
    "pmtu": (60, "I"),
    "rtt": (68, "I"),
    "snd_cwnd": (80, "I"),
    "snd_mss": (16, "I"),
    "total_retrans": (100, "I"),
    "bytes_acked": (120, "Q"),
    "bytes_received": (128, "Q"),
    "min_rtt": (148, "I"),
    "delivery_rate": (160, "Q"),
    "bytes_retrans": (208, "Q"),
}
_BYTES = 256


def parse_tcp_info(data: bytes) -> dict[str, int]:
    """Return the fields of a ``struct tcp_info``; 0 for those that the kernel does not know."""
    fields = {"state": data[0] if data else 0}
    for name, (offset, form) in _FIELDS.items():
        known = len(data) >= offset + struct.calcsize(form)
        fields[name] = struct.unpack_from("=" + form, data, offset)[0] if known else 0
    return fields


def path_status(sock: socket.socket, peer: int, path: int) -> PathStatus:
    """Return the state of a TCP stream; DEAD for one that is closed. Callable from any thread.

    Lost packets are the retransmissions of the kernel, which counts no losses of its own.
    """
    try:
        info = parse_tcp_info(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES))
        local, remote = address_text(sock.getsockname()), address_text(sock.getpeername())
    except OSError:
        return PathStatus(peer=peer, transport="tcp", path=path, state="DEAD")
    controller = ""
    with contextlib.suppress(OSError):
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        controller = name.rstrip(b"\0").decode("ascii", "replace")
    state = "OPEN" if info["state"] == TCP_ESTABLISHED else "DEAD"
    if state == "OPEN" and info["backoff"] > 0:  # the retransmission timer expired twice
        state = "SUSPECT"
    return PathStatus(
        peer=peer,
        transport="tcp",
        path=path,
        local=local,
        remote=remote,
        state=state,
        sent_bytes=info["bytes_acked"],
        received_bytes=info["bytes_received"],
        resent_bytes=info["bytes_retrans"],
        lost=info["total_retrans"],
        rtt_us=float(info["rtt"]),
        min_rtt_us=float(info["min_rtt"]) if info["min_rtt"] != 0xFFFFFFFF else 0.0,
        rate=float(info["delivery_rate"]),
        window_bytes=info["snd_cwnd"] * info["snd_mss"],
        controller=controller,
        mtu=info["pmtu"],
    )


def address_text(name: Sequence[object]) -> str:
    """Return ``host:port`` of a socket's name, an IPv6 address in brackets."""
    host, port = str(name[0]), name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
