"""InfiniBand and RoCE devices in an invented sysfs, and what the report says about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miraccl.errors import MissingDependency
from miraccl.native.verbs_abi import VerbsLibrary
from miraccl.sim.verbs import SimulatedVerbs
from miraccl.tools.net import hcas
from miraccl.tools.net.devices import render
from miraccl.topo.hca import read_hcas, select_ports
from miraccl.transport.hca_devices import hca_devices


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def add_device(
    root: Path, name: str, *, state: str = "4: ACTIVE", layer: str = "Ethernet", v4: bool = True
) -> None:
    base = root / "sys/class/infiniband" / name
    port = base / "ports/1"
    for file, text in {
        base / "fw_ver": "22.35.1012",
        base / "node_guid": "946d:ae03:0055:2f1c",
        base / "device/vendor": "0x15b3",
        base / "device/numa_node": "1",
        port / "state": state,
        port / "phys_state": "5: LinkUp",
        port / "link_layer": layer,
        port / "rate": "100 Gb/sec (4X EDR)",
        port / "lid": "0x0",
        port / "gids/0": "fe80:0000:0000:0000:966d:aeff:fe55:2f1c",
        port / "gids/1": "0000:0000:0000:0000:0000:ffff:0a00:0001",
        port / "gids/2": "0000:0000:0000:0000:0000:0000:0000:0000",
        port / "gid_attrs/types/0": "RoCE v2" if layer == "Ethernet" else "IB/RoCE v1",
        port / "gid_attrs/ndevs/1": "eth0",
    }.items():
        write(file, text)
    if v4:
        write(port / "gid_attrs/types/1", "RoCE v2")
    write(root / f"sys/class/infiniband_verbs/uverbs_{name}/ibdev", name)


def no_library() -> VerbsLibrary:
    raise MissingDependency("cannot use verbs: it is not installed", hint="install it")


def test_ports_and_addresses(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0")
    (hca,) = read_hcas(tmp_path)
    (port,) = hca.ports
    assert (hca.firmware, hca.numa, hca.uverbs) == (
        "22.35.1012",
        1,
        "/dev/infiniband/uverbs_mlx5_0",
    )
    assert (port.active, port.kind, port.gbits) == (True, "roce", 100.0)
    assert [(g.index, str(g.address), g.type) for g in port.gids] == [
        (0, "fe80::966d:aeff:fe55:2f1c", "roce2"),
        (1, "10.0.0.1", "roce2"),
    ]


def test_a_host_without_devices(tmp_path: Path) -> None:
    assert read_hcas(tmp_path) == []
    report = hca_devices(tmp_path, no_library)
    assert "no InfiniBand or RoCE device" in report.problems[0].what
    assert report.problems[0].advice


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("", ["mlx5_0", "mlx5_1", "mlx5_10"]),
        ("mlx5_1", ["mlx5_1", "mlx5_10"]),
        ("=mlx5_1", ["mlx5_1"]),
        ("^mlx5_1", ["mlx5_0"]),
        ("^=mlx5_1", ["mlx5_0", "mlx5_10"]),
        ("mlx5_0:1,mlx5_1:2", ["mlx5_0"]),
    ],
)
def test_selection_is_that_of_nccl(tmp_path: Path, wanted: str, names: list[str]) -> None:
    for name in ("mlx5_0", "mlx5_1", "mlx5_10"):
        add_device(tmp_path, name)
    add_device(tmp_path, "mlx5_2", state="1: DOWN")
    assert [hca.name for hca, _ in select_ports(read_hcas(tmp_path), wanted)] == names


def test_report_says_what_is_wrong(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", state="1: DOWN")
    add_device(tmp_path, "mlx5_1", v4=False)
    add_device(tmp_path, "mlx5_2", state="2: INIT", layer="InfiniBand")
    report = hca_devices(tmp_path, no_library)
    texts = [f"{p.what}: {p.advice}" for d in report.devices for p in d.problems]
    assert "port mlx5_0:1 is DOWN" in texts[0]
    assert "no RoCE v2 GID with a global address" in texts[1]
    assert "subnet manager" in texts[2]
    assert "not installed" in report.problems[-1].what
    assert [device.selected for device in report.devices] == [(), (1,), ()]
    assert json.loads(json.dumps(report.to_dict()))["devices"][1]["selected"] == [1]


def test_capabilities_of_an_opened_device(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0")
    verbs = SimulatedVerbs(["mlx5_0"])
    try:
        (device,) = hca_devices(tmp_path, lambda: verbs.library).devices
    finally:
        verbs.close()
    assert device.problems == ()
    assert device.capabilities is not None
    assert device.capabilities.max_qps == 1 << 16
    assert device.capabilities.inline_bytes == 128
    assert not verbs.wire.regions
    assert not verbs.wire.pairs


def test_device_that_cannot_be_opened_is_a_problem(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_7")
    verbs = SimulatedVerbs(["mlx5_0"])
    try:
        (device,) = hca_devices(tmp_path, lambda: verbs.library).devices
    finally:
        verbs.close()
    assert device.capabilities is None
    assert "libibverbs does not list it" in device.problems[0].what


def test_ports_are_network_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_device(tmp_path, "mlx5_0")
    add_device(tmp_path, "mlx5_1", state="1: DOWN")
    verbs = SimulatedVerbs(["mlx5_0", "mlx5_1"])
    monkeypatch.setattr(hcas, "load_library", lambda: verbs.library)
    report = hcas.report(tmp_path)
    verbs.close()
    first, second = report.devices
    assert (first.kind, first.name, first.state, first.used) == (
        "hca",
        "mlx5_0:1",
        "active",
        True,
    )
    assert first.speed_mbit == 100_000
    assert first.addresses == ("fe80::966d:aeff:fe55:2f1c", "10.0.0.1")
    assert first.details["firmware"] == "22.35.1012"
    assert (second.used, second.use) == (False, "not active")
    assert any("port mlx5_1:1 is DOWN" in finding.found for finding in report.findings)
    text = render(report)
    assert "firmware 22.35.1012; GIDs: 0 roce2 fe80::966d:aeff:fe55:2f1c, " in text
    assert "1 roce2 10.0.0.1; can: on-demand paging, relaxed ordering, dma-buf; cannot: " in text
    none = hcas.report(tmp_path / "none")
    assert (none.devices, none.findings) == ((), ())
    monkeypatch.setenv("MIRACCL_NET", "verbs")
    (finding,) = hcas.report(tmp_path / "none").findings
    assert "has no InfiniBand or RoCE device" in finding.found
