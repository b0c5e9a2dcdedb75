"""``qao convert --to gguf``: codes, scales and tokenizer read back equal, by qao, by transformers and by llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qao
import torch
from qao.checkpoints import load_tokenizer, open_checkpoint
from qao.checkpoints.gguf.read import GgufCheckpoint
from qao.cli import main

gguf: Any = pytest.importorskip("gguf")
transformers: Any = pytest.importorskip("transformers")
tokenizers: Any = pytest.importorskip("tokenizers")

VOCAB = 320
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Q4 = {"scale_dtype": torch.float16, "clip_search": False}


def tokenizer(**options: Any) -> Any:
    """Byte-level BPE with four merges and two special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "he", "ll", "hell", "42"])}
    model = tokenizers.models.BPE(vocab, [("h", "e"), ("l", "l"), ("he", "ll"), ("4", "2")])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = options.get("split", tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.decoder = tokenizers.decoders.ByteLevel()
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    whole.chat_template = "{{ messages[0].content }}"
    return whole


def saved(path: Path, scheme: Any = None, architecture: str = "llama", **changes: Any) -> Any:
    """A model in a directory with its tokenizer, quantized if there is a scheme."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1, "vocab_size": VOCAB}
    ids = {"bos_token_id": 260, "eos_token_id": 261, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(architecture, **sizes | ids | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tied = bool(config.tie_word_embeddings)
    if scheme is not None:
        qao.quantize_(model, scheme, embeddings=tied, progress=False)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return model


@pytest.mark.parametrize(
    "scheme,kind",
    [
        (qao.Int4WeightOnly(32, symmetric=True, **Q4), "Q4_0"),
        (qao.Int4WeightOnly(64, symmetric=True, **Q4), "Q4_0"),
        (qao.Int8DynamicActivationInt4Weight(32, symmetric=True, **Q4), "Q4_0"),
        (qao.Int4WeightOnly(32, **Q4), "Q4_1"),
        (qao.Int4WeightOnly(-1, whole_zeros=True, **Q4), "Q4_1"),
        (qao.Int8WeightOnly(), "Q8_0"),
    ],
    ids=str,
)
def test_quantized_layers(scheme: Any, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of the file are those of the layers; float16 rounds minima and the scales of int8."""
    model = saved(tmp_path / "model", scheme, tie_word_embeddings=False)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "model.gguf"), "--json", "--quiet"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["types"] == {kind: 15, "F32": 6}
    exact = kind == "Q4_0"
    assert any("rounded to float16" in note for note in report["notes"]) != exact
    read = GgufCheckpoint(tmp_path / "model.gguf", dequantize=True)
    named = {f"{name}.weight": one for name, one in model.named_modules() if isinstance(one, qao.QuantLinear)}
    for name, layer in named.items():
        weight = layer.dequantize(torch.float32)
        found = read.layers.get(name.removesuffix(".weight"))
        held = (
            read.tensor(name) if found is None else qao.QuantLinear.from_quantized(*found.read(), scheme=found.scheme)
        )
        plain = held if isinstance(held, torch.Tensor) else held.dequantize(torch.float32)
        assert (plain - weight).abs().max() <= (0.0 if exact else 2.0**-10) * weight.abs().max()
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        logits = qao.from_pretrained(tmp_path / "model.gguf", dequantize=True)(ids).logits
    assert (logits - expected).norm() <= (0.1 if scheme.activations == "int8" else 5e-3) * expected.norm()


EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True, "head_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_key_value_heads": 4},
}
EXPERT_SCHEMES = [
    (qao.Int4WeightOnly(32, symmetric=True, **Q4), "Q4_0"),
    (qao.Int4WeightOnly(32, **Q4), "Q4_1"),
    (qao.Int8WeightOnly(), "Q8_0"),
]


@pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 has a module for each expert")
@pytest.mark.parametrize("architecture", EXPERTS)
@pytest.mark.parametrize("scheme,kind", EXPERT_SCHEMES, ids=str)
def test_quantized_experts(architecture: str, scheme: Any, kind: str, tmp_path: Path) -> None:
    """Gate and up are two tensors of the file and one of the model."""
    model = saved(tmp_path / "model", scheme, architecture, **EXPERTS[architecture], num_experts_per_tok=2)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "model.gguf"), "--quiet"]) == 0
    tensors = {one.name: one for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    experts = [one.tensor_type.name for name, one in tensors.items() if "_exps" in name]
    assert experts == [kind] * 6
    ids = torch.arange(40)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
        logits = qao.from_pretrained(tmp_path / "model.gguf", dequantize=True)(ids[None]).logits[0]
    assert (logits - expected).norm() <= 5e-3 * expected.norm()
    assert main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "again.gguf"), "--quiet"]) == 0
    again = {one.name: one for one in gguf.GGUFReader(tmp_path / "again.gguf").tensors}
    assert tensors.keys() == again.keys()
    assert all(np.array_equal(one.data, again[name].data) for name, one in tensors.items())


@pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 has a module for each expert")
@pytest.mark.parametrize("architecture", EXPERTS)
@pytest.mark.parametrize("scheme,kind", EXPERT_SCHEMES, ids=str)
def test_llama_cpp_with_quantized_experts(architecture: str, scheme: Any, kind: str, tmp_path: Path) -> None:
    llama_cpp: Any = pytest.importorskip("llama_cpp")
    model = saved(tmp_path / "model", scheme, architecture, **EXPERTS[architecture], num_experts_per_tok=2)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "model.gguf"), "--quiet"]) == 0
    ids = torch.arange(40)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, logits_all=True, verbose=False)
    theirs.eval(ids.tolist())
    logits = torch.from_numpy(np.array(theirs.scores[: len(ids)]))
    # llama.cpp rounds activations to eight bits, and so chooses other experts for some tokens.
    assert ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median() <= 0.05


def test_tied_embeddings(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", qao.Int8WeightOnly(), "qwen2", tie_word_embeddings=True)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "model.gguf"), "--quiet"]) == 0
    tensors = {one.name: one for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert "output.weight" not in tensors and tensors["token_embd.weight"].tensor_type.name == "Q8_0"
    rows = torch.from_numpy(gguf.dequantize(tensors["token_embd.weight"].data, gguf.GGMLQuantizationType.Q8_0).copy())
    weight = model.lm_head.dequantize(torch.float32)
    assert (rows - weight).abs().max() <= 2.0**-10 * weight.abs().max()


def test_from_a_gguf_file(tmp_path: Path) -> None:
    """Q4_1's minima become zero points and minima again."""
    saved(tmp_path / "model", qao.Int4WeightOnly(32, **Q4))
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "one.gguf"), "--quiet"]) == 0
    assert main(["convert", str(tmp_path / "one.gguf"), str(tmp_path / "two.gguf"), "--quiet"]) == 0
    one, two = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("one", "two"))
    assert [tensor.name for tensor in one.tensors] == [tensor.name for tensor in two.tensors]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(one.tensors, two.tensors, strict=True))
    tokens = "tokenizer.ggml.tokens"
    assert one.fields[tokens].contents() == two.fields[tokens].contents()


@pytest.mark.parametrize("scheme", [None, qao.Int4WeightOnly(32, symmetric=True, **Q4), qao.Int8WeightOnly()], ids=str)
def test_the_command_line_runs_files(scheme: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(tmp_path / "model", scheme)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "model.gguf"), "--quiet"]) == 0
    capsys.readouterr()
    options = ["--max-new-tokens", "4", "--temperature", "0", "--dtype", "float32", "--device", "cpu"]
    assert main(["generate", str(tmp_path / "model.gguf"), "hello", *options, "--quiet", "--json"]) == 0
    ids = tokenizer()("hello", return_tensors="pt")["input_ids"]
    read = load_tokenizer(tmp_path / "model.gguf")
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert json.loads(capsys.readouterr().out)["text"] == read.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("split", ["gpt-2", "smollm", "qwen2", "unknown"])
def test_the_tokenizer(split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pre = tokenizers.pre_tokenizers
    bytewise = pre.ByteLevel(add_prefix_space=False)
    steps = [bytewise]
    if split == "smollm":
        steps = [pre.Digits(individual_digits=True), bytewise]
    elif split != "gpt-2":
        regex = tokenizers.Regex(QWEN2 if split == "qwen2" else r"\w+")
        steps = [pre.Split(regex, "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    saved(tmp_path / "model")
    own = tokenizer(split=pre.Sequence(steps))
    own.save_pretrained(tmp_path / "model")
    made = main(["convert", str(tmp_path / "model"), str(tmp_path / "model.gguf"), "--quiet"])
    if split == "unknown":
        assert made == 1 and "convert_hf_to_gguf.py" in capsys.readouterr().err
        assert not list(tmp_path.glob("model.gguf*"))
        return
    assert made == 0
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == split
    assert len(fields["tokenizer.ggml.tokens"].contents()) == VOCAB
    read = load_tokenizer(tmp_path / "model.gguf")
    text = "hello he's\n\nhell 42</s>"
    assert read(text)["input_ids"] == own(text)["input_ids"]
    assert (read.bos_token, read.eos_token, read.chat_template) == (own.bos_token, own.eos_token, own.chat_template)


def test_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """Scores of the file join the same pairs as the merges."""
    saved(tmp_path / "model")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581helo", "he", "ll", "hell"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("l", "l"), ("h", "e"), ("he", "ll")]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True
    )
    own.save_pretrained(tmp_path / "model")
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "model.gguf"), "--quiet"]) == 0
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    found = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("model", "scores", "token_type")}
    assert found["model"] == "llama"
    score = dict(zip(tokens, found["scores"], strict=False))
    assert score["ll"] > score["he"] > score["hell"] > score["h"]
    kinds = dict(zip(tokens, found["token_type"], strict=False))
    assert (kinds["<unk>"], kinds["<s>"], kinds["<0x41>"], kinds["he"]) == (2, 3, 6, 1)
    read = load_tokenizer(tmp_path / "model.gguf")
    assert read("hello hell")["input_ids"] == own("hello hell")["input_ids"]


