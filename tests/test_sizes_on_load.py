"""Packed weights of another size are refused by every library that loads qao's own layout."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao.nn import marker

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
V5 = VERSION >= (5, 0)
CAN_IGNORE = VERSION >= (5, 18)  # 5.17 gives float layers the shape of the checkpoint's, with any quantizer

SIZES = {"hidden_size": 60, "intermediate_size": 124, "num_hidden_layers": 1, "vocab_size": 70}
HEADS = {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 12}
INT4 = qao.Int4WeightOnly(group_size=32)
SCHEMES = [INT4, qao.Int4WeightOnly(group_size=32, whole_zeros=True), qao.Fp4WeightOnly("nvfp4"), qao.Int8WeightOnly()]


def saved(path: Path, scheme: qao.Scheme, kind: str = "Llama", **more: Any) -> Any:
    """A model, and its directory."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **HEADS, **more})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    qao.quantize_(model, scheme, progress=False, embeddings=bool(more.get("tie_word_embeddings")))
    model.save_pretrained(path)
    return model


def edit(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(8)[None]).logits


AUTO = transformers.AutoModelForCausalLM.from_pretrained
LOADERS: dict[str, Callable[..., Any]] = {"transformers": AUTO, "qao": qao.from_pretrained}
CHANGES: list[tuple[dict[str, int], str]] = [
    ({"intermediate_size": 120}, r"mlp.gate_proj: a weight \[124, 60\] in the checkpoint, a weight \[120, 60\]"),
    ({"intermediate_size": 128}, r"mlp.down_proj: a weight \[60, 124\] in the checkpoint, a weight \[60, 128\]"),
    ({"vocab_size": 75}, r"lm_head: a weight \[70, 60\] in the checkpoint, a weight \[75, 60\]"),
    ({"head_dim": 10}, r"q_proj: a weight \[60, 60\] in the checkpoint, a weight \[50, 60\]"),
    ({"num_key_value_heads": 1}, r"k_proj: a weight \[60, 60\] in the checkpoint, a weight \[12, 60\]"),
]


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_changed_configuration(scheme: qao.Scheme, load: str, tmp_path: Path) -> None:
    model = saved(tmp_path, scheme)
    assert torch.equal(logits(LOADERS[load](tmp_path)), logits(model))
    original = (tmp_path / "config.json").read_text()
    for change, message in CHANGES:
        edit(tmp_path, **change)
        with pytest.raises(ValueError, match=rf"LlamaForCausalLM: (?s:.*){message}"):
            LOADERS[load](tmp_path)
        (tmp_path / "config.json").write_text(original)
        with pytest.raises(ValueError, match=message):
            LOADERS[load](tmp_path, **change)


@pytest.mark.parametrize("load", LOADERS)
def test_a_tied_embedding_of_another_size(load: str, tmp_path: Path) -> None:
    model = saved(tmp_path, INT4, tie_word_embeddings=True)
    assert torch.equal(logits(LOADERS[load](tmp_path)), logits(model))
    edit(tmp_path, vocab_size=75)
    with pytest.raises(ValueError, match=r"embed_tokens: a weight \[70, 60\] in the checkpoint, a weight \[75, 60\]"):
        LOADERS[load](tmp_path)
    if not V5:
        return
    with pytest.raises(ValueError, match="not supported where weights are tied"):
        LOADERS[load](tmp_path, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("load", LOADERS)
def test_experts_of_another_size(load: str, tmp_path: Path) -> None:
    model = saved(tmp_path, INT4, "Mixtral", num_local_experts=4, num_experts_per_tok=2)
    if not any(isinstance(module, qao.nn.QuantExperts) for module in model.modules()):
        pytest.skip("this version of transformers has no fused experts")
    assert torch.equal(logits(LOADERS[load](tmp_path)), logits(model))
    original = (tmp_path / "config.json").read_text()
    for change, message in (
        ({"intermediate_size": 128}, r"experts.up: a weight \[4, 248, 60\] in the checkpoint, a weight \[4, 256, 60\]"),
        ({"num_local_experts": 3}, r"experts.down: a weight \[4, 60, 124\] in the checkpoint, a weight \[3, 60, 124\]"),
    ):
        (tmp_path / "config.json").write_text(original)
        edit(tmp_path, **change)
        with pytest.raises(ValueError, match=message):
            LOADERS[load](tmp_path)
        if not CAN_IGNORE:
            continue
        with pytest.warns(UserWarning, match=r"experts\.down, .*experts\.up: new random numbers, which stay in float"):
            other = LOADERS[load](tmp_path, ignore_mismatched_sizes=True)
        assert not any(isinstance(module, qao.nn.QuantExperts) for module in other.modules())


@pytest.mark.skipif(not CAN_IGNORE, reason="this version of transformers")
@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_ignore_mismatched_sizes_makes_layers_anew_in_float(scheme: qao.Scheme, load: str, tmp_path: Path) -> None:
    model = saved(tmp_path, scheme)
    edit(tmp_path, intermediate_size=120)
    with pytest.warns(UserWarning, match=r"mlp\.down_proj, .*: new random numbers, which stay in float"):
        other = LOADERS[load](tmp_path, ignore_mismatched_sizes=True)
    mlp, kept = other.model.layers[0].mlp, other.model.layers[0].self_attn.q_proj
    assert [type(layer) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)] == [torch.nn.Linear] * 3
    assert mlp.gate_proj.weight.shape == (120, 60) and mlp.gate_proj.weight.requires_grad
    assert 0 < mlp.gate_proj.weight.abs().max() < 1 and torch.isfinite(logits(other)).all()
    assert torch.equal(kept.dequantize(), model.model.layers[0].self_attn.q_proj.dequantize())
    other.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(LOADERS[load](tmp_path / "again")), logits(other))


