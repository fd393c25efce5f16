"""``miraccl perf --devices cuda`` on fake GPUs: options, ranks, checks, graphs, the peer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from miraccl.errors import InvalidUsage, MissingDependency
from miraccl.executor.cuda import toolkit
from miraccl.ops.device_arrays import device_ordinal, device_view, is_gpu_array
from miraccl.tools import cli, gpu_facts
from miraccl.tools.perf import cli as perf_cli
from miraccl.tools.perf import data, device_check
from miraccl.tools.perf.device_array import Arena, PerfDeviceArray
from miraccl.tools.perf.device_miraccl import is_repeatable
from miraccl.tools.perf.devices import Devices, DevicesType, describe, resolve
from miraccl.tools.perf.engine import place_buffers
from miraccl.tools.perf.gpu_buffers import GpuBuffers
from miraccl.tools.perf.spec import ITEMSIZES, build_case
from miraccl.types import DType
from tests.support.warm_python import warm_python
from tests.tools import fake_gpu

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--iters", "2", "--warmup", "0", "--batches", "1", "--timeout", "100")
OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "sendrecv",
)
ONE_FORM = {"broadcast": [True], "all_to_all": [False], "sendrecv": [False]}


def perf(
    gpus: int, *args: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return start(gpus, "perf", *args, env=env)


def start(
    gpus: int, *words: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    command = [warm_python(), "-m", "tests.tools.fake_gpu", str(gpus), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=150, check=False, env=environ, cwd=ROOT
    )


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu", Devices(kind="cpu")),
        ("cuda", Devices(kind="cuda")),
        ("cuda:0,1", Devices(kind="cuda", ordinals=(0, 1))),
        ("cuda:3,cuda:1", Devices(kind="cuda", ordinals=(3, 1))),
        ("CUDA:2", Devices(kind="cuda", ordinals=(2,))),
    ],
)
def test_devices_are_parsed(text: str, expected: Devices) -> None:
    assert DevicesType().convert(text, None, None) == expected


@pytest.mark.parametrize(
    "text", ["gpu", "0,1", "cuda:", "cuda:0-3", "cuda:0,0", "cuda:0,x", "", "cpu,cuda"]
)
def test_invalid_devices_are_rejected(text: str) -> None:
    with pytest.raises(click.BadParameter):
        DevicesType().convert(text, None, None)


def test_devices_are_resolved() -> None:
    assert resolve(Devices(kind="cuda"), fake_gpu.facts(3)) == (0, 1, 2)
    assert resolve(Devices(kind="cuda", ordinals=(2, 0)), fake_gpu.facts(3)) == (2, 0)
    with pytest.raises(
        InvalidUsage, match=r"no cuda:3, cuda:7; this process sees cuda:0 to cuda:2"
    ):
        resolve(Devices(kind="cuda", ordinals=(0, 3, 7)), fake_gpu.facts(3))
    with pytest.raises(InvalidUsage, match="cuda:0 only"):
        resolve(Devices(kind="cuda", ordinals=(1,)), fake_gpu.facts(1))
    with pytest.raises(InvalidUsage, match=r"no driver.*miraccl doctor"):
        resolve(Devices(kind="cuda"), fake_gpu.facts(0, "no driver"))
    assert describe((3, 1)) == "cuda:3,1"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--graph",), "--graph is for GPU memory"),
        (("--threads",), "--threads is for GPU memory"),
        (("--sms", "4"), "--sms is for GPU memory"),
        (("--compare", "nccl"), "NCCL does not support CPU memory"),
        (("--devices", "cuda", "--compare", "gloo"), "is for CPU memory"),
        (("--devices", "cuda", "--fresh"), "--fresh is for CPU memory"),
        (("--devices", "cuda:4"), "no cuda:4"),
        (
            ("--devices", "cuda", "--sizes", "600M"),
            "the buffers need 1258291200 bytes of a GPU with 1073741824",
        ),
        (
            ("--devices", "cuda:0", "--sizes", "300M", "--ranks", "2"),
            "the buffers of 2 ranks need 1258291200 bytes",
        ),
        (("--devices", "cuda", "--proto", "ll129"), "allowed are simple, ll and ll128"),
        (("--devices", "cuda", "--algo", "rings"), "unknown algorithm 'rings'"),
        (("--devices", "cuda", "--algo", "bruck"), "--algo bruck has no all_reduce over 2 ranks"),
        (
            ("--devices", "cuda:0", "--ranks", "2", "--compare", "nccl"),
            "which NCCL does not support",
        ),
        (
            ("--devices", "cuda", "--threads", "--hosts", "2", "--ranks", "2"),
            "a process for each rank",
        ),
        (("--devices", "cuda", "--ranks", "9"), "at most 8 ranks of a host, not 9"),
        (
            ("--devices", "cuda", "--ranks", "17", "--hosts", "2"),
            "at most 8 ranks of a host, not 9",
        ),
        (
            ("--devices", "cuda", "--deterministic", "--algo", "ring"),
            "not --algo ring; available for all_reduce: one_shot, two_shot",
        ),
    ],
)
def test_inapplicable_options_are_rejected(
    args: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_facts, "read_facts", lambda: fake_gpu.facts(2))
    result = CliRunner().invoke(cli.cli, ["perf", "all_reduce", *args])
    assert result.exit_code == 2 or isinstance(result.exception, InvalidUsage)
    assert told in f"{result.output} {result.exception}"
    assert "#" not in result.output, "no table is printed"


@pytest.mark.parametrize(
    ("args", "environ"),
    [
        (("--ranks", "8"), {}),
        (("--ranks", "16", "--hosts", "2"), {}),
        (("--ranks", "9"), {"MIRACCL_P2P_DISABLE": "1", "MIRACCL_SHM_DISABLE": "1"}),
        (("--ranks", "1", "--deterministic", "--algo", "ring"), {}),
        (("--ranks", "4", "--hosts", "2", "--deterministic", "--algo", "ring"), {}),
        (
            (),
            {
                "WORLD_SIZE": "16",
                "RANK": "0",
                "LOCAL_WORLD_SIZE": "8",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",
            },
        ),
    ],
)
def test_options_checked_by_ranks_are_accepted(
    args: tuple[str, ...], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_facts, "read_facts", lambda: fake_gpu.facts(2))
    monkeypatch.setattr(perf_cli, "_run_own", lambda request: None)
    monkeypatch.setattr(perf_cli, "_run_joined", lambda request: None)
    result = CliRunner().invoke(
        cli.cli, ["perf", "all_reduce", "--devices", "cuda", *args], env=environ
    )
    assert result.exit_code == 0, f"{result.output} {result.exception}"


def test_nccl_is_checked_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The check runs in another process, because this one forks ranks."""
    monkeypatch.setattr(gpu_facts, "read_facts", lambda: fake_gpu.facts(2))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    for text, told in (
        (_CPU_BUILD, "PyTorch 9.9 has no CUDA"),
        ("raise ImportError('no such thing')", "without PyTorch: no such thing"),
    ):
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / "__init__.py").write_text(text)
        (tmp_path / "torch" / "distributed.py").write_text("")
        result = CliRunner().invoke(
            cli.cli, ["perf", "all_reduce", "--devices", "cuda", "--compare", "nccl"]
        )
        assert isinstance(result.exception, MissingDependency), result.exception
        assert told in str(result.exception)
        assert "a build with CUDA" in str(result.exception)
        assert "#" not in result.output, "no table is printed"


