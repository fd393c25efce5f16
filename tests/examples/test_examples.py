"""Every example runs as its docstring says, exits with 0, and prints something.

The command is the first indented line of the docstring that starts Python, a launcher or
``miraccl``. An example is skipped if a package it imports is missing, if the launcher is missing or
cannot start anything (``srun`` without a cluster), or if its docstring says "needs an NVIDIA GPU"
and there is none.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.warm_python import TORCH, warm_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
COMMANDS = {"python": [], "miraccl": ["-m", "miraccl"], "torchrun": ["-m", "torch.distributed.run"]}
LAUNCHERS = ("mpirun", "mpiexec", "srun")
#: Open MPI otherwise rejects root, and more ranks than cores
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
LIMIT_S = 60.0
EVERYWHERE = {"miraccl", "numpy", *sys.stdlib_module_names}


def head_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text("utf-8")), clean=False) or ""


def command_of(path: Path) -> list[str]:
    """Return the words of the command line in the docstring."""
    for line in head_of(path).splitlines():
        words = shlex.split(line) if line.startswith("    ") else []
        if words and words[0] in (*COMMANDS, *LAUNCHERS) and f"examples/{path.name}" in words:
            return words
    raise AssertionError(f"the docstring of {path.name} has no command line")


def packages_of(path: Path) -> set[str]:
    """Return the packages imported at the top of the file."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
            found |= {"torch" for alias in node.names if alias.name.startswith("miraccl.torch")}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def have_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() and importlib.util.find_spec("cuda") is not None


@cache
def find_launcher(name: str) -> str:
    """Return a launcher beside this Python or on PATH that can start a process, or ""."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        return ""
    command, environment = [found, "-n", "1", "true"], {**os.environ, **OPEN_MPI}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            timeout=20,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return ""
    return found if done.returncode == 0 else ""


def interpreter(words: list[str], packages: set[str]) -> str:
    """Return a warm Python, for launchers also that of their ranks.

    This Python for programs of other packages than PyTorch.
    """
    if words[0] == "torchrun" or "torch" in packages:
        return warm_python(*TORCH)
    return warm_python() if packages <= EVERYWHERE else sys.executable


def run(command: list[str], path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **OPEN_MPI}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{path.name}: {done.stdout}{done.stderr}"
    assert done.stdout.strip(), "an example prints its result"


NEEDS_GPU = [
    path for path in EXAMPLES if re.search(r"needs an NVIDIA GPU", head_of(path), re.IGNORECASE)
]


@pytest.mark.parametrize("path", NEEDS_GPU, ids=lambda p: p.stem)
def test_examples_report_a_missing_gpu(path: Path) -> None:
    for package in sorted(packages_of(path) - {"miraccl"}):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(path)]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1
    assert "no GPU" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example(path: Path) -> None:
    words = command_of(path)
    for package in sorted(packages_of(path) - {"miraccl"}):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if words[0] in LAUNCHERS and not find_launcher(words[0]):
        pytest.skip(f"{words[0]} is not installed or cannot start processes")
    if path in NEEDS_GPU and not have_gpu():
        pytest.skip("no NVIDIA GPU, no driver, or cuda-bindings is not installed")
    if words[0] in LAUNCHERS:
        run(
            [
                find_launcher(words[0]),
                *(sys.executable if word == "python" else word for word in words[1:]),
            ],
            path,
        )
    else:
        python = interpreter(words, packages_of(path))
        run([python, *COMMANDS[words[0]], *words[1:]], path)


def test_examples_are_numbered() -> None:
    numbers = [path.name[:2] for path in EXAMPLES]
    assert all(re.fullmatch(r"\d\d_[a-z][a-z0-9_]*\.py", path.name) for path in EXAMPLES)
    assert len(set(numbers)) == len(numbers) >= 16


@pytest.mark.multiprocess
@pytest.mark.parametrize("nranks", [1, 3])
def test_examples_run_on_other_numbers_of_ranks(nranks: int) -> None:
    """Examples started by ``miraccl run`` also work on other numbers of ranks."""
    for path in EXAMPLES:
        words = command_of(path)
        if (
            words[:3] == ["miraccl", "run", "-n"]
            and words[3] != str(nranks)
            and packages_of(path) <= EVERYWHERE
        ):
            launcher = (
                [warm_python(), "-m", "miraccl", "run", "-n", str(nranks)]
                if nranks > 1
                else [warm_python()]
            )
            run([*launcher, str(path)], path)
