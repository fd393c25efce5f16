"""Compilation of all kinds of kernels for all architectures of NVRTC; no GPU is needed."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from importlib import resources

import pytest

from miraccl.errors import MiracclError, MissingDependency
from miraccl.executor.cuda import layout, row_exchange, toolkit
from miraccl.executor.cuda.message_lowering import WarpQueueRules
from miraccl.executor.cuda.row_lowering import RowKernel
from miraccl.executor.cuda.row_lowering import kernel_spec as row_kernel
from miraccl.executor.cuda.source import (
    FAMILIES,
    PACKET_MODES,
    TILED_SHOTS,
    Framing,
    KernelSpec,
    fanout_threads,
    write_source,
)
from miraccl.p2p.device import kernel_source
from miraccl.tools.perf import gpu_buffers
from miraccl.types import DType, RedOp

try:
    ARCHS: tuple[int, ...] = toolkit.supported_archs()
    REASON = ""
except MiracclError as error:
    ARCHS, REASON = (), str(error)

pytestmark = pytest.mark.skipif(not ARCHS, reason=f"no NVRTC: {REASON}")
MOVING_MODES = ("all_gather", "all_to_all", "broadcast", "broadcast_chain", "broadcast_tree")


FLOATS = (
    DType.FLOAT32,
    DType.BFLOAT16,
    DType.FLOAT16,
    DType.FLOAT64,
    DType.FLOAT8_E4M3,
    DType.FLOAT8_E5M2,
)
FRAMES = (
    *((dtype, Framing.WORD) for dtype in FLOATS),
    (DType.INT8, Framing.PAIR),
    (DType.INT64, Framing.MASK),
)


def packets(
    mode: str,
    dtype: DType,
    frame: Framing,
    nranks: int = 4,
    op: RedOp = RedOp.SUM,
    single: bool = False,
    fan: int = 1,
) -> KernelSpec:
    reduces = mode not in MOVING_MODES
    return KernelSpec(
        family="packets",
        mode=mode,
        nranks=nranks,
        dtype=dtype,
        op=op,
        frame=frame,
        reduces=reduces,
        single_tile=single,
        fanout=fan,
    )


def fanout(mode: str, dtype: DType, frame: Framing, nranks: int) -> KernelSpec:
    """Return a kernel in which neighbouring threads share a packet."""
    return packets(mode, dtype, frame, nranks, single=True, fan=fanout_threads(nranks))


def messages(nranks: int) -> list[KernelSpec]:
    every = (
        WarpQueueRules(nranks=nranks, multiprocessors=128, frame=frame)
        for frame in (Framing.LINE, Framing.PAIR)
    )
    rooms = (
        (False, layout.small_capacity(nranks)),
        (False, layout.LARGE_CAPACITY),
        (True, layout.LARGE_CAPACITY),
    )
    return [rules.kernel_spec(bulk, room) for rules in every for bulk, room in rooms]


def representative_specs() -> list[KernelSpec]:
    """Return kernels that cover every file, framing and type."""
    found = [packets("two_shot", dtype, frame) for dtype, frame in FRAMES]
    found += [
        packets("all_reduce", DType.BFLOAT16, Framing.WORD, single=True),
        packets("all_to_all", DType.UINT8, Framing.PAIR, single=True),
    ]
    found += [
        replace(packets("two_shot", dtype, frame, 3), double_buffered=True)
        for dtype, frame in FRAMES[-3:]
    ]
    found += [
        fanout("two_shot", DType.BFLOAT16, Framing.WORD, 4),
        fanout("all_to_all", DType.UINT8, Framing.PAIR, 8),
    ]
    found += [
        packets("broadcast_chain", DType.UINT8, Framing.MASK),
        packets("ring", DType.BFLOAT16, Framing.WORD),
    ]
    found += [
        packets("all_reduce_tree", dtype, frame)
        for dtype, frame in ((DType.BFLOAT16, Framing.WORD), FRAMES[-1])
    ]
    found.append(KernelSpec(family="steps", nranks=2, dtype=DType.BFLOAT16, op=RedOp.AVG))
    found += [row_kernel(kernel, 4, DType.BFLOAT16, RedOp.AVG) for kernel in RowKernel]
    found += row_exchange.kernel_specs(4, DType.BFLOAT16, RedOp.AVG)
    found.append(replace(packets("two_shot", DType.BFLOAT16, Framing.WORD), gated=True))
    found.append(KernelSpec(family="scale", nranks=2, dtype=DType.BFLOAT16, op=RedOp.PREMUL_SUM))
    found.append(
        KernelSpec(family="device_barrier", nranks=4, dtype=DType.UINT8, reduces=False, threads=32)
    )
    return [*found, *messages(2)]


def all_specs() -> list[KernelSpec]:
    """Return kernels that also cover every mode and the maximum number of ranks."""
    found = []
    for mode, files in PACKET_MODES.items():
        frames = (
            ((DType.UINT8, Framing.PAIR), (DType.UINT8, Framing.MASK))
            if mode in MOVING_MODES
            else FRAMES[-3:]
        )
        found += [packets(mode, dtype, frame) for dtype, frame in frames]
        found += (
            [packets(mode, *frames[0], single=True), fanout(mode, *frames[0], 3)]
            if files is TILED_SHOTS
            else []
        )
    found += [
        packets("two_shot", DType.BFLOAT16, Framing.WORD, 3, RedOp.PREMUL_SUM),
        packets("two_shot", DType.BFLOAT16, Framing.WORD, 8),
    ]
    found.append(
        replace(packets("two_shot", DType.BFLOAT16, Framing.WORD, 8), double_buffered=True)
    )
    found.append(packets("all_reduce_tree", DType.BFLOAT16, Framing.WORD, 8, RedOp.AVG))
    found += row_exchange.kernel_specs(8, DType.FLOAT64, RedOp.PREMUL_SUM)
    found += [
        KernelSpec(family="steps", nranks=2, dtype=DType.INT64, op=op)
        for op in (RedOp.SUM, RedOp.PREMUL_SUM)
    ]
    found.append(KernelSpec(family="steps", nranks=8, dtype=DType.UINT8, reduces=False))
    found.append(
        KernelSpec(
            family="steps", nranks=8, dtype=DType.FLOAT32, capacity=layout.STEP_CAPACITIES[-1]
        )
    )
    return [*representative_specs(), *found, *messages(8)]


def family_specs() -> list[KernelSpec]:
    """Return one kernel of each family."""
    return list({spec.family: spec for spec in representative_specs()}.values())


#: as 70 and 90, from which the sources ask for a newer one in no place
LIKE_OLDER = pytest.mark.skipif(
    not os.environ.get("TEST_SLOW"), reason="its sources are those of an older one: TEST_SLOW=1"
)


@pytest.mark.parametrize(
    "arch",
    [70, pytest.param(75, marks=LIKE_OLDER), 80, 90, pytest.param(100, marks=LIKE_OLDER)],
)
def test_kernels_compile(arch: int) -> None:
    """One kernel of each family by default; TEST_SLOW=1 compiles all (4 minutes)."""
    if arch not in ARCHS:
        pytest.skip(f"NVRTC {'.'.join(map(str, toolkit.version()))} compiles for {ARCHS}")
    specs = family_specs()
    if os.environ.get("TEST_SLOW"):
        specs = all_specs() if arch == 90 else representative_specs()
    for spec in specs:
        cubin = toolkit.compile_cubin(write_source(spec, arch), arch, spec.name)
        assert cubin[:4] == b"\x7fELF", spec.name
    for itemsize in gpu_buffers.WIDTHS:
        assert (
            toolkit.compile_cubin(gpu_buffers.source(itemsize), arch, f"perf-{itemsize}")[:4]
            == b"\x7fELF"
        )


def ptx(source: str, arch: int) -> str:
    nvrtc = toolkit.bindings("nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    options = [
        option.encode() for option in (f"--gpu-architecture=compute_{arch}", *toolkit.OPTIONS)
    ]
    assert int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]) == 0
    text: bytes = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode()


MEMORY = re.compile(r"(?<![\w.%])((?:ld|st|atom|red|fence|membar|multimem|cp|ldu)\.[\w.:]+)")
#: Kernels that read the caller's array once: no kernel writes to it at the same time.
SCANS = ("row_scan", "row_send")
#: Atomics on memory that only this GPU accesses: tickets and numbers.
OWN = {
    "atom.relaxed.gpu.global.inc.u32",
    "atom.relaxed.gpu.global.add.u64",
    "red.relaxed.gpu.global.add.u64",
}


@pytest.mark.skipif(90 not in ARCHS, reason="NVRTC does not know sm_90")
def test_shared_memory_is_accessed_with_system_scope() -> None:
    """Fences, marks and packets have system scope in the compiled code, and no load bypasses
    coherence.

    Neither the emulator nor several ranks on one GPU could detect this. Types share their accesses.
    """
    kinds = {(spec.files, spec.frame, spec.mode): spec for spec in representative_specs()}
    for spec in kinds.values():
        words = set(MEMORY.findall(ptx(write_source(spec, 90), 90)))
        scoped = {
            word
            for word in words
            if re.search(r"\.(cta|cluster|gpu|gl|sys)\b|^(fence|membar)", word)
        }
        assert all(".sys" in word for word in scoped - OWN), (spec.name, scoped)
        assert not [
            word
            for word in words
            if (".nc" in word and spec.family not in SCANS)
            or word.startswith(("multimem", "cp", "ldu"))
        ], (spec.name, words)


#: Source of one-sided transfers, which are not collectives: no KernelSpec has it.
TRANSFER_FILE = "scatter.cuh"


@pytest.mark.parametrize("arch", [80, 90])
def test_transfers_are_compiled(arch: int) -> None:
    assert toolkit.compile_cubin(kernel_source(), arch, "scatter")


def test_every_file_and_family_is_compiled_for_all_architectures() -> None:
    every = {
        path.name
        for path in resources.files("miraccl.executor.cuda").joinpath("source").iterdir()
        if path.name.endswith(".cuh")
    }
    compiled = {name for spec in representative_specs() for name in spec.files}
    assert compiled == every - {TRANSFER_FILE}
    assert {spec.family for spec in representative_specs()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        (61, "sm_61: they need sm_70 or newer"),
        (70, "for sm_70: NVRTC 13.2 supports sm_75 to sm_121.*cuda12"),
        (130, "for sm_130: .*--upgrade"),
    ],
)
def test_unsupported_architectures_name_what_to_install(
    arch: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NVRTC 13, which does not support sm_70."""
    monkeypatch.setattr(toolkit, "version", lambda: (13, 2))
    monkeypatch.setattr(toolkit, "supported_archs", lambda: (75, 80, 90, 100, 121))
    with pytest.raises(MissingDependency, match=words):
        toolkit.compile_cubin('extern "C" __global__ void never_compiled() {}', arch, "never")


def test_only_shots_have_a_single_tile_kernel() -> None:
    with pytest.raises(ValueError, match="no single-tile kernel for mode 'ring'"):
        packets("ring", DType.BFLOAT16, Framing.WORD, single=True)


def test_only_two_shot_has_a_double_buffered_kernel() -> None:
    with pytest.raises(
        ValueError, match="only two_shot of several tiles has a double-buffered kernel"
    ):
        replace(packets("all_reduce", DType.BFLOAT16, Framing.WORD), double_buffered=True)


def test_a_compile_error_contains_the_log() -> None:
    with pytest.raises(toolkit.CompileError, match="undefined_thing"):
        toolkit.compile_cubin(
            'extern "C" __global__ void f() { undefined_thing(); }', ARCHS[-1], "broken"
        )


def test_a_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'extern "C" __global__ void cached() {}'
    first = toolkit.compile_cubin(source, ARCHS[-1], "cached")
    monkeypatch.setattr(toolkit, "_compile", lambda *_: pytest.fail("compiled twice"))
    assert toolkit.compile_cubin(source, ARCHS[-1], "cached") == first
