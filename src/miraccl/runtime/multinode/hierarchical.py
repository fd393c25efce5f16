"""Collectives over hosts of equally many GPUs in two steps: kernels inside a host, and the ranks of equal index between hosts.

Every element crosses the network once per host.  16-bit floats are rounded once inside a host and once between hosts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from miraccl.runtime.gpu.communicator import DeviceCommunicator
from miraccl.runtime.gpu.memory import DeviceMemory
from miraccl.runtime.multinode.jobs import ON_GPU, HostsJobs
from miraccl.runtime.multinode.segments import Shape, elements_per_piece
from miraccl.types import Collective, DType, RedOp

SUM = RedOp.SUM
IN_TWO_STEPS = (
    Collective.ALL_REDUCE,
    Collective.REDUCE_SCATTER,
    Collective.ALL_GATHER,
    Collective.ALL_TO_ALL,
    Collective.BROADCAST,
    Collective.REDUCE,
)


class TwoSteps:
    """The algorithms of one communicator; ``local`` is its host's. Streams are numbers."""

    def __init__(self, local: DeviceCommunicator, jobs: HostsJobs) -> None:
        self.local, self.jobs, self.at = local, jobs, jobs.layout
        self._called = ""

    def takes(self, collective: Collective, dtype: DType, op: Any) -> bool:
        """Whether ``run`` can."""
        if collective not in IN_TWO_STEPS or (
            collective is Collective.ALL_TO_ALL and not self.at.host_major
        ):
            return False
        return self.sums(dtype, op) if collective.reduces else self.at.hierarchical

    def run(
        self,
        collective: Collective,
        source: DeviceMemory,
        target: DeviceMemory,
        count: int,
        op: Any,
        root: int,
        number: int,
        captured: bool,
    ) -> None:
        """A collective that ``takes`` says yes to, of blocks of ``count`` elements."""
        self._called = self.jobs.in_words(collective.label, count, source.dtype)
        match collective:
            case Collective.ALL_REDUCE:
                self.all_reduce(source, target, op, number, captured)
            case Collective.REDUCE_SCATTER:
                self.reduce_scatter(source, target, op, number, captured)
            case Collective.ALL_GATHER:
                self.all_gather(source, target, number, captured)
            case Collective.ALL_TO_ALL:
                self.all_to_all(source, target, number, captured)
            case Collective.BROADCAST:
                self.broadcast(source, root, number, captured)
            case Collective.REDUCE:
                self.reduce(source, target, op, root, number, captured)

    def sums(self, dtype: DType, op: Any) -> bool:
        """Whether sums may be made in two steps, on GPUs first. Sums of floats depend on where hosts begin then, which ``deterministic``
        forbids."""
        averages_integers = op is RedOp.AVG and not dtype.is_float
        ordered = self.local.planner.deterministic and dtype.is_float
        return (
            self.at.hierarchical
            and isinstance(op, RedOp)
            and dtype in ON_GPU
            and not averages_integers
            and not ordered
        )

    def all_reduce(
        self, source: DeviceMemory, target: DeviceMemory, op: RedOp, number: int, captured: bool
    ) -> None:
        """reduce_scatter in the host, all_reduce of this rank's shard between hosts, all_gather in the host.

        What cannot be shared out evenly belongs to the last rank of a host, next to its share.
        """
        width, last = self.at.width, self.at.width - 1
        share, rest = divmod(source.count, width)
        even, shard = share * width, target.slice(self.at.index * share, share)
        if share:
            self.local.reduce_scatter(source.slice(0, even), shard, op, stream=number)
        if rest:
            self.local.reduce(
                source.slice(even, rest), last, target.slice(even, rest), op, stream=number
            )
        mine = target.slice(self.at.index * share, share + (rest if self.at.index == last else 0))
        if mine.count:
            shape = self._cross_shape(Collective.ALL_REDUCE, mine, mine.count)
            self._between(shape, mine.dtype, op, (mine.address, mine.address), number, captured)
        with self.local.any_window_offset():
            if share:
                self.local.all_gather(shard, target.slice(0, even), stream=number)
            if rest:
                self.local.broadcast(target.slice(even, rest), last, stream=number)

    def all_gather(
        self, source: DeviceMemory, target: DeviceMemory, number: int, captured: bool
    ) -> None:
        """all_gather between hosts among ranks of equal index, then inside each host."""
        count = source.count
        places = tuple(ranks[self.at.index] * count for ranks in self.at.groups)
        shape = dataclasses.replace(
            self._cross_shape(Collective.ALL_GATHER, source, count), places=places
        )
        self._between(shape, source.dtype, SUM, (source.address, target.address), number, captured)
        if self.at.host_major:
            for host in range(len(self.at.groups)):
                part = target.slice(host * self.at.width * count, self.at.width * count)
                self.local.all_gather(part.slice(self.at.index * count, count), part, stream=number)
            return
        for ranks in self.at.groups:
            for index, rank in enumerate(ranks):
                self.local.broadcast(target.slice(rank * count, count), index, stream=number)

    def reduce_scatter(
        self, source: DeviceMemory, target: DeviceMemory, op: RedOp, number: int, captured: bool
    ) -> None:
        """Each block is reduced inside the host to the rank of its owner's index, into its slot; then reduce_scatter between hosts."""
        count, dtype = target.count, source.dtype
        shape = self._cross_shape(Collective.REDUCE_SCATTER, source, count, kernels=True)
        most = elements_per_piece(shape, self.jobs.slot_bytes)

        def before(piece: int, slot: int) -> None:
            size = min(most, count - piece * most)
            for host, ranks in enumerate(self.at.groups):
                for index, rank in enumerate(ranks):
                    out = (
                        self.jobs.in_slot(slot, host * size, size, dtype)
                        if index == self.at.index
                        else None
                    )
                    self.local.reduce(
                        source.slice(rank * count + piece * most, size),
                        index,
                        out,
                        op,
                        stream=number,
                    )

        self._between(shape, dtype, op, (0, target.address), number, captured, before=before)

    def broadcast(self, memory: DeviceMemory, root: int, number: int, captured: bool) -> None:
        """Between hosts among the ranks with the root's index, then inside each host, piece by piece."""
        host, index = self.at.place(root)
        shape = self._cross_shape(Collective.BROADCAST, memory, memory.count, host, kernels=True)
        most = elements_per_piece(shape, self.jobs.slot_bytes)

        def after(piece: int, slot: int) -> None:
            size = min(most, memory.count - piece * most)
            with self.local.any_window_offset():
                self.local.broadcast(memory.slice(piece * most, size), index, stream=number)

        both = (memory.address, memory.address)
        self._between(
            shape,
            memory.dtype,
            SUM,
            both,
            number,
            captured,
            takes_part=index == self.at.index,
            after=after,
        )

    def reduce(
        self,
        source: DeviceMemory,
        target: DeviceMemory,
        op: RedOp,
        root: int,
        number: int,
        captured: bool,
    ) -> None:
        """Inside each host to the rank with the root's index, into its slot, then between hosts, piece by piece."""
        host, index = self.at.place(root)
        shape = self._cross_shape(Collective.REDUCE, source, source.count, host, kernels=True)
        most = elements_per_piece(shape, self.jobs.slot_bytes)

        def before(piece: int, slot: int) -> None:
            size = min(most, source.count - piece * most)
            out = self.jobs.in_slot(slot, 0, size, source.dtype) if index == self.at.index else None
            self.local.reduce(source.slice(piece * most, size), index, out, op, stream=number)

        to = (0, target.address)
        self._between(
            shape,
            source.dtype,
            op,
            to,
            number,
            captured,
            takes_part=index == self.at.index,
            before=before,
        )

    def all_to_all(
        self, source: DeviceMemory, target: DeviceMemory, number: int, captured: bool
    ) -> None:
        """all_to_all in the host of the blocks for each host, so that a rank has what its own host sends to all ranks of its index; then
        all_to_all between hosts, in place, of what is for others."""
        hosts = len(self.at.groups)
        block = source.count // hosts
        for host in range(hosts):
            self.local.all_to_all(
                source.slice(host * block, block), target.slice(host * block, block), stream=number
            )
        shape = dataclasses.replace(
            self._cross_shape(Collective.ALL_TO_ALL, source, block), own_stays=True
        )
        self._between(shape, source.dtype, SUM, (target.address, target.address), number, captured)

    def _between(self, shape: Shape, *args: Any, **hooks: Any) -> None:
        self.jobs.enqueue(self.jobs.crosses, shape, *args, called=self._called, **hooks)

    def _cross_shape(
        self,
        collective: Collective,
        memory: DeviceMemory,
        count: int,
        root: int = 0,
        *,
        kernels: bool = False,
    ) -> Shape:
        """Of an operation between hosts. ``kernels``: they are launched for every piece."""
        even = Shape.even(
            collective, memory.dtype.itemsize, self.at.host, len(self.at.groups), root, count
        )
        return dataclasses.replace(even, overlaps=False) if kernels else even
