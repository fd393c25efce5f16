"""CollNet's table over a software switch: the exported plugin, loaded as NCCL loads it."""

from __future__ import annotations

import pytest

from miraccl.bootstrap.unique_id import UniqueId
from miraccl.errors import InvalidUsage
from miraccl.nccl_plugin import collnet_handle, collnet_switch
from tests.nccl_plugin import collnet_ranks
from tests.runtime.test_switch import environ, switch
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess


def test_collectives() -> None:
    with switch() as (address, process):
        env = environ(address) | {"MIRACCL_AGGREGATION": "never"}  # of the bootstrap
        names = run_ranks(collnet_ranks.collectives, 2, (8, 12), env=env)
        assert names == [["miraccl-switch"] * 2] * 2
    assert process.returncode == 0


def test_handles() -> None:
    hosts = [("127.0.0.1", 80), ("10.0.0.9", 80), ("fe80::1", 80), *[("10.1.1.1", 80)] * 8]
    ident = UniqueId(addresses=tuple(hosts), secret=bytes(range(32)), host="x")
    found = collnet_handle.decode_handle(collnet_handle.encode_handle(ident))
    assert found.secret == ident.secret
    assert found.addresses[:2] == (("10.0.0.9", 80), ("fe80::1", 80))
    alone = UniqueId(addresses=(("127.0.0.1", 9),), secret=bytes(32))
    assert collnet_handle.decode_handle(collnet_handle.encode_handle(alone)) == alone
    with pytest.raises(InvalidUsage, match="not one of this plugin"):
        collnet_handle.decode_handle(bytes(128))


def test_windows_cut_blocks() -> None:
    shares = collnet_switch.block_shares
    assert shares(10, range(30), 3) == [10, 10, 10]
    assert shares(10, range(5, 12), 3) == [5, 2, 0]
    assert shares(10, range(30, 30), 3) == [0, 0, 0]
