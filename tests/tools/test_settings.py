"""Settings: written defaults, values beyond limits, NCCL's forms; logging levels."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import miraccl
from miraccl import params, trace
from miraccl.errors import InvalidUsage
from miraccl.params import FOREVER, PARAMS, Param
from miraccl.transport.connect_round import set_tcp_options

SOURCE = Path(miraccl.__file__).parent


@pytest.mark.parametrize("param", PARAMS.values(), ids=lambda param: param.name)
def test_defaults_round_trip(param: Param[object]) -> None:
    text = str(int(param.default) if isinstance(param.default, bool) else param.default)
    assert param.read({f"MIRACCL_{param.name}": text}) == param.default


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("BUFFSIZE", "9" * 400),
        ("BUFFSIZE", "9" * 19 + "G"),
        ("BUFFSIZE", "-1"),
        ("TIMEOUT", "nan"),
        ("TIMEOUT", "inf"),
        ("NSOCKS_PERTHREAD", "9" * 5000),
        ("MIN_NCHANNELS", "9" * 5000),
        ("NSOCKS_PERTHREAD", "\N{SUPERSCRIPT TWO}"),
        ("P2P_LEVEL", "-2"),
        ("SMS", "-2"),
        ("P2P_DISABLE", "perhaps"),
        ("DEBUG", "loud"),
        ("NET_PORT_RANGE", "20100-20000"),
        ("NET_PORT_RANGE", "0"),
    ],
)
def test_invalid_values_name_the_variable(name: str, text: str) -> None:
    with pytest.raises(InvalidUsage, match=re.escape(f"MIRACCL_{name}={text!r}: ")):
        PARAMS[name].read({f"MIRACCL_{name}": text})


def test_nccl_flags_are_numbers_or_words() -> None:
    values = {
        text: params.P2P_DISABLE.read({"NCCL_P2P_DISABLE": text})
        for text in ("1", "0x2", "yes", "off")
    }
    assert values == {"1": 1, "0x2": 2, "yes": 1, "off": 0}


def test_names_of_networks_in_any_case() -> None:
    for text, name in ((" UDP", "udp"), ("Plugin:/A/b.so", "plugin:/A/b.so"), ("", "auto")):
        assert params.NET.read({"MIRACCL_NET": text}) == name


def test_a_port_is_a_range() -> None:
    assert str(params.parse_port_range("20000")) == "20000"
    assert str(params.parse_port_range("20000-20001")) == "20000-20001"


def test_debug_levels_match() -> None:
    assert tuple(trace.LEVELS) == params.DEBUG_LEVELS


def test_paths_expand_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/at/home")
    assert params.CACHE_DIR.read({"MIRACCL_CACHE_DIR": "~/kernels"}) == "/at/home/kernels"
    assert params.TOPO_FILE.read({"NCCL_TOPO_FILE": "some~file"}) == "some~file"


def test_huge_timeouts_are_clamped() -> None:
    assert params.TIMEOUT.read({"MIRACCL_TIMEOUT": "1e300"}) == FOREVER
    assert int(FOREVER * 1e9) < 1 << 63


def test_huge_socket_buffers_are_clamped() -> None:
    with socket.socket() as sock:
        set_tcp_options(sock, 1 << 40)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > 1 << 16


# Logging


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore levels and handlers of the loggers."""
    loggers = [logging.getLogger("miraccl"), *map(trace.logger, trace.SUBSYSTEMS)]
    before = [log.level for log in loggers]
    handlers = loggers[0].handlers[:]
    yield
    for log, level in zip(loggers, before, strict=True):
        log.setLevel(level)
    loggers[0].handlers[:] = handlers


@pytest.mark.usefixtures("levels")
@pytest.mark.parametrize(
    ("subsystems", "enabled"),
    [
        ("", set(trace.SUBSYSTEMS)),
        ("ALL", set(trace.SUBSYSTEMS)),
        ("bootstrap, tuning", {"bootstrap", "tuning"}),
        ("INIT,NET", {"init", "socket"}),
        ("INIT,COLL", {"init"}),
        ("^NET", set(trace.SUBSYSTEMS) - {"socket"}),
        ("^ALL", set()),
    ],
)
def test_selected_subsystems_are_logged(
    monkeypatch: pytest.MonkeyPatch, subsystems: str, enabled: set[str]
) -> None:
    for log in map(trace.logger, trace.SUBSYSTEMS):
        log.setLevel(logging.NOTSET)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", subsystems)
    trace.configure()
    assert {
        name for name in trace.SUBSYSTEMS if trace.logger(name).isEnabledFor(logging.INFO)
    } == enabled
    assert all(trace.logger(name).isEnabledFor(logging.WARNING) for name in trace.SUBSYSTEMS)


@pytest.mark.usefixtures("levels")
def test_level_none_disables_all_subsystems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRACCL_DEBUG", "none")
    monkeypatch.setenv("MIRACCL_DEBUG_SUBSYS", "socket")
    trace.configure()
    assert not any(trace.logger(name).isEnabledFor(logging.CRITICAL) for name in trace.SUBSYSTEMS)


@pytest.mark.parametrize("variable", ["MIRACCL_DEBUG", "NCCL_DEBUG"])
def test_invalid_levels_name_the_variable(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "loud")
    with pytest.raises(InvalidUsage, match=f"^{variable}='loud': allowed are none, warn"):
        trace.configure()


@pytest.mark.parametrize("subsystems", ["bootstap", "init,coll", "^sockets"])
def test_unknown_subsystems_are_rejected(monkeypatch: pytest.MonkeyPatch, subsystems: str) -> None:
    monkeypatch.setenv("MIRACCL_DEBUG_SUBSYS", subsystems)
    with pytest.raises(
        InvalidUsage,
        match=re.escape(
            f"MIRACCL_DEBUG_SUBSYS={subsystems!r}: allowed are all, aggregation, bootstrap, cache, "
        ),
    ):
        trace.configure()


def test_all_subsystems_are_listed() -> None:
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    assert set(re.findall(r'trace\.logger\("(\w+)"\)', text)) == set(trace.SUBSYSTEMS)
