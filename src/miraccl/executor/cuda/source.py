"""Kernel source: macros for one rank count, type, operator and shape in front of the .cuh files.

Data that are only moved are moved as bytes or words, never as floats, so NaN payloads are kept.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from importlib import resources

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout
from miraccl.types import DType, RedOp

MACHINE = "machine.cuh"
#: Kernel family -> name of its function, files after machine.cuh and common.cuh.
FAMILIES = {
    "packets": ("packets", ("packets.cuh",)),
    "steps": ("steps", ("packets.cuh", "steps.cuh")),
    "p2p": ("p2p", ("p2p.cuh",)),
    "bulk": ("p2p", ("p2p.cuh", "bulk.cuh")),
    "device_barrier": ("device_barrier", ("packets.cuh", "device_barrier.cuh")),
    "scale": ("scale", ("scale.cuh",)),
    "row_scan": ("row_scan", ("rows.cuh",)),
    "row_list": ("row_list", ("rows.cuh",)),
    "row_gather": ("row_gather", ("rows.cuh",)),
    "row_scatter": ("row_scatter", ("rows.cuh",)),
    "row_fold": ("row_fold", ("rows.cuh",)),
    "row_send": ("row_send", ("packets.cuh", "row_exchange.cuh")),
    "row_reduce": ("row_reduce", ("packets.cuh", "row_exchange.cuh")),
}
CHAIN = ("acks.cuh", "chain.cuh")
TREE = ("acks.cuh", "tree.cuh")
#: Mode of a packet kernel -> files of its loop.
TILED_SHOTS = ("shots.cuh", "tiled.cuh")
PACKET_MODES = {
    "all_reduce": TILED_SHOTS,
    "two_shot": TILED_SHOTS,
    "reduce_scatter": TILED_SHOTS,
    "all_gather": TILED_SHOTS,
    "all_to_all": TILED_SHOTS,
    "broadcast": TILED_SHOTS,
    "reduce": TILED_SHOTS,
    "ring": ("ring.cuh",),
    "broadcast_chain": CHAIN,
    "reduce_chain": CHAIN,
    "all_reduce_tree": TREE,
    "broadcast_tree": TREE,
    "reduce_tree": TREE,
}
#: Replaces TILED_SHOTS if the packets fit one tile.
SINGLE_TILE_SHOTS = ("shots.cuh", "single_tile.cuh")
#: Replaces TILED_SHOTS if tiles alternate between the buffer halves.
DOUBLE_BUFFERED_SHOTS = ("shots.cuh", "double_buffered.cuh")
#: Replaces SINGLE_TILE_SHOTS if neighbouring threads share a packet.
FANOUT_SHOTS = ("shots.cuh", "fanout.cuh")


def fanout_threads(nranks: int) -> int:
    """Return the threads that share a packet (source/fanout.cuh)."""
    return 8 if nranks > 4 else 4


class Framing(enum.Enum):
    """Arrival flags of a 16-byte packet (source/packets.cuh)."""

    WORD = "word"  # every word of a float is its own flag
    PAIR = "pair"  # 8 bytes of data, 8 of flags
    MASK = "mask"  # 16 bytes of any data, masked; every word is its own flag
    LINE = "line"  # messages only: eight packets with one flag (source/p2p.cuh)

    def vectors(self, nbytes: int) -> int:
        """Return the packets for ``nbytes`` of data (``vectors_of`` of source/common.cuh)."""
        if self is Framing.MASK:
            return -(-nbytes // 512) * 32
        return -(-nbytes // (8 if self is Framing.PAIR else 16))

    def run_packets(self, packets: int) -> int:
        """Return the packets of a run for a tile; MASK adds two side packets for each 32."""
        return packets + packets // 16 if self is Framing.MASK else packets


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """Compile-time parameters of a kernel.

    Attributes:
        family: ``packets``, ``steps`` (protocol Simple, any schedule), ``p2p`` (messages), ``bulk``
            (messages, some of them large), ``device_barrier`` (around the work of copy engines),
            ``scale`` (a single rank's pre-multiplied sum, compiled for two ranks), or ``row_*``
            (rows of sparse sums, ``row_lowering``).
        mode: Of ``packets``: one of ``PACKET_MODES``.
        frame: Framing of packets or rows.
        threads: Threads of a block.
        unroll: Vectors of a thread at a time.
        min_blocks: Blocks per multiprocessor, which limits registers.
        single_tile: Shots of one tile.
        fanout: Threads per packet, one for each rank, if above 1.
        double_buffered: two_shot whose tiles alternate between the buffer halves.
        capacity: Argument bytes for messages, or number of steps.
        gated: Of ``packets`` and ``steps``: do nothing unless the kernel before has opened the
            gate (``row_exchange``).
    """

    family: str
    nranks: int
    dtype: DType
    op: RedOp = RedOp.SUM
    mode: str = ""
    frame: Framing = Framing.WORD
    reduces: bool = True
    threads: int = 512
    unroll: int = 1
    min_blocks: int = 1
    single_tile: bool = False
    fanout: int = 1
    double_buffered: bool = False
    capacity: int = 0
    gated: bool = False

    def __post_init__(self) -> None:
        if self.family not in FAMILIES or (self.family == "packets") != (self.mode in PACKET_MODES):
            raise ValueError(f"no kernel of family {self.family!r} and mode {self.mode!r}")
        if self.fanout > 1 and (
            not self.single_tile
            or self.frame is Framing.MASK
            or self.nranks < 3
            or self.unroll != 1
        ):
            raise ValueError(
                "a fanout kernel needs a single tile of unmasked packets, unroll 1 and three ranks"
            )
        if self.fanout not in (1, fanout_threads(self.nranks)):
            raise ValueError(
                f"{self.fanout} threads cannot share a packet of {self.nranks} ranks: "
                f"allowed are 1 and {fanout_threads(self.nranks)}"
            )
        if self.single_tile and PACKET_MODES.get(self.mode) is not TILED_SHOTS:
            raise ValueError(f"no single-tile kernel for mode {self.mode!r}")
        if self.double_buffered and (self.mode != "two_shot" or self.single_tile):
            raise ValueError("only two_shot of several tiles has a double-buffered kernel")
        if not 2 <= self.nranks <= layout.MAX_RANKS:
            raise InvalidUsage(
                f"cannot compile a kernel for {self.nranks} GPUs: "
                f"allowed are 2 to {layout.MAX_RANKS}"
            )
        if self.threads % 32:
            raise ValueError(f"{self.threads} threads are not a multiple of 32")

    @property
    def entry(self) -> str:
        """Name of the kernel's function."""
        return FAMILIES[self.family][0]

    @property
    def name(self) -> str:
        parts = [
            self.family,
            self.mode,
            self.dtype.label if self.reduces else "bytes",
            self.op.name.lower() if self.reduces else "",
        ]
        parts += [
            self.frame.value if self.family != "steps" else "",
            f"n{self.nranks}",
            f"t{self.threads}u{self.unroll}b{self.min_blocks}",
        ]
        parts += [
            "fanout"
            if self.fanout > 1
            else "single"
            if self.single_tile
            else "double"
            if self.double_buffered
            else ""
        ]
        parts += [f"r{self.capacity}" if self.capacity else "", "gated" if self.gated else ""]
        return "-".join(part for part in parts if part)

    @property
    def files(self) -> tuple[str, ...]:
        """Source files of the kernel, in order."""
        loop = (
            FANOUT_SHOTS
            if self.fanout > 1
            else SINGLE_TILE_SHOTS
            if self.single_tile
            else DOUBLE_BUFFERED_SHOTS
            if self.double_buffered
            else PACKET_MODES.get(self.mode, ())
        )
        return (MACHINE, "common.cuh", *FAMILIES[self.family][1], *loop)


def can_spare_a_nan(dtype: DType) -> bool:
    """Return True if packets of ``dtype`` need no flags: a NaN can mean "empty"."""
    return dtype.is_float


@functools.cache
def _text(name: str) -> str:
    return resources.files("miraccl.executor.cuda").joinpath("source", name).read_text()


def write_source(spec: KernelSpec, arch: int, machine: str | None = None) -> str:
    """Return the source text of a kernel for sm_``arch``; ``machine`` replaces machine.cuh if
    given.
    """
    dtype = spec.dtype if spec.reduces else DType.UINT8
    constants: dict[str, int] = layout.common_defines(spec.nranks) | {
        "ARCH": arch,
        "THREADS": spec.threads,
        "UNROLL": spec.unroll,
        "MIN_BLOCKS": spec.min_blocks,
        f"FRAME_{spec.frame.name}": 1,
        "REDUCES": int(spec.reduces),
        "SINGLE_TILE": int(spec.single_tile),
        "DOUBLE_BUFFERED": int(spec.double_buffered),
        "FANOUT": spec.fanout,
        "GATED": int(spec.gated),
        f"TYPE_{dtype.name}": 1,
        f"OP_{spec.op.name}": 1,
    }
    if spec.family == "steps":
        constants |= layout.step_defines(spec.nranks, spec.capacity or layout.STEP_CAPACITIES[0])
    if spec.entry == "p2p":
        constants |= layout.message_defines(spec.nranks, spec.frame.value) | {
            "BULK": int(spec.family == "bulk"),
            "CAPACITY_BYTES": spec.capacity,
        }
    if "row_exchange.cuh" in spec.files:
        constants |= layout.row_exchange_defines(spec.nranks)
        constants[f"KERNEL_{spec.entry.upper()}"] = 1
    elif spec.family.startswith("row_"):
        constants["ROW_ARGS_BYTES"] = layout.row_args_bytes(spec.nranks)
        constants[f"KERNEL_{spec.entry.upper()}"] = 1
    if spec.mode:
        constants[f"MODE_{spec.mode.upper()}"] = 1
    head = "".join(f"#define {name} {value}\n" for name, value in sorted(constants.items()))
    parts = (
        machine if machine is not None and name == MACHINE else _text(name) for name in spec.files
    )
    return head + "".join(parts)
