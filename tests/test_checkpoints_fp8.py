"""e4m3 checkpoints of Hugging Face and of FBGEMM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from checkpoint_support import layer_of, write
from qao.checkpoints import CheckpointError, open_checkpoint
from torch import Tensor


def e4m3(n: int, k: int) -> Tensor:
    """Every finite value of the format occurs in a weight large enough."""
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    return codes.masked_fill((codes & 0x7F) == 0x7F, 0).view(torch.float8_e4m3fn)


def fp8(**more: Any) -> dict[str, Any]:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {"quantization_config": {**config, **more}}


def by_blocks(weight: Tensor, scales: Tensor) -> Tensor:
    n, k = weight.shape
    columns = scales.float().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return weight.float() * columns


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "e8m0", "uint8"])
@pytest.mark.parametrize(("n", "k"), [(256, 384), (200, 100), (1, 129)])
def test_blocks(n: int, k: int, kind: str, tmp_path: Path) -> None:
    weight = e4m3(n, k)
    exponents = torch.randint(110, 130, (-(-n // 128), -(-k // 128)), dtype=torch.uint8)
    scales = torch.rand(exponents.shape) + 0.01
    if kind in ("e8m0", "uint8"):
        scales = torch.exp2(exponents.float() - 127)
    stored = {"float32": scales, "bfloat16": scales.bfloat16(), "uint8": exponents}.get(kind)
    stored = exponents.view(torch.float8_e8m0fnu) if stored is None else stored
    scales = scales.bfloat16().float() if kind == "bfloat16" else scales
    tensors = {"a.weight": weight, "a.weight_scale_inv": stored, "b.weight": torch.randn(4, 4)}
    write(tmp_path, tensors, fp8(scale_fmt="ue8m0" if kind == "uint8" else None))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "fp8" and checkpoint.others == ("b.weight",)
    assert checkpoint.layers["a"].scheme == qao.Float8DynamicActivationFloat8Weight("block")
    assert torch.equal(layer_of(checkpoint, "a").dequantize(torch.float32), by_blocks(weight, scales))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale(shape: tuple[int, ...], static: bool, tmp_path: Path) -> None:
    weight, scale = e4m3(40, 70), torch.full(shape, 0.03)
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.input_scale": torch.full(shape, 0.5)}
    if not static:
        del tensors["a.input_scale"]
    write(tmp_path, tensors, fp8(weight_block_size=None, activation_scheme="static" if static else "dynamic"))
    layer = layer_of(open_checkpoint(tmp_path), "a")
    scheme: qao.Scheme = qao.Float8DynamicActivationFloat8Weight("tensor")
    if static:
        scheme = qao.Float8StaticActivationFloat8Weight("tensor", activation_scale=0.5)
    assert layer.scheme == scheme
    assert torch.equal(layer.dequantize(torch.float32), weight.float() * torch.tensor(0.03))


def test_fbgemm(tmp_path: Path) -> None:
    weight, scales = e4m3(48, 80), torch.rand(48, 1)
    config = {"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}}
    write(tmp_path, {"a.weight": weight, "a.weight_scale": scales, "a.bias": torch.ones(48)}, config)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layers["a"].scheme == qao.Float8DynamicActivationFloat8Weight("row")
    assert "activation_scale_ub" in checkpoint.layers["a"].note and checkpoint.others == ("a.bias",)
    assert torch.equal(layer_of(checkpoint, "a").dequantize(torch.float32), weight.float() * scales)


NAN_WEIGHT = torch.full((256, 128), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
HOSTILE = {
    "scale short": ({"a.weight_scale_inv": torch.ones(1, 1)}, fp8(), "of shape \\[2, 1\\]"),
    "scale uint8": ({"a.weight_scale_inv": torch.ones(2, 1, dtype=torch.uint8)}, fp8(), "not uint8"),
    "scale NaN": ({"a.weight_scale_inv": torch.full((2, 1), float("nan"))}, fp8(), "NaN or Inf"),
    "scale e8m0 NaN": (
        {"a.weight_scale_inv": torch.full((2, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)},
        fp8(),
        "NaN or Inf",
    ),
    "weight NaN": ({"a.weight": NAN_WEIGHT}, fp8(), "a.weight: holds NaN"),
    "weight missing": ({"a.weight": None}, fp8(), "a.weight: this tensor is missing"),
    "weight float": ({"a.weight": torch.ones(256, 128)}, fp8(), "must be float8_e4m3fn"),
    "experts": ({"a.weight": e4m3(256, 128).reshape(2, 128, 128)}, fp8(), "fused experts"),
    "no scale": ({"b.weight": e4m3(8, 8)}, fp8(), "b.weight: is part of a quantized weight"),
    "blocks": ({}, fp8(weight_block_size=[64, 64]), "weight_block_size"),
    "blocks text": ({}, fp8(weight_block_size="128"), "weight_block_size"),
    "static blocks": ({}, fp8(activation_scheme="static"), "activation_scheme"),
    "static, no scale": (
        {"a.weight_scale_inv": torch.ones(1)},
        fp8(activation_scheme="static", weight_block_size=None),
        "a.activation_scale: this tensor is missing",
    ),  # fmt: skip # noqa: E501
    "static, negative": (
        {"a.weight_scale_inv": torch.ones(1), "a.input_scale": -torch.ones(1)},
        fp8(activation_scheme="static", weight_block_size=None),
        "positive number",
    ),  # fmt: skip # noqa: E501
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile(case: str, tmp_path: Path) -> None:
    changes, config, message = HOSTILE[case]
    tensors = {"a.weight": e4m3(256, 128), "a.weight_scale_inv": torch.ones(2, 1)} | changes
    write(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None}, config)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path).layers["a"].read()
