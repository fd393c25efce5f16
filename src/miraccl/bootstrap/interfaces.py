"""Network interfaces of this host, and the choice of the addresses that a rank announces.

The rules are NCCL's (``src/misc/socket.cc``, ``ncclFindInterfaces``): a list in SOCKET_IFNAME wins;
then interfaces that route to the rendezvous; then ordinary ones; then those of containers and
virtual machines; loopback last. Linux only, without further dependencies: names from
``if_nameindex``, IPv4 from SIOCGIFADDR, IPv6 from /proc/net/if_inet6.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from miraccl import params
from miraccl.bootstrap.names import Lookup
from miraccl.errors import BootstrapError, InvalidUsage, as_system_failure

SIOCGIFADDR, SIOCGIFFLAGS = 0x8915, 0x8913  # linux/sockios.h
IFF_UP, IFF_LOOPBACK = 0x1, 0x8  # linux/if.h
DISCARD_PORT = 9
#: Time limit (seconds) of a name resolution that only orders the addresses of this host.
ROUTE_SECONDS = 2.0
_IF_INET6 = "/proc/net/if_inet6"
#: Interfaces that usually lead to containers and virtual machines of this host only.
VIRTUAL_PREFIXES = (
    "docker",
    "virbr",
    "veth",
    "br-",
    "cni",
    "flannel",
    "cali",
    "podman",
    "lxc",
    "lxdbr",
    "vnet",
    "vmnet",
    "tun",
    "tap",
    "dummy",
)


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One interface with its addresses as text, IPv4 first.

    Link-local IPv6 addresses are left out: they need a scope.
    """

    name: str
    addresses: tuple[str, ...]
    up: bool = True
    loopback: bool = False

    @property
    def virtual(self) -> bool:
        return self.name.startswith(VIRTUAL_PREFIXES)


@dataclass(frozen=True, kw_only=True)
class NameFilter:
    """NCCL's syntax of SOCKET_IFNAME.

    ``eth,ib``: prefixes; ``^docker``: all but these; ``=eth0``: exact names; ``^=eth0``: both. A
    port after a colon (``=mlx5_0:1``, the form of IB_HCA) is ignored.
    """

    names: tuple[str, ...]
    exclude: bool = False
    exact: bool = False

    @classmethod
    def parse(cls, text: str) -> NameFilter:
        rest = text.strip()
        exclude = rest.startswith("^")
        rest = rest.removeprefix("^")
        exact = rest.startswith("=")
        rest = rest.removeprefix("=")
        return cls(
            names=tuple(word.partition(":")[0].strip() for word in rest.split(",") if word.strip()),
            exclude=exclude,
            exact=exact,
        )

    def match(self, name: str) -> bool:
        if not self.names:
            return True
        hit = name in self.names if self.exact else name.startswith(self.names)
        return hit != self.exclude

    def order(self, name: str) -> int:
        """Return the position of the first name that matches: the user's order of preference."""
        for position, word in enumerate(self.names):
            if not self.exclude and (name == word if self.exact else name.startswith(word)):
                return position
        return len(self.names)


def list_interfaces() -> list[Interface]:
    """Return all interfaces that are up, in kernel order. Raises ``SystemFailure``."""
    ipv6 = _ipv6_addresses()
    found: list[Interface] = []
    with (
        as_system_failure("cannot list the network interfaces"),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", os.fsencode(name)[:15])
            try:
                (flags,) = struct.unpack_from("<H", fcntl.ioctl(probe, SIOCGIFFLAGS, request), 16)
            except OSError:
                continue
            ipv4: list[str] = []
            with contextlib.suppress(OSError):  # it has none
                ipv4.append(socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24]))
            if flags & IFF_UP:
                addresses = (*ipv4, *ipv6.get(name, ()))
                found.append(
                    Interface(
                        name=name, addresses=addresses, up=True, loopback=bool(flags & IFF_LOOPBACK)
                    )
                )
    return found


def _ipv6_addresses() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    try:
        with open(_IF_INET6, "rb") as file:
            lines = file.read().split(b"\n")  # names are any bytes but spaces, slashes and colons
    except OSError:
        return found
    for line in lines:
        fields = line.split()
        if len(fields) != 6:
            continue
        try:
            address, flags = ipaddress.IPv6Address(int(fields[0], 16)), int(fields[4], 16)
        except ValueError:  # a kernel writes no such line
            continue
        tentative = flags & 0x40 and not flags & 0x80  # IFA_F_TENTATIVE without IFA_F_PERMANENT
        if not address.is_link_local and not tentative:
            found.setdefault(os.fsdecode(fields[5]), []).append(str(address))
    return found


