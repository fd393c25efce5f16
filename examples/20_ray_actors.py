"""Ray: actors get a communicator, train together, and go on after one of them dies.

    python examples/20_ray_actors.py

The actors are an ordinary class without a base class of miraccl. The driver names them in rank
order; in a method, ``get_group`` returns the actor's communicator. The death of an actor is
``PeerDied`` in the others, and in the driver.
"""

import numpy as np
import ray

import miraccl
import miraccl.ray


@ray.remote(num_cpus=0)
class Trainer:
    def __init__(self, seed):
        self.data = np.random.default_rng(seed).normal(size=(500, 3))
        self.weights = np.zeros(3)

    def train(self, steps, truth):
        comm = miraccl.ray.get_group()
        for _ in range(steps):
            gradient = self.data.T @ (self.data @ (self.weights - truth)) / len(self.data)
            self.weights -= 0.5 * comm.all_reduce(gradient, op=miraccl.AVG)
        return self.weights.tolist()


ray.init(
    "local",
    num_cpus=1,
    object_store_memory=80 << 20,
    include_dashboard=False,
    log_to_driver=False,
    logging_level="ERROR",
)
trainers = [Trainer.remote(seed) for seed in range(3)]
truth = np.array([1.0, -2.0, 3.0])

miraccl.ray.create_group(trainers, timeout=30)
results = ray.get([trainer.train.remote(20, truth) for trainer in trainers])
assert results[0] == results[1] == results[2]
assert np.allclose(results[0], truth, atol=1e-3)
print("three actors found", np.round(results[0], 3).tolist())

pending = [trainer.train.remote(1_000_000, truth) for trainer in trainers[:2]]
ray.kill(trainers[2])
for rank, call in enumerate(pending):
    try:
        ray.get(call)
    except miraccl.PeerDied as error:
        print(f"rank {rank} saw it: {error.cause.message}")

miraccl.ray.destroy_group()
with miraccl.ray.create_group(trainers[:2]) as group:
    print("the two that live:", group.run(lambda comm: f"rank {comm.rank} of {comm.nranks}"))
ray.shutdown()
