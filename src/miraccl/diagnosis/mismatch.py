"""Comparison of what ranks run, and its text: op signatures, progress pages, status answers.

A *board* is the progress page of a rank as a dict (``fabric.board``): number, signature and count
of its last collective (``seq``, ``sig``, ``count``) and of its current message (``p2p_sig``,
``p2p_count``), its state, and the peer and step it waits in.
"""

from __future__ import annotations

from typing import Any

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.lower import describe_signature


def _fields(sig: int, count: int) -> dict[str, str]:
    """Return the fields of a signature; with ``count`` -1 the count is the hash in the signature.

    Of two hashes only the difference is reported.
    """
    return {**describe_signature(sig), **({"count": str(count)} if count >= 0 else {})}


def compare_ops(entries: dict[int, tuple[int, int]]) -> str:
    """Describe how operations of one number differ; empty if they do not.

    ``entries``: (signature, count) by rank.
    """
    if len({sig for sig, _ in entries.values()}) < 2:
        return ""
    # Signatures of one hash of the count: the counts may differ all the same, as those of uneven
    # blocks do.
    counts_differ = len({sig >> layout.SIG_COUNT_SHIFT for sig, _ in entries.values()}) > 1
    fields = {
        rank: _fields(sig, count if counts_differ else -1)
        for rank, (sig, count) in sorted(entries.items())
    }
    # The page's count is written after its signature, so it may be that of the operation before;
    # the hash in the signature then still differs.
    return describe_differences(fields) or describe_differences(
        {rank: _fields(sig, -1) for rank, (sig, _) in sorted(entries.items())}
    )


def describe_completed_peer(rank: int, peer: int) -> str:
    """Return the text for a rank that waits for a peer which has completed the operation."""
    return (
        f"message count mismatch: rank {rank} still expects data from rank {peer}, "
        f"but rank {peer} has completed this operation"
    )


def has_completed(board: dict[str, int], theirs: dict[str, Any]) -> bool:
    """Return True if the rank of the board ``theirs`` has completed the collective on ``board``."""
    return bool(
        theirs["seq"] > board["seq"]
        or (theirs["seq"] == board["seq"] and theirs["state"] == layout.STATE_IDLE)
    )


def describe_stray_message(rank: int, peer: int, want: int, got: int) -> str:
    """Describe a message of ``peer`` that belongs to another operation than ``rank`` waits in.

    ``want`` and ``got`` are signatures. Both ranks called the two operations alike. Empty if the
    operations have one number.
    """
    mine, theirs = want & layout.SEQ_MASK, got & layout.SEQ_MASK
    if mine == theirs:
        return ""
    if (theirs - mine) & layout.SEQ_MASK <= layout.SEQ_MASK // 2:
        return (
            f"message count mismatch: rank {rank} waits in operation #{mine} for rank {peer}, "
            f"which has gone on to #{theirs}"
        )
    return (
        f"message count mismatch: rank {peer} sent more in operation #{theirs} "
        f"than rank {rank} received"
    )


def compare_messages(one: int, first: tuple[int, int], other: int, second: tuple[int, int]) -> str:
    """Describe how a message of rank ``one`` differs from that of rank ``other``.

    (signature, count) of each; a count of -1 is unknown.
    """
    both = {one: _fields(*first), other: _fields(*second)}
    if both[one]["collective"] != both[other]["collective"]:
        both = {rank: {"collective": fields["collective"]} for rank, fields in both.items()}
    return describe_differences(both) or "ranks called different operations: the signatures differ"


def describe_differences(fields_of: dict[int, dict[str, str]]) -> str:
    """Describe which fields differ between ranks and who has which value; empty if none does."""
    parts = []
    for field in next(iter(fields_of.values()), {}):
        values: dict[str, list[int]] = {}
        for rank, fields in sorted(fields_of.items()):
            values.setdefault(fields.get(field, ""), []).append(rank)
        if len(values) < 2:
            continue
        if all(value.startswith("hash ") for value in values):
            parts.append(
                f"{field} differs between " + " and ".join(_ranks(who) for who in values.values())
            )
        else:
            shown = (
                ("another" if value.startswith("hash ") else value, who)
                for value, who in values.items()
            )
            parts.append(
                f"{field} is " + ", ".join(f"{value} on {_ranks(who)}" for value, who in shown)
            )
    return "ranks called different operations: " + "; ".join(parts) if parts else ""


