"""Which kernel a collective needs, and its text: constants of one rank count, type, operator and shape in front of the .cuh files.

Data that is only moved is moved as bytes or words, never as floats: bits of a NaN stay.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout
from miraccl.types import DType, RedOp

MACHINE = "machine.cuh"
#: family, which is also the name of the kernel -> the files of its text
FILES = {
    "packets": (MACHINE, "common.cuh", "packets.cuh"),
    "steps": (MACHINE, "common.cuh", "steps.cuh"),
}
PACKET_MODES = ("all_reduce", "two_shot", "ring", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")
#: 8-bit floats are moved, not added up: their conversion needs instructions of sm_89 and later
REDUCIBLE = tuple(dtype for dtype in DType if dtype not in (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2))


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """What a kernel is compiled for.

    ``family`` is ``packets`` (protocol LL, ``mode`` one of ``PACKET_MODES``) or ``steps`` (protocol Simple, any schedule).  ``flagged``:
    packets with words for flags, for types that have no NaN to spare.  ``threads`` of a block, ``unroll`` vectors of a thread at a time,
    ``min_blocks`` per multiprocessor (limits registers).
    """

    family: str
    nranks: int
    dtype: DType
    op: RedOp = RedOp.SUM
    mode: str = ""
    flagged: bool = False
    reduces: bool = True
    threads: int = 512
    unroll: int = 1
    min_blocks: int = 1

    def __post_init__(self) -> None:
        if self.family not in FILES or (self.family == "steps") == (self.mode in PACKET_MODES):
            raise ValueError(f"no kernel of family {self.family!r} and mode {self.mode!r}")
        if not 2 <= self.nranks <= layout.MAX_RANKS:
            raise InvalidUsage(f"kernels are for 2 to {layout.MAX_RANKS} GPUs, not {self.nranks}")
        if self.reduces and self.dtype not in REDUCIBLE:
            raise InvalidUsage(f"{self.dtype.label} cannot be reduced on a GPU; it can be moved")
        if self.op is RedOp.PREMUL_SUM:
            raise InvalidUsage("a pre-multiplied sum is not supported on GPU memory; multiply before the call")

    @property
    def entry(self) -> str:
        """The name of the kernel's function."""
        return self.family

    @property
    def name(self) -> str:
        parts = [self.family, self.mode, self.dtype.label if self.reduces else "bytes", self.op.name.lower() if self.reduces else ""]
        parts += ["flagged" if self.flagged else "", f"n{self.nranks}", f"t{self.threads}u{self.unroll}b{self.min_blocks}"]
        return "-".join(part for part in parts if part)

    @property
    def vec_bytes(self) -> int:
        """Bytes of data in a packet, or of a vector."""
        return 8 if self.flagged else 16


def can_spare_a_nan(dtype: DType) -> bool:
    """Whether packets of ``dtype`` need no flags: floats have a NaN that can mean "nothing here yet"."""
    return dtype in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)


@functools.cache
def _text(name: str) -> str:
    return resources.files("miraccl.executor.cuda").joinpath("source", name).read_text()


def write_source(spec: KernelSpec, arch: int, machine: str | None = None) -> str:
    """The text of a kernel for sm_``arch``; ``machine`` is text to stand for machine.cuh."""
    dtype = spec.dtype if spec.reduces else DType.UINT8
    constants: dict[str, int] = layout.defines(spec.nranks) | {
        "ARCH": arch,
        "THREADS": spec.threads,
        "UNROLL": spec.unroll,
        "MIN_BLOCKS": spec.min_blocks,
        "FLAGGED": int(spec.flagged),
        "REDUCES": int(spec.reduces),
        f"TYPE_{dtype.name}": 1,
        f"OP_{spec.op.name}": 1,
    }
    if spec.mode:
        constants[f"MODE_{spec.mode.upper()}"] = 1
    head = "".join(f"#define {name} {value}\n" for name, value in sorted(constants.items()))
    parts = (machine if machine is not None and name == MACHINE else _text(name) for name in FILES[spec.family])
    return head + "".join(parts)
