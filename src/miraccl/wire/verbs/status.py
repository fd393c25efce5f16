"""Completion statuses of verbs as text, with what they mean for a user and what to do.

Numbers are those of ``enum ibv_wc_status``. Vendor errors are codes of the device's maker; those
listed are of mlx5, as its users report them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StatusText:
    """Meaning of a status and an advice."""

    meaning: str
    advice: str


_FABRIC = "check the cable, the switch and that both ports are active (miraccl net devices)"
_BUG = "this is a bug of miraccl or of the driver"
STATUSES: dict[int, StatusText] = {
    1: StatusText(meaning="local length error", advice=_BUG),
    2: StatusText(meaning="local queue pair error", advice=_BUG),
    4: StatusText(
        meaning="local protection error",
        advice="memory was unmapped while a transfer used it, or " + _BUG,
    ),
    5: StatusText(
        meaning="work request flushed",
        advice="the queue pair had failed before; see its first error",
    ),
    8: StatusText(meaning="bad response", advice=_FABRIC),
    9: StatusText(meaning="local access error", advice=_BUG),
    10: StatusText(
        meaning="remote access error: the peer does not allow the address",
        advice="the peer's memory was unmapped, or " + _BUG,
    ),
    11: StatusText(
        meaning="remote operation error", advice="read the kernel log of the peer's host"
    ),
    12: StatusText(
        meaning="transport retry counter exceeded: the peer did not acknowledge",
        advice="the peer's process or port is gone, packets are lost, or the GIDs are not routable "
        "to each other: " + _FABRIC + "; MIRACCL_IB_TIMEOUT and MIRACCL_IB_RETRY_CNT wait longer",
    ),
    13: StatusText(
        meaning="receiver-not-ready retry counter exceeded",
        advice="the peer's process does not run (stopped, swapped out?)",
    ),
    14: StatusText(meaning="local RDD violation", advice=_BUG),
    21: StatusText(meaning="fatal error", advice="the device has failed: read the kernel log"),
    22: StatusText(meaning="response timeout", advice=_FABRIC),
    23: StatusText(meaning="general error", advice="read the kernel log"),
}
VENDOR_ERRORS: dict[int, str] = {
    129: "the acknowledgement timed out (mlx5: 0x81)",
    136: "access to memory was refused (mlx5: 0x88)",
    137: "the local key or address is invalid (mlx5: 0x89)",
    249: "the queue pair was in error already (mlx5: 0xf9)",
}


def describe_status(status: int, vendor: int = 0) -> str:
    """Return a status as one line: number, meaning, vendor error, advice."""
    known = STATUSES.get(status)
    text = f"completion status {status}"
    if known:
        text += f" ({known.meaning})"
    if vendor:
        note = VENDOR_ERRORS.get(vendor)
        text += f", vendor error {vendor}" + (f" ({note})" if note else "")
    return f"{text}: {known.advice}" if known else text
