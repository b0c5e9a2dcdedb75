"""Tokenizers of GGUF files: of every architecture, and llama.cpp's splits of a text into words."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from qao.checkpoints import CheckpointError
from qao.checkpoints.gguf.architectures import ARCHITECTURES
from qao.checkpoints.gguf.tokenizer import load_tokenizer

gguf: Any = pytest.importorskip("gguf")
tokenizers: Any = pytest.importorskip("tokenizers")
pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")

TEXTS = (
    "Hello there, it's 12345 items!  We'LL see\n\n\n  x = foo(bar[3]); y+=1;\t#ok 数学家在2024年说“你好”. I'm 3.14  \n",
    "you'RE 98765 4321 数学 2024年\n\n\t indented   words—and… emoji 🙂🙂 Ñandú über\r\n\r\n x  y",
)
SPLITS = (
    "deepseek-v3",
    "hunyuan-dense",
    "kimi-k2",
    "glm4",
    "chatglm-bpe",
    "hunyuan",
    "seed-coder",
    "exaone4",
    "refact",
)


def write(path: Path, tokens: Sequence[str], merges: Sequence[str], **entries: Any) -> Path:
    """A file without tensors, with a tokenizer of bytes."""
    options = {"architecture": "llama", "model": "gpt2", "pre": "gpt-2", **entries}
    writer = gguf.GGUFWriter(path, options["architecture"])
    sizes = {"context_length": 64, "embedding_length": 64, "block_count": 1, "head_count": 4, "feed_forward_length": 64}
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(options["model"])
    writer.add_tokenizer_pre(options["pre"])
    writer.add_token_list(list(tokens))
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(list(merges))
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges, many of which cross the borders of words."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel
    trained.pre_tokenizer = level(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=900, initial_alphabet=level.alphabet(), show_progress=False)
    trained.train_from_iterator([text[at : at + 9] for text in TEXTS for at in range(len(text))], trainer)
    model = json.loads(trained.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture: str, vocabulary: Any, tmp_path: Path) -> None:
    """transformers refuses some, but not their tokenizers."""
    path = write(tmp_path / "model.gguf", *vocabulary, architecture=architecture)
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer(TEXTS[0])["input_ids"]) == TEXTS[0]
    assert tokenizer.eos_token_id == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


@pytest.mark.parametrize("split", SPLITS)
def test_splits_of_llama_cpp(split: str, vocabulary: Any, tmp_path: Path) -> None:
    llama_cpp: Any = pytest.importorskip("llama_cpp")
    path = write(tmp_path / "model.gguf", *vocabulary, pre=split)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = load_tokenizer(path)
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == theirs.tokenize(text.encode(), add_bos=False, special=False)


def test_digits_of_deepseek_v2(vocabulary: Any, tmp_path: Path) -> None:
    """Its split takes them one by one. llama.cpp leaves that to the merges, which have none of them."""
    llama_cpp: Any = pytest.importorskip("llama_cpp")
    path = write(tmp_path / "model.gguf", *vocabulary, pre="deepseek-llm")
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    tokenizer = load_tokenizer(path)
    for text in TEXTS:
        letters = "".join(one for one in text if not one.isdigit())
        assert tokenizer(letters)["input_ids"] == theirs.tokenize(letters.encode(), add_bos=False, special=False)
    assert tokenizer.tokenize("12345") == list("12345")


def test_unknown_tokenizers(vocabulary: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'bloom', is unknown, so that of GPT-2 is used"):
        load_tokenizer(write(tmp_path / "model.gguf", *vocabulary, pre="bloom"))
    with pytest.raises(CheckpointError, match="cannot read its tokenizer: .*'rwkv'"):
        load_tokenizer(write(tmp_path / "model.gguf", *vocabulary, model="rwkv"))
