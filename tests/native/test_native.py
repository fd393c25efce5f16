"""Compiled code on disk and in memory: what is cached, what a broken cache does, and builtins over
compiled functions.
"""

from __future__ import annotations

import ast
import ctypes
import errno
import fcntl
import importlib.util
import os
import pwd
import stat
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miraccl import native
from miraccl.errors import SystemFailure
from miraccl.native import atomics, cache
from miraccl.native.intrinsics import PyLong_AsLong, PyLong_FromLong, load
from tests.support.fault_injection import limit_descriptors

LIBRARIES = (
    "miraccl.native.words",
    "miraccl.executor.cpu.kernels.engine",
    "miraccl.executor.cpu.kernels.fold",
    "miraccl.executor.cpu.kernels.nogil.operations",
    "miraccl.fastpath.cuda.call",
    "miraccl.proxy.kernels.staging",
    "miraccl.graph.search.kernel.channel_search",
)


def test_packed_objects_are_whole_or_nothing() -> None:
    objects = [b"one", b"", b"three" * 1000]
    data = native._pack(objects)
    assert native._unpack(data) == objects
    assert native._unpack(native._pack([])) == []
    for broken in (
        b"",
        data[:-1],
        data[1:],
        data[:50],
        data + b"x",
        bytes([data[0] ^ 1]) + data[1:],
        data[:60] + b"?" + data[61:],
    ):
        assert native._unpack(broken) is None


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MIRACCL_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    assert cache.read("nothing") is None
    cache.write("thing", b"bytes")
    assert cache.read("thing") == b"bytes"
    assert sorted(p.name for p in (tmp_path / "deep" / "cache").iterdir()) == ["thing"]
    assert stat.S_IMODE((tmp_path / "deep" / "cache").stat().st_mode) == 0o700
    with cache.lock("thing") as first:
        assert first


