"""Every kind of kernel compiles for every architecture that NVRTC knows; no GPU is needed."""

from __future__ import annotations

import pytest

from miraccl.errors import MiracclError
from miraccl.executor.cuda import toolkit
from miraccl.executor.cuda.messages import Reach
from miraccl.executor.cuda.source import PACKET_MODES, Frame, KernelSpec, write_source
from miraccl.types import DType, RedOp

try:
    ARCHS: tuple[int, ...] = toolkit.supported_archs()
    REASON = ""
except MiracclError as error:
    ARCHS, REASON = (), str(error)

pytestmark = pytest.mark.skipif(not ARCHS, reason=f"no NVRTC: {REASON}")
MOVES = ("all_gather", "all_to_all", "broadcast", "broadcast_chain")


def specs() -> list[KernelSpec]:
    found = []
    for mode in PACKET_MODES:
        if mode in MOVES:
            frames: tuple[tuple[DType, Frame], ...] = ((DType.UINT8, Frame.PAIR), (DType.UINT8, Frame.MASK))
        else:
            floats = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)
            frames = (*((dtype, Frame.WORD) for dtype in floats), (DType.INT8, Frame.PAIR), (DType.INT64, Frame.MASK))
        for dtype, frame in frames:
            found.append(KernelSpec(family="packets", mode=mode, nranks=4, dtype=dtype, frame=frame, reduces=mode not in MOVES))
    found.append(KernelSpec(family="packets", mode="two_shot", nranks=3, dtype=DType.BFLOAT16, op=RedOp.PREMUL_SUM))
    for dtype in (DType.BFLOAT16, DType.INT64):
        found += [KernelSpec(family="steps", nranks=2, dtype=dtype, op=op) for op in (RedOp.SUM, RedOp.AVG, RedOp.PREMUL_SUM)]
    found.append(KernelSpec(family="steps", nranks=8, dtype=DType.UINT8, reduces=False))
    found.append(KernelSpec(family="meet", nranks=4, dtype=DType.UINT8, reduces=False, threads=32))
    found += [Reach(nranks=n, multiprocessors=128, frame=frame).spec() for n in (2, 8) for frame in (Frame.LINE, Frame.PAIR)]
    return found


@pytest.mark.parametrize("arch", [70, 75, 80, 90, 100])
def test_kernels_compile(arch: int) -> None:
    if arch not in ARCHS:
        pytest.skip(f"NVRTC {'.'.join(map(str, toolkit.version()))} compiles for {ARCHS}")
    for spec in specs():
        cubin = toolkit.compile_cubin(write_source(spec, arch), arch, spec.name)
        assert cubin[:4] == b"\x7fELF", spec.name


def test_an_error_shows_the_compilers_words() -> None:
    with pytest.raises(toolkit.CompileError, match="undefined_thing"):
        toolkit.compile_cubin('extern "C" __global__ void f() { undefined_thing(); }', ARCHS[0], "broken")


def test_the_cache_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'extern "C" __global__ void cached() {}'
    first = toolkit.compile_cubin(source, ARCHS[0], "cached")
    monkeypatch.setattr(toolkit, "_compile", lambda *_: pytest.fail("compiled twice"))
    assert toolkit.compile_cubin(source, ARCHS[0], "cached") == first
