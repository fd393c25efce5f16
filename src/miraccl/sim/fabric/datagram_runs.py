"""Runs of datagram flows on the fabric and what they measure: goodput, incast, message times."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from miraccl.sim.fabric.datagram_host import IP_UDP_BYTES, DatagramHost, FlowEnd, join
from miraccl.sim.fabric.events import SECOND
from miraccl.sim.fabric.network import PacketFabric
from miraccl.sim.fabric.topology import FabricTopology, LinkProfile, parallel_paths, star
from miraccl.wire.datagram.credit import Grantor
from miraccl.wire.datagram.packets import DATA_BYTES, HEADER_BYTES, TAG_BYTES

FRAME_BYTES = 1 << 18
NSTREAMS = 16
LIMIT = 600 * SECOND


class AdmissionPolicy(enum.Enum):
    """Admission at a receiver: none, one posted receive per sender, or grants over all senders."""

    OFF = "off"
    CTS = "cts"
    CREDIT = "credit"


def payload_share(mtu: int) -> float:
    """Payload of a full packet without frame header as a share of its bytes on the wire."""
    return (mtu - HEADER_BYTES - DATA_BYTES - TAG_BYTES) / (mtu + IP_UDP_BYTES)


@dataclass(frozen=True)
class GoodputResult:
    """Outcome of a transfer: time in ns, payload rate as a share of what its paths can carry."""

    time: int
    share: float
    packets: int
    lost: int
    dropped: int


def run_transfer(
    paths: Sequence[LinkProfile],
    nbytes: int,
    *,
    congestion: str = "swift",
    mtu: int = 1472,
    seed: int = 0,
) -> GoodputResult:
    """Send ``nbytes`` over parallel paths; the possible rate is that of the paths less loss."""
    fabric = PacketFabric(parallel_paths(paths), seed=seed)
    ends = join(
        DatagramHost(fabric, 0),
        DatagramHost(fabric, 1),
        npaths=len(paths),
        mtu=mtu,
        congestion=congestion,
        nstreams=NSTREAMS,
    )
    for i, frame in enumerate(_frames(nbytes)):
        ends[0].submit(i % NSTREAMS, frame, i)
    fabric.run(LIMIT, lambda: ends[0].flow.idle)
    possible = sum(p.rate * (1 - p.loss) for p in paths) * payload_share(mtu)
    forward = [fabric.ports[2 * i].counters for i in range(len(paths))]
    return GoodputResult(
        fabric.now,
        nbytes * 8 * SECOND / fabric.now / possible,
        ends[0].sent_packets,
        sum(c.lost for c in forward),
        sum(c.dropped for c in forward),
    )


def _frames(nbytes: int) -> list[bytes]:
    buffer = bytes(FRAME_BYTES)
    rest = nbytes % FRAME_BYTES
    return [buffer] * (nbytes // FRAME_BYTES) + ([buffer[:rest]] if rest else [])


def run_messages(
    path: LinkProfile, nbytes: int, count: int, *, congestion: str = "swift", seed: int = 0
) -> list[int]:
    """Send messages one after the other; return their times to acknowledgement in ns, sorted."""
    fabric = PacketFabric(parallel_paths([path]), seed=seed)
    sender, _ = join(DatagramHost(fabric, 0), DatagramHost(fabric, 1), congestion=congestion)
    times: list[int] = []
    payload = bytes(nbytes)
    started = 0

    def submit_next(end: FlowEnd, stream: int) -> None:
        nonlocal started
        times.append(fabric.now - started)
        started = fabric.now
        if len(times) < count:
            end.submit(stream, payload, len(times))

    sender.on_acknowledged = submit_next
    sender.submit(0, payload)
    fabric.run(LIMIT, lambda: len(times) == count)
    return sorted(times)


@dataclass(frozen=True, kw_only=True)
class Incast:
    """Many senders, one receiver.

    Args:
        senders: Number of senders. nbytes: Bytes of each. bottleneck: Link to the receiver; the
            other links are ``access``. admission, congestion: What holds the senders back. mtu: UDP
            payload. budget: Bytes granted at most (CREDIT); at most the queue of the bottleneck.
    """

    senders: int = 8
    nbytes: int = 4 << 20
    bottleneck: LinkProfile = field(
        default_factory=lambda: LinkProfile(rate=500_000_000, latency=25_000, queue=300_000)
    )
    access: LinkProfile = field(
        default_factory=lambda: LinkProfile(rate=10 * SECOND, latency=25_000, queue=1 << 30)
    )
    admission: AdmissionPolicy = AdmissionPolicy.CREDIT
    congestion: str = "swift"
    mtu: int = 1472
    budget: int = 256 << 10


@dataclass(frozen=True)
class IncastResult:
    """Outcome: time over the ideal time, share of packets dropped, Jain's index of the rates."""

    time: int
    over_ideal: float
    dropped_share: float
    jain: float
    peak_queue: int


