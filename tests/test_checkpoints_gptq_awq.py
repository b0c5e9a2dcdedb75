"""GPTQ and AWQ files, built value by value from the format descriptions and read bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from checkpoint_support import ORDERS, layer_of, words, write
from qao.checkpoints import CheckpointError, open_checkpoint
from torch import Tensor


class Weight:
    """q [K, N], zeros [G, N] and scales [G, N] of a weight, and its float32 value [N, K]."""

    def __init__(self, n: int, k: int, group_size: int, bits: int = 4, zero: int | None = None, dtype=torch.float16):
        self.bits, self.group_size = bits, group_size
        groups = -(-k // group_size) if group_size > 0 else 1
        self.q = torch.randint(0, 1 << bits, (k, n))
        self.zeros = torch.randint(0, 1 << bits, (groups, n)) if zero is None else torch.full((groups, n), zero)
        self.scales = (torch.rand(groups, n) * 0.1 + 0.01).to(dtype)
        self.group_of = torch.arange(k) // (group_size if group_size > 0 else k)

    @property
    def dequantized(self) -> Tensor:
        value = torch.empty(self.q.shape, dtype=torch.float64)
        for k, group in enumerate(self.group_of.tolist()):  # the formula of the formats, column by column
            value[k] = (self.q[k] - self.zeros[group]) * self.scales[group].double()
        return value.t().float()

    def gptq(self, version: int = 1) -> dict[str, Tensor]:
        natural = ORDERS["gptq"][: 32 // self.bits]
        stored = (self.zeros + version - 2) % (1 << self.bits)
        return {
            "a.qweight": words(self.q.t(), natural).t(),
            "a.qzeros": words(stored, natural),
            "a.scales": self.scales,
            "a.g_idx": self.group_of.to(torch.int32),
            "a.bias": torch.randn(self.q.shape[1], dtype=torch.float16),
        }

    def awq(self) -> dict[str, Tensor]:
        return {
            "a.qweight": words(self.q, ORDERS["awq"]),
            "a.qzeros": words(self.zeros, ORDERS["awq"]),
            "a.scales": self.scales,
        }


def gptq(**more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, **more}}


def awq(**more: Any) -> dict[str, Any]:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return {"quantization_config": {**config, **more}}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, 512, 96, -1])
def test_gptq_asymmetric(group_size: int, version: int, tmp_path: Path) -> None:
    weight = Weight(24, 512 if group_size == -1 else 2 * abs(group_size) + 32, group_size)
    config = gptq(group_size=group_size, sym=False, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    write(tmp_path, weight.gptq(version), config)
    checkpoint = open_checkpoint(tmp_path)
    layer = checkpoint.layers["a"]
    kernels = {512: 256, 96: 32}.get(group_size, group_size)
    assert layer.scheme == qao.Int4WeightOnly(kernels, scale_dtype=torch.float16)
    assert checkpoint.format == "gptq" and checkpoint.others == ("a.bias",)
    assert torch.equal(layer_of(checkpoint, "a").dequantize(torch.float32), weight.dequantized)


@pytest.mark.parametrize("stated", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_symmetric_even_if_its_version_is_misstated(version: int, stated: str, tmp_path: Path) -> None:
    weight = Weight(16, 64, 32, zero=8, dtype=torch.bfloat16)
    write(tmp_path, weight.gptq(version), gptq(sym=True, checkpoint_format=stated))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layers["a"].scheme == qao.Int4WeightOnly(32, True, torch.bfloat16)
    assert torch.equal(layer_of(checkpoint, "a").dequantize(torch.float32), weight.dequantized)


def test_gptq_symmetric_by_name_alone(tmp_path: Path) -> None:
    write(tmp_path, Weight(16, 64, 32).gptq(), gptq(sym=True))
    with pytest.raises(CheckpointError, match='a.qzeros: zero points differ from 8.*Set "sym": false'):
        open_checkpoint(tmp_path).layers["a"].read()


def test_gptq_eight_bits(tmp_path: Path) -> None:
    weight = Weight(16, 96, -1, bits=8, zero=128)
    write(tmp_path, weight.gptq(), gptq(bits=8, group_size=-1, sym=True))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layers["a"].scheme == qao.Int8WeightOnly()
    assert torch.equal(layer_of(checkpoint, "a").dequantize(torch.float32), weight.dequantized)
    write(tmp_path, Weight(16, 96, 32, bits=8, zero=128).gptq(), gptq(bits=8, sym=True))
    with pytest.raises(CheckpointError, match="int8 with groups of 32"):
        open_checkpoint(tmp_path)
    write(tmp_path, Weight(16, 96, -1, bits=8).gptq(), gptq(bits=8, group_size=-1, sym=False))
    with pytest.raises(CheckpointError, match="zero points other than 128"):
        open_checkpoint(tmp_path).layers["a"].read()


def test_gptq_settings_of_single_modules(tmp_path: Path) -> None:
    narrow, wide = Weight(16, 128, 32), Weight(16, 128, 128)
    tensors = {f"x.{key}": value for key, value in narrow.gptq().items()}
    tensors |= {f"y.{key}": value for key, value in wide.gptq().items()}
    write(tmp_path, tensors, gptq(sym=False, dynamic={"+:y\\..*": {"group_size": 128}}))
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(layer_of(checkpoint, "x.a").dequantize(torch.float32), narrow.dequantized)
    assert torch.equal(layer_of(checkpoint, "y.a").dequantize(torch.float32), wide.dequantized)
    write(tmp_path, tensors, gptq(sym=False, dynamic={"-:x\\..*": {}}))
    with pytest.raises(CheckpointError, match="x.a is excluded"):
        open_checkpoint(tmp_path)


def test_gptq_config_of_its_own_file(tmp_path: Path) -> None:
    weight = Weight(16, 64, 32)
    write(tmp_path, weight.gptq(), {"model_type": "llama"})
    with pytest.raises(CheckpointError, match="a.qweight: is part of a quantized weight"):
        open_checkpoint(tmp_path)
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32, "sym": false, "desc_act": false}')
    assert torch.equal(layer_of(open_checkpoint(tmp_path), "a").dequantize(torch.float32), weight.dequantized)


@pytest.mark.parametrize("group_size", [32, 64, 128, 512, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_awq(group_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    weight = Weight(40, 1024, group_size, dtype=dtype)
    write(tmp_path, weight.awq() | {"norm": torch.ones(3)}, awq(group_size=group_size))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "awq" and checkpoint.others == ("norm",)
    assert checkpoint.layers["a"].scheme == qao.Int4WeightOnly(min(group_size, 256), scale_dtype=dtype)
    assert torch.equal(layer_of(checkpoint, "a").dequantize(torch.float32), weight.dequantized)


def damage(weight: Weight, **changes: Any) -> dict[str, Tensor]:
    tensors = weight.gptq()
    for name, change in changes.items():
        tensors[f"a.{name}"] = change(tensors[f"a.{name}"])
    return {name: value for name, value in tensors.items() if value is not None}


HOSTILE = {
    "reordered": (dict(g_idx=lambda t: t.flip(0).contiguous()), gptq(desc_act=True), "reordered into groups"),
    "reordered, unsaid": (dict(g_idx=lambda t: t.flip(0).contiguous()), gptq(), "reordered into groups"),
    "g_idx beyond": (dict(g_idx=lambda t: t + 100), gptq(), "holds the group 103; there are 0..3"),
    "g_idx negative": (dict(g_idx=lambda t: t - 1), gptq(), "holds the group -1"),
    "g_idx short": (dict(g_idx=lambda t: t[:5]), gptq(), "of shape \\[128\\]"),
    "g_idx float": (dict(g_idx=lambda t: t.float()), gptq(), "must be int32 or int64"),
    "scales": (dict(scales=lambda t: t[:, :8]), gptq(), "of shape \\[4, 16\\]"),
    "scales missing": (dict(scales=lambda t: None), gptq(), "a.scales: this tensor is missing"),
    "scales NaN": (dict(scales=lambda t: t * float("nan")), gptq(), "NaN or Inf"),
    "qzeros": (dict(qzeros=lambda t: t[:1]), gptq(), "of shape \\[4, 2\\]"),
    "qweight float": (dict(qweight=lambda t: t.float()), gptq(), "must be int32"),
    "qweight 1-D": (dict(qweight=lambda t: t[0]), gptq(), "a matrix is needed"),
    "bits": ({}, gptq(bits=3), "3 bits"),
    "bits text": ({}, gptq(bits="4"), "integer"),
    "group 0": ({}, gptq(group_size=0), "groups of 0"),
    "group 16": ({}, gptq(group_size=16), "groups of 16"),
    "group -7": ({}, gptq(group_size=-7), "integer from -1"),
    "group huge": ({}, gptq(group_size=10**30), "integer"),
    "group a list": ({}, gptq(group_size=[32]), "integer"),
    "format": ({}, gptq(checkpoint_format="marlin"), "marlin"),
    "group lies": ({}, gptq(group_size=64), "of shape \\[2, 16\\]"),
    "dynamic": ({}, gptq(dynamic={"+:(": {"bits": 4}}), "not a regular expression"),
    "config": ({}, {"quantization_config": [1]}, "must be an object"),
    "method": ({}, {"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    "method a number": ({}, {"quantization_config": {"quant_method": 4}}, "a string"),
    "awq order": ({}, awq(version="gemv"), "gemv"),
    "awq shapes": ({}, awq(), "a.scales: must be"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile(case: str, tmp_path: Path) -> None:
    changes, config, message = HOSTILE[case]
    write(tmp_path, damage(Weight(16, 128, 32), **changes), config)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path).layers["a"].read()
