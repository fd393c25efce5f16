"""Detection on machines made of files, and on the one that runs the tests."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from miraccl.topo.analyse import analyse_topology
from miraccl.topo.check import check_topology
from miraccl.topo.detect import NetInfo, detect_machine
from miraccl.topo.nvml import NvmlGpu, read_gpus, short_bus_id
from miraccl.topo.records import CpuVendor, LinkType, NodeType, PathType
from miraccl.topo.sysfs import Sysfs, natural
from miraccl.topo.xmlfile import format_topology, parse_topology, read_topology
from tests.topo.fake_sysfs import FakeMachine
from tests.topo.golden import TOPOLOGIES

DEVICE = {
    "vendor": "0x10de",
    "device": "0x2335",
    "subsystem_vendor": "0x10de",
    "subsystem_device": "0x18bf",
}


@pytest.fixture
def machine(tmp_path):
    """Two NUMA domains: a switch with two GPUs and a NIC below one, a GPU below the other."""
    fake = FakeMachine(tmp_path)
    fake.numa(0, "0-3", "0f")
    fake.numa(1, "4-7", "f0")
    fake.cpuinfo()
    up = "pci0000:00/0000:00:01.0/0000:01:00.0"
    fake.pci("pci0000:00/0000:00:01.0", cls="0x060400")
    fake.pci(up, cls="0x060400", vendor="0x1000", device="0xc010")
    for slot, (bus, cls) in enumerate(
        (("0000:03:00.0", "0x030200"), ("0000:05:00.0", "0x020700"), ("0000:04:00.0", "0x030200"))
    ):
        fake.pci(
            f"{up}/0000:02:0{slot}.0",
            cls="0x060400",
            speed="8.0 GT/s PCIe" if slot == 2 else "16.0 GT/s PCIe",
        )
        fake.pci(f"{up}/0000:02:0{slot}.0/{bus}", cls=cls, **(DEVICE if cls == "0x030200" else {}))
    fake.pci("pci0000:80/0000:80:01.0", cls="0x060400", numa="1")
    fake.pci("pci0000:80/0000:80:01.0/0000:81:00.0", cls="0x030200", numa="1", width="8")
    fake.infiniband("mlx5_0", (tmp_path / "sys/bus/pci/devices/0000:05:00.0").resolve())
    fake.file("sys/module/nvidia_peermem/version", "550")
    fake.net("eth0", None)
    return fake


GPUS = [
    NvmlGpu(dev=0, bus_id="0000:03:00.0", sm=80, nvlinks=(("0000:04:00.0", 4),)),
    NvmlGpu(dev=1, bus_id="0000:04:00.0", sm=80, nvlinks=(("0000:03:00.0", 4),)),
    NvmlGpu(
        dev=2, bus_id="0000:81:00.0", sm=80, nvlinks=(("fffffff:ffff:ff", 6),), c2c=(44712, 10)
    ),
]


def test_detected_file_is_that_of_nccl(machine):
    file = detect_machine(machine.root, gpus=GPUS, arch="x86_64")
    assert format_topology(file.root).splitlines() == [
        '<system version="1">',
        '  <cpu numaid="0" affinity="0f" arch="x86_64" vendor="GenuineIntel" familyid="6" '
        'modelid="143">',
        '    <pci busid="0000:01:00.0" class="0x060400" vendor="0x1000" device="0xc010" '
        'link_speed="16.0 GT/s PCIe" link_width="16">',
        '      <pci busid="0000:03:00.0" class="0x030200" vendor="0x10de" device="0x2335" '
        'subsystem_vendor="0x10de" '
        'subsystem_device="0x18bf" link_speed="16.0 GT/s PCIe" link_width="16">',
        '        <gpu dev="0" sm="80" rank="0" gdr="1">',
        '          <nvlink target="0000:04:00.0" count="4" tclass="0x030200"/>',
        "        </gpu>",
        "      </pci>",
        '      <pci busid="0000:05:00.0" class="0x020700" link_speed="16.0 GT/s PCIe" '
        'link_width="16">',
        "        <nic>",
        '          <net name="mlx5_0" dev="0" latency="0" speed="200000" port="1" '
        'guid="0x1e95b50003fd7010" maxconn="131072" gdr="1"/>',
        "        </nic>",
        "      </pci>",
        '      <pci busid="0000:04:00.0" class="0x030200" vendor="0x10de" device="0x2335" '
        'subsystem_vendor="0x10de" '
        # the port is slower than the GPU
        'subsystem_device="0x18bf" link_speed="8.0 GT/s PCIe" link_width="16">',
        '        <gpu dev="1" sm="80" rank="1" gdr="1">',
        '          <nvlink target="0000:03:00.0" count="4" tclass="0x030200"/>',
        "        </gpu>",
        "      </pci>",
        "    </pci>",
        "  </cpu>",
        '  <cpu numaid="1" affinity="f0" arch="x86_64" vendor="GenuineIntel" familyid="6" '
        'modelid="143">',
        '    <pci busid="0000:81:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" '
        'link_width="8">',
        '      <gpu dev="2" sm="80" rank="2" gdr="1">',
        '        <nvlink target="fffffff:ffff:ff" count="6" tclass="0x068000"/>',
        '        <c2c bw="44712" count="10"/>',
        "      </gpu>",
        "    </pci>",
        "  </cpu>",
        "</system>",
    ]


def test_a_detected_machine_can_be_planned_on(machine):
    file = detect_machine(machine.root, gpus=GPUS, arch="x86_64")
    found = analyse_topology(parse_topology(format_topology(file.root)).root)
    assert found.paths.gpu_gpu(0, 1).type == PathType.NVL
    assert found.paths.gpu_net(0, 0).type == PathType.PIX
    assert found.paths.gpu_gpu(0, 2).type == PathType.SYS
    assert not [finding for finding in check_topology(file) if finding.severity == "error"]


@pytest.mark.parametrize(
    ("setting", "value", "names"),
    [
        ("MIRACCL_IB_HCA", "=mlx5_1", ["mlx5_1"]),
        ("NCCL_IB_HCA", "^mlx5_1", ["mlx5_0"]),
        ("MIRACCL_IB_HCA", "mlx5_0:2", ["eth0"]),
        ("NCCL_IB_DISABLE", "1", ["eth0"]),
    ],
)
def test_settings_choose_the_nets_as_in_nccl(machine, monkeypatch, setting, value, names):
    second = (machine.root / "sys/bus/pci/devices/0000:05:00.0").resolve()
    machine.infiniband("mlx5_1", second)
    machine.net("eth0", second)
    monkeypatch.setenv(setting, value)
    monkeypatch.setenv("MIRACCL_IB_MERGE_NICS", "0")
    found = analyse_topology(detect_machine(machine.root, gpus=GPUS, arch="x86_64").root)
    assert [net.label for net in found.system.nets] == names


def test_nets_of_a_plugin(machine):
    """Devices that sysfs does not show take the place of those that it shows."""
    nets = [
        NetInfo(name="near", speed_mbps=200_000, gdr=True, bus_id="0000:05:00.0", guid=7, port=1),
        NetInfo(name="nowhere", speed_mbps=-1, max_connections=-1, latency_us=2.5),
    ]
    file = detect_machine(machine.root, gpus=GPUS, arch="x86_64", nets=nets)
    found = analyse_topology(file.root)
    first = found.system.nets[0]
    assert (first.label, first.bw, first.gdr) == ("near", 25.0, 1)
    assert found.paths.gpu_net(0, 0).type == PathType.PIX
    assert 'name="nowhere" dev="1" latency="2.5" speed="0"' in format_topology(file.root)


def test_interfaces_are_the_nets_without_verbs(machine):
    machine.file("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    nic = (machine.root / "sys/bus/pci/devices/0000:05:00.0").resolve()
    machine.net("eth10", nic, speed="100000")
    machine.net("eth2", None, speed="-1", state="unknown")
    machine.net("docker0", None)
    machine.net("eth3", None, state="down")
    found = analyse_topology(detect_machine(machine.root, gpus=GPUS, arch="x86_64").root)
    assert [(net.label, net.bw, net.gdr) for net in found.system.nets] == [
        ("eth10", 12.5, 0),
        ("eth0", 3.125, 0),
        ("eth2", 1.25, 0),
    ]
    assert [n.name for n in found.system.of(NodeType.NIC)] == ["NIC/0-5000", "NIC/0-0"]


def test_ports_of_a_nic_are_one_device(machine, monkeypatch):
    up = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0"
    second = machine.pci(f"{up}/0000:05:00.1", cls="0x020700")
    machine.infiniband("mlx5_1", second, rate="400 Gb/sec (4X NDR)")
    file = detect_machine(machine.root, gpus=GPUS, arch="x86_64")
    found = analyse_topology(file.root)
    assert [(net.label, net.bw) for net in found.system.nets] == [("mlx5_0+mlx5_1", 75.0)]
    assert found.system.count(NodeType.NIC) == 1
    assert (0, "mlx5_0 and mlx5_1 are one network device") in file.notes
    for name, value in (("NCCL_NET_MERGE_LEVEL", "LOC"), ("NCCL_IB_MERGE_NICS", "0")):
        monkeypatch.setenv(name, value)
        found = analyse_topology(detect_machine(machine.root, gpus=GPUS, arch="x86_64").root)
        assert [(net.label, net.bw) for net in found.system.nets] == [
            ("mlx5_0", 25.0),
            ("mlx5_1", 50.0),
        ]
        assert found.system.count(NodeType.NIC) == 1
        monkeypatch.delenv(name)


def test_gpu_missing_from_sysfs(machine):
    file = detect_machine(
        machine.root, gpus=[NvmlGpu(dev=0, bus_id="0000:77:00.0", sm=90)], arch="x86_64"
    )
    assert [cpu.attrs["numaid"] for cpu in file.root.children] == ["-1", "0"]
    assert any("0000:77:00.0 is not in sysfs" in text for _, text in file.notes)
    assert analyse_topology(file.root).system.gpus[0].links[0].bw == 12.0


PROVIDED = """<system version="1">
<cpu numaid="1" arch="x86_64">
<pci busid="ffff:ff:01.0" class="0x060400" link_speed="16 GT/s" link_width="16">
<pci busid="0000:03:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="8"/>
<pci busid="0000:99:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="8"/>
</pci>
</cpu>
</system>"""


@pytest.mark.parametrize("place", ["named", "provided"])
def test_provider_file_is_completed(machine, place):
    """Values of the file take precedence over the kernel's; missing devices are added, unused ones
    dropped.
    """
    if place == "named":
        file = detect_machine(
            machine.root, gpus=GPUS[:1], arch="x86_64", base=parse_topology(PROVIDED).root
        )
    else:
        machine.file("var/run/nvidia-topologyd/virtualTopology.xml", PROVIDED)
        file = detect_machine(machine.root, gpus=GPUS[:1], arch="x86_64")
        assert any("virtualTopology.xml" in text for _, text in file.notes)
    found = analyse_topology(file.root)
    assert [cpu.name for cpu in found.system.cpus] == ["CPU/0-1", "CPU/0-0"]
    assert found.system.cpus[0].vendor == CpuVendor.INTEL
    assert [pci.name for pci in found.system.pcis] == ["PCI/0-ffffff010", "PCI/0-1000"]
    gpu = found.system.gpus[0]
    assert [(link.type, link.bw) for link in gpu.links] == [
        (LinkType.PCI, 24.0)
    ]  # 8 lanes of 32 GT/s, as the file says
    assert found.paths.gpu_net(0, 0).type == PathType.SYS


def test_a_host_of_cpus_is_a_topology(machine):
    file = detect_machine(machine.root, gpus=[], cpu_ranks=6, arch="x86_64")
    found = analyse_topology(file.root)
    assert [gpu.label for gpu in found.system.gpus] == ["cpu"] * 6
    homes = [found.system.nodes[gpu.links[0].target].name for gpu in found.system.gpus]
    assert homes == ["CPU/0-0"] * 3 + ["CPU/0-1"] * 3
    assert found.paths.gpu_gpu(0, 1).type == PathType.PHB
    assert found.paths.gpu_gpu(0, 5).type == PathType.SYS
    assert any("6 CPU ranks" in text for _, text in file.notes)


def test_host_without_sysfs(tmp_path):
    file = detect_machine(tmp_path, gpus=[], arch="aarch64")
    assert (
        file.notes[0][1]
        == f"cannot read {tmp_path}/sys: PCI tree, NUMA domains and nets are unknown"
    )
    found = analyse_topology(file.root)
    assert len(found.system.gpus) == 1
    assert found.system.cpus[0].name == "CPU/0-ffffffffffffff"


#: what a file of the kernel may hold, if something else pretends to be the kernel
ODD = {
    "nothing": b"",
    "bytes": b"\xff\xfe\0\n",
    "nul": b"a\0b\n",
    "lines": b"a\nb\tc\n",
    "digit": "\u00b2\n".encode(),  # a digit to Python, and no number
    "long": b"9" * 5000,
    "range": b"7-3\n",
    "many": b"0-999999999,0-99999999999999\n",
    "markup": b"\"<&>'\n",
}


@pytest.mark.parametrize("name", [*ODD, "missing", "folder", "loop"])
def test_odd_kernel_files(machine, name):
    """For each file in turn the machine is still found, and the result can be read.

    With GPUs and without in turns; TEST_SLOW=1 tries both with each file.
    """
    files = [path for path in machine.root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 60
    kinds = ((GPUS, 2), ((), 4))
    for number, path in enumerate(sorted(files)):
        was = path.read_bytes()
        path.unlink()
        if name in ODD:
            path.write_bytes(ODD[name])
        elif name == "folder":
            path.mkdir()
        elif name == "loop":
            path.symlink_to(path)
        some = kinds if os.environ.get("TEST_SLOW") else [kinds[(number + len(name)) % 2]]
        for gpus, cpu_ranks in some:
            text = format_topology(
                detect_machine(machine.root, gpus=gpus, cpu_ranks=cpu_ranks, arch="x86_64").root
            )
            again = parse_topology(text)
            assert format_topology(again.root) == text, path
            assert len(analyse_topology(again.root).whole.gpus) == len(gpus) + cpu_ranks, path
            check_topology(again)
        (path.rmdir if path.is_dir() else path.unlink)() if name != "missing" else None
        path.write_bytes(was)


def test_odd_interface_names(machine):
    """Linux allows all characters except spaces, slashes and colons in names of interfaces."""
    os.makedirs(os.fsencode(machine.root) + b"/sys/class/net/a\xff\x01\xc2\xb2")
    (machine.root / "sys/class/net/\u00b2").mkdir()
    for path in (machine.root / "sys/class/net").iterdir():
        (path / "operstate").write_text("up")
    (machine.root / "sys/class/infiniband/mlx5_0/ports/one/").mkdir()
    (machine.root / "sys/class/infiniband/mlx5_0/ports/one/state").write_text("4: ACTIVE")
    (machine.root / "sys/class/infiniband/mlx5_0/ports/1/state").unlink()
    text = format_topology(detect_machine(machine.root, gpus=(), cpu_ranks=2, arch="x86_64").root)
    assert {net.attrs["name"] for net in parse_topology(text).root.walk() if net.name == "net"} == {
        "a??\u00b2",
        "eth0",
        "\u00b2",
    }


def test_cyclic_pci_tree(machine):
    """Links of a recorded folder may lead anywhere."""
    inner = machine.pci("pci0000:90/0000:90:01.0/0000:91:00.0/x/0000:91:00.0", cls="0x030200")
    upper = machine.root / "sys/devices/pci0000:90/0000:90:01.0/0000:91:00.0/0000:92:00.0"
    for bus_id, folder in (("0000:91:00.0", upper / "0000:91:00.0"), ("0000:92:00.0", upper)):
        folder.mkdir(parents=True, exist_ok=True)
        place = machine.root / "sys/bus/pci/devices" / bus_id
        place.unlink(missing_ok=True)
        place.symlink_to(folder)
    assert inner.exists()
    gpus = [NvmlGpu(dev=0, bus_id="0000:91:00.0", sm=80)]
    text = format_topology(detect_machine(machine.root, gpus=gpus, arch="x86_64").root)
    assert len(analyse_topology(parse_topology(text).root).system.gpus) == 1


@pytest.mark.parametrize(
    ("vendor", "family", "model", "expected"),
    [
        ("AuthenticAMD", 25, 17, ("175", "17")),
        ("AuthenticAMD", 23, 49, ("143", "49")),
        ("GenuineIntel", 6, 207, ("6", "207")),
    ],
)
def test_family_numbers_are_those_of_cpuid(tmp_path, vendor, family, model, expected):
    FakeMachine(tmp_path).cpuinfo(vendor, family, model)
    (cpu,) = detect_machine(tmp_path, gpus=[], arch="x86_64").root.children
    assert (cpu.attrs["familyid"], cpu.attrs["modelid"]) == expected


def test_this_machine_is_a_topology():
    file = detect_machine(gpus=[], cpu_ranks=2)
    found = analyse_topology(file.root)
    assert len(found.system.gpus) == 2
    assert all(link.type != LinkType.NVL for link in found.system.links)


def test_helpers():
    assert sorted(["mlx5_10", "mlx5_9", "eth0"], key=natural) == ["eth0", "mlx5_9", "mlx5_10"]
    assert Sysfs.count("0-3,8,10-11") == 7
    assert Sysfs.count("none") == 0
    assert short_bus_id("00000000:1B:00.0") == "0000:1b:00.0"
    assert short_bus_id("00010000:1B:00.0") == "10000:1b:00.0"


class FakeNvml:
    """Used part of pynvml: a Hopper GPU, two active links to a switch, one inactive, one C2C."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int = 1, fails: bool = False) -> None:
        self.count, self.fails, self.closed = count, fails, False

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fails:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.closed = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def nvmlDeviceGetHandleByIndex(self, dev: int) -> int:  # noqa: N802
        return dev

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return 9, 0

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=b"00000000:1B:00.0")

    def nvmlDeviceGetNvLinkCapability(  # noqa: N802
        self, handle: int, link: int, capability: int
    ) -> int:
        if link > 3:
            raise self.NVMLError("Invalid Argument")
        return int(link != 3)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        return int(link < 2)

    def nvmlDeviceGetNvLinkRemotePciInfo(  # noqa: N802
        self, handle: int, link: int
    ) -> SimpleNamespace:
        return SimpleNamespace(busId=b"FFFFFFFF:FF:FF.0", **self.legacy)

    legacy: ClassVar[dict[str, bytes]] = {}

    def nvmlDeviceGetFieldValues(  # noqa: N802
        self, handle: int, fields: list[tuple[int, int]]
    ) -> list[SimpleNamespace]:
        value = {170: 2, 171: 1 - fields[0][1], 172: 44712}[fields[0][0]]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=value))]