def describe_diverged(statuses: dict[int, dict[str, Any]]) -> str:
    """Describe control-plane operations that some ranks are in while others are not.

    ``statuses``: answers by rank. A rank is not in one if it waits for such a rank in another
    operation, of the control plane or not. Empty if there are none.
    """
    boards = {
        r: s["status"]
        for r, s in statuses.items()
        if isinstance(s.get("status"), dict) and "seq" in s["status"]
    }
    control_ops = {
        r: board["control_op"]
        for r, board in boards.items()
        if isinstance(board.get("control_op"), dict) and board["control_op"]
    }
    names: dict[int, dict[str, str]] = {}
    if len({op.get("op") for op in control_ops.values()}) > 1:
        names = {r: {"collective": str(op.get("op"))} for r, op in control_ops.items()}
    for waiter, control_op in control_ops.items():
        for rank, board in boards.items():
            if rank in control_ops or not control_op.get("alone"):
                continue
            if board["p2p_sig"]:
                blocked = board["state"] == layout.STATE_WAITING and board["peer"] == waiter
                sig = board["p2p_sig"] if blocked else 0
            else:
                sig = board["sig"] if board["seq"] > boards[waiter]["seq"] else 0
            if sig:
                names[rank] = {"collective": describe_signature(sig)["collective"]}
                names[waiter] = {"collective": str(control_op.get("op"))}
    return describe_differences(dict(sorted(names.items())))


def describe_operation(board: dict[str, int]) -> str:
    """Return the operation on a board: ``all_reduce #17 (1024 x float32, sum)``."""
    if board.get("p2p_sig"):
        return describe_message(board["p2p_sig"], board["p2p_count"])
    if not board.get("sig"):
        return "no operation yet"
    fields = describe_signature(board["sig"])
    if fields["collective"] == "barrier":
        return f"barrier #{board['seq']}"
    detail = f"{board['count']} x {fields['dtype']}"
    if fields["collective"] in ("all_reduce", "reduce_scatter", "reduce"):
        detail += f", {fields['operator']}"
    if fields["collective"] in ("broadcast", "reduce", "gather", "scatter"):
        detail += f", root {fields['root']}"
    return f"{fields['collective']} #{board['seq']} ({detail})"


def describe_message(sig: int, count: int) -> str:
    """Return ``send/recv (1024 x float32)``, or the ``_v`` collective the message belongs to."""
    fields = describe_signature(sig)
    name = "send/recv" if fields["collective"] == "send_recv" else f"{fields['collective']}_v"
    return f"{name} ({count} x {fields['dtype']})"


def describe_activity(board: dict[str, Any], newest: int) -> str:
    """Describe what a rank is doing; ``newest``: number of the newest operation of any rank."""
    op = describe_operation(board)
    if board.get("control_op"):
        return f"waits in {board['control_op'].get('op')}; its last operation was {op}"
    if board["state"] == layout.STATE_WAITING:
        whom = "any rank" if board["peer"] == layout.ANY_PEER else f"rank {board['peer']}"
        return f"waits for {whom} in {op}, step {board['step']}"
    if board["state"] == layout.STATE_RUNNING:
        return f"runs {op}"
    if board["seq"] < newest:
        return f"never arrived at operation #{board['seq'] + 1}; its last was {op}"
    return f"has completed {op}"


def _ranks(who: list[int]) -> str:
    # Not only commas: after a comma follows another value, which may be a number too.
    *some, last = map(str, who)
    return f"ranks {', '.join(some)} and {last}" if some else f"rank {last}"
