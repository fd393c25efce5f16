"""Output of several ranks: whole lines, partial lines, and tracebacks that are shown once."""

from __future__ import annotations

import pytest

from miraccl.tools.rank_output import HOLD_S, MAX_HELD, PARTIAL_S, RankOutput

FRAMES = b'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\n'


class Recorded:
    """A ``RankOutput`` and what it has written."""

    def __init__(self, *, tag: bool = False) -> None:
        self.out, self.err = b"", b""
        self.output = RankOutput(self.write, tag=tag)

    def write(self, number: int, data: bytes) -> None:
        if number == 1:
            self.out += data
        else:
            self.err += data

    def raise_on(self, rank: int, text: str, now: float = 0.0) -> None:
        """Let a rank print a traceback and fail."""
        self.output.feed(rank, 2, FRAMES + text.encode() + b"\n", now)
        self.output.close(rank, now)
        self.output.fail(rank)

    @property
    def headings(self) -> list[str]:
        return [line for line in self.err.decode().splitlines() if line.startswith("miraccl run: ")]


def test_lines_are_not_mixed() -> None:
    recorded = Recorded()
    recorded.output.feed(0, 1, b"first ha", 0.0)
    recorded.output.feed(1, 1, b"second\nthi", 0.1)
    recorded.output.feed(0, 1, b"lf\n", 0.2)
    recorded.output.feed(1, 1, b"rd\n", 0.3)
    assert recorded.out == b"second\nfirst half\nthird\n"


def test_a_line_without_an_end_is_shown_after_a_while() -> None:
    recorded = Recorded(tag=True)
    recorded.output.feed(0, 1, b"epoch 1 ", 5.0)
    recorded.output.poll(5.0 + PARTIAL_S / 2)
    assert recorded.out == b""
    assert recorded.output.due() == 5.0 + PARTIAL_S
    recorded.output.poll(5.0 + PARTIAL_S)
    assert recorded.out == b"[0] epoch 1 "
    assert recorded.output.due() is None
    recorded.output.feed(0, 1, b"done\n", 7.0)
    recorded.output.feed(0, 1, b"epoch 2 ", 8.0)
    recorded.output.poll(9.0)
    recorded.output.feed(1, 1, b"other\n", 9.5)  # begins a line of its own
    assert recorded.out == b"[0] epoch 1 done\n[0] epoch 2 \n[1] other\n"


def test_the_last_line_needs_no_end() -> None:
    recorded = Recorded()
    recorded.output.feed(3, 1, b"bye", 0.0)
    recorded.output.finish()
    assert recorded.out == b"bye\n"


def test_equal_tracebacks_are_shown_once_with_their_ranks() -> None:
    recorded = Recorded()
    for now, rank in enumerate((2, 0, 1)):
        recorded.raise_on(rank, f"miraccl.errors.InvalidUsage: rank {rank}: no such thing", now)
    recorded.output.finish()
    assert recorded.headings == ["miraccl run: first failure, on ranks 0, 1 and 2 alike:"]
    assert recorded.err.count(b"Traceback") == 1
    assert b"rank 2: no such thing" in recorded.err  # that of the first one


def test_the_cause_comes_first_even_if_it_ends_later() -> None:
    recorded = Recorded()
    for rank in (0, 3):
        recorded.raise_on(rank, f"miraccl.errors.PeerDied: rank {rank}: rank 1 died")
    recorded.raise_on(1, "ValueError: no data")
    recorded.output.finish()
    assert recorded.headings == [
        "miraccl run: first failure, on rank 1:",
        "miraccl run: on ranks 0 and 3 alike:",
    ]


def test_a_rank_without_a_traceback_leaves_the_others_unmarked() -> None:
    recorded = Recorded()
    recorded.output.fail(1)  # killed by a signal
    recorded.raise_on(0, "miraccl.errors.PeerDied: rank 0: rank 1 died")
    recorded.output.finish()
    assert recorded.headings == ["miraccl run: on rank 0:"]


def test_chained_and_prefixed_tracebacks_are_kept_whole() -> None:
    chained = (
        FRAMES
        + b"KeyError: 3\n\nDuring handling of the above exception, another exception occurred:\n\n"
        + FRAMES
        + b"ValueError: no data\n  indented\nand more\n"
    )
    recorded = Recorded()
    for rank in (0, 1):
        prefix = b"[rank%d]: " % rank  # torch.distributed's
        text = b"".join(prefix + line + b"\n" for line in chained.splitlines())
        recorded.output.feed(rank, 2, text, 0.0)
        recorded.output.fail(rank)
    recorded.output.finish()
    assert recorded.headings == ["miraccl run: first failure, on ranks 0 and 1 alike:"]
    assert recorded.err.count(b"KeyError: 3") == recorded.err.count(b"and more") == 1


def test_tracebacks_of_running_ranks_are_shown_soon() -> None:
    recorded = Recorded(tag=True)
    recorded.output.feed(1, 2, b"before\n" + FRAMES + b"ValueError: logged\n", 3.0)
    assert recorded.err == b"[1] before\n"
    assert recorded.output.due() == 3.0 + HOLD_S
    recorded.output.poll(3.0 + HOLD_S)
    assert b"miraccl run: on rank 1:\n[1] Traceback" in recorded.err
    recorded.output.feed(1, 2, b"after\n", 4.0)
    assert recorded.err.endswith(b"[1] after\n")


def test_endless_output_after_a_traceback_is_not_held_back() -> None:
    recorded = Recorded()
    recorded.output.fail(0)
    recorded.output.feed(1, 2, FRAMES + b"ValueError\n", 0.0)
    recorded.output.feed(1, 2, b"x" * MAX_HELD + b"\n", 0.0)
    assert len(recorded.err) > MAX_HELD


@pytest.mark.parametrize("tag", [False, True])
def test_what_was_printed_before_comes_before(tag: bool) -> None:
    recorded = Recorded(tag=tag)
    recorded.output.feed(0, 2, b"one\ntwo\n" + FRAMES, 0.0)
    recorded.output.feed(0, 2, b"ValueError\n", 0.0)
    recorded.output.finish()
    text = recorded.err.decode()
    assert (
        text.index("one") < text.index("two") < text.index("Traceback") < text.index("ValueError")
    )
