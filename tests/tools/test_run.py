"""``miraccl run``: commands, failures, signals, output."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from miraccl.errors import InvalidUsage, SystemFailure
from miraccl.tools.run import LocalJob, build_command, open_job
from tests.support.fault_injection import limit_descriptors, open_files

Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Return a function that writes a program and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "a program.py"
        path.write_text(
            "import os, signal, sys\nrank = int(os.environ['MIRACCL_RANK'])\n"
            + textwrap.dedent(text)
        )
        return str(path)

    return write


def run(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miraccl", "run", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )


def test_ranks_receive_their_numbers(script: Script) -> None:
    path = script(
        """
        numbers = [os.environ['MIRACCL_NRANKS'], os.environ['MIRACCL_LOCAL_RANK']]
        line = ' '.join([str(rank), *numbers, *sys.argv[1:]])
        os.write(1, line.encode() + b'\\n')
    """
    )
    done = run("-n", "3", path, "--epochs", "3", "-n")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{r} 3 {r} --epochs 3 -n" for r in range(3)]


def test_all_ranks_share_one_unique_id(script: Script) -> None:
    done = run("-n", "2", script("os.write(1, os.environ['MIRACCL_UNIQUE_ID'].encode() + b'\\n')"))
    first, second = done.stdout.splitlines()
    assert first == second != ""


def test_lines_are_tagged(script: Script) -> None:
    done = run(
        "-n", "2", "--tag", script("print('out'); print('no newline', end='', file=sys.stderr)")
    )
    assert sorted(done.stdout.splitlines()) == ["[0] out", "[1] out"]
    assert sorted(done.stderr.splitlines()) == ["[0] no newline", "[1] no newline"]


def test_exit_before_output_is_read(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A program may exit before it is monitored."""
    opened = os.pidfd_open

    def open_ended(pid: int) -> int:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return opened(pid)

    monkeypatch.setattr(os, "pidfd_open", open_ended)
    assert (
        LocalJob(
            ["sh", "-c", "echo out; echo err >&2"], 2, lambda rank: {}, tag=True, grace=0.0
        ).run()
        == 0
    )
    out, err = capfd.readouterr()
    assert (out.splitlines(), err.splitlines()) == (["[0] out", "[1] out"], ["[0] err", "[1] err"])


def test_all_output_arrives_through_a_non_blocking_pipe(script: Script) -> None:
    """Another program may set O_NONBLOCK, which belongs to the shared file description."""
    path = script("sys.stdout.write(('x' * 99 + '\\n') * 5000)")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = [sys.executable, "-m", "miraccl", "run", "--tag", path]
    with (
        subprocess.Popen(command, stdout=writer, stdin=subprocess.DEVNULL) as job,
        os.fdopen(reader) as output,
    ):
        os.close(writer)
        assert sum(line == "[0] " + "x" * 99 + "\n" for line in output) == 5000
        assert job.wait(60) == 0