def test_gpu_info_from_nvml(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpus, _ = read_gpus()
    assert gpus == [
        NvmlGpu(
            dev=0, bus_id="0000:1b:00.0", sm=90, nvlinks=(("ffffffff:ff:ff.0", 2),), c2c=(44712, 1)
        )
    ]
    assert nvml.closed
    nvml.legacy = {"busIdLegacy": b"FFFFFFF:FF:FF.0"}  # type: ignore[misc]
    assert read_gpus()[0][0].nvlinks == (("fffffff:ff:ff.0", 2),)


def test_a_virtual_machine_as_nccl_dumped_it(tmp_path):
    """Two H200 in a virtual machine: the file that NCCL 2.28.9 wrote there, without the host's
    hash.
    """
    fake = FakeMachine(tmp_path)
    fake.cpuinfo("GenuineIntel", 6, 207)
    fake.numa(0, "0-31")
    for slot in (6, 7):
        folder = fake.pci(
            f"pci0000:00/0000:00:0{slot}.0",
            cls="0x030200",
            speed="32.0 GT/s PCIe",
            numa="-1",
            **DEVICE,
        )
        assert (folder / "max_link_width").read_text() == "16\n"  # but there is no port above it
    virtio = tmp_path / "sys/devices/pci0000:00/0000:00:03.0/virtio2"
    virtio.mkdir(parents=True)
    fake.net("eth0", virtio, speed="-1")
    fake.net("ifb0", None)
    links = (("fffffff:ff:ff.0", 18),)
    gpus = [NvmlGpu(dev=i, bus_id=f"0000:00:0{6 + i}.0", sm=90, nvlinks=links) for i in range(2)]
    dumped = read_topology(TOPOLOGIES / "device-2xH200-vm.xml").root
    assert format_topology(
        detect_machine(tmp_path, gpus=gpus, arch="x86_64").root
    ) == format_topology(dumped)


@pytest.mark.parametrize(
    ("nvml", "why"),
    [
        (None, "nvidia-ml-py is not installed"),
        (FakeNvml(fails=True), "Driver Not Loaded"),
        (FakeNvml(count=0), "NVML shows no GPU"),
    ],
)
def test_missing_gpus_have_a_reason(monkeypatch, nvml, why):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpus, reason = read_gpus()
    assert gpus == []
    assert why in reason
