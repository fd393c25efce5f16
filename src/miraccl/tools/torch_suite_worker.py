"""One backend's run of PyTorch's ``distributed_test``; started by ``tools.torch_suite``.

The tests of PyTorch decide by the name of the backend which of them apply.  The name they see is
``gloo``, so that all tests of CPU backends run, and the groups are then made with the backend under
test.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import unittest
from collections.abc import Callable
from typing import Any

os.environ["BACKEND"] = "gloo"
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="miraccl-torch-suite-"))
for _name in ("test_dir", "init_dir"):
    os.makedirs(os.path.join(os.environ["TEMP_DIR"], _name), exist_ok=True)

import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

BACKEND = os.environ.get("MIRACCL_SUITE_BACKEND", "gloo")
if BACKEND == "miraccl":
    import miraccl.torch  # noqa: F401

    if BACKEND not in distributed_test.PROFILING_SUPPORTED_BACKENDS:
        distributed_test.PROFILING_SUPPORTED_BACKENDS.append(BACKEND)


#: Ranks are forked from a server that has imported PyTorch: its import takes 4 s of a core.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch.testing._internal.distributed.distributed_test",
        *(["miraccl.torch", "miraccl.runtime.core"] if BACKEND == "miraccl" else []),
    ]
)


def _create_process(*, target: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:
    """Return a process that runs ``target`` in the present environment of this process."""
    return _CONTEXT.Process(target=_run_in, args=(dict(os.environ), target, *args), **options)


def _run_in(environment: dict[str, str], target: Callable[..., Any], *args: Any, **kw: Any) -> None:
    os.environ.update(environment)  # the server has that of its start; tests set TEMP_DIR anew
    target(*args, **kw)


_Tests: Any = distributed_test.DistributedTest._DistTestBase


class TestSuite(distributed_test.TestDistBackend, _Tests):  # type: ignore[misc]
    """PyTorch's tests of a backend, each with new processes as ranks."""

    def setUp(self) -> None:
        """Start the ranks of one test."""
        super().setUp()
        self._start_processes(_create_process)

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        """Run one rank, with the backend under test instead of the one that the tests name."""
        original = dist.init_process_group

        def init_process_group(*init_args: Any, backend: Any = None, **options: Any) -> Any:
            named = BACKEND if backend == "gloo" else backend
            return original(*init_args, backend=named, **options)

        dist.init_process_group = init_process_group
        super()._run(*args, **kwargs)


class _Result(unittest.TestResult):
    """Reports each outcome as a line of JSON on standard output."""

    def _report(self, test: Any, outcome: str, text: str = "") -> None:
        name = test.id().rsplit(".", 1)[-1]
        last = [line for line in text.strip().splitlines() if line.strip()]
        reason = next((ln for ln in reversed(last) if "Error" in ln), last[-1] if last else "")
        line = json.dumps({"test": name, "outcome": outcome, "reason": reason[:300]})
        print(line, file=REPORT, flush=True)

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        """Report a test that passed."""
        self._report(test, "passed")

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        """Report a test whose assertion failed."""
        base: Any = super()
        self._report(test, "failed", base._exc_info_to_string(err, test))

    addError = addFailure  # noqa: N815

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        """Report a test that does not apply."""
        self._report(test, "skipped", reason)


REPORT = sys.stdout


def main(patterns: list[str]) -> None:
    """Run the tests whose names contain one of the patterns, or all."""
    loader = unittest.TestLoader()
    names = [
        n
        for n in loader.getTestCaseNames(TestSuite)
        if not patterns or any(p in n for p in patterns)
    ]
    suite = unittest.TestSuite(TestSuite(name) for name in sorted(names))
    suite.run(_Result())


if __name__ == "__main__":
    main(sys.argv[1:])