def test_exit_status_with_ignored_sigchld(script: Script) -> None:
    """SIGCHLD ignored by ``trap '' CHLD`` or a parent is inherited."""
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
        " os.execv(sys.executable, sys.argv[1:])"
    )
    command = [
        sys.executable,
        "-c",
        ignore,
        sys.executable,
        "-m",
        "miraccl",
        "run",
        "-n",
        "2",
        script("sys.exit(7 * rank)"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 7, done.stderr
    assert "rank 1 exited with status 7" in done.stderr


def test_a_rank_killed_by_a_signal_without_name(script: Script) -> None:
    done = run(script("os.kill(os.getpid(), 40)"))
    assert done.returncode == 168
    assert "rank 0 was killed by signal 40" in done.stderr


@pytest.mark.parametrize(
    "count", range(10)
)  # 3 for the launcher, 3 per rank, more while one is started
def test_a_shortage_of_descriptors_is_reported_and_cleaned_up(count: int) -> None:
    files, jobs = open_files(), []

    def start() -> None:
        jobs.append(LocalJob(["sleep", "60"], 2, lambda rank: {}, tag=True, grace=0.0))
        jobs[0].run()

    with limit_descriptors(count), pytest.raises(SystemFailure, match="Too many open files"):
        start()
    assert all(entry.process.returncode is not None for job in jobs for entry in job._processes)
    jobs.clear()
    assert open_files() <= files


def test_modules_and_other_programs() -> None:
    assert run("-n", "2", "-m", "platform").returncode == 0
    assert run("-n", "2", "--", "sh", "-c", "echo $MIRACCL_RANK").stdout.split() in (
        ["0", "1"],
        ["1", "0"],
    )


def test_the_first_failure_stops_all_and_gives_the_status(script: Script) -> None:
    done = run("-n", "3", "--grace", "0.1", script("sys.exit(7) if rank == 1 else signal.pause()"))
    assert done.returncode == 7
    assert "rank 1 exited with status 7" in done.stderr
    assert done.stderr.count("miraccl run:") == 1


def test_a_very_long_grace_period(script: Script) -> None:
    """The grace period exceeds epoll's 32-bit milliseconds."""
    program = script("sys.exit(7) if rank == 1 else sys.stdin.read()")
    command = [sys.executable, "-m", "miraccl", "run", "-n", "2", "--grace", "1e9", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "rank 1 exited with status 7; stopping the others" in process.stderr.readline()
        assert process.communicate(timeout=60)[1] == ""  # closes rank 0's standard input
    assert process.returncode == 7


def test_a_rank_that_ignores_sigterm_is_killed(script: Script) -> None:
    text = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        while True:
            signal.pause()
    """
    done = run("-n", "2", "--grace", "0.1", script(text))
    assert done.returncode == 128 + signal.SIGSEGV
    assert "SIGSEGV" in done.stderr


class Launched:
    """A ``miraccl run`` in the background, killed at the end of the block."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "-m", "miraccl", "run", *args]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True
        )
        assert self.process.stdout is not None
        self._fd = self.process.stdout.fileno()
        self._text = b""

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)

    def line(self) -> str:
        while b"\n" not in self._text:
            assert select.select([self._fd], [], [], 30)[0], (
                f"no line after 30 s, only {self._text!r}"
            )
            data = os.read(self._fd, 4096)
            assert data, f"the program exited after {self._text!r}"
            self._text += data
        first, self._text = self._text.split(b"\n", 1)
        return first.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_ranks(script: Script, number: signal.Signals) -> None:
    text = """
        def leave(number, frame):
            os.write(1, b"got %d\\n" % number)
            os._exit(0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, leave)
        os.write(1, b"ready\\n")
        while True:
            signal.pause()
    """
    with Launched("-n", "2", "--grace", "20", script(text)) as launched:
        assert [launched.line(), launched.line()] == ["ready", "ready"]
        launched.process.send_signal(number)
        assert [launched.line(), launched.line()] == [f"got {int(number)}"] * 2
        assert launched.process.wait(30) == 128 + number


def test_processes_started_by_a_rank_end_with_it(script: Script) -> None:
    text = """
        import subprocess
        child = subprocess.Popen(["sleep", "1000"])
        print(child.pid, flush=True)
        sys.exit(3)
    """
    done = run("-n", "1", script(text))
    assert done.returncode == 3
    # The child has been killed, but may not have been scheduled since.
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(int(done.stdout))
        assert select.select([pidfd], [], [], 30)[0], "a child outlived its rank"
        os.close(pidfd)


def test_ranks_end_with_the_launcher(script: Script) -> None:
    with Launched("-n", "1", script("print(os.getpid(), flush=True); signal.pause()")) as launched:
        pidfd = os.pidfd_open(int(launched.line()))
        launched.process.kill()
        launched.process.wait(30)
    assert select.select([pidfd], [], [], 30)[0], "the rank outlived its launcher"
    os.close(pidfd)


def test_a_signal_stops_a_starting_job() -> None:
    started = []

    def environ(local_rank: int) -> dict[str, str]:
        started.append(local_rank)
        if local_rank == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    assert (
        LocalJob(["sleep", "60"], 20, environ, tag=False, grace=0.1).run() == 128 + signal.SIGTERM
    )
    assert started == [0, 1, 2, 3]


def test_an_unusable_interface_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    monkeypatch.setenv("MIRACCL_SOCKET_IFNAME", "=nosuch0")
    done = run("-n", "2", script("pass"))
    assert done.returncode == 2
    assert done.stderr.startswith(
        "miraccl: cannot use MIRACCL_SOCKET_IFNAME='=nosuch0': no interface"
    )


def test_usage_errors(tmp_path: Path) -> None:
    for command in (["nonexistent.py"], ["no-such-program-anywhere"]):
        done = run("-n", "1", *command)
        assert done.returncode == 2
        assert command[0] in done.stderr
    assert "miraccl run --help lists the options" in run("--bogus", "train.py").stderr
    assert "--node-rank 1: with --nnodes 1 it must be 0" in run("--node-rank", "1", "sh").stderr


def test_commands() -> None:
    assert build_command("package.module", ("a",), as_module=True) == [
        sys.executable,
        "-m",
        "package.module",
        "a",
    ]
    assert build_command("sh", ("-c", "true"), as_module=False)[0].endswith("/sh")


def test_static_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidUsage, match="MIRACCL_SECRET"):
        open_job(2, 2, 1, "10.0.0.1:29500").__enter__()
    monkeypatch.setenv("MIRACCL_SECRET", "for this test only")
    with pytest.raises(InvalidUsage, match="HOST:PORT"):
        open_job(2, 2, 1, "10.0.0.1").__enter__()
    with pytest.raises(InvalidUsage, match="--master"):
        open_job(2, 2, 1, None)
    with pytest.raises(InvalidUsage, match="--node-rank 2"):
        open_job(2, 2, 2, "10.0.0.1:29500")
    with open_job(2, 2, 1, "[fe80::1]:29500") as environ_of:
        environ = environ_of(1)
    assert environ["MIRACCL_RANK"] == "3"
    assert environ["MIRACCL_NRANKS"] == "4"
    assert environ["MIRACCL_LOCAL_RANK"] == "1"
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("fe80::1", "29500")