@pytest.fixture
def told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[], list[str]]:
    """Return the log messages of the cache, each once."""
    cache._warn_once.cache_clear()
    monkeypatch.setattr(cache.log, "handle", caplog.handler.handle)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def below(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A path below a folder that cannot be written."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary / f"miraccl-{os.getuid()}"


def test_a_cache_folder_that_cannot_be_written_is_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, below: Path, told: Callable[[], list[str]]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MIRACCL_CACHE_DIR", str(tmp_path / "file"))
    assert cache.writable_folder() == cache.writable_folder() == below
    assert stat.S_IMODE(below.stat().st_mode) == 0o700
    (message,) = told()
    assert message.startswith(f"cannot write to MIRACCL_CACHE_DIR={tmp_path}/file (File exists)")


def test_a_cache_folder_that_may_only_be_read_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, below: Path
) -> None:
    """Such a folder belongs to an image that ships compiled kernels."""
    monkeypatch.setenv("MIRACCL_CACHE_DIR", str(tmp_path))
    (tmp_path / "old").write_bytes(b"compiled before")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    cache.write("new", b"compiled now")
    assert (cache.read("old"), cache.read("new")) == (b"compiled before", b"compiled now")
    assert (below / "new").read_bytes() == b"compiled now"
    assert cache.plan_folder() == below / "plans"
    with cache.lock("thing") as first:
        assert first
    assert (below / "thing.lock").exists()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Makes folders refuse every new file."""
    monkeypatch.setenv("MIRACCL_CACHE_DIR", str(tmp_path))
    opened = os.open

    def fill(*folders: Path) -> None:
        def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_CREAT and Path(path).parent in folders:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return opened(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)

    return fill


def test_what_a_full_disk_does_not_take_lies_elsewhere(
    tmp_path: Path, below: Path, full: Callable[..., None], told: Callable[[], list[str]]
) -> None:
    full(tmp_path)
    cache.write("thing", b"bytes")
    assert cache.read("thing") == b"bytes"
    assert told() == [f"cannot write to {tmp_path}: No space left on device; {below} is used"]
    with cache.lock("thing") as first:
        assert first
    assert (below / "thing.lock").exists()


def test_nothing_is_kept_where_no_folder_takes_it(
    tmp_path: Path, below: Path, full: Callable[..., None], told: Callable[[], list[str]]
) -> None:
    full(tmp_path, below)
    cache.write("thing", b"bytes")
    assert cache.read("thing") is None
    (message,) = told()
    assert "every process makes again" in message
    assert "No space left on device" in message
    with cache.lock("thing") as first:
        assert first


def test_a_folder_of_somebody_else_below_the_temporary_one_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, below: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thing").write_bytes(b"code of theirs")
    below.symlink_to(tmp_path / "theirs")
    monkeypatch.setenv("MIRACCL_CACHE_DIR", "/proc/nothing")
    cache._private_folder.cache_clear()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    below.rename(below.parent / f"miraccl-{os.getuid()}")
    assert cache.read("thing") is None
    found = cache.writable_folder()
    assert found is not None
    assert found == cache.writable_folder() != below.parent / f"miraccl-{os.getuid()}"
    found.rmdir()
    cache._private_folder.cache_clear()


@pytest.mark.parametrize("somebody_elses", [False, True])
def test_a_user_without_a_home(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    below: Path,
    told: Callable[[], list[str]],
    somebody_elses: bool,
) -> None:
    """A user id without a name, as in containers: nothing is created in the working directory."""
    for name in ("MIRACCL_CACHE_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert cache.preferred_folder() == below
    if somebody_elses:
        below.mkdir()
        (below / "thing").write_bytes(b"theirs")
        monkeypatch.setattr(cache, "_owned_by_user", lambda path: path != below)
        cache._private_folder.cache_clear()
    cache.write("thing", b"bytes")
    assert cache.read("thing") == (None if somebody_elses else b"bytes")
    assert (cache.writable_folder() == below) is not somebody_elses
    assert not list(here.iterdir())
    assert not told()


def test_a_file_system_without_locks_makes_nobody_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setenv("MIRACCL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", flock)
    with cache.lock("thing") as first:
        assert first


def test_no_descriptor_for_compiled_code_is_a_system_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_cached_key", native._key)
    with (
        limit_descriptors(0),
        pytest.raises(SystemFailure, match=r"words cannot be loaded: Too many open files"),
    ):
        native.library("miraccl.native.words")


def test_a_broken_cache_is_compiled_anew(tmp_path: Path) -> None:
    """Another process with a cache of its own: compiled, kept, damaged, compiled again."""
    code = (
        "from miraccl.native import atomics; import ctypes; word = ctypes.c_int64(5);"
        "print(atomics.load_acquire(ctypes.addressof(word)))"
    )
    (
        other := tmp_path / "other"
    ).mkdir()  # instead of the one that others may have used in the place of theirs
    env = {**os.environ, "MIRACCL_CACHE_DIR": str(tmp_path), "TMPDIR": str(other)}

    def run() -> str:
        return subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout.strip()

    assert run() == "5"
    (kept,) = tmp_path.glob("words-*.o")
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    assert run() == "5"
    assert kept.read_bytes()[32:40] == whole[32:40]  # written again, whole
    assert native._unpack(kept.read_bytes()) is not None


def test_keys_differ_by_source_and_are_stable() -> None:
    engine, words = (
        native._key("miraccl.executor.cpu.kernels.engine"),
        native._key("miraccl.native.words"),
    )
    assert engine == native._key("miraccl.executor.cpu.kernels.engine")
    assert len(engine) == len(words) == 20


def test_the_key_names_compiler_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.import_module("numba").__version__ in native._version_of("numba")
    processor = native._processor()
    assert "flags" in processor or "Features" in processor
    assert "MHz" not in processor, "it changes with time"
    before = native._key("miraccl.native.words")
    monkeypatch.setattr(native, "_processor", lambda: processor + " another")
    assert native._key("miraccl.native.words") != before


def test_a_change_of_what_stands_apart_compiles_nothing_else_anew() -> None:
    apart, engine = (
        set(native.sources_of(f"miraccl.executor.cpu.kernels.{name}"))
        for name in ("nogil.operations", "engine")
    )
    assert engine < apart
    assert {path.name for path in apart - engine} == {
        "__init__.py",
        "offsets.py",
        "operations.py",
        "tcp_streams.py",
    }


def _imports(path: Path) -> Iterator[str]:
    """Modules of this package that a file takes something from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("miraccl."):
            found = importlib.util.find_spec(str(node.module))
            assert found is not None
            yield from (
                (f"{node.module}.{alias.name}" for alias in node.names)
                if found.submodule_search_locations
                else (found.name,)
            )


