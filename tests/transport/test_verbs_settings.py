"""Settings of verbs under both names: what they change, and the error of a value that is not
allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from miraccl import params
from miraccl.errors import InvalidUsage
from miraccl.topo.options import PathOptions
from miraccl.topo.records import PathType
from miraccl.transport.verbs import VerbsOptions
from miraccl.transport.verbs_ports import options_from_environment
from miraccl.wire.verbs.policy import NAMES

Row = tuple[str, str, str, Callable[[VerbsOptions], Any], Any, str, str]

#: Own name, NCCL's name, value, what it changes, and how; a wrong value, and part of the error.
ROWS: list[Row] = [
    (
        "IB_QPS_PER_CONNECTION",
        "IB_QPS_PER_CONNECTION",
        "4",
        lambda o: o.qps_per_connection,
        4,
        "33",
        "1 to 32",
    ),
    ("IB_POLICY", "IB_SPLIT_DATA_ON_QPS", "0", lambda o: NAMES[o.policy], "rotate", "x", "split"),
    ("IB_POLICY", "IB_SPLIT_DATA_ON_QPS", "1", lambda o: NAMES[o.policy], "split", "2", "split"),
    ("IB_GID_INDEX", "IB_GID_INDEX", "3", lambda o: o.gid.index, 3, "-2", "-1 to"),
    ("IB_ROCE_VERSION_NUM", "IB_ROCE_VERSION_NUM", "1", lambda o: o.gid.version, 1, "3", "0 to 2"),
    ("IB_ADDR_FAMILY", "IB_ADDR_FAMILY", "AF_INET6", lambda o: o.gid.family, 6, "ipx", "AF_INET"),
    (
        "IB_ADDR_RANGE",
        "IB_ADDR_RANGE",
        "10.1.2.3/8",
        lambda o: o.gid.range,
        "10.0.0.0/8",
        "10.0.0/33",
        "networks such as",
    ),
    ("IB_TIMEOUT", "IB_TIMEOUT", "20", lambda o: o.qp.timeout, 20, "0", "1 to 31"),
    ("IB_RETRY_CNT", "IB_RETRY_CNT", "3", lambda o: o.qp.retry_count, 3, "8", "0 to 7"),
    ("IB_TC", "IB_TC", "106", lambda o: o.qp.traffic_class, 106, "256", "0 to 255"),
    ("IB_FIFO_TC", "IB_FIFO_TC", "84", lambda o: o.control_class, 84, "-2", "-1 to 255"),
    ("IB_SL", "IB_SL", "5", lambda o: o.qp.service_level, 5, "16", "0 to 15"),
    ("IB_PKEY", "IB_PKEY", "2", lambda o: o.qp.pkey_index, 2, "65536", "0 to 65535"),
    ("IB_INLINE", "IB_USE_INLINE", "0", lambda o: o.qp.inline_bytes, 0, "maybe", "MIRACCL_IB"),
    (
        "IB_ADAPTIVE_ROUTING",
        "IB_ADAPTIVE_ROUTING",
        "1",
        lambda o: o.apart_bytes("roce"),
        8192,
        "2",
        "-2 to 1",
    ),
    (
        "IB_AR_THRESHOLD",
        "IB_AR_THRESHOLD",
        "100",
        lambda o: o.apart_bytes("ib"),
        100,
        "-1",
        "0 to",
    ),
    (
        "IB_PCI_RELAXED_ORDERING",
        "IB_PCI_RELAXED_ORDERING",
        "0",
        lambda o: o.qp.relaxed_ordering,
        0,
        "3",
        "0 to 2",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}={row[2]}" for row in ROWS])
def test_settings_reach_the_transport(row: Row) -> None:
    own, nccl, value, read, wanted, wrong, text = row
    default = read(options_from_environment({}))
    for name in (f"MIRACCL_{own}", f"NCCL_{nccl}"):
        assert read(options_from_environment({name: value})) == wanted
    if value not in ("1",):  # split is the default
        assert default != wanted
    # Ours takes precedence, and the error names the variable.
    both = {f"MIRACCL_{own}": wrong, f"NCCL_{nccl}": value}
    with pytest.raises(InvalidUsage, match=rf"^MIRACCL_{own}='{wrong}': .*") as caught:
        options_from_environment(both)
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("IB_QP_TYPE", "UD", "ud"),
        ("IB_HCA", "=mlx5_0:1", "=mlx5_0:1"),
        ("IB_DISABLE", "1", 1),
        ("IB_MERGE_NICS", "0", 0),
        ("NCHANNELS_PER_NET_PEER", "4", 4),
    ],
)
def test_settings_that_are_read_elsewhere(name: str, value: str, wanted: Any) -> None:
    assert params.PARAMS[name].read({f"MIRACCL_{name}": value}) == wanted


def test_kind_of_queue_pairs_is_checked() -> None:
    with pytest.raises(InvalidUsage, match=r"MIRACCL_IB_QP_TYPE='xrc': allowed are rc, uc and ud"):
        params.IB_QP_TYPE.read({"MIRACCL_IB_QP_TYPE": "xrc"})


@pytest.mark.parametrize(("value", "wanted"), [("SYS", PathType.SYS), ("LOC", PathType.LOC)])
def test_level_of_gpu_memory(value: str, wanted: PathType) -> None:
    for name in ("MIRACCL_NET_GDR_LEVEL", "NCCL_NET_GDR_LEVEL"):
        assert PathOptions.read({name: value}).gdr_level == wanted
    with pytest.raises(InvalidUsage, match="NCCL_NET_GDR_LEVEL='FAR'"):
        params.NET_GDR_LEVEL.read({"NCCL_NET_GDR_LEVEL": "FAR"})
