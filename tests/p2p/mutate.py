"""Feed mutated frames to the compiled target: ``python -m tests.p2p.mutate --frames 1000000``.

Sessions of valid requests are mutated at random and sent over a socket pair. Nothing may be written
outside of the regions, nor to the region that peers may only read, and the process must not crash.
"""

from __future__ import annotations

import argparse
import logging
import random
import time

from miraccl.wire import p2p_target as wire
from tests.p2p.target_pair import SIZES, Regions


def valid(regions: Regions, rng: random.Random, number: int) -> bytes:
    """Return a request that is allowed."""
    slot = rng.choice(sorted(regions.regions))
    region = regions.regions[slot]
    kind = rng.choice((wire.PUT, wire.PUT, wire.GET, wire.NOTIFY, wire.END))
    if kind == wire.NOTIFY:
        return (
            wire.TargetRequest(kind=kind, number=number, payload=8, generation=1).encode()
            + b"\1" * 8
        )
    if kind == wire.END:
        return wire.TargetRequest(kind=kind, number=number).encode()
    extents = []
    for _ in range(rng.randint(1, 4)):
        offset = rng.randint(0, region.nbytes - 1)
        extents.append((offset, rng.randint(0, min(100, region.nbytes - offset))))
    payload = sum(n for _, n in extents)
    head = wire.TargetRequest(
        kind=kind,
        flags=rng.randint(0, 3),
        number=number,
        slot=slot,
        payload=payload,
        generation=region.generation,
        key=region.key,
        extents=tuple(extents),
    ).encode()
    return head + (b"\7" * payload if kind == wire.PUT else b"")


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the frame with bits flipped, words replaced, or bytes cut or repeated."""
    changed = bytearray(data)
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(changed))
        match rng.randrange(4):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                word = rng.choice((0, -1, 1 << 62, -(1 << 63), 3000, 1 << 32, rng.getrandbits(62)))
                at = at // 8 * 8
                changed[at : at + 8] = word.to_bytes(8, "little", signed=True)
            case 2:
                del changed[at : at + rng.randint(1, 8)]
            case _:
                changed[at:at] = changed[at : at + rng.randint(1, 8)]
        if not changed:
            break
    return bytes(changed)


def run(nframes: int, seed: int, per_session: int = 8) -> int:
    """Send frames; return the number that the target executed."""
    regions, rng = Regions(), random.Random(seed)
    readonly = next(s for s, r in regions.regions.items() if r.nbytes == SIZES["r"])
    before, executed = regions.memory[readonly].copy(), 0
    for _ in range(nframes // per_session):
        frames = [mutated(valid(regions, rng, i), rng) for i in range(per_session)]
        # Later frames of a session are reached only if the earlier ones keep the stream in step.
        session = b"".join(frames if rng.random() < 0.5 else frames[: rng.randint(1, 5)] + frames)
        replies, notes = regions.run_compiled(session)
        executed += len(replies) // 32 + len(notes)
        if not regions.intact() or (regions.memory[readonly] != before).any():
            raise SystemExit("bytes were written outside of what was permitted")
    return executed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    start = time.perf_counter()
    executed = run(options.frames, options.seed)
    print(
        f"{options.frames} frames, {executed} replies and notifications, 0 bytes written outside, "
        f"{time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
