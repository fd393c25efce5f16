"""The choice of the network interface, on made-up hosts and on this one."""

from __future__ import annotations

import socket

import pytest

from miraccl.bootstrap import interfaces
from miraccl.bootstrap.interfaces import (
    Interface,
    NameFilter,
    choose_addresses,
    is_loopback,
    list_interfaces,
    rail_addresses,
    rank_interfaces,
    source_address,
)
from miraccl.errors import BootstrapError, InvalidUsage

LO = Interface(name="lo", addresses=("127.0.0.1", "::1"), loopback=True)
DOCKER = Interface(name="docker0", addresses=("172.17.0.1",))
VIRBR = Interface(name="virbr0", addresses=("192.168.122.1",))
VETH = Interface(name="veth12ab", addresses=("169.254.1.1",))
ETH0 = Interface(name="eth0", addresses=("10.0.0.5", "fd00::5"))
ETH1 = Interface(name="eth1", addresses=("10.1.0.5",))
ETH10 = Interface(name="eth10", addresses=("10.10.0.5",))
IB0 = Interface(name="ib0", addresses=("192.168.7.5",))
DOWN = Interface(name="eno1", addresses=("10.9.0.5",), up=False)
BARE = Interface(name="eno2", addresses=())
ALL = [LO, DOCKER, VIRBR, VETH, DOWN, BARE, ETH0, ETH1, ETH10, IB0]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["eth0", "eth1", "eth10", "ib0", "docker0", "virbr0", "veth12ab", "lo"]),
        ("eth", ["eth0", "eth1", "eth10"]),
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("ib,eth", ["ib0", "eth0", "eth1", "eth10"]),
        ("=ib0,eth0", ["ib0", "eth0"]),
        ("^eth", ["ib0", "docker0", "virbr0", "veth12ab", "lo"]),
        ("^docker,virbr,veth,lo", ["eth0", "eth1", "eth10", "ib0"]),
        ("^=eth1", ["eth0", "eth10", "ib0", "docker0", "virbr0", "veth12ab", "lo"]),
        ("docker", ["docker0"]),
        ("lo", ["lo"]),
        ("=eth", []),
        (" eth0 , ib0 ", ["eth0", "ib0"]),
        ("eth0:1", ["eth0"]),
    ],
)
def test_syntax_of_socket_ifname(text, names):
    assert [i.name for i in rank_interfaces(ALL, text)] == names


def test_names_outside_ascii(monkeypatch, tmp_path):
    """And lines that no kernel writes."""
    fine = b"fd000000000000000000000000000001 03 40 00 82 "
    odd = (
        b"",
        b"x",
        b"g" * 32 + b" 03 40 00 82 eth0",
        b"f" * 33 + b" 03 40 00 82 eth0",
        b"0" * 32 + b" 03 40 00 -- eth0",
        b"\xff" * 9,
    )
    (tmp_path / "if_inet6").write_bytes(
        b"\n".join((*odd, fine + b"a\xff", fine + "\u00fc\u20030".encode(), fine + b"lo", b""))
    )
    monkeypatch.setattr(interfaces, "_IF_INET6", str(tmp_path / "if_inet6"))
    assert interfaces._ipv6_addresses() == {
        "a\udcff": ["fd00::1"],
        "\u00fc\u20030": ["fd00::1"],
        "lo": ["fd00::1"],
    }
    names = [*enumerate(["a\udcff", "\u00fc\u20030", "lo"], 1)]
    monkeypatch.setattr(socket, "if_nameindex", lambda: names)  # only one of them is there
    assert [(found.name, found.addresses) for found in list_interfaces()] == [
        ("lo", ("127.0.0.1", "fd00::1"))
    ]


def test_an_empty_filter_matches_all():
    assert NameFilter.parse("").match("anything")


