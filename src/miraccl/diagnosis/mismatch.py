"""What ranks say that they run, compared and told in words: signatures of operations, boards, answers to a request for status."""

from __future__ import annotations

from typing import Any

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.lower import describe_signature


def _fields(sig: int, count: int) -> dict[str, str]:
    """The fields of a signature; ``count`` -1 leaves the hash of the count, of which only the difference is told."""
    return {**describe_signature(sig), **({"count": str(count)} if count >= 0 else {})}


def compare_ops(entries: dict[int, tuple[int, int]]) -> str:
    """How operations that ranks number alike differ, from (signature, count) by rank; empty if they do not.

    A count may be that of the operation before: it is written after the signature, which has a hash of it.
    """
    if len({sig for sig, _ in entries.values()}) < 2:
        return ""
    told = (
        len({sig >> layout.SIG_COUNT_SHIFT for sig, _ in entries.values()}) > 1
    )  # else the counts may differ, as those of uneven blocks do
    fields = {
        rank: _fields(sig, count if told else -1) for rank, (sig, count) in sorted(entries.items())
    }
    return describe_differences(fields) or describe_differences(
        {rank: _fields(sig, -1) for rank, (sig, _) in sorted(entries.items())}
    )


def describe_completed_peer(rank: int, peer: int) -> str:
    """That ``rank`` waits for ``peer`` in an operation that this one has ended."""
    return f"ranks disagree on what is sent: rank {rank} waits for rank {peer}, which has ended this operation"


def has_completed(board: dict[str, int], theirs: dict[str, Any]) -> bool:
    """Whether the rank with the board ``theirs`` has ended the collective on ``board``."""
    return bool(
        theirs["seq"] > board["seq"]
        or (theirs["seq"] == board["seq"] and theirs["state"] == layout.STATE_IDLE)
    )


def describe_stray_message(rank: int, peer: int, want: int, got: int) -> str:
    """What a message of ``peer`` means that belongs to an operation of another number than the one that ``rank`` waits in, where both ranks
    ran these alike; empty if it belongs to this one."""
    mine, theirs = want & layout.SEQ_MASK, got & layout.SEQ_MASK
    if mine == theirs:
        return ""
    if (theirs - mine) & layout.SEQ_MASK <= layout.SEQ_MASK // 2:
        return f"ranks disagree on what is sent: rank {rank} waits in operation #{mine} for rank {peer}, which has gone on to #{theirs}"
    return f"ranks disagree on what is sent: rank {peer} sent more in operation #{theirs} than rank {rank} took"


def compare_messages(one: int, first: tuple[int, int], other: int, second: tuple[int, int]) -> str:
    """How a message of rank ``one`` differs from that of rank ``other``; (signature, count) of each, where a count of -1 is unknown."""
    both = {one: _fields(*first), other: _fields(*second)}
    if both[one]["collective"] != both[other]["collective"]:
        both = {rank: {"collective": fields["collective"]} for rank, fields in both.items()}
    return describe_differences(both) or "ranks called different operations: the signatures differ"


def describe_differences(fields_of: dict[int, dict[str, str]]) -> str:
    """Which fields differ between ranks, and who has which value; empty if none does."""
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
    """Which ranks are in an operation on the control plane while others wait for them in another one, there or elsewhere; empty if none
    are."""
    boards = {
        r: s["status"]
        for r, s in statuses.items()
        if isinstance(s.get("status"), dict) and "seq" in s["status"]
    }
    at_meeting = {
        r: board["meeting"]
        for r, board in boards.items()
        if isinstance(board.get("meeting"), dict) and board["meeting"]
    }
    names: dict[int, dict[str, str]] = {}
    if len({meeting.get("op") for meeting in at_meeting.values()}) > 1:
        names = {met: {"collective": str(meeting.get("op"))} for met, meeting in at_meeting.items()}
    for met, meeting in at_meeting.items():
        for rank, board in boards.items():
            if rank in at_meeting or not meeting.get("alone"):
                continue
            if board["p2p_sig"]:
                sig = (
                    board["p2p_sig"]
                    if board["state"] == layout.STATE_WAITING and board["peer"] == met
                    else 0
                )
            else:
                sig = board["sig"] if board["seq"] > boards[met]["seq"] else 0
            if sig:
                names[rank], names[met] = (
                    {"collective": describe_signature(sig)["collective"]},
                    {"collective": str(meeting.get("op"))},
                )
    return describe_differences(dict(sorted(names.items())))


def describe_operation(board: dict[str, int]) -> str:
    """``all_reduce #17 (1024 x float32, sum)`` for what is on a board."""
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
    """``send/recv (1024 x float32)``, or the collective with counts that the message is one of."""
    fields = describe_signature(sig)
    name = "send/recv" if fields["collective"] == "send_recv" else f"{fields['collective']}_v"
    return f"{name} ({count} x {fields['dtype']})"


def describe_activity(board: dict[str, Any], newest: int) -> str:
    what = describe_operation(board)
    if board.get("meeting"):
        return f"waits in {board['meeting'].get('op')}; its last operation was {what}"
    if board["state"] == layout.STATE_WAITING:
        whom = "any rank" if board["peer"] == layout.ANY_PEER else f"rank {board['peer']}"
        return f"waits for {whom} in {what}, step {board['step']}"
    if board["state"] == layout.STATE_RUNNING:
        return f"works on {what}"
    if board["seq"] < newest:
        return f"never arrived at operation #{board['seq'] + 1}; its last was {what}"
    return f"has finished {what}"


def _ranks(who: list[int]) -> str:
    """Ends with ``and``: behind a comma stands another value, which may be a number, too."""
    *some, last = map(str, who)
    return f"ranks {', '.join(some)} and {last}" if some else f"rank {last}"