_CPU_BUILD = """
__version__ = "9.9"
class cuda:
    is_available = staticmethod(lambda: False)
"""


def test_options_reach_the_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    monkeypatch.setattr(gpu_facts, "read_facts", lambda: fake_gpu.facts(2))
    monkeypatch.setattr(
        perf_cli, "_run_own", lambda request: jobs.append(perf_cli._device_job(request))
    )
    result = CliRunner().invoke(
        cli.cli,
        [
            "perf",
            "broadcast",
            "--devices",
            "cuda",
            "--deterministic",
            "--algo",
            "chain",
            "--proto",
            "ll",
        ],
    )
    assert result.exit_code == 0, result.output
    assert jobs[0].init == {"deterministic": True, "algo": "chain", "proto": "ll"}


# ---------------------------------------------------------------------- arrays, patterns, checks


@pytest.fixture
def gpu_buffers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(toolkit, "compile_cubin", fake_gpu.compile_nothing)
    gpu: Any = fake_gpu.FakeGpu(0)
    return GpuBuffers(gpu)


def arena_of(gpu_buffers: Any, nbytes: int = 1 << 22) -> Arena:
    return Arena(gpu_buffers.gpu.allocate(nbytes), nbytes, 3)


@pytest.mark.parametrize("name", ITEMSIZES)
def test_communicators_accept_the_arrays(gpu_buffers: Any, name: str) -> None:
    array = arena_of(gpu_buffers).allocate(100, name)
    assert is_gpu_array(array)
    assert device_ordinal(array) == 3
    part = array[10:30]
    seen = device_view(part, "x", "a test")
    assert seen[:3] == (array.address + 10 * ITEMSIZES[name], 20, DType[name.upper()])
    assert array[40:40].nbytes == 0


