"""CPU kernels with every QAO_CPU_ISA, several thread counts, and calls from several Python threads."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cpu_isas import ISA_FLAGS
from ops_schemes import DTYPES, PRODUCTS, Scheme
from ops_support import bits, check_product, randn

pytestmark = pytest.mark.cpu
TESTS = Path(__file__).parent
# Compilers and autograd see an operator, not its kernels: these tests run once.
CHOSEN = "not cuda and not opcheck and not compiles and not gradients"

PARTS = 3  # of the tests of a level, for machines with many CPUs

CALL_INT4_MM = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from ops_schemes import INT4
from ops_support import randn
INT4.mm(randn(2, 64, dtype=torch.bfloat16, device="cpu"), INT4.make_weight(16, 64))
"""


def cpu_offers(isa: str) -> bool:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line for line in lines if line.startswith(("flags", "Features"))).split()
    return all(flag in flags for flag in ISA_FLAGS[isa])


OWN = [isa for isa in ISA_FLAGS if cpu_offers(isa)][-1]


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.early
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=[] if isa == OWN else pytest.mark.extended) for isa in ISA_FLAGS]
)
def test_isa(isa: str, part: int) -> None:
    """All tests marked every_isa, with this level forced and every allocation filled with 0x7F by glibc."""
    if not cpu_offers(isa):
        pytest.skip(f"this CPU has no {isa}")
    files = sorted(str(path) for path in TESTS.glob("test_*.py") if "mark.every_isa" in path.read_text())[part::PARTS]
    result = run(
        ["-m", "pytest", "-x", "-m", "every_isa", "-k", CHOSEN, "-p", "no:cacheprovider", *files],
        QAO_CPU_ISA=isa,
        MALLOC_PERTURB_="128",
        OMP_NUM_THREADS="1",  # test_numbers_of_threads sets its own
        OMP_WAIT_POLICY="passive",  # and has more threads than there are CPUs
        PYTEST_ADDOPTS="",  # this run's: workers, how much is printed
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@pytest.mark.skipif(platform.machine() == "aarch64", reason="torch's wheel for aarch64 has its own allocator")
def test_glibc_fills_allocations() -> None:
    """So that the poison of test_isa is real."""
    code = "import torch; t = torch.empty(4096, dtype=torch.uint8); print(bool((t[64:-64] == 0x7F).all()))"
    assert run(["-c", code], MALLOC_PERTURB_="128").stdout.strip() == "True"


def test_unknown_isa_is_an_error() -> None:
    result = run(["-c", CALL_INT4_MM, str(TESTS)], QAO_CPU_ISA="sse9")
    assert result.returncode != 0
    assert "RuntimeError: qao::int4_mm: QAO_CPU_ISA=sse9 is not one of " + ", ".join(ISA_FLAGS) in result.stderr


def test_missing_isa_is_an_error() -> None:
    missing = [isa for isa in ISA_FLAGS if not cpu_offers(isa)]
    if not missing:
        pytest.skip("this CPU has every level")
    result = run(["-c", CALL_INT4_MM, str(TESTS)], QAO_CPU_ISA=missing[0])
    assert result.returncode != 0
    assert f"RuntimeError: qao::int4_mm: QAO_CPU_ISA={missing[0]}, but this CPU offers only" in result.stderr


def test_empty_isa_means_the_best() -> None:
    result = run(["-c", CALL_INT4_MM, str(TESTS)], QAO_CPU_ISA="")
    assert result.returncode == 0, result.stderr


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
def test_numbers_of_threads(scheme: Scheme, threads: int, x_dtype: torch.dtype) -> None:
    """More threads than cores, tiles or rows included."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for m, n, k in ((1, 100, 600), (1, 5, 64), (7, 100, 300), (40, 33, 300), (130, 17, 65)):
            weight = scheme.make_weight(n, k, scheme.few_formats[1])
            x = randn(m, k, dtype=x_dtype, device="cpu")
            check_product(scheme.mm(x, weight), x, weight)
    finally:
        torch.set_num_threads(before)


@pytest.mark.every_isa
@pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
def test_several_python_threads(scheme: Scheme) -> None:
    """Kernels keep no state between or across calls: every thread gets the bits that it gets alone."""
    calls = [
        (randn(m, k, dtype=dtype, device="cpu", seed=m), scheme.make_weight(n, k, fmt))
        for (m, n, k), dtype in itertools.product(((1, 100, 600), (3, 64, 128), (70, 48, 130)), DTYPES)
        for fmt in scheme.few_formats
    ]
    expected = [bits(scheme.mm(x, weight)) for x, weight in calls]

    def repeat(i: int) -> bool:
        return all(torch.equal(bits(scheme.mm(*calls[i])), expected[i]) for _ in range(10))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(repeat, range(len(calls))))


@pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
def test_shared_tiles_have_the_same_bits(scheme: Scheme) -> None:
    """Long products hand out pieces of N to the threads as they come."""
    weight = scheme.make_weight(2064, 544, scheme.few_formats[0])
    x = randn(250, 544, dtype=torch.bfloat16, device="cpu")
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2, 5):
            torch.set_num_threads(threads)
            results.append(bits(scheme.mm(x, weight)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.every_isa
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", PRODUCTS, ids=lambda scheme: scheme.word)
def test_split_rows_have_the_same_bits(scheme: Scheme, x_dtype: torch.dtype) -> None:
    """With a small weight, threads split many rows: as many parts as threads, more, and fewer."""
    weight = scheme.make_weight(50, 130, scheme.few_formats[0])
    before = torch.get_num_threads()
    try:
        for m in (300, 1060):
            x = randn(m, 130, dtype=x_dtype, device="cpu")
            torch.set_num_threads(5)
            check_product(scheme.mm(x, weight), x, weight)
            x[2, 3], x[m - 1, 5] = float("inf"), 30000  # which kernels leave out and add afterwards
            results = []
            for threads in (1, 2, 3, 5, 16):
                torch.set_num_threads(threads)
                results.append(bits(scheme.mm(x, weight)))
            assert all(torch.equal(result, results[0]) for result in results)
    finally:
        torch.set_num_threads(before)