def test_a_changed_scheme_in_the_configuration(tmp_path: Path) -> None:
    saved(tmp_path, qao.Fp4WeightOnly("mxfp4"))
    content = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    content["layers"][0]["scheme"] = qao.Int8WeightOnly().to_dict()
    edit(tmp_path, quantization_config=content)
    with pytest.raises(ValueError, match="gate_proj: scheme='fp4' in the checkpoint, scheme='int8' in the model"):
        AUTO(tmp_path)


def test_a_state_dict_of_another_size(tmp_path: Path) -> None:
    """With markers, whatever the sizes; without, where padding shows it."""
    model = saved(tmp_path, INT4)
    state = model.state_dict()
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    same = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=dict(state))
    assert torch.equal(logits(same), logits(model))
    config.intermediate_size = 128
    with pytest.raises(ValueError, match=r"gate_proj: a weight \[124, 60\] in the checkpoint"):
        transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=dict(state))
    plain = {name: tensor for name, tensor in state.items() if not name.endswith((".weight", marker.MARKER))}
    plain |= {name: state[name] for name in state if state[name].is_floating_point()}
    with pytest.raises(ValueError, match=r"gate_proj\.qweight: .* smaller layer"):
        transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=plain)


def test_several_files(tmp_path: Path) -> None:
    model = saved(tmp_path / "whole", INT4)
    model.save_pretrained(tmp_path / "parts", max_shard_size="20kB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert torch.equal(logits(AUTO(tmp_path / "parts")), logits(model))
    edit(tmp_path / "parts", intermediate_size=120)
    with pytest.raises(ValueError, match="down_proj: a weight"):
        AUTO(tmp_path / "parts")


@pytest.mark.skipif(V5, reason="which makes the layers anew")
def test_version_4_makes_nothing_anew(tmp_path: Path) -> None:
    saved(tmp_path, INT4)
    edit(tmp_path, intermediate_size=120)
    with pytest.raises(ValueError, match="down_proj: a weight"):
        AUTO(tmp_path, ignore_mismatched_sizes=True)


def test_nothing_is_said_where_sizes_fit(tmp_path: Path) -> None:
    saved(tmp_path, INT4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AUTO(tmp_path, ignore_mismatched_sizes=True)


# ---- diffusers -------------------------------------------------------------------------------------------------------


def test_a_diffusers_model_of_another_size(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    kind = diffusers.PriorTransformer
    config = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "embedding_dim": 20}
    model = kind(**config, num_embeddings=7, additional_embeddings=4).eval()
    qao.quantize_(model, INT4, progress=False)
    model.save_pretrained(tmp_path)
    same = kind.from_pretrained(tmp_path)
    assert torch.equal(same.proj_in.dequantize(), model.proj_in.dequantize())
    edit(tmp_path, embedding_dim=24)
    with pytest.raises(ValueError, match=r"proj_in: a weight \[24, 20\] in the checkpoint, a weight \[24, 24\]"):
        kind.from_pretrained(tmp_path)
