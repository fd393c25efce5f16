"""Mutated packets: none is accepted, none ends in anything but a named rejection.

Two layers. A packet changed on the wire must fail its tag (0 accepted). The same change before the
tag is made stands for a faulty peer that has the key: ``decode`` must reject it or have read a
packet that ``encode`` gives back, and the flow that receives it must reject it with
``ProtocolError`` or go on with valid state.

    python -m tests.wire.datagram.mutations --count 10000000 --processes 2
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from miraccl.errors import ProtocolError
from miraccl.native.crypto import AesGcm
from miraccl.wire.datagram.flow import DatagramFlow, validate_state
from miraccl.wire.datagram.flow_records import FlowConfig
from miraccl.wire.datagram.packets import Ack, Data, Grant, Packet, Probe, Record, decode, encode
from miraccl.wire.datagram.seal import Protection, protect, unprotect
from miraccl.wire.stream import Frame, FrameType, encode_frame
from tests.wire.datagram.campaign import run_campaign

CHUNK = 2_000
#: Every so many mutations one is also given to a flow.
FLOW_EVERY = 20


@cache
def cipher() -> AesGcm:
    return AesGcm(bytes(range(16)))


def random_record(draw: random.Random) -> Record:
    kind = draw.randrange(4)
    if kind == 0:
        payload = draw.randbytes(draw.choice((1, 20, 200)))
        n = len(payload)
        frame = Frame(FrameType.DATA, 0, draw.randrange(9), 0, n, 0, n, 0)
        header = encode_frame(frame) if draw.random() < 0.7 else b""
        return Data(draw.randrange(4), draw.randrange(3), draw.randrange(300), payload, header)
    if kind == 1:
        edges = sorted(draw.sample(range(2000), 2 * draw.randrange(1, 9)))
        ranges = tuple(zip(edges[::2], edges[1::2], strict=True))[::-1]
        return Ack(draw.randrange(4), ranges, draw.randrange(1 << 20))
    return Grant(draw.randrange(1 << 40)) if kind == 2 else Probe(draw.randrange(30))


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Change bits, bytes and lengths in one to three places."""
    changed = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        kind, at = draw.randrange(5), draw.randrange(len(changed) or 1)
        if kind <= 1 and changed:
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 2 and changed:
            changed[at] = draw.choice((0, 0xFF, 0x80, draw.randrange(256)))
        elif kind == 3:
            del changed[at : at + draw.choice((1, 4, 1 << 16))]
        else:
            changed[at:at] = draw.randbytes(draw.choice((1, 2, 8)))
    return bytes(changed)


def run_chunk(seed: int) -> dict[str, Any]:
    """Run ``CHUNK`` mutations; findings are returned with their seed."""
    draw = random.Random(seed)
    counts = dict.fromkeys(("mutations", "accepted", "decoded", "received", "unchanged"), 0)
    findings: list[tuple[int, str]] = []
    config = FlowConfig(connection=7, peer_connection=8, npaths=4, nstreams=4, granted=1 << 20)
    flow, now = DatagramFlow(config), 0
    for i in range(CHUNK):
        if i % 8 == 0:
            records = tuple(random_record(draw) for _ in range(draw.randrange(1, 4)))
            packet = Packet(draw.randrange(4), 7, draw.randrange(1 << 20), records)
            plain = encode(packet)
            mode = draw.choice((Protection.MAC, Protection.AEAD))
            sealed = protect(mode, cipher(), plain)
        counts["mutations"] += 1
        wire = mutate(sealed, draw)
        if wire == sealed:
            counts["unchanged"] += 1
        elif unprotect(mode, cipher(), wire) is not None:
            counts["accepted"] += 1
            findings.append((seed, f"accepted {wire.hex()}"))
        try:
            changed = mutate(plain, draw)
            try:
                found = decode(changed)
            except ProtocolError:
                continue
            counts["decoded"] += 1
            if encode(found) != changed:
                findings.append((seed, f"not canonical {changed.hex()}"))
            if i % FLOW_EVERY == 0:
                now += 1000
                counts["received"] += 1
                flow = _receive(flow, config, now, found)
        except Exception as error:
            findings.append((seed, f"{type(error).__name__}: {error}"))
    return {**counts, "findings": findings}


def _receive(flow: DatagramFlow, config: FlowConfig, now: int, packet: Packet) -> DatagramFlow:
    """Give a packet to a flow; return it, or a new one after a protocol error."""
    try:
        flow.receive(now, packet, path=packet.path % config.npaths)
    except ProtocolError:
        return DatagramFlow(config)
    validate_state(flow)
    return flow


def main() -> None:
    run_campaign(
        run_chunk, about=__doc__.split("\n\n")[0], unit="mutations", chunk=CHUNK, count=100_000
    )


if __name__ == "__main__":
    main()
