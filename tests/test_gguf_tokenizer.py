"""Tokenizers of GGUF files: of every architecture, and llama.cpp's splits of a text into words."""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao.checkpoints import CheckpointError, load_tokenizer
from qao.checkpoints.gguf.architectures import ARCHITECTURES, ROWS
from qao.cli import main

gguf: Any = pytest.importorskip("gguf")
tokenizers: Any = pytest.importorskip("tokenizers")
transformers: Any = pytest.importorskip("transformers")

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


def write(path: Path, tokens: Sequence[str] | None, merges: Sequence[str] | None = None, **entries: Any) -> Path:
    """A file without tensors, with a tokenizer of bytes. None leaves an entry out."""
    architecture = entries.pop("architecture", "llama")
    made = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [1] * len(tokens or "a"), "merges": merges}
    made |= {"add_bos_token": False, "eos_token_id": 1, **entries}
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"context_length": 64, "embedding_length": 64, "block_count": 1, "head_count": 4, "feed_forward_length": 64}
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in made.items():
        if isinstance(value, (str, bool)):
            (writer.add_string if isinstance(value, str) else writer.add_bool)(f"tokenizer.ggml.{name}", value)
        elif value is not None:
            (writer.add_uint32 if isinstance(value, int) else writer.add_array)(f"tokenizer.ggml.{name}", value)
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
    path = write(tmp_path / "model.gguf", *vocabulary, architecture=architecture)
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer(TEXTS[0])["input_ids"]) == TEXTS[0]
    assert tokenizer.eos_token_id == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


