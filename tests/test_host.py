"""qao._host: its reports about problems, and its kernel table."""

from __future__ import annotations

from typing import Any

import pytest
from cpu_isas import ISA_FLAGS
from qao.ops.library import cpu_features

host: Any = pytest.importorskip("qao._host", reason="qao was built without qao._host")

GPUS = {80: (108, 166912), 86: (82, 101376), 89: (128, 101376), 90: (132, 232448), 100: (148, 232448)}
OPS = {
    "int4_mm": {"x": "float", "weight": "int4"},
    "int8_mm": {"x": "float", "weight": "int8"},
    "fp8_mm": {"x": "float", "weight": "fp8"},
    "fp4_mm": {"x": "float", "weight": "fp4"},
    "int8_int8_mm": {"x": "int8", "weight": "int8"},
    "int8_int4_mm": {"x": "int8", "weight": "int4"},
    "fp8_fp8_mm": {"x": "fp8", "weight": "fp8"},
    "fp8_int4_mm": {"x": "fp8", "weight": "int4"},
}


def gpu(capability: int) -> Any:
    num_sms, shared_bytes = GPUS[capability]
    return host.Gpu(compute_capability=capability, num_sms=num_sms, shared_bytes_per_cta=shared_bytes)


def problem(op: str, **attributes: Any) -> Any:
    facts = {"n": 4096, "k": 4096, "group_size": 128, "scale_dtype": "bfloat16"}
    return host.Problem(**{**facts, **OPS[op], **attributes})


def test_attributes_are_what_was_given() -> None:
    given = host.Problem(m=3, x="fp8", weight="int4", x_dtype="float16", has_zeros=True)
    assert (given.m, given.x, given.weight, given.x_dtype, given.has_zeros) == (3, "fp8", "int4", "float16", True)
    assert (given.n, given.has_bias, given.x_aligned) == (0, False, True)


@pytest.mark.parametrize("capability", GPUS)
def test_formats_without_a_kernel_are_refused(capability: int) -> None:
    with pytest.raises(RuntimeError, match="no CUDA kernel multiplies x in int8 by W in fp8"):
        host.plan(host.Problem(m=64, n=4096, k=4096, x="int8", weight="fp8"), gpu(capability))


def test_a_plan_of_experts_without_groups() -> None:
    given = host.Problem(m=64, n=1536, k=2048, x="int8", weight="int8")
    assert host.plan(given, gpu(90), experts=8)["ctas"] > 0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="x_dtype 'int8' is not one of float32, float16, bfloat16"):
        host.Problem(x_dtype="int8")
    with pytest.raises(AttributeError, match="tokens"):
        host.Problem(tokens=1)
    with pytest.raises(ValueError, match="isa 'sse9' is not one of " + ", ".join(ISA_FLAGS)):
        host.cpu_kernel(host.Problem(m=1, n=64, k=64, group_size=64), "sse9")
    with pytest.raises(ValueError, match="weight 'int3' is not one of float, int8, fp8, int4, fp4"):
        host.Problem(weight="int3")


@pytest.mark.parametrize("op", OPS)
def test_old_gpus_are_refused(op: str) -> None:
    old = host.Gpu(compute_capability=75, num_sms=40, shared_bytes_per_cta=65536)
    with pytest.raises(RuntimeError, match="7.5 are not supported"):
        host.plan(problem(op, m=1), old)


@pytest.mark.parametrize("op", ["int4_mm", "int8_int4_mm", "fp8_int4_mm"])
def test_one_group_a_row(op: str) -> None:
    for capability in GPUS:
        plans = [host.plan(problem(op, m=16, group_size=size), gpu(capability)) for size in (-1, 4096)]
        assert plans[0] == plans[1]


def test_the_kernel_in_use_is_that_of_the_selected_isa() -> None:
    selected = cpu_features()["selected"]
    for op in OPS:
        for m in (1, 512):
            assert host.cpu_kernel(problem(op, m=m)) == host.cpu_kernel(problem(op, m=m), selected)


@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize("isa", [isa for isa in ISA_FLAGS if isa != "scalar"])
def test_sums_beyond_32_bits_have_a_kernel_of_their_instruction_set(isa: str, m: int) -> None:
    """65537 int8 products may overflow an int32, and plain C++ is 60 times slower."""
    kernel = host.cpu_kernel(problem("int8_int8_mm", m=m, k=131072), isa)
    assert kernel.split()[0] != "scalar"


@pytest.mark.parametrize("op", OPS)
def test_the_kernel_table_is_what_the_choices_answer(op: str) -> None:
    rows = [row for row in host.kernels() if row["op"] == op]
    on_gpus = {
        (row["compute_capability"], row["kernel"], row["instruction"]) for row in rows if row["device"] == "cuda"
    }
    on_cpus = {(row["isa"], row["kernel"]) for row in rows if row["device"] == "cpu"}
    seen_gpus, seen_cpus = set(), set()
    for dtype in ("float32", "float16", "bfloat16"):
        for m in (1 << exponent for exponent in range(13)):
            asked = problem(op, m=m, x_dtype=dtype)
            for capability in GPUS:
                plan = host.plan(asked, gpu(capability))
                seen_gpus.add((capability, plan["kernel"], plan["instruction"]))
            seen_cpus |= {(isa, host.cpu_kernel(asked, isa)) for isa in ISA_FLAGS}
    assert seen_gpus == {row for row in on_gpus if row[0] in GPUS}
    assert seen_cpus == on_cpus
