"""What all tests share: no test may leave the settings of another one's environment behind, none
fails because the machine is busy.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

_OURS = ("MIRACCL_", "NCCL_", "OMPI_", "PMI_", "SLURM_")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


#: Folder in which the processes of .ci/test claim files of tests; empty: this one runs all.
_CLAIMS = os.environ.get("TEST_CLAIMS", "")


@functools.cache
def _claim(file: str) -> bool:
    """Return True if this process is the first to run the tests of a file."""
    try:
        os.close(os.open(os.path.join(_CLAIMS, file.replace("/", "-")), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leave out the tests of files that the other process of .ci/test runs."""
    return True if _CLAIMS and not _claim(item.nodeid.partition("::")[0]) else None


settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")


def pytest_collection_finish() -> None:
    """The collector need not go through torch, Numba and all tests again, each time that a test
    makes many objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's MIRACCL_ALGO must not decide what a test sees; the cache folder of kernels
    stays, for speed.
    """
    for name in list(os.environ):
        if (name.startswith(_OURS) and name != "MIRACCL_CACHE_DIR") or name in _TORCHRUN:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Communicators begin with ``trace.configure``, which lasts: a later test would capture lines
    twice or never.
    """
    log = logging.getLogger("miraccl")
    handlers, propagate, level = list(log.handlers), log.propagate, log.level
    yield
    for handler in [handler for handler in log.handlers if handler not in handlers]:
        log.removeHandler(handler)
    log.propagate = propagate
    log.setLevel(level)
