"""State of the compiled engine of one rank: its control page, connections and wait policies."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Mapping
from dataclasses import replace

from miraccl.executor.cpu.context import Context, PeerConnections, WaitPolicy, words_at
from miraccl.executor.cpu.kernels import layout
from miraccl.native import atomics
from miraccl.runtime import group
from miraccl.runtime.rank_records import RankRecords
from miraccl.transport.base import Capability, FifoPair, NetworkProxy, Transport

#: Wait policies of ranks with a core each, and of ranks that share cores.
DEDICATED_CORES = WaitPolicy(spin=1000, yields=5)
SHARED_CORES = WaitPolicy(spin=30, yields=60, membarrier=False)
#: Spins and yields of ranks that advance network connections while they wait: each makes a system
#: call, and a sleep hands the connections to a thread, which costs two switches. Few spins: a peer
#: on the same core runs at the first yield (two ranks on one core, 8 B: 40 us with 30 spins, 18 us
#: with 4), which costs 0.3 us where no thread waits for the core.
DRIVING_SPINS, DRIVING_YIELDS = 4, 300
#: The same of ranks with a single core whose connections an engine's thread advances.
ONE_CORE_SPINS, ONE_CORE_YIELDS = 0, 5
#: Ranks per core up to which the thread of a proxy has a core of its own.
OVERLAP_RANKS_PER_CORE = 0.5

_PROGRESS_WORDS = {
    "seq": layout.PROGRESS_SEQ,
    "sig": layout.PROGRESS_SIG,
    "count": layout.PROGRESS_COUNT,
    "step": layout.PROGRESS_STEP,
    "peer": layout.PROGRESS_PEER,
    "state": layout.PROGRESS_STATE,
    "p2p_sig": layout.PROGRESS_P2P_SIG,
    "p2p_count": layout.PROGRESS_P2P_COUNT,
}


class ControlPage:
    """Control page of a rank at ``address``, which the caller keeps mapped."""

    def __init__(self, address: int) -> None:
        self.address = address

    def wake(self) -> None:
        """Wake the rank if it sleeps in the engine; callable from any thread."""
        atomics.ring_futex(self.address + layout.CTRL_DOORBELL)

    def set_abort(self, code: int) -> None:
        """End every wait of the rank, now and later, with ``code``; callable from any thread."""
        atomics.store_release(self.address + layout.CTRL_ABORT, code)
        self.wake()

    def board(self) -> dict[str, int]:
        """Return the state of the engine as its progress page shows it to the other ranks."""
        words = words_at(self.address, layout.PAGE // 8)
        return {name: int(words[place // 8]) for name, place in _PROGRESS_WORDS.items()}

    def history(self) -> dict[int, tuple[int, int]]:
        """Return {sequence number, low bits: (signature, count)} of the last operations."""
        words = words_at(self.address + layout.CTRL_HISTORY, 2 * layout.HISTORY)
        entries = [(int(words[2 * i]), int(words[2 * i + 1])) for i in range(layout.HISTORY)]
        return {sig & layout.SEQ_MASK: (sig, count) for sig, count in entries if sig}


def wait_policy(ranks_per_core: float, timeout: float, membarrier: bool) -> WaitPolicy:
    """Return the wait policy of a rank; ``membarrier``: all ranks have registered for it."""
    policy = SHARED_CORES if ranks_per_core > 1 else DEDICATED_CORES
    return replace(policy, timeout_s=timeout, membarrier=membarrier and policy.membarrier)


def drive_network(context: Context, proxy: NetworkProxy | Transport, ranks_per_core: float) -> None:
    """Let the engine advance the connections of ``proxy`` while it waits, if the proxy can."""
    driving = proxy.driver(overlap=ranks_per_core <= OVERLAP_RANKS_PER_CORE)
    if driving.sleeps:
        context.set(layout.CTX_SPIN, 0)
        context.set(layout.CTX_YIELDS, 0)
    elif driving.function:
        context.set(layout.CTX_SPIN, DRIVING_SPINS)
        context.set(layout.CTX_YIELDS, DRIVING_YIELDS)
    elif len(os.sched_getaffinity(0)) == 1:
        context.set(layout.CTX_SPIN, ONE_CORE_SPINS)
        context.set(layout.CTX_YIELDS, ONE_CORE_YIELDS)
    context.set(layout.CTX_DRIVE_SLEEPS, int(driving.sleeps))
    context.set(layout.CTX_DRIVEN, driving.argument)
    context.set(layout.CTX_DRIVE, driving.function)


def fanout_bytes(slot_bytes: int, receivers: int, window_bytes: int) -> int:
    """Return the bytes of a rank's slots for payloads with several receivers (kernels.fanout).

    They are the end of its window. 0 if it has less than two ``receivers`` on its host, or if they
    would be much of the window.
    """
    nbytes = -(-layout.NFANOUT * slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return nbytes if receivers > 1 and nbytes <= window_bytes // 16 else 0


def open_context(
    ranks: RankRecords,
    pairs: Mapping[int, FifoPair],
    *,
    control: int,
    window: tuple[int, int],
    fanout: int,
    readable: Collection[int],
    policy: WaitPolicy,
) -> Context:
    """Return the state of the compiled engine over connections.

    Args:
        control: Address of this rank's control page.
        window: (address, bytes) of its window memory.
        fanout: Address of its slots for payloads with several receivers, in the window; 0: none.
        readable: Peers that can read this rank's private memory.
    """
    return Context(
        rank=ranks.rank,
        nranks=len(ranks.endpoints),
        ctrl=control,
        connections={
            peer: peer_connections(pair, readable=peer in readable) for peer, pair in pairs.items()
        },
        policy=policy,
        window=(window[0], window[0] + window[1]),
        fanout=fanout,
        threaded=ranks.threaded,
        groups=group.address(),
        stream_from=ranks.cache_share(),
    )


def peer_connections(pair: FifoPair, *, readable: bool) -> PeerConnections:
    """Return the engine's view of ``pair``; ``readable``: the peer can read this rank's memory."""
    return PeerConnections(
        capabilities=int(pair.capabilities),
        slot_bytes=pair.send.slot_bytes,
        send_descs=pair.send.descriptors,
        send_tail=pair.send.tail,
        send_slots=pair.send.slots,
        recv_descs=pair.recv.descriptors,
        recv_tail=pair.recv.tail,
        recv_slots=pair.recv.slots,
        recv_cts=pair.recv.cts,
        ctrl=pair.control,
        pid=pair.pid,
        window=pair.window,
        readable=readable or Capability.IN_PLACE in pair.capabilities,
        doorbell=pair.send.doorbell,
        asleep=pair.send.asleep,
    )
