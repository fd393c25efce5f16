"""Random histories of a network between two flows, with everything that must hold after each event.

An adversary loses, duplicates, delays, reorders and corrupts packets, cuts paths in one or both
directions, and moves the clocks of both hosts. Checked: every frame arrives once, in order and
byte-equal; a packet never names memory that was released; a receiver gets no byte that it has not
granted; state stays bounded; corrupted bytes are not authentic; and every history ends.

    python -m tests.wire.datagram.histories --count 1000000 --processes 2
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from miraccl.native.crypto import AesGcm
from miraccl.sim.fabric.datagram_host import DatagramHost, FlowEnd, join
from miraccl.sim.fabric.events import MS, SECOND, US
from miraccl.sim.fabric.faults import LinkChange
from miraccl.sim.fabric.network import PacketFabric
from miraccl.sim.fabric.topology import LinkProfile, parallel_paths
from miraccl.wire.datagram.control import CONTROLLERS
from miraccl.wire.datagram.credit import UNSOLICITED_BYTES, Grantor
from miraccl.wire.datagram.packets import Packet, decode, encode
from miraccl.wire.datagram.path import REMEMBERED
from miraccl.wire.datagram.seal import Protection, protect, unprotect
from tests.wire.datagram.campaign import run_campaign

LIMIT = 24 * 3600 * SECOND
CHUNK = 100


@dataclass(frozen=True)
class SealedCodec:
    """Packets as bytes with a tag, as on a real network."""

    cipher: AesGcm
    mode: Protection

    def seal(self, packet: Packet) -> bytes:
        return protect(self.mode, self.cipher, encode(packet))

    def open(self, data: bytes) -> Packet | None:
        plain = unprotect(self.mode, self.cipher, data)
        return None if plain is None else decode(plain)


def random_profile(draw: random.Random) -> LinkProfile:
    probability = (0.0, 0.0, 0.02, 0.2, 0.5)
    return LinkProfile(
        rate=draw.choice((20, 500, 10_000)) * 1_000_000,
        latency=draw.choice((0, 50 * US, 5 * MS)),
        queue=draw.choice((20_000, 300_000)),
        loss=draw.choice((*probability, 0.8)),
        jitter=draw.choice((0, 200 * US, 20 * MS)),
        duplicate=draw.choice(probability),
        corrupt=draw.choice(probability),
    )


def random_cuts(draw: random.Random, nlinks: int) -> list[LinkChange]:
    """Cuts of links, each repaired later, so that the network delivers now and then."""
    changes = []
    for _ in range(draw.choice((0, 0, 1, 2, 4))):
        link, start = draw.randrange(nlinks), draw.randrange(500 * MS)
        length = draw.choice((1 * MS, 30 * MS, 300 * MS, 3 * SECOND))
        changes += [
            LinkChange(time=start, link=link, up=False),
            LinkChange(time=start + length, link=link, up=True),
        ]
    return changes


def check_end(end: FlowEnd, host: DatagramHost, received: int) -> None:
    """Assert what must hold at any time at one end; ``received`` are payload bytes so far."""
    for path in end.flow.paths:
        assert len(path._lost) + len(path.sent) <= REMEMBERED, "remembered packets"
        assert len(path.received.numbers) <= 32, "ranges of received numbers"
    if host.admission is not None:
        granted = host.admission.senders[end.number].granted
        assert received <= max(granted, UNSOLICITED_BYTES), "bytes beyond the grant"


def run_history(seed: int) -> dict[str, int]:
    """Run one history; ``AssertionError`` or ``ProtocolError`` is a violation."""
    draw = random.Random(seed)
    npaths = draw.randrange(1, 4)
    fabric = PacketFabric(parallel_paths([random_profile(draw) for _ in range(npaths)]), seed=seed)
    fabric.schedule_changes(random_cuts(draw, 2 * npaths))
    # tags in Python take as long as the rest of a history
    mode = Protection.MAC if draw.random() < 0.1 else Protection.AEAD
    codec = SealedCodec(AesGcm(bytes(16)), mode)
    hosts = []
    for number in (0, 1):
        admission = Grantor(draw.choice((64 << 10, 1 << 20))) if draw.random() < 0.3 else None
        hosts.append(DatagramHost(fabric, number, admission=admission, codec=codec, check=True))
    congestion = draw.choice(sorted(CONTROLLERS))
    ends = join(*hosts, npaths=npaths, mtu=1232, congestion=congestion, nstreams=4)
    for _ in range(draw.choice((0, 0, 1, 3))):
        jump = draw.choice((1 * MS, 1 * SECOND, 3600 * SECOND))
        fabric.events.schedule(draw.randrange(300 * MS), _jump, (hosts[draw.randrange(2)], jump))
    sent = _submit(draw, ends, hosts)
    total = sum(len(frames) for frames in sent.values())

    def done() -> bool:
        for i in (0, 1):
            check_end(ends[i], hosts[i], received_bytes(ends[i]))
        return all(end.flow.idle for end in ends)

    fabric.run(LIMIT, done)
    assert all(end.flow.idle for end in ends), f"not finished at {fabric.now} ns"
    for (side, stream), frames in sent.items():
        got = [f.payload for f in ends[1 - side].frames if f.stream == stream]
        assert got == frames, f"side {side}, stream {stream}"
    assert sum(len(end.frames) for end in ends) == total
    return {
        "histories": 1,
        "frames": total,
        "packets": sum(end.sent_packets for end in ends),
        "rejected": sum(host.rejected for host in hosts),
        "lost": fabric.total("lost") + fabric.total("dropped"),
        "events": fabric.events.executed,
    }


def _jump(argument: tuple[DatagramHost, int]) -> None:
    """Move a host's clock forward, as a suspended virtual machine sees it."""
    host, by = argument
    host.clock_offset += by
    for end in host.ends.values():
        host.wake(end)


def _submit(
    draw: random.Random, ends: tuple[FlowEnd, FlowEnd], hosts: list[DatagramHost]
) -> dict[tuple[int, int], list[bytes]]:
    sent: dict[tuple[int, int], list[bytes]] = {}
    # Most histories are short, so that many are run; every twentieth is long.
    longest = 100_000 if draw.random() < 0.05 else 4_000
    for i in range(draw.randrange(1, 7)):
        side, stream = draw.randrange(2), draw.randrange(4)
        payload = draw.randbytes(draw.choice((0, 1, draw.randrange(1200), draw.randrange(longest))))
        sent.setdefault((side, stream), []).append(payload)
        ends[1 - side].expect(len(payload))
        ends[side].submit(stream, payload, i)
    return sent


def received_bytes(end: FlowEnd) -> int:
    """Payload bytes that have arrived at an end."""
    partial = sum(s.received.total for s in end.flow._incoming)
    return partial + sum(len(f.payload) for f in end.frames)


def run_chunk(first: int) -> dict[str, Any]:
    """Run ``CHUNK`` histories; findings are returned with their seeds."""
    totals: dict[str, Any] = {"findings": []}
    for seed in range(first, first + CHUNK):
        try:
            for name, count in run_history(seed).items():
                totals[name] = totals.get(name, 0) + count
        except Exception as error:  # any exception is a finding
            totals["findings"].append((seed, f"{type(error).__name__}: {error}"))
    return totals


def main() -> None:
    run_campaign(
        run_chunk,
        about=__doc__.split("\n\n")[0],
        unit="histories",
        chunk=CHUNK,
        count=10_000,
        step=CHUNK,
    )


if __name__ == "__main__":
    main()
