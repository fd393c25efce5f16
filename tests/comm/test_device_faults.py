"""What a communicator on GPU memory raises for what its kernels found and what the control plane told."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from miraccl.bootstrap import Notice, PeerLost
from miraccl.comm.device.faults import NOTICE, DeviceFaults
from miraccl.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorAborted, PeerDied
from miraccl.executor.cuda import layout


class Told:
    """Faults with the words of a kernel, and the way by which the control plane tells."""

    def __init__(self) -> None:
        self.words = np.zeros(layout.HOST_BYTES // 4, np.uint32)
        session: Any = types.SimpleNamespace(rank=0, on_event=lambda hear: setattr(self, "hear", hear))
        self.faults = DeviceFaults(session, self.words, 1.0)

    def kernel(self, error: int, peer: int) -> None:
        self.words[layout.HOST_PEER], self.words[layout.HOST_WHAT], self.words[layout.HOST_ERROR] = peer, layout.WHAT_MESSAGE, error

    hear: Any = None


LOST = PeerLost(rank=1, reason="it ended")
ABORTED = Notice(from_rank=1, payload={NOTICE: "enough"})


@pytest.mark.parametrize("event", [LOST, ABORTED])
def test_a_mismatch_is_told_though_the_peer_has_gone(event: Any) -> None:
    """The peer may have found it first, raised it and ended."""
    told = Told()
    told.hear(event)
    told.kernel(layout.ERROR_MISMATCH, 1)
    with pytest.raises(CollectiveMismatch, match="rank 1 called another operation"):
        told.faults.check("all_reduce")


@pytest.mark.parametrize(("event", "error"), [(LOST, PeerDied), (ABORTED, CommunicatorAborted)])
def test_what_was_heard_ends_waits_and_is_told(event: Any, error: type[Exception]) -> None:
    told = Told()
    told.faults.check()
    told.hear(event)
    assert told.words[layout.HOST_ABORT] == 1
    told.kernel(layout.ERROR_TIMEOUT, 1)  # a deadline that passed meanwhile is no news
    with pytest.raises(error):
        told.faults.check("all_reduce")


def test_a_deadline() -> None:
    told = Told()
    told.kernel(layout.ERROR_TIMEOUT, 1)
    with pytest.raises(CollectiveTimeout, match="from rank 1"):
        told.faults.check("all_reduce")
