"""A flood of connections at a hub with few descriptors: the job forms all the same."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time

import pytest

from miraccl.bootstrap import UniqueId, connect
from miraccl.errors import BootstrapError, MiracclError
from tests.bootstrap.kit import PATIENCE, in_threads

pytestmark = pytest.mark.multiprocess

#: Rank 0 with its hub, in a process that may open 40 files.
_RANK_0 = """
import json, resource, sys
from miraccl.bootstrap import connect, create_hub
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
unique_id, hub = create_hub(nranks=3, hosts=["127.0.0.1"])
print(json.dumps({"id": str(unique_id)}), flush=True)
try:
    session = connect(unique_id, 0, 3, float(sys.argv[1]), hub=hub)
    print(json.dumps({"met": [p.decode() for p in session.all_gather(b"0", "x", 60)]}), flush=True)
    session.barrier("end", 60)
except Exception as error:
    print(json.dumps({"error": str(error)}), flush=True)
"""


class Flood:
    """Connects as fast as it can, says nothing and holds its connections."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address, self._end = address, threading.Event()
        self.held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._end.is_set():
            sock = socket.socket()
            sock.settimeout(0.2)
            try:
                sock.connect(self._address)
                self.held.append(sock)
            except OSError:
                sock.close()
            while len(self.held) > 300:
                self.held.pop(0).close()
            time.sleep(0.0005)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join(PATIENCE)
        for sock in self.held:
            sock.close()


@pytest.fixture
def rank_0(request: pytest.FixtureRequest) -> object:
    process = subprocess.Popen(
        [sys.executable, "-c", _RANK_0, str(request.param)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "src"},
    )
    assert process.stdout is not None
    yield process
    process.kill()
    process.wait(PATIENCE)
    process.stdout.close()


def _line(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], PATIENCE)[0], "rank 0 says nothing"
    answer: dict[str, object] = json.loads(process.stdout.readline())
    return answer


@pytest.mark.parametrize("rank_0", [50.0], indirect=True)
def test_the_job_forms_in_a_flood(rank_0: subprocess.Popen[str]) -> None:
    unique_id = UniqueId.parse(str(_line(rank_0)["id"]))

    def rank(number: int) -> list[bytes]:
        session = connect(unique_id, number, 3, PATIENCE, session_timeout=PATIENCE)
        parts = session.all_gather(str(number).encode(), "x")
        session.barrier("end")
        session.close()
        return parts

    with Flood(unique_id.addresses[0]) as flood:
        while len(flood.held) < 100:
            time.sleep(0.01)
        results = in_threads([lambda r=r: rank(r) for r in (1, 2)])
        assert _line(rank_0) == {"met": ["0", "1", "2"]}
    assert results == [[b"0", b"1", b"2"]] * 2


@pytest.mark.parametrize("rank_0", [3.0], indirect=True)
def test_the_flood_is_named_when_ranks_are_missing(rank_0: subprocess.Popen[str]) -> None:
    unique_id = UniqueId.parse(str(_line(rank_0)["id"]))
    with Flood(unique_id.addresses[0]) as flood:
        while len(flood.held) < 100:
            time.sleep(0.01)
        (error,) = in_threads([lambda: connect(unique_id, 1, 3, 2.5)])
    assert isinstance(error, MiracclError | BootstrapError)
    assert "ran out of descriptors (ulimit -n)" in str(error) + str(_line(rank_0))
