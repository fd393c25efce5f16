"""Every kind of kernel compiles for every architecture that NVRTC knows; no GPU is needed."""

from __future__ import annotations

import pytest

from miraccl.errors import MiracclError
from miraccl.executor.cuda import toolkit
from miraccl.executor.cuda.source import PACKET_MODES, KernelSpec, can_spare_a_nan, write_source
from miraccl.types import DType, RedOp

try:
    ARCHS: tuple[int, ...] = toolkit.supported_archs()
    REASON = ""
except MiracclError as error:
    ARCHS, REASON = (), str(error)

pytestmark = pytest.mark.skipif(not ARCHS, reason=f"no NVRTC: {REASON}")
MOVES = ("all_gather", "all_to_all")


def specs() -> list[KernelSpec]:
    found = []
    for mode in PACKET_MODES:
        for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64, DType.INT8):
            reduces = mode not in MOVES
            flagged = not (reduces and can_spare_a_nan(dtype))
            if reduces or dtype is DType.INT8:
                found.append(KernelSpec(family="packets", mode=mode, nranks=4, dtype=dtype, flagged=flagged, reduces=reduces))
    for dtype in (DType.BFLOAT16, DType.INT64):
        found += [KernelSpec(family="steps", nranks=2, dtype=dtype, op=op) for op in (RedOp.SUM, RedOp.AVG)]
    found.append(KernelSpec(family="steps", nranks=8, dtype=DType.UINT8, reduces=False))
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
