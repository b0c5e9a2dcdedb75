"""Every causal language model of transformers, tiny: the decoding loop of ``generate()`` gives transformers' tokens.

As in test_decoding_loop.py, steps are not compiled. What transformers itself cannot run with a static cache is skipped,
and so are models of sizes for which ``SIZES`` has no name.
"""

from __future__ import annotations

from typing import Any

import pytest
import qao
import torch
from test_compiled_generate import compiled, generate, random_model  # noqa: F401  # a fixture
from test_decoding_loop import STATIC, of_transformers

transformers = pytest.importorskip("transformers")
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS  # noqa: E402

pytestmark = [
    pytest.mark.extended,
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:quantize_. these big weights stay as they are"),
]

# Sizes by the names that configurations give them.
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "head_dim"), 16),
    "num_key_value_heads": 2,
    "qk_rope_head_dim": 8,
}
ALWAYS = {"vocab_size": 96, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
MOST_PARAMETERS = 30_000_000


def config_of(name: str) -> Any:
    kind = type(transformers.AutoConfig.for_model(name))
    if getattr(kind, "sub_configs", None):
        pytest.skip("made of several models")
    default = kind()
    names = {*default.to_dict(), *getattr(kind, "attribute_map", {})}
    given = {key: size for key, size in SIZES.items() if key in names} | ALWAYS
    if "kv_lora_rank" in names:  # multi-head latent attention: head_dim is that of the rotary embedding
        given |= {"num_key_value_heads": 4, **({"head_dim": 8} if "head_dim" in names else {})}
    if getattr(default, "sliding_window", None):
        given["sliding_window"] = 6
    return kind(**given)


def tiny(name: str) -> Any:
    """A float model with random weights."""
    try:
        config = config_of(name)
        with torch.device("meta"):
            size = sum(of.numel() for of in transformers.AutoModelForCausalLM.from_config(config).parameters())
    except Exception as error:  # sizes that do not fit together, or another package is missing
        pytest.skip(f"no such model of these sizes: {type(error).__name__}: {error}")
    if size > MOST_PARAMETERS:
        pytest.skip(f"{size:,} parameters")
    return random_model(config)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_transformers(name: str, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    model = tiny(name)
    qao.quantize_(model, qao.Int8WeightOnly(), progress=False)
    for options in ({"max_new_tokens": 12}, {"batch": 3, "max_new_tokens": 12}):
        try:
            expected = of_transformers(monkeypatch, model, **options)
        except Exception as error:
            with pytest.raises((RuntimeError, ValueError, LookupError)):  # without qao, too
                of_transformers(monkeypatch, tiny(name), **options)
            pytest.skip(f"transformers with a static cache: {type(error).__name__}: {error}")
        assert generate(model, **STATIC, **options).tolist() == expected.tolist(), options
