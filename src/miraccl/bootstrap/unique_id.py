"""Unique id of a job: the addresses of its hub and the secret that its ranks prove to each other.

A ``UniqueId`` corresponds to ``ncclUniqueId``: one rank creates it, all ranks receive it by means
of the user's. It admits its holder to the job: treat it like a password.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import ClassVar

from miraccl.errors import InvalidUsage, ProtocolError
from miraccl.wire import framing
from miraccl.wire.auth import SECRET_BYTES, VERSION

PREFIX = "miraccl:"


@dataclass(frozen=True, kw_only=True)
class UniqueId:
    """Addresses and secret of a job.

    Args:
        addresses: (host, port) in the order to try them; loopback addresses are tried only on the
            host
            of the hub.
        secret: 32 bytes.
        host: Network fingerprint of the hub's host.
        version: Version of the encoding.
    """

    addresses: tuple[tuple[str, int], ...]
    secret: bytes = field(repr=False)
    host: str = ""
    version: int = VERSION

    MAX_BYTES: ClassVar[int] = 2048

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise InvalidUsage(
                f"cannot make a unique id: the secret has {SECRET_BYTES} bytes, got "
                f"{len(self.secret)}"
            )
        if not self.addresses or not all(
            host and 0 < port < 65536 for host, port in self.addresses
        ):
            raise InvalidUsage(
                "cannot make a unique id: it has one or more addresses, each a host and a "
                "port 1..65535"
            )

    def to_bytes(self) -> bytes:
        """Encode the id as at most ``MAX_BYTES`` bytes.

        Raises:
            InvalidUsage: Never for an id that exists.
        """
        return framing.encode(
            _Fields(
                version=self.version,
                secret=self.secret,
                host=self.host,
                hosts=tuple(host for host, _ in self.addresses),
                ports=tuple(port for _, port in self.addresses),
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> UniqueId:
        """Decode the result of ``to_bytes``.

        Args:
            data: The encoded id.

        Raises:
            InvalidUsage: The bytes are not an encoded id.
        """
        try:
            if len(data) > cls.MAX_BYTES:
                raise ProtocolError("too long")
            fields = framing.decode(data, {_Fields.KIND: _Fields})
            if len(fields.hosts) != len(fields.ports):
                raise ProtocolError("hosts and ports do not match")
        except ProtocolError as error:
            raise InvalidUsage(f"cannot parse the unique id: {error.message}") from None
        return cls(
            addresses=tuple(zip(fields.hosts, fields.ports)),
            secret=fields.secret,
            host=fields.host,
            version=fields.version,
        )

    def __str__(self) -> str:
        """Return a printable form without spaces, for an environment variable. It contains the
        secret.
        """
        return PREFIX + base64.urlsafe_b64encode(self.to_bytes()).decode("ascii").rstrip("=")

    @classmethod
    def parse(cls, text: str) -> UniqueId:
        """Parse the result of ``str(unique_id)``.

        Args:
            text: The printable form.

        Raises:
            InvalidUsage: The text is not a unique id.
        """
        text = text.strip()
        if not text.startswith(PREFIX):
            raise InvalidUsage(f"cannot parse the unique id: it does not start with {PREFIX!r}")
        body = text[len(PREFIX) :]
        try:
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise InvalidUsage("cannot parse the unique id: it is truncated or altered") from None
        return cls.from_bytes(data)


@dataclass(frozen=True, kw_only=True)
class _Fields:
    version: int
    secret: bytes
    host: str
    hosts: tuple[str, ...]
    ports: tuple[int, ...]

    KIND: ClassVar[int] = 77
    LAYOUT: ClassVar[tuple[tuple[str, str], ...]] = (
        ("version", "u16"),
        ("secret", "b32"),
        ("host", "text"),
        ("hosts", "texts"),
        ("ports", "u32s"),
    )