def test_arrays_of_an_arena_do_not_overlap(gpu_buffers: Any) -> None:
    arena = arena_of(gpu_buffers, 4096)
    arrays = [arena.allocate(count, "float32") for count in (1, 130, 200)]
    ends = [a.address + a.nbytes for a in arrays]
    assert all(a.address % 512 == 0 for a in arrays)
    assert all(end <= b.address for end, b in zip(ends, arrays[1:]))
    with pytest.raises(InvalidUsage, match="exceed the"):
        arena.allocate(1 << 20, "float32")
    arena.reset()
    assert arena.allocate(1, "int8").address == arrays[0].address


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float64"])
def test_one_wrong_element_is_detected(
    gpu_buffers: Any, dtype: str, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_check, "HOST_BYTES", 1 << 30 if on_cpu else 0)
    monkeypatch.setattr(device_check, "_CHUNK", 2 * data.PERIOD)
    case = build_case(
        "all_gather", ITEMSIZES[dtype] * 3 * (2 * data.PERIOD + 5), nranks=3, dtype=dtype
    )
    output = arena_of(gpu_buffers).allocate(case.output_count, dtype)
    device_check.poison(gpu_buffers, output)
    assert device_check.count_wrong(gpu_buffers, case, output, 0, 5) == case.output_count
    for rank in range(3):
        device_check.fill_input(
            gpu_buffers, case, output[rank * case.count : (rank + 1) * case.count], rank, 5
        )
    assert device_check.count_wrong(gpu_buffers, case, output, 0, 5) == 0
    fake_gpu.view(output.address, output.nbytes)[-1] ^= 1
    fake_gpu.view(output.address, output.nbytes)[0] ^= 1
    assert device_check.count_wrong(gpu_buffers, case, output, 0, 5) == 2


def test_rounded_averages_are_compared_on_the_cpu(
    gpu_buffers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_check, "HOST_BYTES", 0)
    case = build_case("all_reduce", 4 * 1000, nranks=3, dtype="float32", redop="avg")
    output = arena_of(gpu_buffers).allocate(case.count, "float32")
    right = np.resize(data.reduced_table(case, 1), case.count).astype(np.float32)
    gpu_buffers.write(output.address, np.nextafter(right, np.float32(np.inf)))
    assert device_check.count_wrong(gpu_buffers, case, output, 0, 1) == 0
    gpu_buffers.write(output.address, right * np.float32(1.001))
    assert device_check.count_wrong(gpu_buffers, case, output, 0, 1) == case.count


@pytest.mark.parametrize(("redop", "value"), [("sum", 0.0), ("prod", 1.0)])
def test_neutral_buffers(gpu_buffers: Any, redop: str, value: float) -> None:
    case = build_case("all_reduce", 4 * 50, nranks=2, dtype="float32", redop=redop)
    array = arena_of(gpu_buffers).allocate(50, "float32")
    device_check.fill_neutral(gpu_buffers, case, array)
    assert fake_gpu.view(array.address, array.nbytes).view(np.float32).tolist() == [value] * 50


@pytest.mark.parametrize(
    ("op", "in_place", "repeatable"),
    [
        ("all_reduce", False, True),
        ("all_reduce", True, False),
        ("reduce_scatter", True, False),
        ("all_gather", True, True),
    ],
)
def test_only_in_place_reductions_are_not_repeatable(
    gpu_buffers: Any, op: str, in_place: bool, repeatable: bool
) -> None:
    case, arena = build_case(op, 4 * 300, nranks=3, dtype="float32"), arena_of(gpu_buffers)
    x, y = place_buffers(case, 1, in_place, lambda count: arena.allocate(count, "float32"))
    assert isinstance(x, PerfDeviceArray)
    assert is_repeatable(case, x, y) is repeatable