@pytest.mark.parametrize(
    ("route", "first"),
    [("10.1.0.5", "eth1"), ("172.17.0.1", "docker0"), ("127.0.0.1", "lo"), ("8.8.8.8", "eth0")],
)
def test_route_to_the_rendezvous_decides(route, first):
    assert rank_interfaces(ALL, "", route)[0].name == first


def test_configured_interface_outweighs_the_route():
    assert rank_interfaces(ALL, "ib0", "10.1.0.5")[0].name == "ib0"
    assert rank_interfaces(ALL, "^ib", "10.1.0.5")[0].name == "eth1"


@pytest.mark.parametrize("variable", ["MIRACCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_the_environment_chooses(monkeypatch, variable):
    monkeypatch.setenv(variable, "=ib0")
    assert choose_addresses(interfaces=ALL) == (("192.168.7.5",), False)
    monkeypatch.setenv(variable, "wlan")
    with pytest.raises(
        InvalidUsage,
        match=rf"cannot use {variable}='wlan': no interface .* available: lo, docker0, virbr0",
    ):
        choose_addresses(interfaces=ALL)


def test_loopback_is_the_default_on_one_host(monkeypatch):
    assert choose_addresses(interfaces=ALL) == (("10.0.0.5", "fd00::5"), True)
    assert choose_addresses(interfaces=[LO]) == (("127.0.0.1", "::1"), True)
    with pytest.raises(BootstrapError, match="not even loopback"):
        choose_addresses(interfaces=[DOWN, BARE])


def test_the_address_family_follows_the_route(monkeypatch):
    monkeypatch.setattr(
        "miraccl.bootstrap.interfaces.source_address",
        lambda host: {"six": "fd00::5", "four": "10.0.0.5"}[host],
    )
    assert choose_addresses("six", ALL)[0] == ("fd00::5", "10.0.0.5")
    assert choose_addresses("four", ALL)[0] == ("10.0.0.5", "fd00::5")


def test_route_to_a_loopback_name_is_ignored(monkeypatch):
    """Debian's /etc/hosts gives a host's own name the address 127.0.1.1."""
    monkeypatch.setattr("miraccl.bootstrap.interfaces.source_address", lambda host: "127.0.0.1")
    assert choose_addresses("myself", ALL)[0] == ("10.0.0.5", "fd00::5")


def test_this_host_has_a_loopback():
    loopbacks = [i for i in list_interfaces() if i.loopback]
    assert any("127.0.0.1" in i.addresses for i in loopbacks)
    assert all(not a.startswith("fe80") for i in list_interfaces() for a in i.addresses)


def test_the_route_to_loopback_is_loopback():
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address("no-such-host.invalid") is None


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("h", False),
    ],
)
def test_loopback_addresses(address, loopback):
    assert is_loopback(address) is loopback


@pytest.mark.parametrize(
    ("names", "rails"),
    [
        ("", ("10.0.1.5", "10.0.2.5")),
        ("eth0,eth2", ("10.0.2.5",)),
        ("eth0,docker0", ("172.17.0.1",)),
    ],
)
def test_further_interfaces_carry_data(
    names: str, rails: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One address per interface, of the first one's family; virtual ones only if they are named."""
    monkeypatch.setenv("MIRACCL_SOCKET_IFNAME", names)
    host = [
        Interface(name="lo", addresses=("127.0.0.1",), loopback=True),
        Interface(name="eth0", addresses=("10.0.0.5", "fd00::5")),
        Interface(name="eth1", addresses=("10.0.1.5", "10.0.1.6")),
        Interface(name="eth2", addresses=("10.0.2.5",)),
        Interface(name="eth3", addresses=("fd00::7",)),
        Interface(name="docker0", addresses=("172.17.0.1",)),
        Interface(name="eth4", addresses=("10.0.4.5",), up=False),
    ]
    assert rail_addresses(("10.0.0.5", "fd00::5"), host) == rails
    assert rail_addresses(("127.0.0.1",), host) == ()
