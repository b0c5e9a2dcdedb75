"""Commands on models with tensors that transformers renames, joins or splits while it loads them."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao.cli import main
from qao.nn.packed_module import PackedModule

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
if int(transformers.__version__.partition(".")[0]) < 5:
    pytest.skip("version 4 joins no experts", allow_module_level=True)

TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FEW = {"num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", **TEXT}
CLIP = {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 16, **VISION}

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**TEXT, **FEW, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {**TEXT, **FEW, "num_experts": 4, "moe_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3Moe", {**TEXT, **FEW, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}),
    "olmoe": ("Olmoe", {**TEXT, **FEW, "num_experts": 4}),
    "deepseek_v2": (
        "DeepseekV2",
        {**TEXT, **FEW, **LATENT, "n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **TEXT,
            **FEW,
            **LATENT,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": ("GptOss", {**TEXT, **FEW, "num_local_experts": 4, "head_dim": 16}),
    "phimoe": ("Phimoe", {**TEXT, **FEW, "num_local_experts": 4}),
    "granitemoe": ("GraniteMoe", {**TEXT, **FEW, "num_local_experts": 4}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **TEXT,
            **FEW,
            "num_local_experts": 4,
            "shared_intermediate_size": 32,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
        },
    ),
    "llama4": (
        "Llama4",
        {**TEXT, "num_experts_per_tok": 1, "num_local_experts": 4, "intermediate_size_mlp": 64, "head_dim": 16},
    ),
    "jamba": (
        "Jamba",
        {
            **TEXT,
            **FEW,
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "use_mamba_kernels": False,
            "mamba_dt_rank": 8,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **TEXT,
            **FEW,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
        },
    ),
    "ernie4_5_moe": ("Ernie4_5_Moe", {**TEXT, "moe_k": 2, "moe_num_experts": 4, "moe_intermediate_size": 32}),
    "hunyuan": ("HunYuanMoEV1", {**TEXT, "num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "minimax": ("MiniMax", {**TEXT, **FEW, "num_local_experts": 4, "head_dim": 16}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **TEXT,
            **FEW,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}


def mixture(kind: str) -> Any:
    name, options = MIXTURES[kind]
    config_name = "Llama4TextConfig" if kind == "llama4" else f"{name}Config"
    config = getattr(transformers, config_name)(**options)
    return save_ready(getattr(transformers, f"{name}ForCausalLM"), config)


def save_ready(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # some leave experts and biases at zero
            if "norm" not in name:
                parameter.normal_(0, 0.05)
    return model


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Without the markers, which say of int4 in memory that its scales follow the dtype, and loaded which they have."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("pip_install_qao")}


def assert_as_the_library(float_path: Path, out: Path, scheme: Any, auto: Any) -> Any:
    """The command's output loads as the result of ``quantize_``, with the names of ``save_pretrained``."""
    expected = auto.from_pretrained(float_path, dtype="auto").eval()
    qao.quantize_(expected, scheme, progress=False)
    loaded = qao.from_pretrained(out)
    ours, theirs = state(loaded), state(expected)
    assert ours.keys() == theirs.keys()
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    expected.save_pretrained(out.parent / f"{out.name}-library")
    written, library = (
        safetensors_torch.load_file(path / "model.safetensors") for path in (out, out.parent / f"{out.name}-library")
    )
    assert written.keys() == library.keys()
    return loaded


