"""Models with other tensor names in files than in memory, saved quantized by ``save_pretrained`` and ``qao quantize``.

transformers 5 renames, joins and splits float weights by patterns when it loads and saves a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao.cli import main

transformers = pytest.importorskip("transformers", "5.0")
safetensors = pytest.importorskip("safetensors.torch")

IDS = torch.arange(3, 12)[None]
SIZES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "max_position_embeddings": 64}
DENSE = {**SIZES, "intermediate_size": 96}
EXPERTS = {**SIZES, "num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 32}

MODELS: dict[str, dict[str, Any]] = {
    # sconv.weight_proj.weight is sconv.weight_proj in files: sconv.weight_proj.qweight would not be found again
    "inkling2_text": {**EXPERTS, "unpadded_vocab_size": 100, "layer_types": ["hybrid_sliding", "hybrid"]},
    "exaone": DENSE,  # every layer has another name, in the form that compressed-tensors has
    "sarvam_moe": {**EXPERTS, "intermediate_size": 96, "n_group": 1, "topk_group": 1},  # q, k and v are joined
    # lm_head.weight is head.weight in files: head.qweight would not be found again
    "deepseek_v4": {**EXPERTS, "q_lora_rank": 32, "qk_rope_head_dim": 16, "index_n_heads": 2, "index_head_dim": 16}
    | {"o_groups": 2, "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"]},
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits  # type: ignore[no-any-return]


def names(path: Path) -> set[str]:
    return set(safetensors.load_file(path / "model.safetensors"))


@pytest.mark.parametrize("kind", MODELS)
def test_a_quantized_model_is_found_again_under_the_names_in_its_files(kind: str, tmp_path: Path) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    load = transformers.AutoModelForCausalLM.from_pretrained
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **MODELS[kind]))
    made.save_pretrained(tmp_path / "float")
    model = load(tmp_path / "float")
    floats = logits(model)
    for one in (made, model):  # never loaded, and with the conversions that loading noted
        qao.quantize_(one, qao.Int8WeightOnly())
        expected = logits(one)
        assert not torch.equal(expected, floats)
        one.save_pretrained(tmp_path / "saved")
        assert torch.equal(logits(load(tmp_path / "saved")), expected)
        qao.dequantize_(one).save_pretrained(tmp_path / "plain")
        assert names(tmp_path / "plain") == names(tmp_path / "float")
    assert main(["quantize", str(tmp_path / "float"), str(tmp_path / "written"), "--scheme", "int8"]) == 0
    assert torch.equal(logits(load(tmp_path / "written")), expected)


def test_the_configuration_says_that_a_model_is_quantized() -> None:
    """Mamba layers and flash attention of transformers read the attribute, which ``from_pretrained`` sets."""
    sizes = {**DENSE, "model_type": "llama"}
    vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlavaConfig(vision_config=vision | {"model_type": "clip_vision_model"}, text_config=sizes)
    model = transformers.LlavaForConditionalGeneration(config)
    parts = (model.config, model.model.language_model.config, model.model.vision_tower.config)
    qao.quantize_(model, qao.Int8WeightOnly())
    assert all(part._is_quantized for part in parts)
    qao.dequantize_(model)
    assert not any(hasattr(part, "_is_quantized") for part in parts)
