"""Small random machines for property tests, as topology files.

Sockets, PCI switches, NVLinks, an NVSwitch or none, NICs of various speeds.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from miraccl.topo.analyse import Domain, analyse_topology
from miraccl.topo.load import load_topology_text
from miraccl.topo.options import PathOptions, TopoOptions
from miraccl.topo.records import PathType

_CPUS = (
    'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85"',
    'arch="x86_64" vendor="AuthenticAMD" familyid="23" modelid="49"',
    'arch="ppc64"',
)
_NVSWITCH = "ffff:ff:ff.0"


@st.composite
def topology_texts(draw: Any, max_gpus: int = 4) -> str:
    """Draw the text of a topology file with 1 to ``max_gpus`` GPUs."""
    ngpus = draw(st.integers(1, max_gpus))
    sockets = draw(st.integers(1, 2))
    sm = draw(st.sampled_from((70, 80, 90, 100)))
    nvlinks = draw(st.sampled_from(("none", "mesh", "switch")))
    cpu = draw(st.sampled_from(_CPUS))
    slots: list[list[str]] = [[] for _ in range(2 * sockets)]
    for gpu in range(ngpus):
        links = ""
        if nvlinks == "switch":
            links = (
                f'<nvlink target="{_NVSWITCH}" count="{draw(st.integers(1, 6))}" '
                'tclass="0x068000"/>'
            )
        elif nvlinks == "mesh":
            peers = (peer for peer in range(ngpus) if peer != gpu)
            counts = [
                (peer, (gpu * peer + gpu + peer + sm) % 3) for peer in peers
            ]  # the same from both sides
            links = "".join(
                f'<nvlink target="{_bus(peer)}" count="{n}" tclass="0x030200"/>'
                for peer, n in counts
                if n
            )
        slots[draw(st.integers(0, len(slots) - 1))].append(
            f'<pci busid="{_bus(gpu)}" class="0x030200" link_speed="{draw(_SPEEDS)}" '
            'link_width="16">'
            f'<gpu dev="{gpu}" sm="{sm}" rank="{gpu}" gdr="1">{links}</gpu></pci>'
        )
    for net in range(draw(st.integers(0, 3))):
        slots[draw(st.integers(0, len(slots) - 1))].append(
            f'<pci busid="0000:{0x80 + net:02x}:00.0" class="0x020700" '
            f'link_speed="{draw(_SPEEDS)}" link_width="16"><nic>'
            f'<net name="n{net}" dev="{net}" '
            f'speed="{draw(st.sampled_from((1000, 10000, 100000, 200000, 400000)))}" port="1" '
            ""
            f'guid="0x{draw(st.integers(1, 2)):x}" maxconn="64" '
            f'gdr="{draw(st.integers(0, 1))}"/></nic></pci>'
        )
    text = ['<system version="1">']
    for socket in range(sockets):
        text.append(f'<cpu numaid="{socket}" affinity="ffff" {cpu}>')
        for slot in (2 * socket, 2 * socket + 1):
            bus = f"0000:{0xC0 + slot:02x}:00.0"
            text.append(
                f'<pci busid="{bus}" class="0x060400" link_speed="16.0 GT/s PCIe" '
                f'link_width="16">{"".join(slots[slot])}</pci>'
            )
        text.append("</cpu>")
    return "\n".join([*text, "</system>"])


_SPEEDS = st.sampled_from(("8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe"))


def _bus(gpu: int) -> str:
    return f"0000:{0x10 + gpu:02x}:00.0"


@st.composite
def domains(draw: Any, max_gpus: int = 4) -> Domain:
    """Draw the first domain of such a machine, alone or in a job of two."""
    options = TopoOptions(
        nodes=draw(st.integers(1, 2)),
        collnet=draw(st.booleans()),
        paths=PathOptions(
            p2p_level=draw(st.sampled_from((None, PathType.SYS))),
            net_per_gpu=draw(st.sampled_from((0, 0, -1, 1))),
        ),
    )
    return analyse_topology(
        load_topology_text(draw(topology_texts(max_gpus))).root, options
    ).domains[0]
