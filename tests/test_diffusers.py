"""diffusers: quantised while it loads, saved and loaded again; tests/test_saving.py loads in other processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qao
import saving_support as support
import torch

if not support.importable("diffusers"):
    pytest.skip("no diffusers that works", allow_module_level=True)
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("accelerate")
every_scheme = pytest.mark.parametrize("kind", qao.SCHEMES.values(), ids=lambda kind: kind.word)


def unet() -> Any:
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    sizes = {"sample_size": 8, "block_out_channels": (32,), "norm_num_groups": 8, "layers_per_block": 1}
    return diffusers.UNet2DConditionModel(**sizes, **blocks, cross_attention_dim=32, attention_head_dim=8)


def flux() -> Any:
    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)}
    layers = {"num_layers": 1, "num_single_layers": 1, "patch_size": 1, "in_channels": 4}
    return diffusers.FluxTransformer2DModel(**sizes, **layers, pooled_projection_dim=32)


def run(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(*shape, generator=generator).to(model.dtype) for shape in ((1, 5, 32), (1, 32), (1, 4, 8, 8))]
    text, pooled, image = made
    with torch.no_grad():
        if isinstance(model, diffusers.UNet2DConditionModel):
            return model(image, 3, text).sample
        where = {"img_ids": torch.zeros(64, 3), "txt_ids": torch.zeros(5, 3)}
        tokens, time = image.flatten(2).transpose(1, 2), torch.tensor([1.0]).to(model.dtype)
        return model(tokens, text, pooled, time, **where).sample


@every_scheme
@pytest.mark.parametrize("make", [unet, flux])
@pytest.mark.filterwarnings("ignore:quantize_. these big weights")  # convolutions
def test_on_load_saved_and_loaded_again(make: Callable[[], Any], kind: type[qao.Scheme], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().bfloat16()
    model.save_pretrained(tmp_path / "f")
    load = type(model).from_pretrained
    expected = load(tmp_path / "f", torch_dtype=torch.bfloat16)
    qao.quantize_(expected, kind())
    config = qao.QaoConfig(kind())
    loaded = load(tmp_path / "f", torch_dtype=torch.bfloat16, quantization_config=config)
    assert torch.equal(run(loaded), run(expected))
    for i, one in enumerate((expected, loaded)):
        path = tmp_path / str(i)
        one.save_pretrained(path)
        assert json.loads((path / "config.json").read_text())["quantization_config"]["quant_method"] == "qao"
        again = load(path, torch_dtype=torch.bfloat16)
        assert torch.equal(run(again), run(expected))
        layers = [module for module in again.modules() if isinstance(module, qao.QuantLinear)]
        assert layers and not any(layer.scales.requires_grad or layer.qweight.requires_grad for layer in layers)


def test_another_dtype_leaves_scales_alone(tmp_path: Path) -> None:
    model = flux()
    qao.quantize_(model, qao.Int8WeightOnly())
    model.save_pretrained(tmp_path)
    half = type(model).from_pretrained(tmp_path, torch_dtype=torch.float16)
    for name, parameter in model.named_parameters():
        if name.endswith((".qweight", ".scales")):
            assert torch.equal(half.get_parameter(name), parameter)
            assert half.get_parameter(name).dtype == parameter.dtype
    assert half.norm_out.linear.bias.dtype == torch.float16
    assert torch.allclose(run(half).float(), run(model), atol=0.02 * float(run(model).abs().max()))
