"""Architectures of GGUF files: names of the package gguf, metadata of llama.cpp, logits of the float model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qao
import torch
from qao.checkpoints import CheckpointError, open_checkpoint
from qao.cli import main
from qao.nn import QuantEmbedding, QuantExperts
from torch import Tensor

gguf: Any = pytest.importorskip("gguf")
transformers: Any = pytest.importorskip("transformers")

from gguf_configs import ALIASES, GRANITE, HEADS, MODELS, NOT_WRITTEN, SIZES, VOCAB  # noqa: E402
from gguf_files import CHANGED, COMPUTED, float_model, mla_keys, rope_parameters, scores, write  # noqa: E402


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_architectures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    architecture, changes = MODELS[name]
    model: Any = float_model(name, changes)
    path = write(tmp_path / "model.gguf", model, architecture)
    ours = qao.from_pretrained(path, dequantize=True)
    assert type(ours) is type(model)
    ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, logits = model(ids).logits, ours(ids).logits
    assert expected.std() > 0.01
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()

    model.save_pretrained(tmp_path / "model")
    made = main(["convert", str(tmp_path / "model"), str(tmp_path / "ours.gguf"), "--quiet"])
    if architecture in NOT_WRITTEN:
        assert made == 1 and "are read, but not written" in capsys.readouterr().err
        return
    if "rotary_dim" in changes and "partial_rotary_factor" not in model.config.rope_parameters:
        # transformers 5.17 rotates whole heads of such a model, and llama.cpp a part.
        assert made == 1 and "cannot hold rope_parameters" in capsys.readouterr().err
        return
    assert made == 0
    if architecture in ALIASES:
        assert open_checkpoint(tmp_path / "ours.gguf").config["architectures"] == [type(model).__name__]
        return
    theirs, written = (gguf.GGUFReader(tmp_path / file) for file in ("model.gguf", "ours.gguf"))
    expected, tensors = ({one.name: one.data for one in reader.tensors} for reader in (theirs, written))
    assert expected.keys() == tensors.keys()
    assert all(np.array_equal(expected[name], tensors[name]) for name in expected)
    for key, field in theirs.fields.items():
        if key.startswith(f"{architecture}."):
            assert written.fields[key].contents() == pytest.approx(field.contents()), key


def test_a_model_that_transformers_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an older version would: a clear error, not its list of all models."""
    path = write(tmp_path / "model.gguf", float_model("llama", {}), "llama")
    monkeypatch.delitem(transformers.CONFIG_MAPPING._mapping, "llama")
    with pytest.raises(CheckpointError, match="model.gguf: transformers .* has no model of type 'llama': pip install"):
        qao.from_pretrained(path, dequantize=True)