def test_graphs_replay_captured_work(gpu_buffers: Any) -> None:
    array = arena_of(gpu_buffers).allocate(4, "uint8")
    replay = gpu_buffers.capture(lambda: gpu_buffers.set_bytes(array.address, 2, 9))
    assert fake_gpu.view(array.address, 4).tolist() == [0, 0, 0, 0]
    assert gpu_buffers.time_us(replay) == 500.0
    assert fake_gpu.view(array.address, 4).tolist() == [9, 9, 0, 0]
    with pytest.raises(RuntimeError, match="on purpose"):
        gpu_buffers.capture(_fails)
    assert gpu_buffers.capture(lambda: None) is not None, (
        "the stream is usable after a failed capture"
    )
    gpu_buffers.close()
    gpu_buffers.close()


def _fails() -> None:
    raise RuntimeError("on purpose")


# ---------------------------------------------------------------------- ranks


@pytest.mark.multiprocess
@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_is_correct(op: str) -> None:
    done = perf(
        3,
        op,
        "--devices",
        "cuda",
        "--sizes",
        "1,50000",
        "--dtype",
        "bfloat16",
        "--json",
        "-",
        "--graph",
        *QUICK,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["in_place"] for row in rows] == ONE_FORM.get(op, [False, True]) * 2
    for row in rows:
        assert (row["op"], row["ranks"], row["dtype"], row["wrong"]) == (op, 3, "bfloat16", 0)
        assert (row["device"], row["graph"], row["algo"], row["threads"]) == (
            fake_gpu.NAME,
            True,
            "one_shot",
            64,
        )
        assert row["time_us"] > 0
        assert row["host_us"] > 0
        assert "peer" not in row


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "options",
    [("--threads",), ("--ranks", "2", "--hosts", "2"), ("--redop", "premul_sum", "--explain")],
)
def test_kinds_of_ranks(options: tuple[str, ...]) -> None:
    done = perf(2, "all_reduce", "--devices", "cuda:1,0", "--sizes", "3000", *options, *QUICK)
    assert done.returncode == 0, done.stderr
    assert "0 OK" in done.stdout
    assert "(cuda:1,0)" in done.stdout.splitlines()[0]
    assert ("3 blocks of 64 threads" in done.stdout) is ("--explain" in options)
    assert ("for all_reduce of 750" in done.stdout) is ("--explain" in options)


@pytest.mark.multiprocess
def test_more_ranks_than_gpus_share_them() -> None:
    done = perf(
        1,
        "all_reduce",
        "--devices",
        "cuda",
        "--ranks",
        "3",
        "--sizes",
        "3000",
        "--json",
        "-",
        *QUICK,
    )
    assert [row["ranks"] for row in json.loads(done.stdout)] == [3, 3], done.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize("options", [(), ("--threads",)])
