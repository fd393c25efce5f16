"""Range sets against Python sets."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from miraccl.wire.datagram.ranges import RangeSet

EDGE = st.integers(0, 40)
STEPS = st.lists(st.tuples(st.sampled_from(("add", "remove")), EDGE, EDGE), max_size=30)


@given(STEPS, EDGE, EDGE)
def test_a_range_set_is_a_set_of_integers(
    steps: list[tuple[str, int, int]], start: int, stop: int
) -> None:
    ranges, reference = RangeSet(), set[int]()
    for kind, low, high in steps:
        new = set(range(low, high))
        if kind == "add":
            assert ranges.add(low, high) == len(new - reference)
            reference |= new
        else:
            ranges.remove(low, high)
            reference -= new
        pairs = list(ranges)
        assert {i for a, b in pairs for i in range(a, b)} == reference
        assert all(a < b for a, b in pairs)
        assert all(b < c for (_, b), (c, _) in itertools.pairwise(pairs))
        assert ranges.total == len(reference)
    assert all((i in ranges) == (i in reference) for i in range(41))
    gaps = {i for a, b in ranges.missing(start, stop) for i in range(a, b)}
    assert gaps == set(range(start, stop)) - reference
    ranges.drop_below(start)
    assert {i for a, b in ranges for i in range(a, b)} == {i for i in reference if i >= start}