@pytest.mark.parametrize("module", LIBRARIES)
def test_keys_cover_everything_that_is_compiled(module: str) -> None:
    """Whatever kernel sources take from elsewhere in the package: else a changed number would leave
    old code in the cache.
    """
    covered = native.sources_of(module)
    packages = {path.parent for path in covered if path.name == "__init__.py"}
    left, seen = [module], set()
    while left:
        name = left.pop()
        (path,) = native._files_of(name)
        assert path in covered, (
            f"{module} is made of {name}, which its key leaves out: list it in SOURCES"
        )
        seen.add(name)
        if path.parent in packages:  # other modules only give numbers and functions of their own
            left += [more for more in _imports(path) if more not in seen]
    assert len(seen) > 1


def test_unknown_functions_are_named() -> None:
    with pytest.raises(SystemFailure, match="no function 'miraccl_nonsense'"):
        native.library("miraccl.native.words").address("miraccl_nonsense")


def test_words() -> None:
    import ctypes

    word = ctypes.c_int64(-7)
    address = ctypes.addressof(word)
    assert atomics.load_acquire(address) == -7
    atomics.store_release(address, (1 << 63) - 1)
    assert word.value == (1 << 63) - 1
    assert atomics.exchange(address, -(1 << 63)) == (1 << 63) - 1
    assert word.value == -(1 << 63)
    atomics.store_release(address, 0xFFFFFFFF)
    atomics.ring_futex(address)  # 32 bits wrap around; the word beside stays
    assert word.value == 0
    assert isinstance(atomics.register_membarrier(), bool)


def test_helpers_of_kernels_are_callable_from_kernels_only() -> None:
    """The intrinsics have no body in Python: a kernel source that is run by mistake fails at
    once.
    """
    with pytest.raises(Exception, match=r".+"):
        load(0)
    assert PyLong_AsLong.symbol == "PyLong_AsLong"
    assert PyLong_FromLong.symbol == "PyLong_FromLong"


def test_builtins_of_many_owners_cost_nothing_once_they_are_gone() -> None:
    """Every communicator makes its builtins anew. ``PyObject_Repr`` looks at their owner, and at no
    argument.
    """
    address = ctypes.cast(ctypes.pythonapi.PyObject_Repr, ctypes.c_void_p).value
    assert address is not None
    assert [native.builtin("repr", address, owner)() for owner in ("one", 2)] == ["'one'", "2"]
    tracemalloc.start()
    try:
        for _ in range(1000):
            native.builtin("repr", address)
        assert tracemalloc.get_traced_memory()[0] < 10_000
    finally:
        tracemalloc.stop()


def test_builtins_may_be_there_until_the_interpreter_ends() -> None:
    """The last garbage collection reads their definitions, when the module that made them has gone;
    freed memory is overwritten here.
    """
    command = (
        "import ctypes, sys; from miraccl import native;"
        "address = ctypes.cast(ctypes.pythonapi.PyObject_Repr, ctypes.c_void_p).value; "
        "sys.kept = native.builtin('repr', address, 1); print(sys.kept())"
    )
    environment = os.environ | {"PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "255"}
    done = subprocess.run(
        [sys.executable, "-c", command],
        env=environment,
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
