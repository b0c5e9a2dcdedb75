"""Files of torchao: those that its own writer makes, and those that must be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from checkpoint_support import layer_of, write
from qao.checkpoints import CheckpointError, open_checkpoint
from torch import Tensor

CONFIG = {"quantization_config": {"quant_method": "torchao", "quant_type": {}}}


def tensors_of_torchao() -> dict[str, tuple[Tensor, qao.schemes.Scheme]]:
    """A weight [48, 128] in each of torchao's plain layouts, and the scheme that it is."""
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, MappingType, PerRow, PerTensor
    from torchao.quantization.quantize_.common import KernelPreference
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs, QuantizeTensorToInt8Kwargs

    w = torch.randn(48, 128, dtype=torch.bfloat16)
    symmetric = QuantizeTensorToInt8Kwargs(granularity=PerRow())
    asymmetric = QuantizeTensorToInt8Kwargs(granularity=PerRow(), mapping_type=MappingType.ASYMMETRIC)

    def fp8(granularity: Any, inputs: Any = None, fast: bool = False) -> Tensor:
        kwargs = None if inputs is None else QuantizeTensorToFloat8Kwargs(granularity=inputs)
        config = Float8MMConfig(use_fast_accum=fast)
        plain = KernelPreference.TORCH
        return Float8Tensor.from_hp(
            w, granularity=granularity, mm_config=config, act_quant_kwargs=kwargs, kernel_preference=plain
        )

    def intx(bits: int, group_size: int, mapping: Any, inputs: str | None = None) -> Tensor:
        dtype = getattr(torch, f"int{bits}")
        return IntxUnpackedToInt8Tensor.from_hp(
            w, (1, group_size), dtype, mapping_type=mapping, activation_quantization=inputs
        )

    by_token = "int8_asym_per_token"
    fp8_fp8 = qao.Float8DynamicActivationFloat8Weight
    return {
        "int8": (Int8Tensor.from_hp(w, PerRow()), qao.Int8WeightOnly()),
        "int8_int8": (
            Int8Tensor.from_hp(w, PerRow(), act_quant_kwargs=symmetric),
            qao.Int8DynamicActivationInt8Weight(),
        ),
        "int8_int8 asymmetric": (
            Int8Tensor.from_hp(w, PerRow(), act_quant_kwargs=asymmetric),
            qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
        ),
        "fp8": (fp8(PerRow()), qao.Float8WeightOnly("row")),
        "fp8 tensor": (fp8(PerTensor()), qao.Float8WeightOnly("tensor")),
        "fp8_fp8": (fp8(PerRow(), PerRow(), fast=True), fp8_fp8("row", fast_accum=True)),
        "fp8_fp8 tensor": (fp8(PerTensor(), PerTensor()), fp8_fp8("tensor")),
        "fp8_fp8 tensor by token": (fp8(PerTensor(), PerRow()), fp8_fp8("row")),
        "int4": (intx(4, 32, MappingType.SYMMETRIC), qao.Int4WeightOnly(32, True, torch.bfloat16)),
        "int4 asymmetric": (intx(4, 64, MappingType.ASYMMETRIC), qao.Int4WeightOnly(64, False, torch.bfloat16)),
        "int8_int4": (
            intx(4, 128, MappingType.SYMMETRIC, by_token),
            qao.Int8DynamicActivationInt4Weight(128, True, torch.bfloat16, symmetric_activations=False),
        ),
        "intx of eight bits": (
            intx(8, 128, MappingType.SYMMETRIC, by_token),
            qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
        ),
    }


