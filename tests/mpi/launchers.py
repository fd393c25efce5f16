"""The launchers of MPI that these tests run for real, and how each is told to start few ranks
anywhere, also as root.

They are the ``mpirun`` on PATH, and what MIRACCL_TEST_MPIRUN lists: MPIRUN or MPIRUN=PYTHON,
separated by colons.  PYTHON has mpi4py for that library; by default it is the one beside MPIRUN,
else the one that runs the tests.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 150.0


@dataclass(frozen=True)
class Mpirun:
    """``library`` is ompi4, ompi5, mpich or unknown; ``python`` the interpreter for programs with
    mpi4py.
    """

    path: str
    python: str
    library: str

    @property
    def id(self) -> str:
        return self.library

    def command(self, nranks: int) -> list[str]:
        words = [self.path]
        if self.library.startswith("ompi"):
            words += (
                ["--map-by", ":OVERSUBSCRIBE"] if self.library == "ompi5" else ["--oversubscribe"]
            )
            words += ["--bind-to", "none"]
            words += ["--allow-run-as-root"] if os.getuid() == 0 else []
        return [*words, "-n", str(nranks)]


def _listed() -> list[str]:
    given = os.environ.get("MIRACCL_TEST_MPIRUN", "")
    return [entry for entry in given.split(":") if entry] or [
        path for path in [shutil.which("mpirun")] if path
    ]


def _find(entry: str) -> Mpirun:
    path, _, python = entry.partition("=")
    beside = Path(path).with_name("python")
    text = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=PATIENCE, check=False
    ).stdout
    library = (
        "mpich"
        if "HYDRA" in text
        else "ompi" + text.split("(Open MPI) ")[1][0]
        if "(Open MPI) " in text
        else "unknown"
    )
    return Mpirun(
        path,
        python
        or (
            str(beside) if beside.exists() and beside.parent != Path("/usr/bin") else sys.executable
        ),
        library,
    )


MPIRUNS = [_find(entry) for entry in _listed()]


def environment(**more: str) -> dict[str, str]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), **more}


@functools.cache
def lacks(python: str, *modules: str) -> str:
    """Return why ``python`` cannot run programs with these modules and miraccl; empty if it can."""
    names = ", ".join(["miraccl.api.init", *modules])
    done = subprocess.run(
        [python, "-c", f"import {names}"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return f"{python}: {done.stderr.strip().splitlines()[-1]}" if done.returncode else ""


def run_job(
    command: list[str], scenario: str, folder: Path, *, python: str = sys.executable, **env: str
) -> list[dict[str, Any]]:
    """Run ``job.py`` under ``command``; the results of the ranks that wrote one, in order of
    rank.
    """
    folder.mkdir(exist_ok=True)
    program = [python, str(Path(__file__).with_name("job.py")), scenario, str(folder)]
    done = subprocess.run(
        [*command, *program],
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, (
        f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return [
        json.loads(path.read_text())
        for path in sorted(folder.glob("*.json"), key=lambda p: int(p.stem))
    ]