def test_rotary_embeddings_that_transformers_4_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ignore them, and compute wrong numbers."""
    architecture, changes = MODELS["olmo3 thetas"]
    path = write(tmp_path / "model.gguf", float_model("olmo3 thetas", changes), architecture)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    with pytest.raises(CheckpointError, match="of several kinds, which transformers 4.57.6 does not have: pip install"):
        qao.from_pretrained(path, dequantize=True)


LONG = {"original_max_position_embeddings": 512, "max_position_embeddings": 512}
# What llama.cpp lacks or does differently: changes of config.json, or a reason to skip.
DIFFERENT: dict[str, dict[str, Any] | str] = {
    "olmoe": {"num_key_value_heads": HEADS},
    "dots1": {"num_key_value_heads": HEADS},
    "cohere": {"use_qk_norm": False},  # it reads these norms in files of 64 blocks only
    "exaone4": {"rope_scaling": None},
    "gpt_oss": "it rounds the bounds between which YaRN blends frequencies",
    "olmo3 thetas": "it has one base of rotary embeddings",
    # It chooses the factors by the size of the context, at least 256, not of the text.
    **{name: LONG for name in ("phi3 longrope", "granite minicpm4", "minicpm3")},
    **dict.fromkeys(("phimoe", "phimoe longrope"), "it weighs experts by softmax, not by sparsemixer"),
    "deepseek_v2 groups": "it scores groups by their two best experts, not by the best",
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp(name: str, tmp_path: Path) -> None:
    """The test's own files are those of llama.cpp."""
    llama_cpp: Any = pytest.importorskip("llama_cpp")
    architecture, changes = MODELS[name]
    different = DIFFERENT.get(name, {})
    if isinstance(different, str):
        pytest.skip(different)
    if "rope_scaling" in changes and "original_max_position_embeddings" in different:
        original = {"original_max_position_embeddings": different["original_max_position_embeddings"]}
        different = {**different, "rope_scaling": changes["rope_scaling"] | original}
    model: Any = float_model(name, changes | different)
    path = str(write(tmp_path / "model.gguf", model, architecture))
    rope = rope_parameters(model.config)
    betas = {f"yarn_beta_{name}": rope.get(f"beta_{name}", value) for name, value in (("fast", 32.0), ("slow", 1.0))}
    theirs = llama_cpp.Llama(path, n_ctx=64, logits_all=True, verbose=False, type_k=0, type_v=0, **betas)
    ids = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(1))
    theirs.eval(ids.tolist())
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    logits = torch.from_numpy(np.array(theirs.scores[: len(ids)]))
    assert (logits - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("name", ["gemma", "gemma3_text", "gemma4_text per layer"])
def test_blocks_of_scaled_embeddings(name: str, tmp_path: Path) -> None:
    """transformers fills the factor of Gemma's embeddings after it has created them, without one for others."""
    architecture, changes = MODELS[name]
    path = write(tmp_path / "model.gguf", float_model(name, changes), architecture, "Q8_0")
    floats, model = qao.from_pretrained(path, dequantize=True), qao.from_pretrained(path, dtype=torch.float32)
    for key in ("embed_tokens", "embed_tokens_per_layer"):
        if hasattr(model.model, key):
            embedding, expected = getattr(model.model, key), getattr(floats.model, key)
            assert isinstance(embedding, QuantEmbedding)
            assert torch.equal(embedding(torch.arange(VOCAB)), expected(torch.arange(VOCAB)))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name,layers",
    {"granitemoeshared": 4, "gemma4_text experts": 4, "deepseek_v3": 3, "lfm2_moe": 3, "minimax_m2": 4}.items(),
)
def test_blocks_of_experts(name: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However transformers names them, experts keep the file's blocks or are quantized with a scheme."""
    architecture, changes = MODELS[name]
    changes |= {"shared_intermediate_size": 64} if name == "granitemoeshared" else {}
    path = write(tmp_path / "model.gguf", float_model(name, changes), architecture, "Q8_0")
    monkeypatch.setattr("qao.integrations.huggingface.from_pretrained.kept_gguf_types", lambda device_map: ("Q8_0",))
    floats, model = qao.from_pretrained(path, dequantize=True), qao.from_pretrained(path, dtype=torch.float32)
    made = qao.from_pretrained(path, scheme=qao.Int8WeightOnly(), dtype=torch.float32)
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        expected, logits, rounded = (one(ids).logits for one in (floats, model, made))
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert 0 < (rounded - expected).norm() <= 0.2 * expected.norm()
    if transformers.__version__ < "5":  # it has a module for each expert
        return
    for one in (model, made):
        assert sum(isinstance(module, QuantExperts) for module in one.modules()) == layers


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_old_files_of_deepseek(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until 2025, heads were not split, and all keys were of whole heads."""

    def keys(config: Any) -> dict[str, Any]:
        made = mla_keys(config) | {"attention.head_count_kv": HEADS, "attention.key_length_mla": None}
        made |= {
            "attention.value_length_mla": None,
            "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        }
        return made | {"attention.value_length": config.v_head_dim}

    monkeypatch.delitem(CHANGED, "deepseek2")
    monkeypatch.setitem(COMPUTED, "deepseek2", keys)
    model: Any = float_model("deepseek_v3", MODELS["deepseek_v3"][1])
    path = write(tmp_path / "model.gguf", model, "deepseek2")
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        expected, logits = model(ids).logits, qao.from_pretrained(path, dequantize=True)(ids).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_blocks_that_predict_further_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers leaves out the last block of GLM-4.5."""
    _, changes = MODELS["glm4_moe"]
    layers = SIZES["num_hidden_layers"]

    def keys(config: Any) -> dict[str, Any]:
        return scores(config) | {"block_count": layers + 1, "nextn_predict_layers": 1}

    def twice(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
        again = name.replace(f"layers.{layers - 1}.", f"layers.{layers}.")
        added = {f"model.layers.{layers}.enorm.weight": tensor} if name == "model.norm.weight" else {}
        return {name: tensor, again: tensor, **added}

    model: Any = float_model("glm4_moe", changes)
    monkeypatch.setitem(COMPUTED, "glm4moe", keys)
    monkeypatch.setitem(CHANGED, "glm4moe", twice)
    path = write(tmp_path / "model.gguf", model, "glm4moe")
    assert f"blk.{layers}.nextn.enorm.weight" in {one.name for one in gguf.GGUFReader(path).tensors}
    read = qao.from_pretrained(path, dequantize=True)
    assert read.config.num_hidden_layers == layers
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        assert torch.equal(read(ids).logits, model(ids).logits)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_of_two_tensors(tmp_path: Path) -> None:
    """They keep their blocks if both are of one type."""
    model = float_model("qwen3_next", MODELS["qwen3_next"][1])
    path = write(tmp_path / "model.gguf", model, "qwen3next", "Q8_0", floats=["blk.1.attn_gate.weight"])
    floats, read = qao.from_pretrained(path, dequantize=True), open_checkpoint(path)
    names = [f"model.layers.{block}.linear_attn.in_proj_qkvz" for block in range(2)]
    assert names[0] in read.layers and names[1] not in read.layers
    layer = qao.QuantLinear.from_quantized(*read.layers[names[0]].read(), scheme=read.layers[names[0]].scheme)
    expected = floats.get_submodule(names[0]).weight
    assert (layer.dequantize(torch.float32) - expected).abs().max() <= 0.01 * expected.abs().max()
    assert torch.equal(read.tensor(f"{names[1]}.weight"), floats.get_submodule(names[1]).weight)
    assert torch.equal(qao.from_pretrained(path, dtype=torch.float32).lm_head.weight, floats.lm_head.weight)


def test_mistral_without_a_temperature(tmp_path: Path) -> None:
    """llama.cpp's "mistral3" is two models of transformers."""
    model: Any = float_model("llama", {})
    read = qao.from_pretrained(write(tmp_path / "model.gguf", model, "mistral3"), dequantize=True)
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        assert type(read) is type(model) and torch.equal(read(ids).logits, model(ids).logits)


def test_missing_halves(tmp_path: Path) -> None:
    """Of a tensor that is made from two."""
    model = float_model("deepseek_v3", MODELS["deepseek_v3"][1])
    for missing, left in (("attn_k_b", "attn_v_b"), ("attn_v_b", "attn_k_b")):
        path = write(tmp_path / "model.gguf", model, "deepseek2", left_out=f"blk.2.{missing}.weight")
        with pytest.raises(CheckpointError, match=rf"it has blk\.2\.{left}\.weight, but"):
            open_checkpoint(path)


def test_sliding_windows(tmp_path: Path) -> None:
    """llama.cpp writes 0 for none; a window that the model would ignore is refused."""
    model = float_model("phi3", {})
    model.config.sliding_window = 0
    assert "sliding_window" not in open_checkpoint(write(tmp_path / "phi.gguf", model, "phi3")).config
    model = float_model("granite", GRANITE)
    model.config.sliding_window = 8
    with pytest.raises(CheckpointError, match="granite with a sliding window is not supported"):
        open_checkpoint(write(tmp_path / "granite.gguf", model, "granite"))


def test_more_blocks_than_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged number is an error before lists of that length are made."""
    monkeypatch.setitem(COMPUTED, "afmoe", lambda config: COMPUTED["exaone-moe"](config) | {"block_count": 2**31 - 1})
    path = write(tmp_path / "model.gguf", float_model("afmoe", MODELS["afmoe"][1]), "afmoe")
    with pytest.raises(CheckpointError, match="says 2147483647 blocks, but has"):
        open_checkpoint(path)
