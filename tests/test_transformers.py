"""transformers: quantization while loading, in bounded memory; third-party checkpoints; reloading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import qao
import saving_support as support
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
AutoModelForCausalLM = transformers.AutoModelForCausalLM
every_scheme = pytest.mark.parametrize("kind", qao.schemes.SCHEMES.values(), ids=lambda kind: kind.word)


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("floats")
    support.llama(128).save_pretrained(path)
    return path


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(support.IDS.to(model.device)).logits


def load(path: Path, config: Any = None, **options: Any) -> Any:
    if config is not None:
        options["quantization_config"] = config
    return AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.bfloat16, **options})


# ---- quantize on load ------------------------------------------------------------------------------------------------


@every_scheme
@pytest.mark.parametrize("device_map", [None, "cpu", "auto"])
def test_on_load_is_what_quantize_does(kind: type[qao.Scheme], device_map: str | None, floats: Path) -> None:
    model = load(floats, qao.QaoConfig(kind()), device_map=device_map)
    expected = load(floats).to(model.device)  # a GPU quantizes with other roundings
    qao.quantize_(expected, kind())
    assert torch.equal(logits(model), logits(expected))
    names = {name for name, module in model.named_modules() if isinstance(module, qao.QuantLinear)}
    assert len(names) == 15
    assert not any(p.requires_grad for n, p in model.named_parameters() if n.rpartition(".")[0] in names)
    assert model.hf_quantizer.is_trainable and model.hf_quantizer.is_serializable()
    assert "QuantLinear(" in str(model)
    assert model.generate(support.IDS.to(model.device), max_new_tokens=2, do_sample=False).shape == (1, 11)


@pytest.mark.parametrize("device_map", ["mps", {"model": "cpu", "lm_head": "mps"}, {"model": "mps", "lm_head": "disk"}])
def test_devices_without_kernels_are_refused(device_map: Any, floats: Path, tmp_path: Path) -> None:
    """Before a weight moves there, so on every machine."""
    scheme = {"lm_head": qao.Int4WeightOnly(256)}  # which is written in the format of qao
    message = (
        'QaoConfig: lm_head would run on "mps", which has no kernels of Int4WeightOnly .int4 g256 asymmetric.*. '
        'Load with device_map="cpu" or device_map="cuda"'
    )
    if not (isinstance(device_map, dict) and "disk" in device_map.values()):
        with pytest.raises(ValueError, match=message):
            load(floats, qao.QaoConfig(scheme), device_map=device_map)
    load(floats, qao.QaoConfig(scheme)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, device_map=device_map)


def test_which_layers(floats: Path) -> None:
    mapping = {"lm_head": None, r"re:.*\.down_proj": qao.Int8WeightOnly(), "re:.*": qao.Int4WeightOnly(32)}
    config = qao.QaoConfig(mapping, modules_to_not_convert=["layers.1", "self_attn.q_proj"])
    model = load(floats, config)
    found = {n: m.scheme.word for n, m in model.named_modules() if isinstance(m, qao.QuantLinear)}
    layer = "model.layers.0."
    expected = dict.fromkeys((f"{layer}self_attn.{one}_proj" for one in "kvo"), "int4")
    expected |= {f"{layer}mlp.gate_proj": "int4", f"{layer}mlp.up_proj": "int4", f"{layer}mlp.down_proj": "int8"}
    assert found == expected
    with pytest.raises(ValueError, match="no module of the model matches 'lm_heat'"):
        load(floats, qao.QaoConfig(qao.Int8WeightOnly(), modules_to_not_convert=["lm_heat"]))
    with pytest.raises(ValueError, match="say how to quantize it"):
        load(floats, qao.QaoConfig())


def test_embeddings_are_tied_again(tmp_path: Path) -> None:
    config = support.llama(128).config
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "f")
    model = load(tmp_path / "f", qao.QaoConfig(qao.Int8WeightOnly(), embeddings=True))
    assert isinstance(model.get_input_embeddings(), qao.nn.QuantEmbedding)
    model.save_pretrained(tmp_path / "q")
    for other in (load(tmp_path / "q", dtype="auto"), qao.from_pretrained(tmp_path / "q")):
        assert torch.equal(logits(other), logits(model))
        assert other.lm_head.qweight is other.model.embed_tokens.qweight
        assert other.model.norm.weight.dtype == torch.bfloat16


@every_scheme
def test_dtypes_of_scales_outlive_a_cast(kind: type[qao.Scheme], floats: Path, tmp_path: Path) -> None:
    model = load(floats)
    qao.quantize_(model, {"lm_head": qao.Int4WeightOnly(32), "re:.*": kind()})
    model.hf_quantizer.quantization_config = model.config.quantization_config
    model.save_pretrained(tmp_path)
    wide = qao.from_pretrained(tmp_path, dtype=torch.float32)
    assert wide.model.norm.weight.dtype == wide.lm_head.dtype == torch.float32
    assert wide.lm_head.scales.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        if name.endswith((".qweight", ".scales")):
            other = wide.get_parameter(name)
            assert other.dtype == parameter.dtype and torch.equal(other, parameter)
    assert torch.allclose(logits(wide), logits(model).float(), atol=0.1 * float(logits(model).abs().max()))


def test_without_and_with_a_head(floats: Path, tmp_path: Path) -> None:
    for scheme, method in ((qao.Int8WeightOnly(), "compressed-tensors"), (qao.Int4WeightOnly(256), "qao")):
        path = tmp_path / method
        model = load(floats, qao.QaoConfig(scheme))
        model.save_pretrained(path)
        assert json.loads((path / "config.json").read_text())["quantization_config"]["quant_method"] == method
        base = qao.from_pretrained(path, auto_class="AutoModel")
        hidden = base(support.IDS).last_hidden_state
        assert torch.equal(hidden, model.model(support.IDS).last_hidden_state)
        if method == "qao":
            bare = transformers.AutoModel.from_pretrained(path, dtype=torch.bfloat16)
            assert torch.equal(bare(support.IDS).last_hidden_state, hidden)


def test_a_part_that_was_quantized_is_an_error_on_plain_reload(floats: Path, tmp_path: Path) -> None:
    model = load(floats)
    qao.quantize_(model.model.layers[0].mlp, qao.Int4WeightOnly())
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        load(tmp_path)
    assert torch.equal(logits(qao.from_pretrained(tmp_path)), logits(model))


def test_shards_and_a_second_save_in_place(floats: Path, tmp_path: Path) -> None:
    model = load(floats, qao.QaoConfig(qao.Int4WeightOnly(256)))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for reload in (load, qao.from_pretrained, qao.load):
        assert torch.equal(logits(reload(tmp_path)), logits(model))


@pytest.mark.parametrize("name", ["GPT2", "CLIPVision", "Bert"])
def test_other_architectures(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    if name == "GPT2":  # Conv1D, tied
        config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=128, n_positions=32)
        kind: Any = transformers.GPT2LMHeadModel
    elif name == "CLIPVision":  # its initialization reaches for weights of children
        sizes = {"hidden_size": 64, "intermediate_size": 128, "image_size": 32, "patch_size": 16}
        config = transformers.CLIPVisionConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)
        kind = transformers.CLIPVisionModel
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
        config = transformers.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)
        kind = transformers.BertForMaskedLM
    x = torch.ones(1, 3, 32, 32) if name == "CLIPVision" else support.IDS
    kind(config).save_pretrained(tmp_path / "f")
    expected = kind.from_pretrained(tmp_path / "f")
    qao.quantize_(expected, qao.Int8WeightOnly())
    y = expected(x)[0]
    model = kind.from_pretrained(tmp_path / "f", quantization_config=qao.QaoConfig(qao.Int8WeightOnly()))
    assert torch.equal(model(x)[0], y)
    model.save_pretrained(tmp_path / "q")
    method = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["quant_method"]
    assert method == ("qao" if name == "GPT2" else "compressed-tensors")
    again = qao.from_pretrained(tmp_path / "q")
    assert type(again) is kind and torch.equal(again(x)[0], y)


def test_modules_that_files_name_otherwise(tmp_path: Path) -> None:
    """transformers 5.23 calls DINOv2's projections attention.q_proj, and attention.attention.query in files."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "mlp_ratio": 2, "image_size": 32, "patch_size": 16}
    config = transformers.Dinov2WithRegistersConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)
    kind = transformers.Dinov2WithRegistersModel
    model = kind(config).eval()
    qao.quantize_(model, qao.Int8WeightOnly())
    model.save_pretrained(tmp_path)
    again = qao.from_pretrained(tmp_path)
    x = torch.ones(1, 3, 32, 32)
    assert torch.equal(again(x)[0], model(x)[0])
    count = sum(isinstance(module, qao.QuantLinear) for module in again.modules())
    assert count == sum(isinstance(module, qao.QuantLinear) for module in model.modules()) == 6


