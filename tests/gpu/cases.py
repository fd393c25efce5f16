"""Cases of the GPU tests: collective, type, operator, size, alignment, algorithm, protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Case = dict[str, Any]


def name_of(case: Case) -> str:
    return "-".join(
        f"{key}={value}" if key not in ("collective", "dtype") else str(value)
        for key, value in case.items()
    )


def _all_reduce() -> Iterator[Case]:
    for dtype in ("float32", "bfloat16", "float16", "int32"):
        for count in (1, 7, 1000, 65536 + 3):
            for algo in ("one_shot", "two_shot"):
                yield {"collective": "all_reduce", "dtype": dtype, "count": count, "algo": algo}
    for algo in ("one_shot", "two_shot"):
        for proto in ("ll", "ll128", "simple"):
            for offset, out_offset in ((0, 0), (1, 0), (3, 5)):
                case = {
                    "collective": "all_reduce",
                    "dtype": "bfloat16",
                    "count": 10001,
                    "algo": algo,
                    "proto": proto,
                }
                yield case | {"offset": offset, "out_offset": out_offset}
        # several tiles, so that slots are reused
        plan = {"algo": algo, "proto": "ll128", "blocks": 64, "threads": 256, "unroll": 1}
        yield {
            "collective": "all_reduce",
            "dtype": "bfloat16",
            "count": (6 << 20) + 5,
            "plan": plan,
            "repeat": 3,
        }
        yield {
            "collective": "all_reduce",
            "dtype": "float32",
            "count": 5000,
            "algo": algo,
            "graph": 5,
            "in_place": True,
        }
        yield {
            "collective": "all_reduce",
            "dtype": "bfloat16",
            "count": 300000,
            "algo": algo,
            "repeat": 50,
            "in_place": True,
        }
    for algo in ("one_shot", "two_shot"):
        for unroll, proto in ((1, "ll128"), (2, "ll128"), (2, "ll")):
            for count in (3, 100001, (5 << 20) + 3):
                plan = {
                    "algo": algo,
                    "proto": proto,
                    "blocks": 16,
                    "threads": 256,
                    "unroll": unroll,
                }
                yield {
                    "collective": "all_reduce",
                    "dtype": "bfloat16",
                    "count": count,
                    "plan": plan,
                    "repeat": 3,
                }
    for count in (1001, 30001, 100001, (3 << 20) + 5):  # one part to many
        for unroll, proto, dtype in (
            (1, "ll128", "float32"),
            (2, "ll128", "bfloat16"),
            (1, "ll128", "int32"),
            (1, "ll", "int8"),
        ):
            plan = {
                "algo": "two_shot",
                "proto": proto,
                "blocks": 16,
                "threads": 64,
                "unroll": unroll,
                "double_buffered": True,
            }
            yield {
                "collective": "all_reduce",
                "dtype": dtype,
                "count": count,
                "plan": plan,
                "repeat": 3,
            }
    plan = {
        "algo": "two_shot",
        "proto": "ll128",
        "blocks": 128,
        "threads": 512,
        "unroll": 1,
        "double_buffered": True,
    }
    yield {
        "collective": "all_reduce",
        "dtype": "bfloat16",
        "count": (8 << 20) + 5,
        "plan": plan,
        "graph": 5,
        "in_place": True,
    }
    for dtype in ("bfloat16", "int32"):  # double-buffered with eight ranks
        yield {
            "collective": "all_reduce",
            "dtype": dtype,
            "count": (16 << 20) // (2 if dtype == "bfloat16" else 4) - 3,
            "repeat": 5,
        }
    for count in (1, 100001, (5 << 20) + 3):
        for unroll, proto, dtype in (
            (1, "ll128", "float32"),
            (2, "ll128", "bfloat16"),
            (1, "ll", "int32"),
        ):
            plan = {"algo": "ring", "proto": proto, "blocks": 16, "threads": 128, "unroll": unroll}
            yield {
                "collective": "all_reduce",
                "dtype": dtype,
                "count": count,
                "plan": plan,
                "repeat": 3,
                "close": True,
            }
    plan = {"algo": "ring", "proto": "ll128", "blocks": 128, "threads": 256, "unroll": 1}
    yield {
        "collective": "all_reduce",
        "dtype": "bfloat16",
        "count": (12 << 20) + 5,
        "plan": plan,
        "graph": 3,
        "close": True,
        "op": "AVG",
    }
    for count in (1, 1001, 100001, (9 << 20) + 3):
        for proto, dtype in (
            ("ll128", "float32"),
            ("ll128", "bfloat16"),
            ("ll128", "int32"),
            ("ll", "int8"),
        ):
            case = {
                "collective": "all_reduce",
                "dtype": dtype,
                "count": count,
                "algo": "double_binary_tree",
                "proto": proto,
            }
            yield case | {"repeat": 3, "close": True}
    for threads, unroll, proto in (
        (64, 1, "ll128"),
        (256, 2, "ll128"),
        (128, 1, "ll"),
    ):  # few and small slots, several tiles
        plan = {
            "algo": "double_binary_tree",
            "proto": proto,
            "blocks": 16,
            "threads": threads,
            "unroll": unroll,
        }
        case = {
            "collective": "all_reduce",
            "dtype": "bfloat16",
            "count": (5 << 20) + 3,
            "op": "AVG",
            "plan": plan,
        }
        yield case | {"graph": 3, "close": True}
    for op in ("MAX", "PREMUL_SUM"):
        case = {
            "collective": "all_reduce",
            "dtype": "float32",
            "count": 70001,
            "op": op,
            "algo": "double_binary_tree",
            "offset": 1,
        }
        yield case | {"close": True}
    for dtype in ("int8", "uint8", "uint32", "int64", "uint64", "float64"):
        yield {"collective": "all_reduce", "dtype": dtype, "count": 4099}
    for op in ("PROD", "MIN", "MAX", "AVG"):
        for dtype in ("float32", "bfloat16", "int32"):
            yield {"collective": "all_reduce", "dtype": dtype, "count": 3001, "op": op}
    for algo in ("ring", "one_shot", "two_shot", "double_binary_tree"):
        for count in (9, 70001, 3 << 20):
            case = {
                "collective": "all_reduce",
                "dtype": "float32",
                "count": count,
                "algo": algo,
                "proto": "simple",
            }
            yield case | {"close": True, "repeat": 3}
    yield {
        "collective": "all_reduce",
        "dtype": "float32",
        "count": 1 << 18,
        "algo": "ring",
        "proto": "simple",
        "graph": 4,
        "close": True,
    }
    for dtype, count in (
        ("bfloat16", (13 << 20) + 5),
        ("int32", 70001),
    ):  # slots of full size; an average divides once
        case = {
            "collective": "all_reduce",
            "dtype": dtype,
            "count": count,
            "algo": "ring",
            "proto": "simple",
        }
        yield case | {"op": "AVG", "repeat": 3, "close": True}


def _others() -> Iterator[Case]:
    for collective in ("reduce_scatter", "all_gather", "all_to_all"):
        for dtype in ("float32", "bfloat16", "uint8"):
            for count in (1, 1000, 30011):
                for proto in ("", "simple"):
                    yield {"collective": collective, "dtype": dtype, "count": count, "proto": proto}
        yield {"collective": collective, "dtype": "float32", "count": 2000, "graph": 3}
        yield {"collective": collective, "dtype": "float32", "count": 1 << 20, "repeat": 3}
    for collective in ("broadcast", "reduce"):
        for root in (0, 1):
            for count in (1, 30011, 1 << 20):
                yield {
                    "collective": collective,
                    "dtype": "float32",
                    "count": count,
                    "root": root,
                    "repeat": 3,
                    "close": True,
                }
        for dtype in ("bfloat16", "uint8", "int64"):
            yield {"collective": collective, "dtype": dtype, "count": 9001, "root": 1, "repeat": 20}
        yield {
            "collective": collective,
            "dtype": "float32",
            "count": 5000,
            "proto": "simple",
            "close": True,
        }
        for proto in ("ll", "ll128"):
            for dtype, count in (("float32", 3), ("int32", 70001), ("uint8", 7 << 20)):
                case = {
                    "collective": collective,
                    "dtype": dtype,
                    "count": count,
                    "root": 1,
                    "algo": "chain",
                    "proto": proto,
                }
                yield case | {"repeat": 5, "close": True}
        for root, dtype, count, proto in (
            (0, "float32", 1, "ll128"),
            (1, "bfloat16", 70001, "ll"),
            (1, "int32", 7 << 20, "ll128"),
        ):
            case = {
                "collective": collective,
                "dtype": dtype,
                "count": count,
                "root": root,
                "algo": "double_binary_tree",
                "proto": proto,
            }
            yield case | {"repeat": 5, "close": True}
        simple = {"proto": "simple"}
        for count, more in (
            (500000, {"graph": 4}),
            ((13 << 20) + 5, simple | {"graph": 3}),
            (9 << 20, simple | {"repeat": 3}),
        ):
            yield {
                "collective": collective,
                "dtype": "float32",
                "count": count,
                "root": 1,
                "algo": "chain",
                "close": True,
            } | more
    yield {"collective": "all_gather", "dtype": "float8_e4m3", "count": 999}
    for collective in ("all_gather", "all_to_all"):
        for count in (7, 40001, 9 << 20):
            yield {
                "collective": collective,
                "dtype": "uint8",
                "count": count,
                "proto": "ll128",
                "offset": 3,
                "repeat": 3,
            }
    for algo in ("one_shot", "two_shot", "ring"):
        yield {
            "collective": "all_reduce",
            "dtype": "int32",
            "count": 300001,
            "algo": algo,
            "proto": "ll128",
            "repeat": 3,
        }
        for dtype in ("float8_e4m3", "float8_e5m2"):
            yield {
                "collective": "all_reduce",
                "dtype": dtype,
                "count": 5001,
                "algo": algo,
                "close": algo == "ring",
            }
    for dtype in ("float32", "bfloat16", "int32"):
        for proto in ("", "simple"):
            yield {
                "collective": "all_reduce",
                "dtype": dtype,
                "count": 3001,
                "op": "PREMUL_SUM",
                "algo": "one_shot",
                "proto": proto,
            }


def _by_other_schedules() -> Iterator[Case]:
    """Yield schedules without packet kernels, some with scratch memory; ``worker.one_sided`` runs
    those on windows.
    """
    for collective, algo in (
        ("all_reduce", "recursive_doubling"),
        ("all_reduce", "recursive_halving_doubling"),
        ("reduce_scatter", "recursive_halving_doubling"),
        ("reduce_scatter", "pat"),
        ("all_gather", "pat"),
        ("all_to_all", "bruck"),
        ("all_to_all", "pairwise"),
        ("reduce", "double_binary_tree"),
    ):
        for dtype, count in (("int32", 5), ("bfloat16", 1001), ("float32", 700_003)):
            case = {
                "collective": collective,
                "dtype": dtype,
                "count": count,
                "algo": algo,
                "proto": "simple",
                "repeat": 3,
            }
            yield case | (
                {"close": True} if collective in ("all_reduce", "reduce_scatter", "reduce") else {}
            )


CASES: list[Case] = [*_all_reduce(), *_others(), *_by_other_schedules()]
