"""GPUs of this machine as reported by NVML (``pynvml``, package nvidia-ml-py).

NVLinks are selected like in NCCL (``src/graph/xml.cc`` ncclTopoGetXmlFromGpu): links that support
peer access and are up; a remote end that this machine cannot see counts as an NVSwitch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

MAX_LINKS = 18
_FI_C2C_LINK_COUNT, _FI_C2C_LINK_STATUS, _FI_C2C_LINK_MAX_BW = (
    170,
    171,
    172,
)  # nvml.h NVML_FI_DEV_C2C_*
_CAP_P2P = 0  # NVML_NVLINK_CAP_P2P_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class NvmlGpu:
    """Properties of one GPU.

    ``sm`` is the compute capability times ten; ``nvlinks`` lists remote ends (bus id, lower case)
    with their number of links; ``c2c`` is the bandwidth of a link (MB/s) and the number of links,
    None without C2C.
    """

    dev: int
    bus_id: str
    sm: int
    nvlinks: tuple[tuple[str, int], ...] = ()
    c2c: tuple[int, int] | None = None


def short_bus_id(text: str) -> str:
    """Convert ``00000000:1B:00.0`` to the form of sysfs, ``0000:1b:00.0``.

    A domain that needs more than four digits keeps them.
    """
    domain, _, rest = text.lower().strip("\0 ").partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"


def read_gpus() -> tuple[list[NvmlGpu], str]:
    """Return the GPUs that NVML reports, and the reason if there are none."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return [], "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"NVML: {error}"
    try:
        return [
            _gpu(pynvml, dev) for dev in range(pynvml.nvmlDeviceGetCount())
        ], "NVML shows no GPU"
    except pynvml.NVMLError as error:
        return [], f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, dev: int) -> NvmlGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(dev)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return NvmlGpu(
        dev=dev,
        bus_id=short_bus_id(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        sm=major * 10 + minor,
        nvlinks=_nvlinks(nvml, handle),
        c2c=_c2c(nvml, handle) if major >= 9 else None,
    )


def _nvlinks(nvml: Any, handle: Any) -> tuple[tuple[str, int], ...]:
    ends: dict[str, int] = {}
    for link in range(MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkCapability(handle, link, _CAP_P2P):
                continue
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            end = _remote_end(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
        except nvml.NVMLError:
            continue
        ends[end] = ends.get(end, 0) + 1
    return tuple(ends.items())


def _remote_end(info: Any) -> str:
    """Return the bus id of a remote end in the short form of NCCL's files.

    For a switch hidden by a virtual machine it is truncated to ``fffffff:ff:ff.0``.
    """
    legacy = _text(getattr(info, "busIdLegacy", ""))
    return legacy.lower() if legacy else short_bus_id(_text(info.busId))


def _c2c(nvml: Any, handle: Any) -> tuple[int, int] | None:
    def field(number: int, scope: int = 0) -> int | None:
        try:
            value = nvml.nvmlDeviceGetFieldValues(handle, [(number, scope)])[0]
        except nvml.NVMLError:
            return None
        return int(value.value.uiVal) if value.nvmlReturn == 0 else None

    bw = count = 0
    for link in range(field(_FI_C2C_LINK_COUNT) or 0):
        if (
            field(_FI_C2C_LINK_STATUS, link) == 1
            and (speed := field(_FI_C2C_LINK_MAX_BW, link)) is not None
        ):
            bw, count = speed, count + 1
    return (bw, count) if count else None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
