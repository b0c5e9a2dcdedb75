"""diffusers: quantization during loading, saving and reloading."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qao
import saving_support as support
import torch
from qao.integrations.huggingface.loading import Loader

if not support.importable("diffusers"):
    pytest.skip("no diffusers that works", allow_module_level=True)
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("accelerate")
every_scheme = pytest.mark.parametrize("kind", qao.schemes.SCHEMES.values(), ids=lambda kind: kind.word)


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
        assert again.half().dtype == torch.float16 and again.float().dtype == torch.float32
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
def test_a_pipeline_with_a_quantized_part_is_loaded_again(kind: type[qao.Scheme], tmp_path: Path) -> None:
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
    """Pipelines cast a model's inputs to this dtype. The first float tensor of Flux is a scale."""
    model = make().bfloat16()
    qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    assert model.dtype == torch.bfloat16
    assert run(model).dtype == torch.bfloat16
    assert model.to(torch.float16).dtype == torch.float16
    assert make().dtype == torch.float32


def test_a_model_that_is_dequantized_is_saved_as_floats(tmp_path: Path) -> None:
    model = flux()
    qao.quantize_(model, qao.Int8WeightOnly(clip_search=False), progress=False)
    qao.dequantize_(model).save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    loaded = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path)
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def save_floats(path: Path, make: Callable[[], Any] = flux) -> Any:
    torch.manual_seed(0)
    model = make().bfloat16()
    model.save_pretrained(path)
    return model


INT8 = qao.Int8WeightOnly()
BF16 = {"torch_dtype": torch.bfloat16}


