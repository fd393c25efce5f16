"""Hosts and switches as network namespaces: several paths with rate, queue and loss.

Each host is a namespace with one interface per path; each path is a namespace with a bridge. A
switch port sends at ``rate`` from a queue of ``queue`` bytes (tbf); a packet that reaches the
switch is lost with probability ``loss`` (nftables). Packets are cut before the wire, so that one is
lost at a time. Needs root, iproute2 and nftables.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from types import TracebackType

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """Return why this host cannot make namespaces, "" if it can."""
    if os.geteuid() != 0:
        return "needs root"
    for command in ("ip", "tc", "nft"):
        if shutil.which(command) is None:
            return f"needs {command}"
    return ""


def enter(namespace: str) -> None:
    """Move the calling thread into a namespace; sockets that it opens belong to it."""
    with open(f"/run/netns/{namespace}") as file:
        if _libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


def _run(*words: str, stdin: str = "") -> str:
    done = subprocess.run(
        words, input=stdin, check=False, capture_output=True, text=True, timeout=30
    )
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Lab:
    """A network of hosts and switches; a context manager.

    Args:
        rate: Bits per second of each switch port, 0 without limit.
        queue: Bytes of its queue.
        loss: Probability that a packet is lost on its way to the switch.
    """

    def __init__(
        self,
        *,
        hosts: int = 2,
        paths: int = 1,
        rate: float = 500e6,
        queue: int = 300_000,
        loss: float = 0.0,
        mtu: int = 1500,
        prefix: str = "",
    ) -> None:
        self.prefix = prefix or f"mclab{os.getpid()}"
        self.nhosts, self.npaths, self.mtu, self.queue = hosts, paths, mtu, queue
        self._rate, self._loss = rate, loss

    def host(self, index: int) -> str:
        """Return the namespace of a host."""
        return f"{self.prefix}-h{index}"

    def switch(self, path: int) -> str:
        """Return the namespace of a path's switch."""
        return f"{self.prefix}-s{path}"

    def addresses(self, host: int) -> tuple[str, ...]:
        """Return the addresses of a host, path by path."""
        return tuple(f"10.88.{path}.{host + 1}" for path in range(self.npaths))

    def __enter__(self) -> Lab:
        try:
            for path in range(self.npaths):
                self._make_switch(path)
            for host in range(self.nhosts):
                self._make_host(host)
            for path in range(self.npaths):
                self.set_loss(path, self._loss)
                self.set_rate(path, self._rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _make_switch(self, path: int) -> None:
        name = self.switch(path)
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "br0", "mtu", str(self.mtu), "type", "bridge")
        _run("ip", "-n", name, "link", "set", "br0", "up")

    def _make_host(self, host: int) -> None:
        name = self.host(host)
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        for path in range(self.npaths):
            switch, device, port = self.switch(path), f"p{path}", f"h{host}"
            pair = ["type", "veth", "peer", "name", port, "netns", switch]
            _run("ip", "-n", name, "link", "add", "name", device, "mtu", str(self.mtu), *pair)
            # one segment per packet: super-packets are cut before the wire
            _run("ip", "-n", name, "link", "set", device, "gso_max_segs", "1", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.addresses(host)[path]}/24", "dev", device)
            _run("ip", "-n", switch, "link", "set", port, "mtu", str(self.mtu))
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")

    def set_loss(self, path: int, loss: float) -> None:
        """Lose packets with a probability from now on."""
        rules = (
            "table bridge lab { }\ndelete table bridge lab\ntable bridge lab {\n"
            " chain in { type filter hook prerouting priority -300; policy accept;\n"
            "  ether type arp accept\n"
            f"  numgen random mod 1000000 < {round(loss * 1e6)} counter drop\n"
            "  counter\n }\n}\n"
        )
        _run("ip", "netns", "exec", self.switch(path), "nft", "-f", "-", stdin=rules)

    def set_rate(self, path: int, rate: float) -> None:
        """Send at ``rate`` bits per second from each port of a switch."""
        for host in range(self.nhosts):
            words = ["dev", f"h{host}", "root"]
            with contextlib.suppress(OSError):
                _run("tc", "-n", self.switch(path), "qdisc", "del", *words)
            if rate:
                limits = ["burst", "36000", "limit", str(self.queue)]
                shape = ["tbf", "rate", f"{round(rate)}bit", *limits]
                _run("tc", "-n", self.switch(path), "qdisc", "add", *words, *shape)

    def set_up(self, path: int, up: bool) -> None:
        """Let a switch forward, or drop everything."""
        state = "up" if up else "down"
        _run("ip", "-n", self.switch(path), "link", "set", "br0", state)

    def counters(self, path: int) -> dict[str, int]:
        """Return packets lost and passed on a path, and packets dropped by full queues."""
        name = self.switch(path)
        table = _run("ip", "netns", "exec", name, "nft", "list", "table", "bridge", "lab")
        counts = [int(n) for n in re.findall(r"counter packets (\d+)", table)]
        queues = _run("tc", "-n", name, "-s", "qdisc", "show")
        dropped = sum(int(n) for n in re.findall(r"dropped (\d+)", queues))
        return {"lost": counts[0], "passed": counts[1], "queue_drops": dropped}

    def close(self) -> None:
        """Remove all namespaces."""
        names = [self.host(i) for i in range(self.nhosts)]
        for name in names + [self.switch(i) for i in range(self.npaths)]:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _run("ip", "netns", "del", name)
