"""KV cache from a prefill process to a decode process: blocks, a notification, a failure.

    python examples/27_kv_transfer.py

The two processes share no communicator. The decode process offers its cache and is told when the
blocks of a request are there; the prefill process writes them where the decode process has room.
"""

import multiprocessing

import numpy as np

import miraccl

BLOCKS, BLOCK_BYTES = 256, 16 * 1024


def decode(pipe):
    with miraccl.Agent("decode-0", secret="example", timeout=30) as agent:
        cache = agent.empty((BLOCKS, BLOCK_BYTES), np.uint8)
        registration = agent.register(cache, access="w")
        free = [200, 3, 4, 5, 77]  # where this process has room
        pipe.send((agent.address, registration.advertise(), free))
        note = agent.wait_notification()
        assert note.error is None
        assert [int(cache[block, 0]) for block in free] == [10, 11, 12, 13, 14]
        print(f"decode: {note.data.decode()} of {note.peer} is in blocks {free}", flush=True)
        registration.deregister()  # no byte can come any more
        pipe.send("reused")
        pipe.recv()


def prefill(pipe):
    address, descriptor, free = pipe.recv()
    with miraccl.Agent("prefill-3", secret="example", timeout=30) as agent:
        peer = agent.connect(address)
        cache = np.repeat(np.arange(BLOCKS, dtype=np.uint8)[:, None], BLOCK_BYTES, axis=1)
        transfer = peer.writev(
            cache,
            descriptor,
            src_blocks=np.arange(10, 15, dtype=np.int32),
            dst_blocks=np.array(free, np.int32),
            notify=b"request 17",
            deadline=5.0,
        )
        transfer.wait()
        plan = transfer.explain()
        print(f"prefill: {plan.blocks} blocks in {plan.extents} extents by {plan.method}")
        pipe.recv()
        try:
            peer.write(cache, descriptor).wait()
        except miraccl.StaleDescriptor as error:
            print(f"prefill: refused as it should be: {error.reason}")
        pipe.send("end")


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=decode, args=(theirs,))
    process.start()
    prefill(ours)
    process.join()
    assert process.exitcode == 0