SMALL = {"hidden_size": 128, "n_embd": 128, "n_layer": 2, "n_head": 4, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"vocab_size": VOCAB, "bos_token_id": 260, "eos_token_id": 261, "initializer_range": 0.1}
PUBLISHED: dict[str, dict[str, Any]] = {  # as the configurations of published models have them, but for the sizes
    "llama": {"intermediate_size": 192, "unsloth_version": "2026.1", "notes": {"by": "a tool"}, "use_flash_attn": True},
    "bloom": {"offset_alibi": 100, "seq_length": 2048},
    "gpt_bigcode": {"n_inner": 512, "n_positions": 64, "scale_attention_softmax_in_fp32": True},
    "lfm2": {
        **{"block_auto_adjust_ff_dim": True, "block_ff_dim": 512, "block_multiple_of": 64, "block_dim": 128},
        **{"full_attn_idxs": [1], "conv_dim": 128, "use_pos_enc": True, "num_key_value_heads": 2, "num_heads": 4},
    },
    "minimax_m2": {
        **{"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
        **{"head_dim": 32, "rotary_dim": 32, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
    },
}


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_configurations_as_they_are_published(architecture: str, tmp_path: Path) -> None:
    """With names that transformers does not know, and without those that it adds."""
    if architecture not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {architecture}")
    content = {"model_type": architecture, **SMALL, **PUBLISHED[architecture]}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**content)).eval()
    qao.quantize_(model, qao.Int4WeightOnly(32, symmetric=True, **Q4), progress=False)
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    kept = ("architectures", "quantization_config")
    path.write_text(json.dumps(content | {key: json.loads(path.read_text())[key] for key in kept}))
    tokenizer().save_pretrained(tmp_path / "model")
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "model.gguf"), "--quiet"]) == 0
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        found = qao.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32)(ids, use_cache=False).logits
        torch.testing.assert_close(found, model(ids, use_cache=False).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "scheme,changes,reason",
    [
        (qao.Float8WeightOnly(), {}, "hold int4 and int8, not fp8; quantize the float model with int4"),
        (qao.Int8WeightOnly(), {"intermediate_size": 144}, "in_features 144 is not a multiple"),
        (qao.Int8DynamicActivationInt8Weight(rotation=32), {}, "the weight is rotated"),
        (qao.Int4WeightOnly(32, symmetric=True), {"initializer_range": 1e-7}, "outside the range of float16"),
        (None, {"hidden_act": "relu"}, "cannot hold hidden_act = 'relu': llama.cpp computes with 'silu'"),
        (None, {"architecture": "opt"}, "no architecture for model_type 'opt', only afmoe"),
    ],
    ids=str,
)
def test_what_does_not_fit(
    scheme: Any, changes: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "model", scheme, **changes)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "model.gguf"), "--quiet"]) == 1
    assert reason in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("model.gguf*"))


def test_an_existing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "model")
    arguments = ["convert", str(tmp_path / "model"), str(tmp_path / "model.gguf"), "--quiet"]
    assert main(arguments) == 0 and main(arguments) == 1 and main([*arguments, "--force"]) == 0
    assert open_checkpoint(tmp_path / "model.gguf").config["hidden_size"] == 128
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "other"), "--to", "gguf"]) == 1
    assert "ends in .gguf" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", [None, qao.Int4WeightOnly(32, symmetric=True, **Q4), qao.Int8WeightOnly()], ids=str)
def test_llama_cpp(scheme: Any, tmp_path: Path) -> None:
    llama_cpp: Any = pytest.importorskip("llama_cpp")
    model = saved(tmp_path / "model", scheme)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "model.gguf"), "--quiet"]) == 0
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, logits_all=True, verbose=False)
    ids = theirs.tokenize(b"hello he's 42", special=False)
    assert ids == tokenizer()("hello he's 42")["input_ids"]
    theirs.eval(ids)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    logits = torch.from_numpy(np.array(theirs.scores[: len(ids)]))
    assert (logits - expected).norm() <= 0.02 * expected.norm()  # llama.cpp rounds activations to eight bits