_MEET = """
    import numpy as np, miraccl
    with miraccl.init() as comm:
        x = comm.all_reduce(np.array([comm.rank], np.int64))
        local = int(os.environ["MIRACCL_LOCAL_RANK"])
        os.write(1, b"%d of %d, local %d: %d\\n" % (comm.rank, comm.nranks, local, x[0]))
"""


@pytest.mark.multiprocess
def test_ranks_meet_on_one_host(script: Script) -> None:
    done = run("-n", "3", script(_MEET))
    assert sorted(done.stdout.splitlines()) == [f"{r} of 3, local {r}: 3" for r in range(3)], (
        done.stderr
    )


@pytest.mark.multiprocess
def test_two_hosts_meet_at_the_master(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRACCL_SECRET", "for this test only")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    path = script(_MEET)
    common = ("-n", "2", "--nnodes", "2", "--master", f"127.0.0.1:{port}")
    with (
        Launched(*common, "--node-rank", "1", path) as second,
        Launched(*common, "--node-rank", "0", path) as first,
    ):
        lines = [launched.line() for launched in (first, first, second, second)]
        assert sorted(lines) == [f"{r} of 4, local {r % 2}: 6" for r in range(4)]
        assert [first.process.wait(60), second.process.wait(60)] == [0, 0]


@pytest.mark.multiprocess
def test_peers_report_a_killed_rank(script: Script) -> None:
    text = """
        import numpy as np, miraccl
        comm = miraccl.init()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(np.ones(4))
    """
    done = run("-n", "2", "--grace", "30", script(text))
    assert done.returncode == 128 + signal.SIGKILL
    assert "PeerDied" in done.stderr


def test_output_of_several_ranks_appears_by_lines(script: Script) -> None:
    path = script(
        """
        import time
        for part in ("abc", "def", "ghi\\n") * 20:
            sys.stdout.write(part)
            time.sleep(0.001)
    """
    )
    done = run("-n", "3", path)
    assert done.stdout == "abcdefghi\n" * 60


def test_equal_tracebacks_are_shown_once(script: Script) -> None:
    path = script("raise ValueError(f'rank {rank}: no data')")
    done = run("-n", "3", path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "first failure, on ranks 0, 1 and 2 alike:" in done.stderr


def test_ranks_may_write_to_the_terminal_themselves(script: Script) -> None:
    ours, theirs = os.openpty()
    path = script("print(sys.stdout.isatty(), sys.stderr.isatty(), flush=True)")
    command = [sys.executable, "-m", "miraccl", "run", "-n", "2", "--raw", path]
    subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, timeout=60, check=True
    )
    os.close(theirs)
    assert os.read(ours, 1000).decode().split() == ["True"] * 4
    os.close(ours)
    assert "cannot combine --raw with --tag" in run("--raw", "--tag", "sh").stderr


def test_ranks_have_the_variables_of_torchrun(script: Script) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    path = script(f"print(*(os.environ[name] for name in {names}), os.environ['MASTER_PORT'])")
    rows = sorted(line.split() for line in run("-n", "2", path).stdout.splitlines())
    assert [row[:6] for row in rows] == [
        ["0", "2", "0", "2", "0", "127.0.0.1"],
        ["1", "2", "1", "2", "0", "127.0.0.1"],
    ]
    assert rows[0][6] == rows[1][6]


@pytest.mark.multiprocess
def test_an_unchanged_pytorch_script_runs(script: Script) -> None:
    pytest.importorskip("torch")
    path = script(
        """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.full((4,), float(dist.get_rank()))
        dist.all_reduce(x)
        print(dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], x[0].item())
        dist.destroy_process_group()
    """
    )
    done = run("-n", "2", path)
    assert sorted(done.stdout.splitlines()) == ["0 2 0 1.0", "1 2 1 1.0"], done.stderr
