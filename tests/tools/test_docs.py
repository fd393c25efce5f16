"""The documentation agrees with the code.

Names, errors, options, settings, commands, files and identifiers exist, generated parts are up to
date, and figures are those of bench/results.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import click
import pytest

import miraccl
from miraccl import errors, params
from miraccl.runtime.options import CommunicatorOptions, Options
from miraccl.tools import cli
from miraccl.tools.env import LAUNCH_VARIABLES
from miraccl.tools.perf.transfers import transfers
from tests.support.documents import ROOT, TEXTS
from tests.support.warm_python import warm_python

OPERATIONS = TEXTS["docs/guide/operations.md"]
ALGORITHMS = TEXTS["docs/guide/algorithms.md"]
#: constructors that only other parts of the package call
_INTERNAL = {"from_session", "split_within", "serve_as_aggregator", "use_aggregators"}
#: variables that the tests, NCCL or no program reads
_OTHER_VARIABLES = {
    "MIRACCL_TEST_MPIRUN",
    "MIRACCL_EMULATOR_CACHE",
    "MIRACCL_X",
    "NCCL_X",
    "NCCL_IB_HCA",
    "NCCL_NET",
    "NCCL_LAUNCH_MODE",
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "NCCL_STEPS",
    "NCCL_NVLS_ENABLE",
}


def _names(word: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text) is not None


@cache
def _generators() -> tuple[ModuleType, ModuleType]:
    """``docgen.pages`` and ``docgen.measurements`` of ``.ci``."""
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        return (
            importlib.import_module("docgen.pages"),
            importlib.import_module("docgen.measurements"),
        )
    finally:
        sys.path.remove(str(ROOT / ".ci"))


def test_generated_pages_are_up_to_date() -> None:
    pages, _ = _generators()
    stale = [
        str(path.relative_to(ROOT))
        for path, text in pages.rendered().items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    assert stale == [], "run: make docs"


def test_only_the_newest_run_of_each_machine_is_kept() -> None:
    _, measurements = _generators()
    assert measurements.superseded() == []


def test_every_result_is_on_the_measurements_page() -> None:
    _, measurements = _generators()
    known = {"gpu_final", "experiments", *(b.folder for b in measurements.BENCHMARKS)}
    assert {path.name for path in (ROOT / "bench" / "results").iterdir()} == known


def test_the_api_is_documented() -> None:
    options = [
        name
        for name, p in inspect.signature(Options.create).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    ]
    methods = [
        name
        for cls in (miraccl.Communicator, miraccl.Work)
        for name in vars(cls) | vars(cls.__base__)
        if name[0] != "_"
    ]
    wanted = {*miraccl.__all__, *options, *methods} - _INTERNAL - {"__version__", "is_completed"}
    forms = {name for name in wanted if name.endswith("_init")}
    assert {name.removesuffix("_init") for name in forms} < wanted
    assert [name for name in sorted(wanted - forms) if not _names(name, OPERATIONS)] == []


@pytest.mark.parametrize(("package", "page"), [("torch", "pytorch"), ("ray", "ray")])
def test_the_page_of_a_package_has_all_of_it(package: str, page: str) -> None:
    """``__all__``, read without the import, which needs PyTorch or Ray."""
    source = (ROOT / "src" / "miraccl" / package / "__init__.py").read_text()
    (names,) = re.findall(r"^__all__ = (\[.*?\])$", source, re.MULTILINE | re.DOTALL)
    text = TEXTS[f"docs/guide/{page}.md"]
    assert [name for name in ast.literal_eval(names) if not _names(name, text)] == []


def _error_classes() -> set[str]:
    """Names of all subclasses of ``MiracclError`` in the package, also those of modules."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for path in (ROOT / "src" / "miraccl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    found = {"MiracclError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def test_every_error_is_documented() -> None:
    found = _error_classes()
    assert {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.MiracclError)
    } <= found
    assert "JobAlreadyFormed" in found
    pattern = r"`(errors\.|miraccl\.)?{}`"
    assert [n for n in sorted(found) if not re.search(pattern.format(n), OPERATIONS)] == []


def test_help_names_the_options_of_a_communicator() -> None:
    for call in (miraccl.init, miraccl.Communicator):
        names = list(inspect.signature(call).parameters)
        assert set(CommunicatorOptions.__annotations__) <= set(names)
        assert "options" not in names


