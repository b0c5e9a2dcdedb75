"""Schemas of operators: tensors before numbers, and grouped GEMMs as dense ones."""

from __future__ import annotations

import pytest
import qao
import torch
from ops_schemes import PRODUCTS

SCHEMAS = {
    schema.name.removeprefix("qao::"): [(argument.name, str(argument.type)) for argument in schema.arguments]
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("qao::")
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_tensors_come_before_numbers(name: str) -> None:
    kinds = ["Tensor" in kind for _, kind in SCHEMAS[name]]
    assert kinds and kinds == sorted(kinds, reverse=True)


@pytest.mark.parametrize("word", [scheme.word for scheme in PRODUCTS])
def test_a_grouped_gemm_has_the_arguments_of_the_dense_one(word: str) -> None:
    dense, grouped = SCHEMAS[f"{word}_mm"], SCHEMAS[f"{word}_grouped_mm"]
    routing = ["offsets", "row_index", "row_scale", "gate"]
    assert [argument for argument in grouped if argument[0] not in routing] == dense
    assert {name for name, _ in grouped} == {name for name, _ in dense} | set(routing)


def test_the_order_before_0_2_is_an_error_with_the_present_one() -> None:
    layer = qao.QuantLinear.from_linear(torch.nn.Linear(64, 32), qao.Int8DynamicActivationInt4Weight(group_size=32))
    x, packed = torch.randn(2, 64), (layer.qweight, layer.scales, layer.bias)
    with torch.inference_mode():
        y = qao.ops.int8_int4_mm(x, *packed, None, None, 32, 64, 32)
        assert torch.equal(y, layer(x))
        assert torch.equal(qao.ops.int8_int4_mm(x, *packed, out_features=32, in_features=64, group_size=32), y)
    with pytest.raises(TypeError, match=r"int8_int4_mm: row_scales must be a tensor .* Since qao 0.2 tensors come"):
        qao.ops.int8_int4_mm(x, *packed, None, 32, 64, 32)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"(?s)row_scales.*Declaration: qao::int8_int4_mm"):
        torch.ops.qao.int8_int4_mm(x, *packed, None, 32, 64, 32)
    for call, message in (
        (
            lambda: qao.ops.fp8_quantize(x, -1, None),
            r"scale.*Declaration: qao::fp8_quantize\(Tensor x, Tensor\? scale, ",
        ),
        (lambda: qao.ops.expert_topk(x, 2, False, None, True, 1.0), r"bias.*Declaration: qao::expert_topk"),
        (lambda: qao.ops.quantize_groups(x, 32, torch.uint8, False, torch.float32, [1.0]), "quantize_groups"),
    ):
        with pytest.raises((RuntimeError, TypeError), match=f"(?s){message}"):
            call()
