"""``miraccl net``: advice on devices, probes, rates of paths, and both ends on real ranks."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from miraccl.bootstrap.runtime_file import runtime_folder as runtime_folder_of_user
from miraccl.errors import InvalidUsage
from miraccl.runtime import net_status
from miraccl.tools import cli
from miraccl.tools.net import cli as net_cli
from miraccl.tools.net import devices, external, interfaces, pair, probe, watch
from miraccl.tools.net.devices import NetDevice
from miraccl.tools.net.probe_packets import HEADER_BYTES, ProbePacket, decode, encode
from miraccl.transport.base import PathStatus
from miraccl.transport.tcp_info import parse_tcp_info, path_status
from tests.support.warm_python import warm_python

KEY = b"k" * 32
GOOD = NetDevice(
    kind="interface",
    name="eth0",
    state="up",
    used=True,
    addresses=("10.0.0.1",),
    speed_mbit=25_000,
    duplex="full",
    mtu=9000,
    offloads={"tso": True, "gso": True, "gro": True},
    counters={"rx_packets": 10**9, "rx_dropped": 10, "tx_packets": 10**9},
)


def advice(*found: NetDevice) -> dict[str, str]:
    return {f.name: f"{f.found} -> {f.advice}" for f in interfaces.examine(found)}


def test_a_good_interface_needs_no_advice() -> None:
    assert advice(GOOD) == {}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"duplex": "half"}, "half duplex -> ethtool -s eth0 duplex full"),
        ({"state": "down"}, "down -> ip link set eth0 up"),
        ({"mtu": 1500}, "MTU 1500 on a fast interface"),
        ({"offloads": {"gso": True, "gro": False}}, "gro off"),
        ({"counters": {"rx_packets": 1000, "rx_dropped": 9}}, "9 of 1000 rx packets: dropped"),
    ],
)
def test_what_is_wrong_with_an_interface(change: dict[str, Any], text: str) -> None:
    assert text in advice(replace(GOOD, **change))["eth0"]


def test_mtus_that_differ() -> None:
    assert "eth0 9000, eth1 1400" in advice(GOOD, replace(GOOD, name="eth1", mtu=1400))["mtu"]


def test_small_socket_buffers() -> None:
    facts = {"rmem_max": "212992", "wmem_max": "8388608", "udp_segmentation": "yes"}
    found = {f.name: f for f in interfaces.examine_host(facts, 1 << 22)}
    assert found["rmem_max"].advice == "sysctl -w net.core.rmem_max=4194304"
    assert (found["rmem_max"].status, found["wmem_max"].status) == ("note", "ok")


def test_devices_of_this_host() -> None:
    result = CliRunner().invoke(cli.cli, ["net", "devices", "--json", "-"])
    record = json.loads(result.output)
    (loopback,) = [d for d in record["devices"] if d["details"]["loopback"]]
    assert (loopback["state"], loopback["use"]) == ("up", "loopback")
    assert "lo" in CliRunner().invoke(cli.cli, ["net", "devices"]).output


def test_settings_that_end_ranks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, found in (
        ("MIRACCL_SOCKET_IFNAME", "nope0", "missing  interfaces: cannot use MIRACCL_SOCKET_IFNAME"),
        ("MIRACCL_NET_PORT_RANGE", "70000", "missing  settings: MIRACCL_NET_PORT_RANGE='70000'"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            result = CliRunner().invoke(cli.cli, ["net", "devices"])
            assert (result.exit_code, found in result.output) == (1, True), result.output
            assert "65536" in result.output  # loopback


def test_a_provider_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> devices.DeviceReport:
        raise OSError("no such device")

    monkeypatch.setitem(devices.PROVIDERS, "hcas", fail)
    assert "cannot list: OSError: no such device" in devices.render(devices.collect())


def test_probes_are_authenticated() -> None:
    packet = ProbePacket(flow=3, number=7, sent_ns=12, interface=2, ttl=63, received=8, padding=100)
    data = encode(packet, KEY)
    assert len(data) == HEADER_BYTES + 100
    assert decode(data, KEY) == packet
    assert decode(data, b"other") is None
    choose = random.Random(1)
    for _ in range(300):
        changed = bytearray(data)
        changed[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        assert decode(bytes(changed), KEY) is None
        assert decode(data[: choose.randrange(len(data))], KEY) is None


def test_arrival_and_offender() -> None:
    info = struct.pack("i", 4) + bytes(8)
    control = [
        (socket.IPPROTO_IP, probe.IP_PKTINFO, info),
        (socket.IPPROTO_IP, probe.IP_TTL, struct.pack("i", 61)),
    ]
    assert probe.arrival(control) == (4, 61)
    name = struct.pack("=HH4s8x", socket.AF_INET, 0, bytes([10, 0, 0, 9]))
    assert probe.offender(bytes(16) + name) == "10.0.0.9"
    assert probe.offender(b"") == ""


def test_targets() -> None:
    assert pair.parse_target("node7") == ("node7", pair.DEFAULT_PORT)
    assert pair.parse_target("10.0.0.1:99") == ("10.0.0.1", 99)
    assert pair.parse_target("[fe80::1]:99") == ("fe80::1", 99)
    assert pair.parse_target("fd00::2") == ("fd00::2", pair.DEFAULT_PORT)
    for text in ("", "host:x", "host:99999"):
        with pytest.raises(InvalidUsage, match="expected HOST"):
            pair.parse_target(text)


def test_another_host_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIRACCL_SECRET", raising=False)
    with pytest.raises(InvalidUsage, match="without MIRACCL_SECRET"):
        pair.pair_secret(local=False)


def test_output_of_other_programs() -> None:
    record = {"end": {"sum_received": {"bits_per_second": 9.4e8}}}
    (row,) = external.parse("iperf3", json.dumps(record), "iperf3 -c x", (64,))
    assert row["gbps"] == pytest.approx(0.94)
    (row,) = external.parse("iperf3", "iperf3: error - refused\n", "", ())
    assert (row["gbps"], row["how"]) == (0.0, "failed: iperf3: error - refused")
    text = (
        " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n"
        " 2          5000           0.051              0.050                3.1\n"
        " 65536      5000           11.90              11.88                0.022\n"
    )
    (row,) = external.parse("ib_write_bw", text, "", (65536,))
    assert (row["bytes"], row["gbps"]) == (65536, 11.88)


def test_fields_of_tcp_info() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            client.sendall(bytes(5000))
            while len(accepted.recv(5000, socket.MSG_PEEK)) < 5000:
                pass
            status = path_status(accepted, peer=1, path=0)
            assert status.received_bytes == 5000
            assert (status.state, status.transport) == ("OPEN", "tcp")
            assert status.remote == f"127.0.0.1:{client.getsockname()[1]}"
            assert path_status(client, peer=0, path=0).rtt_us > 0
        assert path_status(accepted, peer=1, path=0).state == "DEAD"
    assert parse_tcp_info(bytes([1, 0, 3])) == {**parse_tcp_info(b""), "state": 1, "retransmits": 3}


def document(time: float, **path: int) -> dict[int, dict[str, Any]]:
    status = PathStatus(peer=1, transport="tcp", path=0, **path)  # type: ignore[arg-type]
    paths = [vars(status)]
    world = {"name": "world", "rank": 0, "nranks": 2, "paths": paths}
    return {42: {"pid": 42, "time": time, "communicators": [world]}}


def test_rates_between_two_documents() -> None:
    before = document(1.0, sent_bytes=1000, received_bytes=0, resent_bytes=0)
    after = document(3.0, sent_bytes=1000 + 10**9, received_bytes=5 * 10**8, resent_bytes=10**7)
    (row,) = watch.rows_between(before, after)
    assert (row.sent_gbps, row.received_gbps) == (4.0, 2.0)
    assert row.resent_share == pytest.approx(0.01)
    (new,) = watch.rows_between({}, after)  # nothing to compare with
    assert new.sent_gbps == 0.0
    assert "world" in watch.render([row])


@pytest.fixture
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_status_of_a_process(runtime_folder: Path) -> None:
    server = net_status.StatusServer()
    status = PathStatus(peer=1, transport="tcp", path=0, sent_bytes=7)
    source = net_status.PathSource(name="world", rank=0, nranks=2, paths=lambda: [status])
    server.add(source)
    try:
        documents = watch.read_processes()
        assert list(documents) == [os.getpid()]
        (row,) = watch.rows_between(documents, documents)
        assert (row.peer, row.communicator) == (1, "world")
    finally:
        server.remove(source)
    assert list(net_status.find_processes()) == []
    with pytest.raises(InvalidUsage, match="cannot watch process 1:"):
        watch.read_processes([1])


def test_socket_of_a_dead_process_is_removed(runtime_folder: Path) -> None:
    path = Path(runtime_folder_of_user()) / "net-99.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    assert watch.read_processes() == {}
    assert not path.exists()


def test_watch_writes_lines_to_a_file(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = net_status.StatusServer()
    status = PathStatus(peer=1, transport="udp", path=3, sent_bytes=7)
    source = net_status.PathSource(name="world", rank=0, nranks=2, paths=lambda: [status])
    monkeypatch.setattr("miraccl.clock.sleep", lambda seconds: None)
    server.add(source)
    try:
        target = runtime_folder / "lines"
        words = ["net", "watch", "--count", "2", "--json", str(target)]
        result = CliRunner().invoke(cli.cli, words)
    finally:
        server.remove(source)
    assert (result.exit_code, result.output) == (0, "")
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(line["transport"], line["path"]) for line in lines] == [("udp", 3)] * 2


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_server_that_does_not_run_is_named() -> None:
    target = f"127.0.0.1:{free_port()}"
    for words, server in (
        (["probe", target], "probe --listen"),
        (["bench", "--client", target], "bench --server"),
    ):
        result = CliRunner().invoke(cli.cli, ["net", *words, "--wait", "0.2"])
        text = str(result.exception)
        assert f"cannot reach the other end within 0.2 s: {target}: " in text
        assert f"miraccl net {server} must run there" in text


def test_a_client_that_does_not_come() -> None:
    words = ["net", "probe", "--listen", "--wait", "0.2", "--port", str(free_port())]
    result = CliRunner().invoke(cli.cli, words)
    assert "of this host only, as MIRACCL_SECRET is not set" in result.output
    assert str(result.exception) == "no client came within 0.2 s"


def test_ends_that_measure_different_things() -> None:
    port, errors = free_port(), []

    def open_end(end: Any) -> None:
        with pytest.raises(InvalidUsage) as caught, end:
            pass
        errors.append(str(caught.value))

    server = threading.Thread(target=open_end, args=[pair.serve("bench", port, timeout=20)])
    server.start()
    open_end(pair.join("probe", "127.0.0.1", port, timeout=20))
    server.join(30)
    assert errors == 2 * [
        "cannot measure: the server runs miraccl net bench, the client miraccl net probe"
    ]


@pytest.mark.multiprocess
def test_both_ends_of_a_bench(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    command = [warm_python(), "-m", "miraccl", "net", "bench", "--both", "--sizes", "1,70000"]
    command += ["--seconds", "0.01", "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(target.read_text())["rows"]
    assert [(row["bytes"], row["wrong"], row["transport"]) for row in rows] == [
        (1, 0, "tcp"),
        (70000, 0, "tcp"),
    ]
    assert all(row["latency_us"] > 0 and row["oneway_gbps"] > 0 for row in rows)


@pytest.mark.multiprocess
def test_probe_of_this_host(tmp_path: Path) -> None:
    command = [warm_python(), "-m", "miraccl", "net", "probe", "--port", str(free_port())]
    with subprocess.Popen([*command, "--listen", "--json", str(tmp_path / "there")]) as server:
        options = ["--count", "16", "--flows", "4", "--seconds", "0.01", "--json", "-"]
        done = subprocess.run(
            [*command, "127.0.0.1", *options],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert server.wait(100) == 0
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads((tmp_path / "there").read_text()) == result
    (address,) = [a for a in result["addresses"] if a["remote"] == "127.0.0.1"]
    assert (address["paths"], address["loss_out"], address["loss_back"]) == (1, 0, 0)
    assert address["mtu"] > 60_000
    assert 0 < address["rtt_us"][0] <= address["rtt_us"][1] <= address["rtt_us"][2]
    assert result["to_gbps"] > 0 < result["from_gbps"]


def test_addresses_that_do_not_answer_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    silent = probe.ProbedPath(local="10.0.0.1", remote="10.0.0.2", loss_out=1.0, flows=4)
    result = {"transport": "tcp", "reason": "r", "paths": 0, "to_gbps": 0.0}
    net_cli._print_probe({**result, "addresses": [silent.to_dict()]})
    output = capsys.readouterr().out
    assert "no answer over UDP from 10.0.0.2: a firewall may drop it" in output
    assert "nan" not in output


def test_usage_errors() -> None:
    for words, text in (
        (["bench"], "give one of --server"),
        (["probe"], "give either HOST or --listen"),
        (["bench", "--both", "--plot", "x.gif"], "must end in"),
    ):
        result = CliRunner().invoke(cli.cli, ["net", *words])
        assert (result.exit_code, text in result.output) == (2, True), (words, result.output)


def test_doctor_explains_the_network() -> None:
    result = CliRunner().invoke(cli.cli, ["doctor", "--net", "--json", "-"])
    found = {f["name"]: f["found"] for f in json.loads(result.output)}
    assert found["transport"].startswith("MIRACCL_NET=auto: tcp, addresses of a common family")
    assert {"tcp", "rmem_max", "ports"} <= set(found)


def test_doctor_explains_a_network_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for net, status, found in (
        ("udp", "ok", "not tcp: MIRACCL_NET=udp;"),
        ("tcpp", "missing", "cannot use MIRACCL_NET=tcpp: allowed are auto, tcp, udp"),
    ):
        monkeypatch.setenv("MIRACCL_NET", net)
        result = CliRunner().invoke(cli.cli, ["doctor", "--net", "--json", "-"])
        findings = {f["name"]: f for f in json.loads(result.output)}
        assert findings["transport"]["status"] == status
        assert found in findings["transport"]["found"]
        assert result.exit_code == (status == "missing")
        assert "congestion control swift (keeps" in findings["udp"]["found"]