@pytest.mark.skipif(not hasattr(transformers, "Molmo2TextModel"), reason="this transformers has no Molmo2")
@pytest.mark.parametrize("scheme", [qao.Int8WeightOnly(), qao.Int4WeightOnly(256)], ids=["compressed-tensors", "qao"])
def test_modules_that_files_join(scheme: qao.Scheme, tmp_path: Path) -> None:
    """transformers 5.23 writes Molmo2's q_proj, k_proj and v_proj as one att_proj; quantized ones stay three."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 160, "additional_vocab_size": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    kind = transformers.Molmo2TextModel
    config = transformers.Molmo2TextConfig(**sizes, **heads, num_hidden_layers=2, max_position_embeddings=32)
    model = kind(config).eval()
    model.save_pretrained(tmp_path / "f")
    which = {r"re:layers\.0\..*": scheme}
    qao.quantize_(model, which)
    expected = model(support.IDS)[0]
    loaded = kind.from_pretrained(tmp_path / "f", quantization_config=qao.QaoConfig(which))
    assert torch.equal(loaded(support.IDS)[0], expected)
    model.save_pretrained(tmp_path)
    again = qao.from_pretrained(tmp_path)
    assert torch.equal(again(support.IDS)[0], expected)
    again.save_pretrained(tmp_path)  # the conversions that loading noted
    assert torch.equal(qao.from_pretrained(tmp_path)(support.IDS)[0], expected)
    if isinstance(scheme, qao.Int4WeightOnly):  # a short group: qao's own format, which transformers reads itself
        assert torch.equal(kind.from_pretrained(tmp_path)(support.IDS)[0], expected)


def test_models_made_in_the_dtype_of_their_configuration(tmp_path: Path) -> None:
    """Apertus makes tensors of ``config.dtype`` itself, which must be a dtype by then, not its name."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 160, "num_hidden_layers": 1}
    config = transformers.ApertusConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.ApertusForCausalLM(config).eval()
    qao.quantize_(model, qao.Int4WeightOnly(256))  # in qao's own format
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(qao.from_pretrained(tmp_path)), logits(model))


