"""Other programs that measure a network, run by both ends of a pair beside our own measurement."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from miraccl.tools.net.pair import HostPair

TOOLS = ("iperf3", "ib_write_bw")
_PACKAGES = {"iperf3": "apt install iperf3", "ib_write_bw": "apt install perftest"}
#: Seconds in which a server of another program must be listening, and for its start and end.
_LISTEN_SECONDS, _EXTRA_SECONDS = 1.0, 20.0
#: Line of ib_write_bw: bytes, iterations, peak, average, message rate.
_IB_LINE = re.compile(r"^\s*(\d+)\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", re.MULTILINE)


def compare(
    pair: HostPair, tool: str, *, sizes: Sequence[int], streams: int, seconds: float, port: int
) -> list[dict[str, Any]]:
    """Run ``tool`` between the two ends and return its results; both ends return the same.

    A result has ``tool``, ``bytes`` (0 for a stream), ``gbps`` (0 where it could not run) and
    ``how``, the command or the reason.
    """
    have = shutil.which(tool) is not None
    theirs = bool(pair.exchange(have, f"{tool} installed"))
    if not (have and theirs):
        who = (
            "both ends" if not have and not theirs else "this end" if not have else "the other end"
        )
        return [_failed(tool, f"not installed at {who}: {_PACKAGES[tool]}")]
    if tool == "iperf3":
        command = ["iperf3", "-c", pair.host, "-p", str(port), "-P", str(streams), "-J"]
        command += ["-t", str(max(1, round(seconds)))]
        server = ["iperf3", "-s", "-1", "-p", str(port)]
    else:
        common = ["ib_write_bw", "--report_gbits", "-a", "-p", str(port)]
        command, server = [*common, pair.host], common
    output = _run(pair, server if pair.is_server else command, seconds + _EXTRA_SECONDS)
    results = [] if pair.is_server else parse(tool, output, " ".join(command), sizes)
    other = pair.exchange(results, f"{tool} results", seconds + 2 * _EXTRA_SECONDS)
    return list(other) if pair.is_server else results


def _failed(tool: str, reason: str) -> dict[str, Any]:
    return {"tool": tool, "bytes": 0, "gbps": 0.0, "how": reason}


def _run(pair: HostPair, command: list[str], timeout: float) -> str:
    """Run one end; the client starts when the server had time to listen."""
    if pair.is_server:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LISTEN_SECONDS)  # a server that ends at once has failed
        pair.exchange(None, f"{command[0]} listens")
        try:
            return process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[0]
    pair.exchange(None, f"{command[0]} listens")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"it did not end within {timeout:g} s"
    return done.stdout or done.stderr


def parse(tool: str, output: str, command: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the results in the output of a client."""
    if tool == "iperf3":
        try:
            record = json.loads(output)
            rate = record["end"]["sum_received"]["bits_per_second"]
        except (ValueError, KeyError, TypeError):
            return [_failed(tool, f"failed: {_last_line(output)}")]
        return [{"tool": tool, "bytes": 0, "gbps": rate / 1e9, "how": command}]
    rows = [(int(size), float(rate)) for size, rate in _IB_LINE.findall(output)]
    wanted = [(size, rate) for size, rate in rows if size in sizes] or rows
    if not wanted:
        return [_failed(tool, f"failed: {_last_line(output)}")]
    return [{"tool": tool, "bytes": size, "gbps": rate, "how": command} for size, rate in wanted]


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[:200] if lines else "no output"