def run_incast(case: Incast, seed: int = 0) -> IncastResult:
    """Run an incast; the receiver posts all of its receives at the start."""
    receiver = case.senders
    fabric = PacketFabric(_incast_topology(case), seed=seed)
    grantor = None
    if case.admission is AdmissionPolicy.CREDIT:
        grantor = Grantor(case.budget, case.bottleneck.rate // 8)
    target = DatagramHost(fabric, receiver, admission=grantor)
    pairs = [
        join(DatagramHost(fabric, i), target, mtu=case.mtu, congestion=case.congestion)
        for i in range(case.senders)
    ]
    ended: dict[int, int] = {}
    missing = {end.number: case.nbytes for _, end in pairs}

    def on_frame(end: FlowEnd, size: int) -> None:
        missing[end.number] -= size
        if not missing[end.number]:
            ended[end.number] = fabric.now

    for sender, end in pairs:
        if case.admission is AdmissionPolicy.CTS:
            _post_in_turn(sender, end, _frames(case.nbytes), on_frame)
        else:
            _post_all(sender, end, _frames(case.nbytes), on_frame)
    fabric.run(LIMIT, lambda: len(ended) == case.senders)
    rates = [case.nbytes / time for time in ended.values()]
    ideal = case.senders * case.nbytes * 8 * SECOND / case.bottleneck.rate
    ideal /= payload_share(case.mtu)
    port = fabric.ports[fabric.topology.routes[0][receiver][0]].counters
    return IncastResult(
        fabric.now,
        fabric.now / ideal,
        port.dropped / sum(sender.sent_packets for sender, _ in pairs),
        sum(rates) ** 2 / len(rates) / sum(rate * rate for rate in rates),
        port.peak,
    )


def _incast_topology(case: Incast) -> FabricTopology:
    topology = star(case.senders + 1, case.access)
    link = topology.routes[0][case.senders][0]
    topology.links[link] = replace(topology.links[link], profile=case.bottleneck)
    return topology


def _post_all(
    sender: FlowEnd, end: FlowEnd, frames: list[bytes], on_frame: Callable[[FlowEnd, int], None]
) -> None:
    end.on_frame = lambda at, frame: on_frame(at, len(frame.payload))
    for i, payload in enumerate(frames):
        end.expect(len(payload))
        sender.submit(i % NSTREAMS, payload, i)


def _post_in_turn(
    sender: FlowEnd, end: FlowEnd, frames: list[bytes], on_frame: Callable[[FlowEnd, int], None]
) -> None:
    """Clear to send: an empty frame of the receiver stands for a posted receive, one at a time."""
    waiting = list(frames)
    posted = len(frames) - 1

    def received(at: FlowEnd, size: int) -> None:
        nonlocal posted
        on_frame(at, size)
        if posted:
            posted -= 1
            at.submit(0, b"")

    end.on_frame = lambda at, frame: received(at, len(frame.payload))
    sender.on_frame = lambda at, _: at.submit(1, waiting.pop())
    end.submit(0, b"")
