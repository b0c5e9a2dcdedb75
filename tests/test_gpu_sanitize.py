"""The parser of compute-sanitizer's output in tests/gpu_sanitize.py."""

from __future__ import annotations

import pytest
from gpu_sanitize import judge

TILE = (
    "void qao::gemm::sm80_mma::sm80_mma<__half, qao::widen::Fp8, qao::gemm::sm80_mma::Tile<{}>, (bool)0>(Params)+0x{}"
)
SLICES = "(int)4, (int)1, (int)2, (int)2, (int)8, (int)3, (int)1"  # two slices of K of four warps each


def hazard(tile: str, write: int, read: int) -> list[str]:
    return [
        "tests/test_mm.py::test_one ========= Error: Potential RAW hazard detected at __shared__ 0xed0:",
        f"=========     Write Thread ({write},0,0) at {TILE.format(tile, '8bb0')}",
        f"=========     Read Thread ({read},0,0) at {TILE.format(tile, '9c00')}",
        "=========     Current Value : 12",
        "========= ",
        "PASSED [  1%]",
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
    ]


def uninitialized(kernel: str) -> list[str]:
    return [
        "tests/test_mm.py::test_two ========= Uninitialized __global__ memory read of size 2 bytes",
        f"=========     at {kernel}+0x870",
        "========= ",
        "========= ERROR SUMMARY: 1 error",
    ]


@pytest.mark.parametrize(
    "tool,lines,errors,known",
    [
        ("racecheck", hazard(SLICES, 66, 168), 0, 1),  # of two slices, which meet at __syncthreads
        ("racecheck", hazard(SLICES, 66, 100), 1, 0),  # of one
        ("racecheck", hazard("(int)1, (int)1, (int)8, (int)2, (int)1, (int)3, (int)1", 2, 40), 1, 0),
        ("racecheck", [line.replace("qao::", "nvjet::") for line in hazard(SLICES, 66, 100)], 0, 1),  # of cuBLAS
        ("initcheck", uninitialized("void at::native::unrolled_elementwise_kernel<int>(int)"), 0, 1),
        ("initcheck", uninitialized("void qao::quantize::rows_kernel(qao::quantize::Params)"), 1, 0),
        ("memcheck", ["tests/test_mm.py::test_three PASSED", "========= ERROR SUMMARY: 0 errors"], 0, 0),
        ("memcheck", ["========= Something new", "========= ERROR SUMMARY: 3 errors"], 3, 0),
        ("synccheck", ["tests/test_mm.py::test_four Fatal Python error: Aborted"], 1, 0),
    ],
)
def test_judge(tool: str, lines: list[str], errors: int, known: int) -> None:
    assert judge(tool, lines)[:2] == (errors, known)


def test_an_error_is_shown_with_its_test() -> None:
    (report,) = judge("racecheck", hazard(SLICES, 66, 100)).reports
    assert report[0] == "tests/test_mm.py::test_one" and "Write Thread (66,0,0)" in report[2]
