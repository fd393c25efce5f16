"""A host of CPU ranks as a topology, analysed by the same stages as a host of GPUs."""

from __future__ import annotations

from miraccl.topo.analyse import Topology, analyse_topology
from miraccl.topo.detect import detect_machine


def detect_host(nranks: int) -> Topology:
    """Detect this machine with ``nranks`` CPU ranks: sockets, NUMA domains, NICs and paths."""
    return analyse_topology(detect_machine(gpus=[], cpu_ranks=nranks).root)


def domain_order(topology: Topology) -> list[int]:
    """Return the NUMA domains that hold ranks, each followed by its best-connected neighbour.

    The distance is that of the paths between the topology's ranks.
    """
    system, paths = topology.system, topology.paths
    homes: dict[int, int] = {}  # position of a CPU node -> position of a rank in it
    for position in range(len(system.gpus)):
        reached = [(paths.gpu_cpu(position, cpu), cpu) for cpu in range(len(system.cpus))]
        _, nearest = min(reached, key=lambda item: (item[0].type, -item[0].bw, item[1]))
        homes.setdefault(nearest, position)
    order = sorted(homes)[:1]
    while len(order) < len(homes):
        last = homes[order[-1]]
        rest = [cpu for cpu in sorted(homes) if cpu not in order]
        order.append(
            min(
                rest,
                key=lambda cpu: (
                    paths.gpu_gpu(last, homes[cpu]).type,
                    -paths.gpu_gpu(last, homes[cpu]).bw,
                ),
            )
        )
    return [system.cpus[cpu].id for cpu in order]