@pytest.mark.skipif(not hasattr(transformers, "NeoMMEConfig"), reason="this version of transformers has no NeoMME")
@pytest.mark.parametrize(
    "scheme", [qao.Int8WeightOnly(), qao.Int8DynamicActivationInt8Weight(symmetric_activations=False)], ids=str
)
def test_linear_layers_of_one_weight(scheme: qao.Scheme, tmp_path: Path) -> None:
    """NeoMME ties two linear layers: their weight is written once and shared after loading."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 160, "embedding_rank": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    kind = transformers.NeoMMEForMaskedLM
    model = kind(transformers.NeoMMEConfig(**sizes, **heads, num_hidden_layers=1)).eval()
    torch.nn.init.normal_(model.model.layers[0].mlp.down_proj.weight)  # it begins with 0
    qao.quantize_(model, scheme)
    expected = model(support.IDS)[0]
    model.save_pretrained(tmp_path)
    for again in (qao.from_pretrained(tmp_path), kind.from_pretrained(tmp_path)):
        assert torch.equal(again(support.IDS)[0], expected)
        tied, other = again.unembedding_projection, again.model.embed_tokens.embedding_projection
        assert isinstance(tied, qao.QuantLinear)
        names = [name for name, tensor in tied.packed.tensors().items() if tensor is not None]
        assert all(getattr(tied, name) is getattr(other, name) for name in names)
    qao.dequantize_(model)
    assert torch.equal(model.unembedding_projection.weight, model.model.embed_tokens.embedding_projection.weight)
    model.tie_weights()
    assert model.unembedding_projection.weight is model.model.embed_tokens.embedding_projection.weight


def test_a_configuration_of_several_texts(tmp_path: Path) -> None:
    """MusicGen has a text encoder and a decoder: transformers finds no single text configuration."""
    torch.manual_seed(0)
    text = transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    audio = transformers.EncodecConfig(
        hidden_size=16, num_filters=2, codebook_size=16, codebook_dim=16, upsampling_ratios=[2]
    )
    sizes = {"vocab_size": 64, "hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    decoder = transformers.MusicgenDecoderConfig(**sizes)
    parts = {"text_encoder": text.to_dict(), "audio_encoder": audio.to_dict(), "decoder": decoder.to_dict()}
    model = transformers.MusicgenForConditionalGeneration(transformers.MusicgenConfig(**parts)).eval()
    qao.quantize_(model, qao.Int8WeightOnly())
    model.save_pretrained(tmp_path)
    again = qao.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_ties_that_a_model_computes() -> None:
    """DEIMv2 defines ``_tied_weights_keys`` as a read-only property."""

    class Detector(torch.nn.Sequential):
        @property
        def _tied_weights_keys(self) -> dict[str, str]:
            return {"1.weight": "0.weight", r"head.(?!0)\d+": "head.0"}

    model = Detector(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    model.all_tied_weights_keys = {"1.weight": "0.weight"}
    qao.quantize_(model, qao.Int8WeightOnly())
    assert model[1].qweight is model[0].qweight
    assert model.all_tied_weights_keys == {"1.qweight": "0.qweight", "1.scales": "0.scales"}
    qao.dequantize_(model)
    assert model.all_tied_weights_keys == {"1.weight": "0.weight"}


def test_a_model_without_linear_layers_is_saved_as_it_is(tmp_path: Path) -> None:
    sizes = {"embedding_size": 16, "hidden_sizes": [16] * 4, "depths": [1] * 4, "groups_width": 8}
    kind = transformers.RegNetModel
    kind(transformers.RegNetConfig(**sizes)).save_pretrained(tmp_path / "f")
    with pytest.warns(UserWarning, match="no layer was quantized"):
        model = kind.from_pretrained(tmp_path / "f", quantization_config=qao.QaoConfig(qao.Int8WeightOnly()))
    model.save_pretrained(tmp_path / "q")
    assert "quantization_config" not in json.loads((tmp_path / "q" / "config.json").read_text())
    x = torch.ones(1, 3, 32, 32)
    assert torch.equal(kind.from_pretrained(tmp_path / "q")(x)[0], model(x)[0])


# ---- QaoConfig -------------------------------------------------------------------------------------------------------


@every_scheme
def test_config_as_data(kind: type[qao.Scheme]) -> None:
    for config in (
        qao.QaoConfig(kind(), modules_to_not_convert=["lm_head"], embeddings=True),
        qao.QaoConfig({"b": None, "a": kind(), "re:.*": qao.Int8WeightOnly()}),
        qao.QaoConfig(layers={"a.b": kind(), "c": qao.Int8WeightOnly()}, dtype=torch.float16),
    ):
        again = qao.QaoConfig.from_dict(json.loads(json.dumps(config.to_dict(), sort_keys=True)))
        assert again == config and repr(again) == repr(config)
        if isinstance(config.scheme, dict):
            assert list(again.scheme) == list(config.scheme)  # the first match wins


@pytest.mark.parametrize(
    "change,message",
    [
        ({"version": 2}, "newer qao .*pip install -U qao"),
        ({"version": None}, "not one that qao wrote"),
        ({"scheme": {"scheme": "int3"}}, "int3"),
        ({"layers": [{"modules": ["a"]}]}, "not one that qao wrote"),
        ({"layers": 3}, "not one that qao wrote"),
        ({"dtype": "load"}, "not one that qao wrote"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list"),
    ],
)
def test_what_is_no_config(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qao.QaoConfig.from_dict(qao.QaoConfig(qao.Int8WeightOnly()).to_dict() | change)
    with pytest.raises(TypeError, match="scheme must be a scheme"):
        qao.QaoConfig(qao.Int8WeightOnly)  # type: ignore[arg-type]


# ---- qao.from_pretrained ---------------------------------------------------------------------------------------------


def rewritten(source: Path, target: Path, change: Any) -> Path:
    """A copy of a checkpoint with ``change`` applied to its tensors."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