@pytest.mark.parametrize("kind", list(MIXTURES))
def test_mixtures(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = mixture(kind)
    model.save_pretrained(tmp_path / "float")
    assert main(["quantize", str(tmp_path / "float"), str(tmp_path / "out"), "--scheme", "int8", "--quiet"]) == 0
    loaded = assert_as_the_library(
        tmp_path / "float", tmp_path / "out", qao.Int8WeightOnly(), transformers.AutoModelForCausalLM
    )
    assert sum(isinstance(module, PackedModule) for module in loaded.modules()) > 4
    capsys.readouterr()

    assert main(["inspect", str(tmp_path / "out"), "--against", str(tmp_path / "float"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    buffers = sum(tensor.numel() for name, tensor in model.named_buffers() if name in model.state_dict())
    assert report["parameters"] == model.num_parameters() + buffers
    for layer in report["layers"]:
        assert 0 < layer["relative_error"] < 0.02, layer["name"]

    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "again"), "--to", "qao", "--quiet"]) == 0
    again = state(qao.from_pretrained(tmp_path / "again"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in state(loaded).items())
    status = main(["convert", str(tmp_path / "out"), str(tmp_path / "ct"), "--to", "compressed-tensors", "--quiet"])
    fused = any(layer["experts"] for layer in report["layers"])
    assert status == (1 if fused else 0) and (tmp_path / "ct").exists() is not fused
    if fused:
        assert "fused experts" in capsys.readouterr().err


def renamed(kind: str) -> tuple[Any, Any]:
    """A model that transformers 5 saves under names other than its modules', and the Auto class that loads it."""
    t: Any = transformers
    if kind == "llava":
        config = t.LlavaConfig(text_config=LLAMA, vision_config=CLIP, image_token_index=95, tie_word_embeddings=False)
        return save_ready(t.LlavaForConditionalGeneration, config), t.AutoModelForImageTextToText
    if kind == "swin":
        config = t.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4)
        return save_ready(t.SwinModel, config), t.AutoModel
    if kind == "qwen2_vl":
        vision = {"embed_dim": 64, "hidden_size": 64, "depth": 1, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
        rope = {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3]}
        config = t.Qwen2VLConfig(text_config={**TEXT, "rope_scaling": rope}, vision_config=vision)
        return save_ready(t.Qwen2VLForConditionalGeneration, config), t.AutoModelForImageTextToText
    if kind == "qwen3_vl_moe":  # transposes its experts while it is loaded
        few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
        sizes = {"depth": 1, "num_heads": 4, "patch_size": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
        vision = {"hidden_size": 64, "intermediate_size": 96, **sizes}
        config = t.Qwen3VLMoeConfig(text_config={**TEXT, **few, "rope_scaling": rope}, vision_config=vision)
        return save_ready(t.Qwen3VLMoeForConditionalGeneration, config), t.AutoModelForImageTextToText
    if kind == "paligemma":
        vision = {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 16, **VISION}
        text = {"model_type": "gemma", **TEXT, "head_dim": 16}
        config = t.PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=95, projection_dim=64)
        return save_ready(t.PaliGemmaForConditionalGeneration, config), t.AutoModelForImageTextToText
    if kind == "dinov2":
        sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32}
        return save_ready(t.Dinov2Model, t.Dinov2Config(**sizes, patch_size=16)), t.AutoModel
    if kind == "detr":
        sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 4}
        backbone = t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
        config = t.DetrConfig(
            **sizes, **heads, use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone
        )
        return save_ready(t.DetrForObjectDetection, config), t.AutoModelForObjectDetection
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["llava", "swin", "qwen2_vl", "qwen3_vl_moe", "paligemma", "dinov2", "detr"])
def test_renamed_tensors(kind: str, tmp_path: Path) -> None:
    model, auto = renamed(kind)
    model.save_pretrained(tmp_path / "float")
    names = safetensors_torch.load_file(tmp_path / "float" / "model.safetensors").keys()
    assert kind not in ("llava", "swin") or names - state(model).keys()  # else this tests nothing
    assert main(["quantize", str(tmp_path / "float"), str(tmp_path / "out"), "--scheme", "int8", "--quiet"]) == 0
    expected = auto.from_pretrained(tmp_path / "float", dtype="auto").eval()
    qao.quantize_(expected, qao.Int8WeightOnly(), progress=False)
    ours, theirs = state(qao.from_pretrained(tmp_path / "out", auto_class=auto)), state(expected)
    assert ours.keys() == theirs.keys()
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    expected.save_pretrained(tmp_path / "library")
    written, library = (safetensors_torch.load_file(tmp_path / one / "model.safetensors") for one in ("out", "library"))
    assert written.keys() == library.keys()
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "again"), "--to", "qao", "--quiet"]) == 0
    again = state(qao.from_pretrained(tmp_path / "again", auto_class=auto))
    assert not [name for name in theirs if not torch.equal(again[name], theirs[name])]


@pytest.mark.parametrize("scheme", [qao.Int8WeightOnly(), qao.Int4WeightOnly(32)], ids=["compressed-tensors", "qao"])
@pytest.mark.parametrize("kind", ["llava", "mixtral", "tied"])
def test_qao_load_takes_what_save_pretrained_wrote(kind: str, scheme: qao.Scheme, tmp_path: Path) -> None:
    """Under other names than the modules have, joined, or once for two names."""
    if kind == "tied":
        config = transformers.LlamaConfig(**TEXT, tie_word_embeddings=True)
        model = save_ready(transformers.LlamaForCausalLM, config)
    else:
        model = mixture(kind) if kind in MIXTURES else renamed(kind)[0]
    empty, other = copy.deepcopy(model), transformers.BertModel(transformers.BertConfig(**VISION, vocab_size=96))
    qao.quantize_(model, scheme, progress=False)
    model.save_pretrained(tmp_path)
    assert qao.load(tmp_path, empty) is empty
    ours, theirs = state(empty), state(model)
    assert ours.keys() == theirs.keys()
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    if kind == "tied":
        assert empty.lm_head.weight is empty.model.embed_tokens.weight
    with pytest.raises(ValueError, match="load: .*not a checkpoint of this BertModel|BertModel has no module"):
        qao.load(tmp_path, other)
    assert not any(isinstance(module, PackedModule) for module in other.modules())


