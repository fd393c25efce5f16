"""Handles of CollNet: the rendezvous of rank 0 in the 128 bytes that NCCL carries."""

from __future__ import annotations

import ipaddress
import struct

from miraccl.bootstrap.interfaces import is_loopback
from miraccl.bootstrap.unique_id import UniqueId
from miraccl.errors import InvalidUsage
from miraccl.native.nccl_net_abi import HANDLE_BYTES
from miraccl.wire.auth import SECRET_BYTES

_MAGIC = b"MIRASW01"
_HEAD = struct.Struct(f"<8s{SECRET_BYTES}sHB")
_ADDRESS_BYTES = 16
_MOST_ADDRESSES = (HANDLE_BYTES - _HEAD.size) // _ADDRESS_BYTES


def encode_handle(ident: UniqueId) -> bytes:
    """Return 128 bytes from which the other ranks find a rendezvous."""
    hosts = [host for host, _ in ident.addresses]
    remote = [host for host in hosts if not is_loopback(host)] or hosts
    numeric = [ipaddress.ip_address(host) for host in remote[:_MOST_ADDRESSES]]
    head = _HEAD.pack(_MAGIC, ident.secret, ident.addresses[0][1], len(numeric))
    packed = b"".join(
        (ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + a.packed) if a.version == 4 else a).packed
        for a in numeric
    )
    return (head + packed).ljust(HANDLE_BYTES, b"\0")


def decode_handle(data: bytes) -> UniqueId:
    """Return the unique id of a handle. Raises ``InvalidUsage`` for other bytes."""
    magic, secret, port, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or not 0 < count <= _MOST_ADDRESSES or not port:
        raise InvalidUsage("cannot connect: the handle of rank 0 is not one of this plugin")
    hosts = []
    for number in range(count):
        start = _HEAD.size + number * _ADDRESS_BYTES
        address = ipaddress.IPv6Address(data[start : start + _ADDRESS_BYTES])
        hosts.append(str(address.ipv4_mapped or address))
    return UniqueId(addresses=tuple((host, port) for host in hosts), secret=secret)