@pytest.fixture(scope="module")
def native(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("native")
    load(floats, qao.QaoConfig(qao.Int4WeightOnly(256))).save_pretrained(path)
    return path


def test_what_from_pretrained_refuses(floats: Path, native: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not quantized. Pass a scheme"):
        qao.from_pretrained(floats)
    with pytest.raises(ValueError, match=r"is already quantized \(qao\)"):
        qao.from_pretrained(native, scheme=qao.Int8WeightOnly())
    with pytest.raises(ValueError, match="device or device_map"):
        qao.from_pretrained(native, device="cpu", device_map="auto")
    norm = "model.norm.weight"
    missing = rewritten(native, tmp_path / "missing", lambda tensors: tensors.pop(norm))
    with pytest.raises(ValueError, match=f"missing: {norm}"):
        qao.from_pretrained(missing)
    extra = rewritten(native, tmp_path / "extra", lambda tensors: tensors.update({"more": torch.ones(2)}))
    with pytest.raises(ValueError, match="unexpected: more"):
        qao.from_pretrained(extra)
    other = rewritten(native, tmp_path / "other", lambda tensors: tensors.update({norm: torch.ones(3)}))
    with pytest.raises((ValueError, RuntimeError), match="mismatch"):
        qao.from_pretrained(other)
    with pytest.raises(ValueError, match="no such file or directory"):
        qao.from_pretrained(tmp_path / "nowhere")


def test_experts_that_the_model_holds_in_one_tensor(native: Path, tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        old, new = "model.layers.0.mlp.up_proj.", "model.layers.0.mlp.experts.0.up_proj."
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    path = rewritten(native, tmp_path / "x", rename)
    config = path / "config.json"
    config.write_text(config.read_text().replace("layers.0.mlp.up_proj", "layers.0.mlp.experts.0.up_proj"))
    with pytest.raises(ValueError, match="experts.0.up_proj: .* experts quantized one by one"):
        qao.from_pretrained(path)


def test_of_gptq(floats: Path, tmp_path: Path) -> None:
    """Every layer in the layout of GPTQ: qweight along K, zero points minus one, scales in float16."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(floats / "model.safetensors")
    shifts = 4 * torch.arange(8, dtype=torch.int32)
    model = load(floats, dtype=torch.float16)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        layer, weight = name.removesuffix(".weight"), tensors.pop(name).float()
        n, k = weight.shape
        groups = weight.view(n, -1, 32)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(1, 15)
        q = (groups / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, 15)
        plain = q.view(n, k).to(torch.int32)
        tensors[f"{layer}.qweight"] = (plain.t().reshape(k // 8, 8, n) << shifts.view(1, 8, 1)).sum(
            1, dtype=torch.int32
        )
        stored = (zeros.t().to(torch.int32) - 1).reshape(-1, n // 8, 8)
        tensors[f"{layer}.qzeros"] = (stored << shifts).sum(-1, dtype=torch.int32)
        tensors[f"{layer}.scales"] = scales.t().contiguous()
        tensors[f"{layer}.g_idx"] = (torch.arange(k) // 32).to(torch.int32)
        restored = ((q - zeros.unsqueeze(-1)) * scales.float().unsqueeze(-1)).view(n, k)
        model.get_parameter(name).data = restored.half()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = json.loads((floats / "config.json").read_text())
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": gptq}))
    found = qao.from_pretrained(tmp_path, dtype=torch.float16)
    assert sum(isinstance(module, qao.QuantLinear) for module in found.modules()) == 14
    # The reference rounds each restored weight to float16.
    y, expected = logits(found).float(), logits(model).float()
    assert (y - expected).abs().max() < 2**-7 * expected.abs().max()
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(qao.from_pretrained(tmp_path / "again")), logits(found))


# ---- processes of their own ------------------------------------------------------------------------------------------

_LIGHT = """
import sys, qao
assert not {"transformers", "diffusers", "safetensors", "peft"} & set(sys.modules), sorted(sys.modules)
"""
_QAO_FIRST = """
import sys, qao
from transformers import AutoModel
AutoModel.from_pretrained(sys.argv[1])
"""
_QAO_LAST = """
import sys
from transformers import AutoModel
import transformers.modeling_utils
import qao
AutoModel.from_pretrained(sys.argv[1])
"""
_MEMORY = """
import sys, threading, time, torch, qao
from transformers import AutoModelForCausalLM, LlamaConfig
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024
tiny = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
model = AutoModelForCausalLM.from_config(tiny)
qao.quantize_(model, qao.Int8WeightOnly())
before, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
config = qao.QaoConfig(qao.Int8WeightOnly(clip_search=False))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=config, dtype=torch.bfloat16)
done = True
thread.join()
print("RESULT", peak - before, sum(p.numel() * p.element_size() for p in model.parameters()))
"""


def process(code: str, *arguments: object) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_import_is_light() -> None:
    process(_LIGHT)


@pytest.mark.parametrize("code", [_QAO_FIRST, _QAO_LAST], ids=["qao first", "qao last"])
def test_whichever_is_imported_first(code: str, native: Path) -> None:
    process(code, native)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A model of 200 MB: private host memory (files are mapped) holds at most the result and two layers."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 1000}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=6, num_attention_heads=8)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    size = sum(p.numel() * 2 for p in model.parameters())
    layer = sum(p.numel() * 2 for p in model.model.layers[0].parameters())
    assert size > 200e6
    model.save_pretrained(tmp_path)
    del model
    peak, result = map(int, process(_MEMORY, tmp_path).split("RESULT")[1].split())
    assert 0.5 * size < result < 0.55 * size
    assert peak < result + 2 * layer, f"{peak / 1e6:.0f} MB for a result of {result / 1e6:.0f} MB"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize(
    "options", [{"new_num_tokens": 130}, {"new_num_tokens": 100}, {"pad_to_multiple_of": 50}], ids=str
)
@pytest.mark.parametrize("mean", [True, False])
def test_resizing_tokens_is_done_whole_or_not_at_all(
    tied: bool, embeddings: bool, options: dict[str, int], mean: bool
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=128, num_key_value_heads=4, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config)
    qao.quantize_(model, qao.Int8WeightOnly(), embeddings=embeddings, progress=False)
    ids = torch.tensor([[1, 2, 99]])
    before, logits = {name: t.clone() for name, t in model.state_dict().items()}, model(ids).logits
    size = options.get("new_num_tokens", 150)
    if isinstance(model.lm_head, torch.nn.Linear):
        model.resize_token_embeddings(**options, mean_resizing=mean)
        assert model.config.vocab_size == size and model.lm_head.weight.shape == (size, 64)
        torch.testing.assert_close(model(ids).logits[..., :100], logits[..., :100])
        return
    with pytest.raises(ValueError, match=rf"resize_token_embeddings\({size}\).*quantized.*The model is unchanged"):
        model.resize_token_embeddings(**options, mean_resizing=mean)
    assert model.config.vocab_size == 128 and model.vocab_size == 128
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(model(ids).logits, logits)
    model.resize_token_embeddings(128)
    model.resize_token_embeddings(pad_to_multiple_of=64)
    assert torch.equal(model(ids).logits, logits)