def test_every_command_is_documented() -> None:
    text = "\n".join(text for name, text in TEXTS.items() if name != "docs/guide/reference/cli.md")

    def commands(group: click.Group, path: str) -> list[str]:
        context = click.Context(group)
        inner = {name: group.get_command(context, name) for name in group.list_commands(context)}
        return [
            full
            for name, command in inner.items()
            for full in (
                commands(command, f"{path} {name}")
                if isinstance(command, click.Group)
                else [f"{path} {name}"]
            )
        ]

    assert [command for command in commands(cli.cli, "miraccl") if not _names(command, text)] == []


#: ``miraccl perf write|read|writev`` is a command of its own.
TRANSFER_OPTIONS = {option for param in transfers.params for option in param.opts}


@pytest.mark.parametrize("name", TEXTS)
def test_options_that_a_document_gives_commands_exist(name: str) -> None:
    """Long options behind ``miraccl COMMAND``, up to the program that it starts."""
    unknown = []
    for words in re.findall(r"(?:^|[`$ ])miraccl ([a-z-]+[^`#|\n]*)", TEXTS[name], re.MULTILINE):
        command: click.Command | None = cli.cli
        context = click.Context(cli.cli)
        known = {"--help"}
        for word in words.split():
            if isinstance(command, click.Group) and (inner := command.get_command(context, word)):
                command = inner
                known |= TRANSFER_OPTIONS if word == "perf" else set()
                known |= {option for param in inner.params for option in param.opts}
            elif word == "--" or word.endswith(".py"):
                break
            elif re.match(r"--[a-z]", word) and command is not cli.cli:
                option = word.partition("=")[0].rstrip(".,;:)")
                unknown += [f"{words}: {option}"] if option not in known else []
    assert unknown == []


def test_every_benchmark_is_documented() -> None:
    scripts = [
        path
        for path in (ROOT / "bench").glob("*.py")
        if f"python bench/{path.name}" in path.read_text()
    ]
    assert len(scripts) > 12
    text = TEXTS["bench/README.md"]
    assert [p.name for p in scripts if not re.search(rf"`(bench/)?{p.name}`", text)] == []


@pytest.mark.parametrize("name", TEXTS)
def test_settings_that_a_document_names_exist(name: str) -> None:
    declared = {f"MIRACCL_{setting}" for setting in (*params.PARAMS, *LAUNCH_VARIABLES)}
    declared |= {f"NCCL_{param.nccl}" for param in params.PARAMS.values()} | _OTHER_VARIABLES
    named = set(re.findall(r"\b(?:MIRACCL|NCCL)_[A-Z0-9_]*[A-Z0-9]\b(?!\*)", TEXTS[name]))
    assert named - declared == set()


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_a_document_names_exist(name: str) -> None:
    """Names with a folder of the repository or of the package."""
    package = ROOT / "src" / "miraccl"
    folders = (ROOT, package, package / "executor" / "cpu", package / "executor" / "cuda")
    tops = sorted(
        {
            path.name
            for folder in folders
            for path in folder.iterdir()
            if path.is_dir() and path.name[0].isalpha()
        }
        - {"site", "device"}  # NCCL's sources have a folder ``device``
    )
    pattern = rf"`((?:{'|'.join(tops)})/[\w./-]+\.(?:py|cuh|md|xml|toml))`"
    missing = [
        file
        for file in re.findall(pattern, re.sub(r"\[`[^]]*`\]\(", "", TEXTS[name]))
        if not re.search("NAME|ISSUE", file)
        and not any((folder / file).exists() for folder in folders)
    ]
    assert missing == []


