"""Checkpoint of a model to the memory of another process, while training goes on.

    python examples/28_checkpoint.py

The keeper offers two buffers. The trainer writes its weights to the one that is not current and
continues training until the transfer has ended; a reader of the keeper always sees one whole
version. After a crash the trainer reads the last version back.
"""

import multiprocessing
import struct

import numpy as np

import miraccl

COUNT, STEPS = 1 << 20, 3


def keep(pipe):
    with miraccl.Agent("keeper", secret="example", timeout=30) as agent:
        checkpoint = miraccl.Versions(agent, COUNT, np.float32)
        pipe.send(agent.address)
        for version in range(1, STEPS + 1):
            pipe.send(checkpoint.begin(version))
            note = agent.wait_notification()
            assert struct.unpack("<q", note.data) == (version,)
            checkpoint.publish(version)
            with checkpoint.pin() as (current, weights):
                assert current == version
                assert (weights == weights[0]).all(), "half an update"
                print(f"keeper: version {version} has {weights[0]:g}", flush=True)
        with checkpoint.pin() as (_, weights):
            pipe.send(agent.register(weights, access="r").advertise())
            pipe.recv()


def train(pipe):
    with miraccl.Agent("trainer", secret="example", timeout=30) as agent:
        keeper = agent.connect(pipe.recv())
        weights = np.zeros(COUNT, np.float32)
        for version in range(1, STEPS + 1):
            weights += 1.5  # a step of training
            snapshot = weights.copy()
            saving = keeper.write(snapshot, pipe.recv(), notify=struct.pack("<q", version))
            (weights * weights).sum()  # training goes on meanwhile
            saving.wait()
        restored = np.zeros_like(weights)
        keeper.read(restored, pipe.recv()).wait()
        assert (restored == weights).all()
        print("trainer: restored the last version")
        pipe.send("end")


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=keep, args=(theirs,))
    process.start()
    train(ours)
    process.join()
    assert process.exitcode == 0