def source_address(host: str) -> str | None:
    """Return the local address from which packets to ``host`` leave, None if it is unknown.

    Name resolution is given ``ROUTE_SECONDS``.
    """
    lookup = Lookup(host)
    if not lookup.wait(ROUTE_SECONDS):
        return None
    for family, _, _, _, address in lookup.infos:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address[0], DISCARD_PORT, *address[2:]))
            return str(probe.getsockname()[0]).partition("%")[0]
    return None


def is_local_host(host: str) -> bool | None:
    """Return True if an address of this name belongs to this host.

    None if name resolution takes longer than ``ROUTE_SECONDS``.
    """
    lookup = Lookup(host)
    if not lookup.wait(ROUTE_SECONDS) or not lookup.infos:
        return None
    for family, _, _, _, address in lookup.infos:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
            return True
    return False


def is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def rank_interfaces(
    interfaces: Iterable[Interface], names: str = "", route: str | None = None
) -> list[Interface]:
    """Return the usable interfaces, best first.

    ``names``: the value of SOCKET_IFNAME. ``route``: local address that leads to the rendezvous.
    """
    usable = [interface for interface in interfaces if interface.up and interface.addresses]
    if names:
        chosen = NameFilter.parse(names)
        usable = [interface for interface in usable if chosen.match(interface.name)]
        if not chosen.exclude:
            return sorted(usable, key=lambda interface: chosen.order(interface.name))
    return sorted(
        usable, key=lambda i: (not (route and route in i.addresses), i.loopback, i.virtual)
    )


def choose_addresses(
    peer: str | None = None, interfaces: Sequence[Interface] | None = None
) -> tuple[tuple[str, ...], bool]:
    """Choose the addresses that this process announces.

    Returns the addresses of one interface, and whether loopback may replace them between ranks of
    one host. ``peer``: host of the rendezvous, if it is known; the address that routes to it comes
    first, if its name resolves within ``ROUTE_SECONDS``. With SOCKET_IFNAME set only those
    interfaces count, and loopback replaces nothing. Raises ``InvalidUsage``, ``SystemFailure`` or
    ``BootstrapError``.
    """
    names, variable = params.SOCKET_IFNAME.resolve()
    interfaces = list_interfaces() if interfaces is None else interfaces
    route = source_address(peer) if peer else None
    if route is not None and is_loopback(route):
        # A host's own name often resolves to 127.0.1.1 there, which no other host can reach.
        route = None
    ranked = rank_interfaces(interfaces, names, route)
    if not ranked:
        if names:
            have = ", ".join(i.name for i in interfaces if i.addresses) or "none"
            raise InvalidUsage(
                f"cannot use {variable}={names!r}: no interface that is up and has an "
                f"address matches; "
                f"available: {have}"
            )
        raise BootstrapError(
            "cannot choose an address: no network interface is up and has one, not even loopback"
        )
    best = ranked[0]
    family = 6 if route and ":" in route else 4
    addresses = sorted(best.addresses, key=lambda a: (a != route, (":" in a) != (family == 6)))
    return tuple(addresses), not names


def rail_addresses(
    chosen: Sequence[str], interfaces: Sequence[Interface] | None = None
) -> tuple[str, ...]:
    """Return one address of every further interface that may carry data, of the family of the
    first.

    With SOCKET_IFNAME set these are the other interfaces that it names; without, all that are
    neither loopback nor virtual. Peers use an address of these only where they share its network
    (``transport.connect_round``).

    Args:
        chosen: The addresses of ``choose_addresses``, best first.
    """
    if not chosen or is_loopback(chosen[0]):
        return ()
    names, _ = params.SOCKET_IFNAME.resolve()
    interfaces = list_interfaces() if interfaces is None else interfaces
    rails = []
    for interface in rank_interfaces(interfaces, names):
        if interface.loopback or (interface.virtual and not names):
            continue
        if set(interface.addresses) & set(chosen):
            continue
        rails += [a for a in interface.addresses if (":" in a) == (":" in chosen[0])][:1]
    return tuple(rails)