def test_names_of_a_base_model(tmp_path: Path) -> None:
    """GPT-2 on the hub has the names of the model without its head."""
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=96, bos_token_id=0, eos_token_id=0)
    model = save_ready(transformers.GPT2LMHeadModel, config)
    model.transformer.save_pretrained(tmp_path / "float")
    model.config.save_pretrained(tmp_path / "float")
    content = json.loads((tmp_path / "float" / "config.json").read_text())
    content["architectures"] = ["GPT2LMHeadModel"]
    (tmp_path / "float" / "config.json").write_text(json.dumps(content))
    assert main(["quantize", str(tmp_path / "float"), str(tmp_path / "out"), "--scheme", "int8", "--quiet"]) == 0
    qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    ours, theirs = state(qao.from_pretrained(tmp_path / "out")), state(model)
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("options", [["--exclude", r"re:.*\.experts"], ["--exclude", "model.layers.0"]])
def test_parts_of_a_mixture(options: list[str], tmp_path: Path) -> None:
    mixture("qwen3_moe").save_pretrained(tmp_path / "float")
    arguments = ["quantize", str(tmp_path / "float"), str(tmp_path / "out"), "--scheme", "int4", "--group-size", "32"]
    assert main([*arguments, *options, "--quiet"]) == 0
    scheme = {options[1]: None, "re:.*": qao.Int4WeightOnly(32)}
    assert_as_the_library(tmp_path / "float", tmp_path / "out", scheme, transformers.AutoModelForCausalLM)


def test_a_mixture_that_lacks_an_expert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixture("qwen3_moe").save_pretrained(tmp_path / "float")
    file = tmp_path / "float" / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    for name in [name for name in tensors if re.search(r"layers\.1\.mlp\.experts\.3\.", name)]:
        del tensors[name]
    safetensors_torch.save_file(tensors, file, {"format": "pt"})
    assert main(["quantize", str(tmp_path / "float"), str(tmp_path / "out"), "--scheme", "int8", "--quiet"]) == 1
    assert "model.layers.1.mlp.experts.gate_up_proj is" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


def test_experts_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As other libraries quantize them, which vLLM loads and transformers does not: never in qao's own layout."""
    from qao.checkpoints.compressed_tensors.write import layer_tensors, quantization_config

    mixture("qwen3_moe").save_pretrained(tmp_path / "float")
    tensors = safetensors_torch.load_file(tmp_path / "float" / "model.safetensors")
    scheme = qao.Int8WeightOnly()
    names = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    for name in names:
        weight = tensors.pop(f"{name}.weight")
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data.copy_(weight)
        made = layer_tensors(qao.QuantLinear.from_linear(linear, scheme))
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in made.items()}
    (tmp_path / "ct").mkdir()
    safetensors_torch.save_file(tensors, tmp_path / "ct" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "float" / "config.json").read_text())
    config["quantization_config"] = quantization_config(dict.fromkeys(names, scheme), ["lm_head"])
    (tmp_path / "ct" / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "ct"), str(tmp_path / "out"), "--to", "qao"]) == 1
    assert "no library could load this in qao's layout" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["convert", str(tmp_path / "ct"), str(tmp_path / "out")]) == 0
    assert "vLLM may" in capsys.readouterr().err
    again = safetensors_torch.load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in again)


def test_code_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "float"
    model = save_ready(transformers.LlamaForCausalLM, transformers.LlamaConfig(**TEXT))
    model.save_pretrained(path)
    (path / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    (path / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (path / "config.json").write_text(json.dumps(config))
    arguments = ["quantize", str(path), str(tmp_path / "out"), "--scheme", "int8", "--to", "qao", "--quiet"]
    assert main(arguments) == 1
    assert "--trust-remote-code allows it to run" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main([*arguments, "--trust-remote-code"]) == 0
    assert (tmp_path / "out" / "modeling_own.py").exists()
    qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    checkpoint = qao.checkpoints.open_checkpoint(tmp_path / "out")
    for name, layer in checkpoint.layers.items():
        assert torch.equal(layer.pack()["qweight"], model.get_submodule(name).qweight), name
