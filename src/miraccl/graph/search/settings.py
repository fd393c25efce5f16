"""Settings of the channel search as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from miraccl import params
from miraccl.topo.options import PathOptions

NVLS_OFF, NVLS_ON, NVLS_AUTO = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of the channel search.

    ``cross_nic`` allows a ring to enter and leave by different NICs: 0 no, 1 yes, 2 where it helps.
    ``net_per_gpu`` is that of ``PathOptions``. ``nvls`` is 0 (off), 1 (on) or 2 (if the GPUs
    support it). ``collnet`` states that a CollNet plugin is present and enabled. ``graph_xml`` is
    the text of a file of graphs that replace the search, empty for none.
    """

    cross_nic: int = 2
    net_per_gpu: int = 0
    nvls: int = NVLS_AUTO
    collnet: bool = False
    graph_xml: str = ""

    @classmethod
    def read(
        cls, environ: Mapping[str, str], *, collnet: bool = False, graph_xml: str = ""
    ) -> SearchSettings:
        """Read the settings from an environment.

        The caller reads the file that ``GRAPH_FILE`` names and passes its text as ``graph_xml``.
        """
        return cls(
            cross_nic=params.CROSS_NIC.read(environ),
            net_per_gpu=PathOptions.read(environ).net_per_gpu,
            nvls=params.NVLS_ENABLE.read(environ),
            collnet=collnet,
            graph_xml=graph_xml,
        )
