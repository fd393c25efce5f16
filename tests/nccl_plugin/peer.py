"""One side of a connection through the exported plugin, as NCCL would drive it."""

from __future__ import annotations

import ctypes
import random
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from miraccl import nccl_plugin
from miraccl.native.nccl_net_plugin import NetPlugin

TIMEOUT_S = 60.0


def poll(action: Any) -> Any:
    """Call ``action`` until it returns something else than None."""
    end = time.monotonic() + TIMEOUT_S
    while (value := action()) is None:
        assert time.monotonic() < end, "the plugin made no progress"
        time.sleep(0)
    return value


def pattern(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def connect(pipe: Connection, plugin: NetPlugin, sends: bool) -> int:
    """Connect one direction; the handle travels over the pipe, as over NCCL's bootstrap."""
    if sends:
        handle = plugin.handle_buffer(pipe.recv())
        return int(poll(lambda: plugin.connect(0, handle)))
    data, listening = plugin.listen(0)
    pipe.send(data)
    comm = int(poll(lambda: plugin.accept(listening)))
    plugin.close_listen(listening)
    return comm


def transfer(pipe: Connection, version: int, sizes: list[int], sends: bool) -> list[int]:
    """Send or receive messages, eight under way at a time; return the sizes that test gave."""
    exported = nccl_plugin.export()
    plugin = NetPlugin(exported.path, version)
    comm = connect(pipe, plugin, sends)
    capacity = max(sizes)
    buffers = [ctypes.create_string_buffer(max(capacity, 1)) for _ in range(8)]
    handles = [plugin.register(comm, ctypes.addressof(b), capacity) for b in buffers]
    done: list[int] = []
    requests: list[int] = []

    def finish() -> None:
        index = len(done)
        size = int(poll(lambda: plugin.test(requests[index])))
        if not sends:
            assert buffers[index % 8].raw[:size] == pattern(sizes[index], index)
        done.append(size)

    for index, size in enumerate(sizes):
        if index >= 8:
            finish()
        address = ctypes.addressof(buffers[index % 8])
        handle = handles[index % 8]
        if sends:
            ctypes.memmove(address, pattern(size, index), size)
            post = partial(plugin.isend, comm, address, size, 1, handle)
        else:
            post = partial(plugin.irecv, comm, address, capacity, 1, handle)
        requests.append(int(poll(post)))
    while len(done) < len(sizes):
        finish()
    pipe.send("done")
    assert pipe.recv() == "done"
    (plugin.close_send if sends else plugin.close_recv)(comm)
    return done