def test_nccl_is_measured_alternating(options: tuple[str, ...]) -> None:
    done = perf(
        2,
        "reduce",
        "--root",
        "1",
        "--devices",
        "cuda",
        "--sizes",
        "8,3000",
        "--compare",
        "nccl",
        "--json",
        "-",
        *options,
        *QUICK,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 4
    for row in rows:
        assert row["peer"] == "nccl"
        assert row["nccl_us"] == row["peer_time_us"] > 0
        assert row["nccl_host_us"] > 0
        assert row["ratio"] == pytest.approx(row["nccl_us"] / row["time_us"])


@pytest.mark.multiprocess
@pytest.mark.parametrize("options", [(), ("--threads",)])
def test_a_peer_that_cannot_be_captured_is_skipped(options: tuple[str, ...]) -> None:
    words = (
        "all_gather",
        "--devices",
        "cuda",
        "--sizes",
        "3000",
        "--compare",
        "nccl",
        "--graph",
        "--json",
        "-",
        *options,
        *QUICK,
    )
    done = perf(2, *words, env={"FAKE_UNCAPTURABLE": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be captured on purpose") == 2, "once for each form"
    assert ["ratio" in row for row in json.loads(done.stdout)] == [False, False]


@pytest.mark.multiprocess
def test_a_wrong_element_is_counted_before_and_after() -> None:
    done = perf(
        2,
        "all_gather",
        "--devices",
        "cuda",
        "--sizes",
        "3000",
        "--json",
        "-",
        *QUICK,
        env={"FAKE_WRONG": "1"},
    )
    assert done.returncode == 1
    assert [row["wrong"] for row in json.loads(done.stdout)] == [2, 2]


@pytest.mark.multiprocess
def test_rejected_operations_are_reported_once() -> None:
    done = perf(
        2,
        "all_gather",
        "--devices",
        "cuda",
        "--sizes",
        "3000",
        *QUICK,
        env={"FAKE_REJECTS": "all_gather"},
    )
    assert done.returncode == 2
    assert done.stderr.count("rejected on purpose") == 1
    assert "Traceback" not in done.stderr
    done = perf(
        2, "gather", "--devices", "cuda", "--sizes", "3000", *QUICK, env={"FAKE_LACKS": "gather"}
    )
    assert done.returncode == 2
    assert "no such form on GPU memory" in done.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize("options", [(), ("--threads",)])
def test_a_killed_rank_ends_the_run(options: tuple[str, ...]) -> None:
    done = perf(
        2,
        "all_gather",
        "--devices",
        "cuda",
        "--sizes",
        "3000",
        *options,
        *QUICK,
        env={"FAKE_DIES": "all_gather"},
    )
    assert done.returncode == 1
    assert "SIGKILL" in done.stderr


@pytest.mark.multiprocess
def test_ranks_of_torchrun_use_the_gpu_of_their_local_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    names = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "of-a-gpu-test",
    }
    command = [
        warm_python(),
        "-m",
        "tests.tools.fake_gpu",
        "4",
        "perf",
        "all_reduce",
        "--devices",
        "cuda:3,1",
        "--sizes",
        "8",
        *QUICK,
    ]
    ranks = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "FAKE_PRINTS": "1",
                **names,
                "RANK": str(r),
                "LOCAL_RANK": str(r),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for r in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "0 OK" in outputs[0][0]
    assert outputs[1][0] == ""
    assert ["rank 0 on GPU 3" in outputs[0][1], "rank 1 on GPU 1" in outputs[1][1]] == [True, True]


# ---------------------------------------------------------------------- benchmark scripts


def bench(
    script: str, out: Path, *words: str, env: dict[str, str] | None = None
) -> tuple[int, dict[str, Any], str]:
    """Return exit status, JSON and markdown of a script of bench/."""
    done = start(
        2, str(ROOT / "bench" / script), "--out", str(out), "--batches", "1", *words, env=env
    )
    assert out.with_suffix(".json").exists(), done.stderr
    return (
        done.returncode,
        json.loads(out.with_suffix(".json").read_text()),
        out.with_suffix(".md").read_text(),
    )


@pytest.mark.multiprocess
def test_tables_are_written(tmp_path: Path) -> None:
    status, record, text = bench("gpu_all_reduce.py", tmp_path / "result", "--sizes", "16,4096")
    assert status == 0
    assert [(row["bytes"], row["graph"], row["wrong"]) for row in record["rows"]] == [
        (16, True, 0),
        (4096, True, 0),
    ]
    assert record["machine"]["gpus"] == f"2 x {fake_gpu.NAME}"
    assert record["failures"] == record["not_measured"] == []
    assert "## all_reduce, bfloat16" in text
    assert "| 4096 | g |" in text


@pytest.mark.multiprocess
def test_a_failing_cell_is_reported_and_the_rest_is_measured(tmp_path: Path) -> None:
    words = ("--ops", "reduce,all_gather,broadcast", "--dtypes", "float32", "--sizes", "8,1024")
    status, record, text = bench(
        "gpu_collectives.py", tmp_path / "dies", *words, env={"FAKE_DIES": "all_gather"}
    )
    assert status == 1
    assert [row["op"] for row in record["rows"]] == [
        "reduce",
        "reduce",
        "all_gather",
        "broadcast",
        "broadcast",
    ]
    assert [entry["cell"] for entry in record["failures"]] == ["all_gather float32 1024 graph"]
    assert "SIGKILL" in text
    status, record, text = bench(
        "gpu_collectives.py", tmp_path / "refused", *words, env={"FAKE_REJECTS": "all_gather"}
    )
    assert [row["op"] for row in record["rows"]] == ["reduce", "reduce", "broadcast", "broadcast"]
    assert [entry["cell"] for entry in record["failures"]] == [
        "all_gather float32 8 graph",
        "all_gather float32 1024 graph",
    ]


@pytest.mark.multiprocess
def test_cells_beyond_the_time_budget_are_listed(tmp_path: Path) -> None:
    status, record, text = bench("gpu_final.py", tmp_path / "result", "--budget", "0")
    assert status == 0
    assert record["rows"] == []
    cells = record["not_measured"]
    assert cells[0] == "all_reduce bfloat16 16 graph"
    assert {cell.split()[0] for cell in cells} == {*OPERATIONS} - {"gather", "scatter"}
    assert sum(cell.startswith("sendrecv") for cell in cells) == 24
    assert "all_reduce bfloat16 1048576 stream" in cells
    assert "The time was over before" in text