@pytest.mark.parametrize("quantized", [False, True], ids=["floats", "quantized"])
def test_files_are_quantized_one_after_another(
    quantized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers loads shards in threads if HF_ENABLE_PARALLEL_LOADING is set."""
    model = save_floats(tmp_path / "f")
    qao.quantize_(model, INT8, progress=False)
    (model if quantized else qao.dequantize_(copy.deepcopy(model))).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    threads: set[bool] = set()

    def take(self: Any, *arguments: Any) -> None:
        threads.add(threading.current_thread() is threading.main_thread())
        theirs(self, *arguments)

    theirs = Loader.take
    monkeypatch.setattr(Loader, "take", take)
    monkeypatch.setattr(diffusers.models.modeling_utils, "HF_ENABLE_PARALLEL_LOADING", True)
    options = {} if quantized else {"quantization_config": qao.QaoConfig(INT8)}
    loaded = type(model).from_pretrained(tmp_path, **BF16, **options)
    assert threads == (set() if quantized else {True})
    expected, state = model.state_dict(), loaded.state_dict()
    assert expected.keys() == state.keys()
    assert not quantized or all(torch.equal(tensor, state[name]) for name, tensor in expected.items())


def test_a_single_file_is_quantized_while_it_is_loaded(tmp_path: Path) -> None:
    kind = type(save_floats(tmp_path / "f"))
    expected = kind.from_pretrained(tmp_path / "f", **BF16, quantization_config=qao.QaoConfig(INT8))
    file = str(tmp_path / "f" / "diffusion_pytorch_model.safetensors")
    config = {"config": str(tmp_path / "f"), "quantization_config": qao.QaoConfig(INT8)}
    model = kind.from_single_file(file, **BF16, **config)
    assert isinstance(model.proj_out, qao.QuantLinear) and torch.equal(run(model), run(expected))
    model.save_pretrained(tmp_path / "q")
    assert torch.equal(run(kind.from_pretrained(tmp_path / "q", **BF16)), run(expected))


def wan() -> Any:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 64, "text_dim": 32, "freq_dim": 64}
    images = {"patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4}
    return diffusers.WanTransformer3DModel(**sizes, **images, num_layers=1, rope_max_seq_len=32)


@every_scheme
@pytest.mark.filterwarnings("ignore:quantize_. these big weights")
def test_what_a_model_keeps_in_float32_is_so_after_a_reload(kind: type[qao.Scheme], tmp_path: Path) -> None:
    load = type(save_floats(tmp_path / "f", wan)).from_pretrained
    scheme = kind()
    later = load(tmp_path / "f", **BF16)
    qao.quantize_(later, scheme)
    loaded = load(tmp_path / "f", **BF16, quantization_config=qao.QaoConfig(scheme))
    loaded.save_pretrained(tmp_path / "q")
    generator = torch.Generator().manual_seed(1)
    image, text = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((1, 4, 1, 8, 8), (1, 5, 32)))
    results = []
    for model in (later, loaded, load(tmp_path / "q", **BF16)):
        embedder, block = model.condition_embedder.time_embedder, model.blocks[0]
        assert isinstance(embedder.linear_1, qao.QuantLinear)
        assert embedder.linear_1.weight.dtype == embedder.linear_1.bias.dtype == torch.float32
        assert block.ffn.net[2].weight.dtype == block.ffn.net[2].bias.dtype == torch.bfloat16
        with torch.no_grad():
            results.append(model(image, torch.tensor([3]), text).sample)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("part", ["proj_out.weight", "proj_out.qweight"])
def test_a_layer_that_the_file_lacks(part: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = save_floats(tmp_path)
    if part.endswith("qweight"):
        qao.quantize_(model, INT8)
        model.save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != part}, file, {"format": "pt"})
    if part.endswith("qweight"):
        with pytest.raises(ValueError, match="proj_out: .* the checkpoint has no qweight of it"):
            type(model).from_pretrained(tmp_path, **BF16)
        return
    with pytest.warns(UserWarning, match="the checkpoint does not hold proj_out: new random numbers"):
        loaded = type(model).from_pretrained(tmp_path, **BF16, quantization_config=qao.QaoConfig(INT8))
    assert type(loaded.proj_out) is torch.nn.Linear


@pytest.mark.parametrize("kind", [qao.Int4WeightOnly, qao.Fp4WeightOnly], ids=lambda kind: kind.word)
def test_group_offload_to_disk(kind: type[qao.Scheme], tmp_path: Path) -> None:
    model = flux().eval()
    qao.quantize_(model, kind())
    expected = run(model)
    cpu = torch.device("cpu")
    model.enable_group_offload(onload_device=cpu, offload_type="leaf_level", offload_to_disk_path=str(tmp_path))
    assert any(tmp_path.iterdir())  # safetensors files, in which tensors start anywhere
    assert torch.equal(run(model), expected) and torch.equal(run(model), expected)


def run_fused(model: Any) -> torch.Tensor:
    if not isinstance(model, diffusers.WanTransformer3DModel):
        return run(model)
    generator = torch.Generator().manual_seed(1)
    image, text = (torch.randn(*shape, generator=generator) for shape in ((1, 4, 1, 8, 8), (1, 5, 32)))
    with torch.no_grad():
        return model(image, torch.tensor([3]), text).sample


FUSED = [(flux, kind) for kind in qao.schemes.SCHEMES.values()] + [(make, qao.Int4WeightOnly) for make in (unet, wan)]


@pytest.mark.filterwarnings("error:The weight .* was read", "error:fuse_projections")
@pytest.mark.filterwarnings("ignore:quantize_. these big weights")
@pytest.mark.parametrize(("make", "kind"), FUSED)
def test_fused_projections_are_quantized(make: Callable[[], Any], kind: type[qao.Scheme]) -> None:
    model = make().eval()
    qao.quantize_(model, kind())
    expected = run_fused(model)
    model.fuse_qkv_projections()
    fused = [module for name, module in model.named_modules() if name.rpartition(".")[2] in ("to_qkv", "to_kv")]
    assert fused and all(type(module) is qao.QuantLinear for module in fused)
    if make is flux:
        assert type(model.transformer_blocks[0].attn.to_added_qkv) is qao.QuantLinear
    assert torch.equal(run_fused(model), expected)
    model.unfuse_qkv_projections()
    assert torch.equal(run_fused(model), expected)


def test_fused_projections_with_different_schemes() -> None:
    model = flux().eval()
    qao.quantize_(model, {"re:.*to_k": None, "re:.*": INT8})
    expected = run(model)
    with pytest.warns(UserWarning, match="to_qkv stays in float, .* Call it before quantize_"):
        model.fuse_qkv_projections()
    attention = model.transformer_blocks[0].attn
    assert type(attention.to_qkv) is torch.nn.Linear and type(attention.to_added_qkv) is qao.QuantLinear
    torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-4)


def test_what_diffusers_does_with_a_quantized_model(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig

    kind = type(save_floats(tmp_path / "f"))
    plain = {"torch_dtype": torch.float32}
    adapted = kind.from_pretrained(tmp_path / "f", **plain)
    adapted.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k"], init_lora_weights=False))
    adapted.save_lora_adapter(tmp_path / "lora")

    def load(**options: Any) -> Any:
        return kind.from_pretrained(tmp_path / "f", **plain, quantization_config=qao.QaoConfig(INT8), **options)

    expected = run(load())
    model = load(device_map="auto")
    assert torch.equal(run(model).cpu(), expected) or model.device.type != "cpu"
    model = load()
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert torch.equal(run(model), expected)
    model = load()
    model.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")
    assert torch.equal(run(model), expected) and torch.equal(run(model), expected)
    results = []
    for model in (load(), load().dequantize()):
        model.load_lora_adapter(tmp_path / "lora", prefix=None, weight_name="pytorch_lora_weights.safetensors")
        results.append(run(model))
        model.unload_lora()
    with_adapter, truth = results
    assert (truth - expected).norm() > 0.01 * truth.norm()  # an adapter that does something
    torch.testing.assert_close(with_adapter, truth, rtol=1e-3, atol=1e-4 * truth.abs().max().item())
    model = load().dequantize()
    assert type(model.proj_out) is torch.nn.Linear and not getattr(model, "is_quantized", False)
    model.save_pretrained(tmp_path / "again")
    again = kind.from_pretrained(tmp_path / "again", **plain).state_dict()
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
