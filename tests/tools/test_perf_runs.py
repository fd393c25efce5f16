"""``miraccl perf`` on real ranks: every operation, failures, launchers, a peer."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl.tools.perf.engine import BoundOperation
from miraccl.tools.perf.engine_miraccl import MiracclEngine
from miraccl.tools.perf.measure import MeasureOptions, measure
from miraccl.tools.perf.spec import OPERATIONS, ROOTED, Case, build_case
from tests.support.ranks import run_ranks
from tests.support.warm_python import warm_python

pytestmark = pytest.mark.multiprocess

_QUICK = ("--iters", "2", "--warmup", "0", "--batches", "1", "--timeout", "120")
_ONE_FORM = {"broadcast": [True], "all_to_all": [False], "sendrecv": [False], "barrier": [False]}


def perf(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [warm_python(), "-m", "miraccl", "perf", *args]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, **(env or {})},
    )


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_is_correct(op: str) -> None:
    root = ("--root", "2") if op in ROOTED else ()
    sizes = () if op == "barrier" else ("--sizes", "1,5000")
    done = perf(op, "--ranks", "3", *sizes, "--json", "-", *root, *_QUICK)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [r["in_place"] for r in rows] == _ONE_FORM.get(op, [False, True]) * (
        1 if op == "barrier" else 2
    )
    for row in rows:
        assert (row["op"], row["ranks"], row["dtype"]) == (op, 3, "float32")
        assert row["wrong"] == (None if op == "barrier" else 0)
        assert row["bytes"] <= max(5000, 12)
        assert row["time_us"] > 0
        assert row["root"] == (2 if op in ROOTED else -1)
        assert bool(row["algo"]) == (op not in ("sendrecv", "barrier"))


def test_the_table_and_the_explanation() -> None:
    done = perf(
        "all_reduce", "--ranks", "2", "--sizes", "4K", "--algo", "ring", "--explain", *_QUICK
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "busbw" in lines[2]
    assert "ring/" in next(line for line in lines if line.strip().startswith("4096"))
    assert any("us predicted" in line for line in lines)
    assert "# Wrong values         : 0 OK" in lines


@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "bfloat16", "--redop", "avg"),
        ("--dtype", "int8", "--redop", "premul_sum"),
        ("--window",),
        ("--persistent", "--fresh"),
    ],
)
def test_types_operators_and_kinds_of_buffers(options: tuple[str, ...]) -> None:
    done = perf("all_reduce", "--ranks", "2", "--sizes", "3000", *options, *_QUICK)
    assert done.returncode == 0, done.stderr
    assert "0 OK" in done.stdout


def test_the_progress_bar_does_not_break_lines() -> None:
    ours, theirs = os.openpty()
    command = [
        sys.executable,
        "-m",
        "miraccl",
        "perf",
        "all_reduce",
        "--ranks",
        "1",
        "--sizes",
        "8,64",
        *_QUICK,
    ]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:  # EIO: the other side is closed
                break
        process.kill()
    os.close(ours)
    assert process.returncode == 0
    assert "measuring" in shown.decode()
    lines = [
        line
        for line in shown.decode().splitlines()
        if "float32" in line and "one_shot" in line.split("float32")[1]
    ]
    assert [len(line.split("float32")[1].split()) for line in lines] == [12, 12]


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "busbw.svg"
    done = perf("all_reduce", "--ranks", "2", "--sizes", "8,64", "--plot", str(target), *_QUICK)
    assert done.returncode == 0, done.stderr
    assert "<svg" in target.read_text()


def test_a_missing_matplotlib_is_reported_with_the_install_command(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('hidden by a test')")
    done = perf(
        "all_reduce",
        "--ranks",
        "1",
        "--sizes",
        "8",
        "--plot",
        "x.svg",
        *_QUICK,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "pip install matplotlib" in done.stderr


def test_usage_errors_of_ranks_are_reported_once() -> None:
    done = perf(
        "all_reduce", "--ranks", "3", "--sizes", "8", *_QUICK, env={"MIRACCL_ALGO": "no_such"}
    )
    assert done.returncode == 2
    assert done.stderr.count("unknown algorithm") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "env", "expected_text"),
    [
        (
            ("--deterministic", "--algo", "ring"),
            {},
            "--deterministic needs an algorithm that adds in rank order",
        ),
        (
            ("--ranks", "1", "--algo", "ring"),
            {"MIRACCL_DETERMINISTIC": "1"},
            "MIRACCL_DETERMINISTIC needs an algorithm",
        ),
        (
            ("--deterministic",),
            {"MIRACCL_ALGO": "ring"},
            "not MIRACCL_ALGO ring; available for all_reduce: one_shot, two_shot",
        ),
    ],
)
def test_deterministic_conflicts_are_rejected_before_ranks_start(
    args: tuple[str, ...], env: dict[str, str], expected_text: str
) -> None:
    done = perf("all_reduce", "--sizes", "8", *args, *_QUICK, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected_text in done.stderr


def test_deterministic_with_suitable_algorithms() -> None:
    assert (
        perf(
            "all_reduce", "--sizes", "8", "--deterministic", "--algo", "two_shot", *_QUICK
        ).returncode
        == 0
    )
    assert (
        perf("all_gather", "--sizes", "8", "--deterministic", "--algo", "ring", *_QUICK).returncode
        == 0
    )


_CRASH = """
import os, signal, sys
import miraccl
from miraccl.tools import cli
from miraccl.tools.perf import orchestrator
from miraccl.tools.perf.engine_miraccl import MiracclEngine
orchestrator._GRACE = 60.0
barrier = MiracclEngine.barrier
def failing_barrier(self):
    if self.rank == 1:
        {fault}
    barrier(self)
