"""Random histories of compiled flows, and that their checks find what they look for.

``TEST_SLOW=1`` runs a million of them, as ``python -m tests.wire.datagram.compiled_histories`` does
with progress.
"""

from __future__ import annotations

import os

from miraccl.proxy.kernels import flow_layout
from tests.wire.datagram.compiled_histories import CompiledWorld

COUNT = 1_000_000 if os.environ.get("TEST_SLOW") else 3000


def test_random_histories_deliver_every_frame_once() -> None:
    counts, findings = CompiledWorld().run(0, COUNT)
    assert not findings
    assert counts["histories"] == COUNT
    # the adversary was there
    assert counts["lost"] > counts["packets"] // 10
    assert counts["rejected"] > counts["packets"] // 50


def test_without_tags_corrupted_packets_are_found() -> None:
    _, findings = CompiledWorld().run(0, 100, protection=flow_layout.PROTECT_NONE)
    assert "a corrupted packet was accepted" in findings[0][1]
