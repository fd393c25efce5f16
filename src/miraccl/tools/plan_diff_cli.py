"""``miraccl plan diff``: two plans side by side, with the reasons of their differences."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from miraccl import params
from miraccl.errors import InvalidUsage
from miraccl.tools.options import (
    MAX_NODES,
    File,
    Numbers,
    OutputFile,
    accelerators_option,
    read_bytes,
    write_json,
)

if TYPE_CHECKING:
    from miraccl.graph.plan import Plan, PlanRequest
    from miraccl.topo.records import System
    from miraccl.topo.xmlfile import XmlNode


class Assignment(click.ParamType[tuple[str, str]]):
    """``NAME=VALUE``."""

    name = "name=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not name or not equals:
            self.fail(f"{value!r}: expected NAME=VALUE", param, ctx)
        return name, text


class Scale(click.ParamType[tuple[str, float]]):
    """``DEVICE=FACTOR``."""

    name = "device=factor"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        device, _, text = str(value).rpartition("=")
        try:
            return device, float(text)
        except ValueError:
            self.fail(f"{value!r}: expected a device and a factor such as NET/3=0.5", param, ctx)


@click.command(short_help="Compare two plans: channels, rings, choices and times, with reasons.")
@click.argument("left", type=File(".xml", ".json"))
@click.argument("right", type=File(".xml", ".json"), required=False)
@click.option(
    "--nodes",
    type=Numbers(),
    metavar="N[,M]",
    help="Number of machines in the job, on the left and on the right.  [default: 1]",
)
@click.option(
    "--gpus",
    type=Numbers(),
    metavar="0,2,...",
    help="Only the GPUs with these device numbers, on both sides.",
)
@click.option(
    "--set",
    "settings",
    type=Assignment(),
    multiple=True,
    metavar="NAME=VALUE",
    help="Setting of the right side, such as NCCL_ALGO=ring; repeatable.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="DEVICE",
    help="Remove a device on the right, such as NET/3 or GPU/2; repeatable.",
)
@click.option(
    "--scale",
    type=Scale(),
    multiple=True,
    metavar="DEVICE=FACTOR",
    help="Scale the bandwidth of a device's links on the right, such as NET/3=0.5; repeatable.",
)
@accelerators_option
@click.option(
    "--json",
    "json_target",
    type=OutputFile(),
    metavar="FILE",
    help="Write the comparison as JSON; - is standard output.",
)
def diff(
    left: str,
    right: str | None,
    nodes: tuple[int, ...] | None,
    gpus: tuple[int, ...] | None,
    settings: tuple[tuple[str, str], ...],
    without: tuple[str, ...],
    scale: tuple[tuple[str, float], ...],
    accelerators: tuple[str, ...],
    json_target: str | None,
) -> None:
    """Compare two plans side by side: channels, rings, and the choice and predicted time for each
    collective and size, with the reasons.

    LEFT and RIGHT are topology files, or plans that --json wrote. Without RIGHT, both sides are
    LEFT. Settings and changes of the machine apply to the right side.

    The exit status is 1 if the plans differ.

    \b
    Examples:
      miraccl plan diff old.xml new.xml --nodes 4
      miraccl plan diff dgx-h100.xml --nodes 4 --without NET/3
      miraccl plan diff dgx-h100.xml --nodes 4 --scale NET/3=0.5
      miraccl plan diff dgx-h100.xml --nodes 2,4
      miraccl plan diff dgx-h100.xml --set NCCL_ALGO=ring --json -
    """
    from miraccl.graph.plan_diff import compare_plans, diff_to_json

    if right is None and not (settings or without or scale or (nodes and len(nodes) > 1)):
        raise InvalidUsage(
            "cannot compare a plan with itself: pass RIGHT, two numbers of --nodes, --set, "
            "--without or --scale"
        )
    if nodes and not (len(nodes) <= 2 and all(1 <= n <= MAX_NODES for n in nodes)):
        raise InvalidUsage(
            f"cannot use --nodes {','.join(map(str, nodes))}: expected one or two numbers from 1 "
            f"to {MAX_NODES}"
        )
    unknown = [name for name, _ in settings if not name.startswith(("NCCL_", "MIRACCL_"))]
    if unknown:
        raise InvalidUsage(
            f"cannot set {unknown[0]}: settings of a plan begin with NCCL_ or MIRACCL_"
        )
    descriptions = list(accelerators) or [
        file for file in params.ACCELERATORS.read(os.environ).split(":") if file
    ]
    sides = (
        Side(path=left, nodes=nodes[0] if nodes else None),
        Side(
            path=right or left,
            nodes=nodes[-1] if nodes else None,
            settings=dict(settings),
            without=without,
            scale=dict(scale),
        ),
    )
    plans = [side.plan(tuple(gpus or ()), descriptions) for side in sides]
    result = compare_plans(*plans)
    if json_target:
        names = [side.describe() for side in sides]
        write_json(json_target, {"left": names[0], "right": names[1], **diff_to_json(result)})
    if json_target != "-":
        from miraccl.tools.plan_diff_tables import print_diff

        print_diff(result, *(side.describe() for side in sides))
    if not result.equal:
        raise click.exceptions.Exit(1)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of the comparison: a file and the changes made to it.

    - ``nodes``: number of machines, None for the default of the file.
    """

    path: str
    nodes: int | None = None
    settings: Mapping[str, str] | None = None
    without: tuple[str, ...] = ()
    scale: Mapping[str, float] | None = None

    def describe(self) -> str:
        """Return the file and the changes in one line."""
        parts = [Path(self.path).name]
        parts += [f"{self.nodes} nodes"] if self.nodes else []
        parts += [f"{name}={value}" for name, value in (self.settings or {}).items()]
        parts += [f"without {device}" for device in self.without]
        parts += [f"{device} x {factor:g}" for device, factor in (self.scale or {}).items()]
        return ", ".join(parts)

    def plan(self, gpus: tuple[int, ...], descriptions: list[str]) -> Plan:
        """Plan this side.

        - ``gpus``: device numbers that take part, empty for all.
        - ``descriptions``: files that describe accelerators.
        """
        from miraccl.graph.plan import make_plan
        from miraccl.topo.modify import modify_system

        content = read_bytes(self.path, "topology file or plan")
        if content.lstrip()[:1] == b"{":
            if gpus:
                raise InvalidUsage(
                    "cannot select GPUs of a saved plan: --gpus needs topology files"
                )
            source, request = self._from_json(content)
        else:
            request = self._request(os.environ, gpus, self.nodes or 1)
            source = self._from_xml(content, request, descriptions)
            request = replace(request, gpus=())
        if isinstance(source, _Saved):
            return source.plan
        changed = modify_system(source, without=self.without, scale=self.scale or {})
        return make_plan(changed, request)

    def _request(
        self,
        environ: Mapping[str, str],
        gpus: tuple[int, ...],
        nodes: int,
        *,
        collnet: bool = False,
    ) -> PlanRequest:
        from miraccl.graph.plan import PlanRequest

        return PlanRequest.read(
            {**environ, **(self.settings or {})}, nodes=nodes, gpus=gpus, collnet=collnet
        )

    def _from_xml(self, content: bytes, request: PlanRequest, descriptions: list[str]) -> System:
        from miraccl.topo.accelerators import read_accelerators
        from miraccl.topo.analyse import analyse_topology
        from miraccl.topo.load import load_topology_text

        described = [a for file in descriptions for a in read_accelerators(file)]
        root: XmlNode = load_topology_text(content, source=self.path, accelerators=described).root
        return analyse_topology(root, request.topo).whole

    def _from_json(self, content: bytes) -> tuple[System | _Saved, PlanRequest]:
        from miraccl.graph.plan_json import plan_from_json

        try:
            document = json.loads(content)
        except ValueError as error:
            raise InvalidUsage(f"cannot read the plan {self.path}: {error}") from None
        saved = plan_from_json(document)
        if not (self.settings or self.without or self.scale or self.nodes):
            return _Saved(saved), saved.request
        request = self._request(
            dict(saved.request.variables),
            (),
            self.nodes or saved.request.nodes,
            collnet=saved.request.collnet,
        )
        return saved.topology.whole, request


@dataclass(frozen=True)
class _Saved:
    """A plan that is compared as it was saved."""

    plan: Plan
