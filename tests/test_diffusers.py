"""diffusers: quantised while it loads, saved and loaded again; tests/test_saving.py loads in other processes."""

from __future__ import annotations

import copy
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


def pipeline() -> Any:
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "patch_size": 2, "norm_num_groups": 4}
    images = {"in_channels": 4, "out_channels": 8, "sample_size": 8}
    transformer = diffusers.DiTTransformer2DModel(**heads, **images).eval()
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=8).eval()
    return diffusers.DiTPipeline(transformer, vae, diffusers.DDIMScheduler())


def drawn(pipe: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    seed = torch.Generator().manual_seed(1)
    return torch.from_numpy(pipe([1], generator=seed, num_inference_steps=2, output_type="np").images)


@every_scheme
def test_a_pipeline_with_a_quantised_part_is_loaded_again(kind: type[qao.Scheme], tmp_path: Path) -> None:
    torch.manual_seed(0)
    pipe = pipeline()
    pipe.save_pretrained(tmp_path / "f")
    qao.quantize_(pipe.transformer, kind(), progress=False)
    expected = drawn(pipe)
    pipe.save_pretrained(tmp_path / "q")
    again = diffusers.DiTPipeline.from_pretrained(tmp_path / "q")
    config = diffusers.PipelineQuantizationConfig(quant_mapping={"transformer": qao.QaoConfig(kind())})
    on_load = diffusers.DiTPipeline.from_pretrained(tmp_path / "f", quantization_config=config)
    for other in (again, on_load):
        assert any(isinstance(module, qao.QuantLinear) for module in other.transformer.modules())
        assert torch.equal(drawn(other), expected)


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


@pytest.mark.filterwarnings("ignore:quantize_. these big weights")
@pytest.mark.parametrize("make", [unet, flux])
def test_the_dtype_of_a_model_is_not_that_of_its_scales(make: Callable[[], Any]) -> None:
    """Pipelines cast what they give a model to it. The first float tensor of Flux is a scale."""
    model = make().bfloat16()
    qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    assert model.dtype == torch.bfloat16
    assert run(model).dtype == torch.bfloat16
    assert model.to(torch.float16).dtype == torch.float16
    assert make().dtype == torch.float32


@pytest.mark.filterwarnings("ignore:quantize_. these big weights")
@pytest.mark.filterwarnings("ignore:The weight .* of a quantised layer was read")
@pytest.mark.parametrize("make", [unet, flux])
def test_fused_projections_are_those_of_the_dequantised_weights(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make()
    qao.quantize_(model, qao.Int8WeightOnly(clip_search=False), progress=False)
    plain = qao.dequantize_(copy.deepcopy(model))
    truth = run(plain)
    model.fuse_qkv_projections()
    assert any("to_qkv" in name for name, _ in model.named_modules())
    # The same float32 products, of one matrix instead of three.
    torch.testing.assert_close(run(model), truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())
    model.unfuse_qkv_projections()
    torch.testing.assert_close(run(model), truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())


def test_a_model_that_is_dequantised_is_saved_as_floats(tmp_path: Path) -> None:
    model = flux()
    qao.quantize_(model, qao.Int8WeightOnly(clip_search=False), progress=False)
    qao.dequantize_(model).save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    loaded = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path)
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