@pytest.mark.parametrize("model_type", ROWS)
def test_saved_tokenizers(model_type: str, vocabulary: Any, tmp_path: Path) -> None:
    """transformers loads what qao convert saves, as it is. With Qwen's models, version 5 splits as Qwen does."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    architecture, row = ROWS[model_type]
    pre = {"qwen2": "qwen2", "qwen35": "qwen35", "qwen35moe": "qwen35"}.get(architecture, "deepseek-v3")
    tokenizer = load_tokenizer(write(tmp_path / "model.gguf", *vocabulary, architecture=architecture, pre=pre))
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [row.cls]}))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert all(again(text)["input_ids"] == tokenizer(text)["input_ids"] for text in TEXTS)
    assert (again.eos_token_id, again.chat_template) == (1, tokenizer.chat_template)


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


# Sentencepiece: bytes, pieces and their scores, the lowest joined last.
PIECES = ("he", "ll", "hell", "hello", "\u2581he", "\u2581hello", *"\u2581helo", "<")
TOKENS = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|user|>", "<think>", "  ", *PIECES)
SENTENCEPIECE: dict[str, Any] = {
    **{"model": "llama", "pre": "default", "token_type": [2, 3, 3, *[6] * 256, 3, 4, 4, *[1] * len(PIECES)]},
    **{"scores": [0.0] * 262 + [-float(at) for at in range(len(PIECES))], "eos_token_id": 2},
    **{"bos_token_id": 1, "unknown_token_id": 0, "add_bos_token": True},
}


@pytest.mark.parametrize(
    "architecture,options,text,expected",
    [
        ("llama", {}, "hello hell", ["<s>", "\u2581hello", "\u2581", "hell"]),
        ("llama", {"add_bos_token": None}, "hello", ["<s>", "\u2581hello"]),
        ("llama", {"bos_token_id": None, "add_bos_token": None}, "hello", ["<s>", "\u2581hello"]),
        ("llama", {"add_eos_token": True}, "hello", ["<s>", "\u2581hello", "</s>"]),
        ("llama", {"add_space_prefix": False}, "hello hello", ["<s>", "hello", "\u2581hello"]),
        ("llama", {}, "hé", ["<s>", "\u2581", "h", "<0xC3>", "<0xA9>"]),
        ("llama", {}, "<|user|>hello<think>hello", ["<s>", "<|user|>", "hello", "<think>", "hello"]),
        ("llama", {}, "hello  hello", ["<s>", "\u2581hello", "  ", "hello"]),
        ("llama", {}, " hello", ["<s>", "\u2581hello"]),
        ("gemma", {}, "hello  hello", ["<s>", "hello", "\u2581\u2581", "hello"]),
        ("phi3", {}, " hello", ["<s>", "\u2581", "\u2581hello"]),
    ],
)
def test_sentencepiece(
    architecture: str, options: dict[str, Any], text: str, expected: list[str], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(
        write(tmp_path / "model.gguf", TOKENS, architecture=architecture, **SENTENCEPIECE | options)
    )
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text.replace("<|user|>", "").strip()
    assert len(tokenizer) == len(TOKENS)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)


def test_gemma_4(tmp_path: Path) -> None:
    """Merges of the file. Texts have no BOS, because the chat template writes it."""
    merges = ["h e", "l l", "he ll", "hell o", "\u2581 hello"]
    options = {**SENTENCEPIECE, "model": "gemma4", "scores": None}
    tokenizer = load_tokenizer(write(tmp_path / "model.gguf", TOKENS, merges, architecture="gemma4", **options))
    assert tokenizer.tokenize("hello hello") == ["hello", "\u2581hello"]
    assert tokenizer("hello")["input_ids"] == [TOKENS.index("hello")]


def test_special_tokens_of_bytes(vocabulary: Any, tmp_path: Path) -> None:
    """Their spelling is that of the text, also with characters that spell no byte. Each has one id."""
    tokens, merges = vocabulary
    names = ["<\uff5cbegin\u2581of\uff5c>", "<|user|>", "<think>", "   "]
    count = len(tokens)
    options = {"token_type": [1] * count + [3, 3, 4, 4], "bos_token_id": count, "add_bos_token": True}
    path = write(tmp_path / "model.gguf", [*tokens, *names], merges, **options)
    tokenizer = load_tokenizer(path)
    ids = tokenizer("".join(names))["input_ids"]
    assert ids == [count, *range(count, count + 4)] and len(tokenizer) == count + 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>   "
    assert sorted(tokenizer("hi")) == ["attention_mask", "input_ids"]  # models do not take token_type_ids


@pytest.mark.parametrize("pre,whole", [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_words_in_the_vocabulary(pre: str, whole: bool, tmp_path: Path) -> None:
    """Without merges to them, and with BOS, as llama.cpp reads these."""
    tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "<s>", "hi", "he"]
    entries = {"pre": pre, "add_bos_token": None, "bos_token_id": 256, "token_type": [1] * 256 + [3, 1, 1]}
    tokenizer = load_tokenizer(write(tmp_path / "model.gguf", tokens, ["h e"], **entries))
    assert tokenizer.convert_ids_to_tokens(tokenizer("hi")["input_ids"]) == (["<s>", "hi"] if whole else ["h", "i"])


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"model": None}, "the file has none"),
    "kind": ({"model": "rwkv"}, "its kind is 'rwkv', not 'gpt2', 'llama' or 'gemma4'"),
    "tokens": ({"tokens": None}, "tokenizer.ggml.tokens, the vocabulary, is missing"),
    "numbers": ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is not an array of strings"),
    "types": ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 elements for 5 tokens"),
    "merges": ({"merges": None}, "tokenizer.ggml.merges is missing"),
    "words": ({"merges": ["a b", "ab"]}, "merge 1, 'ab', is not a pair of tokens"),
    "result": ({"merges": ["a b", "b a"]}, "Error while initializing BPE: Token `ba` out of vocabulary"),
    "scores": ({"model": "llama", "merges": None}, "tokenizer.ggml.scores is missing"),
    "count": ({"model": "llama", "merges": None, "scores": [0.5]}, "tokenizer.ggml.scores has 1 elements for 5"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_tokenizers(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, problem = DAMAGED[name]
    path = write(tmp_path / "model.gguf", **{"tokens": ["a", "b", "ab", "c", "d"], "merges": ["a b"], **changes})
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: cannot read its tokenizer: {problem}")) as caught:
        load_tokenizer(path)
    assert str(caught.value).endswith("transformers.AutoTokenizer.from_pretrained(NAME)")
    assert main(["generate", str(path), "hi"]) == 1
    assert problem in " ".join(capsys.readouterr().err.split())


def test_ids_of_no_token(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ["a", "b", "ab"], ["a b"], eos_token_id=3, padding_token_id=2**32 - 1)
    assert (load_tokenizer(path).eos_token, load_tokenizer(path).pad_token) == (None, None)


def test_unknown_tokenizers(vocabulary: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'bloom', is unknown, so that of GPT-2 is used"):
        load_tokenizer(write(tmp_path / "model.gguf", *vocabulary, pre="bloom"))


def saved(folder: Path, vocabulary: Any) -> Path:
    """A file of a Llama with random weights, a tokenizer and a chat template."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=900, bos_token_id=1, eos_token_id=2)
    whole = transformers.LlamaForCausalLM(config)
    qao.quantize_(whole, qao.Int8WeightOnly(), progress=False)
    whole.save_pretrained(folder)
    tokens, merges = vocabulary
    model = tokenizers.models.BPE(
        {token: at for at, token in enumerate(tokens)}, [tuple(one.split()) for one in merges]
    )
    made = tokenizers.Tokenizer(model)
    pre = tokenizers.pre_tokenizers
    made.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token=tokens[1], eos_token=tokens[2])
    own.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    own.save_pretrained(folder)
    assert main(["convert", str(folder), str(folder / "model.gguf"), "--quiet"]) == 0
    return folder / "model.gguf"


def test_the_commands(
    vocabulary: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """generate and chat read the file, and convert writes the tokenizer that transformers loads."""
    path = saved(tmp_path / "model", vocabulary)
    tokenizer, model = load_tokenizer(path), qao.from_pretrained(path, dtype=torch.float32)
    ids = tokenizer("the 42 items", return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    expected = tokenizer.decode(answer, skip_special_tokens=True)
    capsys.readouterr()
    options = ["--max-new-tokens", "4", "--temperature", "0", "--dtype", "float32", "--device", "cpu", "--quiet"]
    for more in ([], ["--chat"]):
        assert main(["generate", str(path), "the 42 items", *options, "--json", *more]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("the 42 items\n"))
    assert main(["chat", str(path), *options, "--no-compile"]) == 0
    assert expected in capsys.readouterr().out
    assert main(["convert", str(path), str(tmp_path / "out"), "--quiet"]) == 0
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (again.eos_token, again.chat_template) == (tokenizer.eos_token, tokenizer.chat_template)