MiracclEngine.barrier = failing_barrier
cli.main(["perf", "all_reduce", "--ranks", "3", "--sizes", "8", "--timeout", "60"])
"""


@pytest.mark.parametrize(
    ("fault", "expected_text", "tracebacks"),
    [
        ("raise RuntimeError('on purpose')", "rank 1: RuntimeError: on purpose", 1),
        ("raise miraccl.CollectiveTimeout('on purpose')", "on purpose", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", 0),
    ],
)
def test_a_crashing_rank_ends_the_run(fault: str, expected_text: str, tracebacks: int) -> None:
    code = _CRASH.format(fault=fault)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert expected_text in done.stderr
    assert done.stderr.count("Traceback") == tracebacks


def test_a_run_beyond_its_timeout_is_stopped() -> None:
    code = _CRASH.format(fault="signal.pause()").replace('"60"', '"0.5"')
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "did not finish in time" in done.stderr


def test_an_interrupt_stops_the_ranks() -> None:
    text = """
import os, signal
from miraccl.tools import cli
from miraccl.tools.perf import orchestrator
process_events = orchestrator.OwnGroup.process_events
def interrupted(self, timeout):
    print(*self._ranks.pids, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    process_events(self, timeout)
orchestrator.OwnGroup.process_events = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)
cli.main(["perf", "all_reduce", "--ranks", "2", "--sizes", "8"])
"""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (130, "miraccl: interrupted\n")
    for pid in done.stdout.splitlines()[-1].split():
        assert not os.path.exists(f"/proc/{pid}")


def test_ranks_of_torchrun() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    names = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "of-a-test",
    }
    command = [
        warm_python(),
        "-m",
        "miraccl",
        "perf",
        "all_reduce",
        "--sizes",
        "8",
        "--json",
        "-",
        *_QUICK,
    ]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **names, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert [row["ranks"] for row in json.loads(outputs[0][0])] == [2, 2]
    assert outputs[1][0] == ""


# ---------------------------------------------------------------------- a faulty library


class _FaultyEngine(MiracclEngine):
    """Changes one element on one rank in every call."""

    def bind(self, case: Case, in_place: bool) -> BoundOperation | None:
        bound = super().bind(case, in_place)
        assert bound is not None

        def call() -> None:
            bound.call()
            if self.rank == 1:
                bound.output[7] += 1

        return BoundOperation(call=call, input=bound.input, output=bound.output)


def _measure_faulty(engine: type[MiracclEngine]) -> list[Any]:
    case = build_case("all_reduce", 4000, nranks=2, dtype="float32")
    options = MeasureOptions(iters=1, warmup=0, batches=1)
    with miraccl.init() as comm:
        rows = [
            measure(engine(comm), case, in_place, options, lambda: None)
            for in_place in (False, True)
        ]
    return [row.wrong for row in rows if row is not None]


def test_one_wrong_element_on_one_rank_is_counted() -> None:
    assert run_ranks(_measure_faulty, 2, _FaultyEngine) == [[2, 2]] * 2, (
        "one before and one after the timed calls"
    )
    assert run_ranks(_measure_faulty, 2, MiracclEngine) == [[0, 0]] * 2


def _measure_alternating() -> tuple[str, str]:
    case = build_case("all_reduce", 1 << 20, nranks=2, dtype="float32")
    with miraccl.init() as comm:

        def wait_for_turn() -> None:
            comm.all_reduce(np.zeros(1))

        row = measure(
            MiracclEngine(comm),
            case,
            True,
            MeasureOptions(iters=1, warmup=0, batches=1),
            wait_for_turn,
        )
        assert row is not None
        return row.algo, comm.explain("all_reduce", 1 << 20)[0].algo


def test_the_algorithm_shown_is_that_of_the_timed_calls() -> None:
    """Operations of ``wait_for_turn`` do not affect the algorithm shown."""
    for shown, planned in run_ranks(_measure_alternating, 2):
        assert shown == planned != "one_shot"


# ---------------------------------------------------------------------- a peer

_FAKE_MPI = '''
"""mpi4py of one rank for the worker, so that the comparison runs without MPI."""
import numpy as np
IN_PLACE = object()
FLOAT = "float"
SUM = "sum"
class Comm:
    rank, size = 0, 1
    def Barrier(self): pass
    def allgather(self, x): return [x]
    def Allreduce(self, x, y, op):
        if x is not IN_PLACE:
            y[0][:] = x[0]
COMM_WORLD = Comm()
def __getattr__(name): return name
'''


@pytest.fixture
def fake_mpi(tmp_path: Path) -> str:
    """Return a Python with a fake mpi4py of one rank, and an mpirun beside it."""
    package = tmp_path / "site" / "mpi4py"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "MPI.py").write_text(_FAKE_MPI)
    folder = tmp_path / "bin"
    folder.mkdir()
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path / "site"}" exec "{sys.executable}" "$@"\n')
    launcher = folder / "mpirun"
    launcher.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo a launcher; exit; }\nshift 2\nexec "$@"\n'
    )
    for path in (python, launcher):
        path.chmod(0o755)
    return str(python)


def test_a_peer_is_measured_alternating(fake_mpi: str) -> None:
    arguments = (
        "all_reduce",
        "--ranks",
        "1",
        "--sizes",
        "8,4K",
        "--compare",
        "mpi",
        "--peer-python",
        fake_mpi,
        *_QUICK,
    )
    done = perf(*arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 4
    for row in rows:
        assert row["peer"] == "mpi"
        assert row["ratio"] == pytest.approx(row["peer_time_us"] / row["time_us"])
    table = perf(*arguments).stdout
    assert "ratio" in table.splitlines()[2]
    assert "Geometric mean" in table


def test_a_missing_launcher_is_reported_before_ranks_start(
    fake_mpi: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(fake_mpi).parent / "mpirun").unlink()
    monkeypatch.setenv("PATH", str(Path(fake_mpi).parent))
    done = perf(
        "all_reduce",
        "--ranks",
        "1",
        "--sizes",
        "8",
        "--compare",
        "mpi",
        "--peer-python",
        fake_mpi,
        *_QUICK,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot find mpirun or mpiexec" in done.stderr


def test_a_failing_peer_ends_the_run(fake_mpi: str) -> None:
    module = Path(fake_mpi).parents[1] / "site" / "mpi4py" / "MPI.py"
    module.write_text(_FAKE_MPI.replace("y[0][:] = x[0]", "raise RuntimeError('peer trouble')"))
    done = perf(
        "all_reduce",
        "--ranks",
        "1",
        "--sizes",
        "8",
        "--compare",
        "mpi",
        "--peer-python",
        fake_mpi,
        *_QUICK,
    )
    assert done.returncode == 1
    assert "peer trouble" in done.stderr


def test_a_peer_with_wrong_results_is_rejected(fake_mpi: str) -> None:
    module = Path(fake_mpi).parents[1] / "site" / "mpi4py" / "MPI.py"
    module.write_text(_FAKE_MPI.replace("y[0][:] = x[0]", "y[0][:] = 0"))
    done = perf(
        "all_reduce",
        "--ranks",
        "1",
        "--sizes",
        "400",
        "--compare",
        "mpi",
        "--peer-python",
        fake_mpi,
        *_QUICK,
    )
    assert done.returncode == 1
    assert "wrong values" in done.stderr


def test_rank_outcomes_report_deaths_and_output() -> None:
    from tests.support.ranks import rank_outcomes

    first, second = rank_outcomes(_die_if_first, 2)
    assert first.status == -signal.SIGKILL
    assert second.ok
    assert second.value.tolist() == [1.0, 2.0]
    assert "printed by the second" in second.output


def _die_if_first() -> Any:
    if os.environ["MIRACCL_RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    print("printed by the second")
    return np.array([1.0, 2.0])
