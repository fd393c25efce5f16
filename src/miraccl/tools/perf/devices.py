"""- ``--devices``: selection of GPUs, checks of their existence, and options that apply to one
kind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from miraccl import params
from miraccl.bootstrap.launch import detect_launch
from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout
from miraccl.tools.gpu_facts import CudaFacts

#: options that apply to CPU memory only, and the reason
_CPU_ONLY = {
    "fresh": "it rewrites inputs on the CPU",
    "persistent": "calls on GPU memory cache their plans, so there is nothing to prepare",
}
_GPU_ONLY = ("graph", "threads")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Value of ``--devices``.

    ``ordinals`` are CUDA device numbers of this process (after CUDA_VISIBLE_DEVICES), None for all.
    """

    kind: str
    ordinals: tuple[int, ...] | None = None

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"


class DevicesType(click.ParamType[Devices]):
    """Option type: ``cpu``, ``cuda``, ``cuda:0,1`` or ``cuda:0,cuda:1``."""

    name = "devices"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Devices:
        if isinstance(value, Devices):
            return value
        text = str(value).replace(" ", "").lower()
        if text in ("cpu", "cuda"):
            return Devices(kind=text)
        ordinals = []
        for number, part in enumerate(text.split(",")):
            match = re.fullmatch(r"(cuda:)?(\d{1,4})", part)
            if match is None or (number == 0 and not match[1]):
                self.fail(
                    f"{value!r}: allowed are cpu, cuda (all GPUs), and numbers as in cuda:0,1",
                    param,
                    ctx,
                )
            ordinals.append(int(match[2]))
        if len(set(ordinals)) < len(ordinals):
            self.fail(
                f"{value!r} lists a GPU twice; use --ranks for more ranks than GPUs", param, ctx
            )
        return Devices(kind="cuda", ordinals=tuple(ordinals))


def resolve(devices: Devices, facts: CudaFacts) -> tuple[int, ...]:
    """Return the numbers of the selected GPUs; raise ``InvalidUsage`` with a remedy if one is
    absent.
    """
    if facts.problem:
        raise InvalidUsage(
            f"cannot use --devices cuda: {facts.problem}",
            hint=f"{facts.advice}; see miraccl doctor",
        )
    known = tuple(gpu.ordinal for gpu in facts.gpus)
    if devices.ordinals is None:
        return known
    absent = [number for number in devices.ordinals if number not in known]
    if absent:
        have = f"cuda:0 to cuda:{known[-1]}" if len(known) > 1 else "cuda:0 only"
        text = (
            f"cannot use --devices: no {', '.join(f'cuda:{number}' for number in absent)}; this"
            f" process sees {have} ({facts.names})"
        )
        raise InvalidUsage(text, hint="numbers refer to the GPUs of CUDA_VISIBLE_DEVICES, from 0")
    return devices.ordinals


def count_ranks_per_host(nranks: int, hosts: int, joined: bool) -> int:
    """Return the number of ranks that count as one host, 0 if unknown.

    Raise ``UsageError`` if they exceed what kernels support.
    """
    # Without P2P and shared memory each rank counts as a host (``runtime.multinode.layout``).
    apart = params.P2P_DISABLE.read() == 1 and params.SHM_DISABLE.read()
    if joined:
        together = (
            0 if apart or params.HOSTID.read() else detect_launch(os.environ).local_nranks or 0
        )
    else:
        together = 1 if apart else -(-nranks // hosts)
    if together > layout.MAX_RANKS:
        text = (
            f"--devices: GPU memory supports at most {layout.MAX_RANKS} ranks of a host, not"
            f" {together}"
        )
        raise click.UsageError(f"{text}; use fewer --ranks or fewer GPUs")
    return together


def describe(ordinals: Sequence[int]) -> str:
    """Format device numbers as ``cuda:0,1``."""
    return "cuda:" + ",".join(map(str, ordinals))


def check_options(options: dict[str, Any]) -> None:
    """Reject options that do not apply to the selected kind of device."""
    on_gpu = options["devices"].on_gpu
    for name, why in _CPU_ONLY.items():
        if on_gpu and options[name]:
            raise click.UsageError(f"--{name} is for CPU memory: {why}")
    for name in _GPU_ONLY:
        if not on_gpu and options[name]:
            raise click.UsageError(f"--{name} is for GPU memory: add --devices cuda")
    if options["sms"] is not None and not on_gpu:
        raise click.UsageError("--sms is for GPU memory: add --devices cuda")
    if options["compare"] == "nccl" and not on_gpu:
        raise click.UsageError(
            "--compare nccl: NCCL does not support CPU memory; add --devices cuda, or compare with"
            " gloo or mpi"
        )
    if options["compare"] in ("gloo", "mpi") and on_gpu:
        raise click.UsageError(
            f"--compare {options['compare']} is for CPU memory; on GPUs compare with nccl"
        )
    if options["peer_python"] and options["compare"] == "nccl":
        raise click.UsageError(
            "--peer-python does not apply to nccl, which runs under this Python through its torch"
        )
