"""The unique id: bytes and text round trips, and nothing else is read as one."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miraccl.bootstrap import UniqueId, create_hub
from miraccl.errors import InvalidUsage

_hosts = st.one_of(
    st.sampled_from(["10.0.0.1", "::1", "fd00::17"]), st.text("abc.-019", min_size=1, max_size=20)
)
_ids = st.builds(
    UniqueId,
    addresses=st.lists(st.tuples(_hosts, st.integers(1, 65535)), min_size=1, max_size=4).map(tuple),
    secret=st.binary(min_size=32, max_size=32),
    host=st.text("0123456789abcdef", max_size=16),
    version=st.integers(0, 65535),
)


@given(_ids)
def test_bytes_and_text_round_trip(unique_id):
    assert UniqueId.from_bytes(unique_id.to_bytes()) == unique_id
    text = str(unique_id)
    assert UniqueId.parse(f" {text}\n") == unique_id
    assert text.isascii()
    assert text.isprintable()
    assert " " not in text


@given(_ids, st.data())
def test_damaged_id_is_rejected_or_differs(unique_id, data):
    body = unique_id.to_bytes()
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(InvalidUsage):
        UniqueId.from_bytes(body[:cut])
    with pytest.raises(InvalidUsage):
        UniqueId.from_bytes(body + b"\0")


@given(st.binary(max_size=300))
def test_arbitrary_bytes(data):
    with contextlib.suppress(InvalidUsage):
        assert UniqueId.from_bytes(data).to_bytes() == data


@pytest.mark.parametrize(
    "text",
    [
        "",
        "miraccl",
        "miraccl:",
        "miraccl:!!!",
        "miraccl:AAAA",
        "nccl:AAAA",
        "miraccl:" + "A" * 100_000,
    ],
)
def test_invalid_id_text(text):
    with pytest.raises(InvalidUsage, match="unique id"):
        UniqueId.parse(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"addresses": ()},
        {"addresses": (("", 1),)},
        {"addresses": (("h", 0),)},
        {"addresses": (("h", 65536),)},
        {"secret": b"short"},
    ],
)
def test_an_illegal_id_cannot_be_made(fields):
    with pytest.raises(InvalidUsage):
        UniqueId(**{"addresses": (("h", 1),), "secret": bytes(32), **fields})


def test_repr_hides_the_secret():
    unique_id, root = create_hub(hosts=["127.0.0.1", "127.0.0.2"])
    root.close()
    assert "secret" not in repr(unique_id)
    assert len(str(unique_id)) < 200
    assert [host for host, _ in unique_id.addresses] == ["127.0.0.1", "127.0.0.2"]
    other, root = create_hub(hosts=["127.0.0.1"])
    root.close()
    assert other.secret != unique_id.secret