def test_what_torchao_wrote(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    cases = {name.replace(" ", "_"): case for name, case in tensors_of_torchao().items()}
    state = {f"{name}.weight": weight for name, (weight, _) in cases.items()} | {"norm.weight": torch.ones(7)}
    tensors, metadata = flatten_tensor_state_dict(state)
    for config in (CONFIG, {}):  # the header suffices
        write(tmp_path, tensors, config, **metadata)
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.format == "torchao" and checkpoint.others == ("norm.weight",)
        assert checkpoint.layers.keys() == cases.keys()
    for name, (weight, scheme) in cases.items():
        assert checkpoint.layers[name].scheme == scheme, name
        assert torch.equal(layer_of(checkpoint, name).dequantize(torch.bfloat16), weight.dequantize()), name


def header(kind: str, **data: Any) -> dict[str, str]:
    return {"tensor_names": '["a.weight"]', "a.weight": json.dumps({"_type": kind, "_data": data})}


def test_int4_tensor(tmp_path: Path) -> None:
    q, scales = torch.randint(-8, 8, (16, 128)), torch.rand(2, 16).bfloat16()
    packed = ((q[:, ::2] & 15) | ((q[:, 1::2] & 15) << 4)).to(torch.uint8).view(torch.int8)
    parts = {"a._weight_qdata": packed, "a._weight_scale": scales, "a._weight_zero_point": torch.zeros_like(scales)}
    about = {"block_size": [1, 64], "activation_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}}
    write(tmp_path, parts, CONFIG, **header("Int4Tensor", **about))
    layer = layer_of(open_checkpoint(tmp_path), "a")
    assert layer.scheme == qao.Float8DynamicActivationInt4Weight(64, True, torch.bfloat16)
    assert torch.equal(layer.dequantize(torch.float32), q * scales.t().float().repeat_interleave(64, 1))
    parts["a._weight_zero_point"][0, 3] = 0.5
    write(tmp_path, parts, CONFIG, **header("Int4Tensor", **about))
    with pytest.raises(CheckpointError, match="a._weight_zero_point: is added to the weight"):
        open_checkpoint(tmp_path)


INT8 = {"a._weight_qdata": torch.ones(16, 64, dtype=torch.int8), "a._weight_scale": torch.ones(16, 1)}
HOSTILE = {
    "tile packed": (INT8, header("Int4TilePackedTo4dTensor"), "Int4TilePackedTo4dTensor"),
    "NVFP4": (INT8, header("NVFP4Tensor"), "NVFP4Tensor"),
    "type a list": (INT8, {"tensor_names": "[]", "a.weight": '{"_type": [1]}'}, "is a \\[1\\]"),
    "no JSON": (INT8, {"tensor_names": "[]", "a.weight": "{"}, "is not JSON"),
    "deep": (INT8, {"tensor_names": "[]", "a.weight": '{"a":' * 100_000}, "is not JSON"),
    "parts missing": ({"x": torch.ones(1)}, header("Int8Tensor"), "a._weight_qdata: this tensor is missing"),
    "block text": (INT8, header("Int8Tensor", block_size="1"), "two positive integers"),
    "block negative": (INT8, header("Int8Tensor", block_size=[1, -64]), "two positive integers"),
    "block of 32": (INT8, header("Int8Tensor", block_size=[1, 32]), "one scale per row"),
    "zeros": (
        INT8 | {"a._weight_zero_point": torch.ones(16, 1, dtype=torch.int8)},
        header("Int8Tensor"),
        "zero points in eight bits",
    ),
    "pre scale": (INT8 | {"a._weight_act_pre_scale": torch.ones(64)}, header("Int8Tensor"), "act_pre_scale"),
    "granularity": (
        INT8,
        header("Int8Tensor", act_quant_kwargs={"_data": {"granularity": {"_type": "PerGroup"}}}),
        "PerRow or PerTensor",
    ),
    "NaN": (INT8 | {"a._weight_scale": torch.full((16, 1), float("nan"))}, header("Int8Tensor"), "NaN or Inf"),
    "no part is known": ({"a.weight": torch.ones(2, 2)}, {"tensor_names": "[]"}, "no tensor is quantized"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile(case: str, tmp_path: Path) -> None:
    tensors, metadata, message = HOSTILE[case]
    write(tmp_path, tensors, CONFIG, **metadata)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path).layers["a"].read()
