"""Detection of unmatched messages of collectives between nodes.

A message is unmatched if ranks disagreed on roots or counts, or not all called the collective. The
next message collective between the two ranks detects it by the number in its header. Without a next
one, ``UnmatchedDetector`` reads data left in a stream after its collective has ended, and
``find_unmatched`` compares at finalize the messages that every pair sent and received. Plain sends
are not checked: whether they are received is the application's business.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from miraccl.errors import CollectiveMismatch
from miraccl.executor.cpu.kernels.nogil import offsets
from miraccl.executor.cpu.lower import describe_signature
from miraccl.types import Collective

HINT = "collective, root and counts must agree on all ranks, in the same order"
_HEADER = struct.Struct("<qq")
_COUNTED, _OF_COLLECTIVES, _LAST = (
    offsets.COUNTED // 8,
    offsets.COLLECTIVE_MESSAGES // 8,
    offsets.LAST_COLLECTIVE // 8,
)
StreamCounters = Mapping[int, np.ndarray]
"""By peer the counter words of messages to it and from it (``offsets.STREAM_BYTES``)."""


def describe_collective(sig: int, number: int) -> str:
    """Return ``scatter_v #17 (root 1)``; the number counts message collectives between nodes."""
    fields = describe_signature(sig)
    text = f"{fields['collective']}_v #{number}"
    return (
        f"{text} (root {fields['root']})"
        if Collective[fields["collective"].upper()].rooted
        else text
    )


def full_number(words: np.ndarray, mark: int) -> int:
    """Return the full number of a collective from its low bits in a header.

    It is at most the number of the last collective.
    """
    counted = int(words[_COUNTED])
    return counted - (counted - mark & offsets.MARK_MASK)


def signature_of(words: np.ndarray, number: int) -> int:
    """Return the signature of collective ``number`` among those counted; 0 if unknown."""
    counted = int(words[_COUNTED])
    return (
        int(words[offsets.RECENT // 8 + number % offsets.RECENT_SIZE])
        if 0 <= counted - number < offsets.RECENT_SIZE and number > 0
        else 0
    )


def describe_unmatched(sender: int, sig: int, receiver: int, known: int, number: int) -> str:
    """Describe an unmatched message of collective ``number``.

    ``sig``: the sender's signature; ``known``: the receiver's, 0 if unknown.
    """
    there, here = describe_collective(sig, number), describe_collective(known or sig, number)
    if here != there:
        both = sorted([(receiver, here), (sender, there)])
        return "ranks called different operations: " + ", ".join(
            f"{what} on rank {who}" for who, what in both
        )
    return (
        f"message count mismatch: rank {sender} sent more in {there} than rank {receiver} received"
    )


@dataclass(frozen=True)
class MessageCounters:
    """Collective counters of a rank, and by peer its messages in collectives.

    ``peers`` has per peer: messages sent, number of the last collective with one, messages
    received.
    """

    collectives: np.ndarray
    peers: np.ndarray

    @classmethod
    def of(cls, nranks: int, collectives: np.ndarray, counters: StreamCounters) -> MessageCounters:
        peers = np.zeros((nranks, 3), np.int64)
        for peer, (out, into) in counters.items():
            peers[peer] = out[_OF_COLLECTIVES], out[_LAST], into[_OF_COLLECTIVES]
        return cls(collectives, peers)

    def to_bytes(self) -> bytes:
        return self.collectives.tobytes() + self.peers.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> MessageCounters:
        words = np.frombuffer(data, np.int64)
        size = offsets.COLLECTIVES_BYTES // 8
        return cls(words[:size], words[size:].reshape(-1, 3))


def find_unmatched(
    tallies: Sequence[MessageCounters | None], rank: int
) -> CollectiveMismatch | None:
    """Return the error of an unmatched message, the same on all ranks, or None.

    A rank without counters (None) does not know what it has sent and received.
    """
    by_rank = {who: tally for who, tally in enumerate(tallies) if tally is not None}
    unmatched = [
        (int(there.peers[receiver][1]), sender, receiver)
        for sender, there in by_rank.items()
        for receiver, here in by_rank.items()
        if there.peers[receiver][0] > here.peers[sender][2]
    ]
    if not unmatched:
        return None
    number, sender, receiver = min(unmatched)
    sig, here = signature_of(by_rank[sender].collectives, number), by_rank[receiver].collectives
    if not sig:
        text = (
            f"message count mismatch: rank {sender} sent more in collective #{number} "
            f"than rank {receiver} received"
        )
    elif number > here[_COUNTED]:
        what = describe_collective(sig, number)
        text = (
            f"message count mismatch: rank {sender} sent in {what}, "
            f"which rank {receiver} did not call"
        )
    else:
        text = describe_unmatched(sender, sig, receiver, signature_of(here, number), number)
    return CollectiveMismatch(
        text, rank=rank, peer=sender if rank == receiver else receiver, hint=HINT
    )


class UnmatchedDetector:
    """Reader of data left in the streams of a rank; it consumes nothing."""

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket]) -> None:
        self._rank, self._sockets = rank, sockets
        self._peers = {stream.fileno(): peer for peer, stream in sockets.items()}
        self._poll = select.poll()
        for descriptor in self._peers:
            self._poll.register(descriptor, select.POLLIN)

    def poll(
        self, collectives: np.ndarray, counters: StreamCounters, between: Callable[[], bool]
    ) -> CollectiveMismatch | None:
        """Return the error of a message that this rank will not receive, or None.

        ``between()``: the staging thread is between operations. It may begin one at any time, as
        another thread may launch a graph; so a header counts only if nothing has begun since.
        """
        if not collectives[_COUNTED]:
            return None
        for descriptor, events in self._poll.poll(0):
            peer = self._peers[descriptor]
            begun = int(counters[peer][1][offsets.MESSAGES_BEGUN // 8]), int(collectives[_COUNTED])
            if not events & select.POLLIN or not between():
                continue
            header = b""
            with contextlib.suppress(OSError):
                header = self._sockets[peer].recv(
                    _HEADER.size, socket.MSG_PEEK | socket.MSG_DONTWAIT
                )
            now = int(counters[peer][1][offsets.MESSAGES_BEGUN // 8]), int(collectives[_COUNTED])
            if len(header) == _HEADER.size and between() and begun == now:
                sig, second = _HEADER.unpack(header)
                found = self._check_header(peer, sig, second, collectives)
                if found is not None:
                    return found
        return None

    def _check_header(
        self, peer: int, sig: int, second: int, collectives: np.ndarray
    ) -> CollectiveMismatch | None:
        """Return the error of a header between two messages of ``peer``, or None.

        A collective still to run has a larger number than all that this rank has begun.
        """
        number = full_number(collectives, second >> offsets.MARK_SHIFT)
        if (
            sig >> 16 & 31 == Collective.SEND_RECV
            or int(collectives[_COUNTED]) - number > offsets.MARK_MASK // 2
        ):
            return None
        text = describe_unmatched(peer, sig, self._rank, signature_of(collectives, number), number)
        return CollectiveMismatch(text, rank=self._rank, peer=peer, hint=HINT)