@cache
def _known_words() -> frozenset[str]:
    words: set[str] = set()
    for folder in ("src", "tests", "bench", "examples", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cuh", ".h", ".cpp", "") and path.is_file():
                words |= set(re.findall(r"\w+", path.read_text("utf-8", "replace")))
                words |= {path.stem, *path.parts}
    return frozenset(words)


@pytest.mark.parametrize("name", [n for n in TEXTS if n.startswith("docs/design/")])
def test_identifiers_that_a_design_page_names_exist(name: str) -> None:
    """Words of inline code with an underscore or in CamelCase, except those of NCCL, CUDA, MPI."""
    text = re.sub(r"```.*?```", "", TEXTS[name], flags=re.DOTALL)
    words = {
        w
        for span in re.findall(r"`([^`\n]+)`", text)
        for w in re.findall(r"(?<!\w)[A-Za-z_]\w+", span)
    }
    own = {
        w
        for w in words
        if re.search(r"[a-z]_[a-z]|[a-z][A-Z]|[A-Z]_[A-Z]", w)
        and not re.match(r"nccl|cu[A-Z]|NCCL|MIRACCL|SLURM|PMI|OMPI|MPI|CUDA|ibv_|IB_|RDMAV_", w)
    }
    foreign = {
        "abortFlag",
        "checkAbort",
        "recvReduceCopySend",
        "runRing",
        "dev_runtime",
        "allReduceByTwo",
        "epoll_pwait2",
        "use_cuda",
        "use_cuda_dmabuf",
        "disable_pcie_relaxed",
        # of Linux
        "tcpi_delivery_rate",
        "completer_retry_err",
        "do_class_d1e_error",
        "rxe_resp",
    }
    assert own - foreign - _known_words() == set()


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    _, measurements = _generators()
    table = dict(re.findall(r"^\| (.+?) \| ([\d.]+ \S+) \|", TEXTS["README.md"], re.MULTILINE))
    tables = measurements.load_gpu_tables()
    row = measurements.all_reduce_times(tables[8])[16]
    theirs = re.search(r"\| NCCL ([\d.]+) µs \|", TEXTS["README.md"])
    assert theirs
    assert float(theirs[1]) == pytest.approx(row["nccl_us"], abs=0.0501)
    (ours,) = (v for k, v in table.items() if k.startswith("`all_reduce` of 16 bytes"))
    assert float(ours.split()[0]) == pytest.approx(row["time_us"], abs=0.0501)
    (path,) = (p for p in measurements.newest("peers") if "EPYC" in p.name)
    cell = re.search(r"\| all_reduce \| ([\d.]+) / impi ([\d.]+)", path.read_text())
    assert cell
    (ours,) = (v for k, v in table.items() if k.startswith("`all_reduce` of 8 bytes"))
    assert float(ours.split()[0]) == pytest.approx(float(cell[1]), abs=0.00501)


def _run_on_two_ranks(folder: Path, program: str) -> list[str]:
    """Return the lines that the ranks print, each with its rank in front."""
    (folder / "program.py").write_text(program)
    command = [warm_python(), "-m", "miraccl", "run", "-n", "2", "--tag", "program.py"]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.multiprocess
def test_the_schedule_and_the_program_on_algorithms_run(tmp_path: Path) -> None:
    (schedule,) = re.findall(r"```\n(schedule .*?)```", ALGORITHMS, re.DOTALL)
    (program,) = re.findall(r"```python\n(.*?)```", ALGORITHMS, re.DOTALL)
    (tmp_path / "swap.txt").write_text(schedule)
    assert _run_on_two_ranks(tmp_path, program) == [
        f"[{rank}] [3. 3. 3. 3.] swap" for rank in range(2)
    ]


_PREAMBLE = """
import numpy as np, miraccl
with miraccl.init() as comm:
    a, b, x = (np.full(8, comm.rank + offset, np.float32) for offset in range(3))
"""


@pytest.mark.multiprocess
def test_the_programs_on_operations_run(tmp_path: Path) -> None:
    """All but those that create communicators, and lines on GPU memory."""
    blocks = re.findall(r"```python\n(.*?)```", OPERATIONS, re.DOTALL)
    blocks = [block for block in blocks if "miraccl.init(" not in block]
    assert len(blocks) == 4
    lines = [line for block in blocks for line in block.splitlines() if 'device="cuda"' not in line]
    program = _PREAMBLE + "\n".join(f"    {line}" for line in [*lines, "print(x.shape)"])
    assert _run_on_two_ranks(tmp_path, program) == [f"[{rank}] (1048576,)" for rank in range(2)]


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """Needs the extra ``docs``; broken links and anchors are warnings."""
    pytest.importorskip("material", reason="MkDocs with Material is not installed (extra docs)")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed (extra docs)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "guide" / "reference" / "api" / "index.html").exists()
