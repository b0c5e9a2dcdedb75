"""Tokenizers of GGUF files: vocabulary, merges, special tokens and chat template as metadata, written and read.

llama.cpp has two kinds of BPE: "gpt2" on bytes spelled as characters, with merges and a named split of the text into
words, and "llama" (sentencepiece), which joins the pair with the highest score.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from ..base import CheckpointError
from .file import open_gguf

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # llama.cpp's types of tokens
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


# Splits that transformers (5.24) takes for GPT-2's; llama.cpp also splits between all digits.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_GPT2 = ("gpt-2", "phi-2", "olmo", "exaone4", "mpt", "trillion", "default")

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NOT_HAN = r"&&[^\p{Han}]"
_ONE_DIGIT = [rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_REST}"]
_THREE_DIGITS = [rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"]
_DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
_DEEPSEEK_V2 = [
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\u10d0-\u10ff]]+",  # letters with a case, without Georgian ones
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
]
_KIMI = [
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NOT_HAN}]*[{_LOWER}{_NOT_HAN}]+{_ENDINGS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NOT_HAN}]+[{_LOWER}{_NOT_HAN}]*{_ENDINGS}?|\p{{N}}{{1,3}}|{_REST}"
]
# Regular expressions, applied one after the other, of splits that transformers (5.24) does not know.
_SPLITS = {
    **dict.fromkeys(("chatglm-bpe", "glm4", "glm5"), _THREE_DIGITS),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _ONE_DIGIT),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "deepseek-llm": _DEEPSEEK_V2,
    "seed-coder": [rf"{_ENDINGS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "kimi-k2": _KIMI,
}


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a file as one of transformers.

    Raises:
        CheckpointError: transformers has no such tokenizer.
    """
    from tokenizers import Regex, pre_tokenizers

    metadata = open_gguf(path).metadata
    tokenizer = _created(path)
    for name, own in _SPECIAL.items():  # transformers 5.17 gives the end of a text the token of its beginning
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokenizer):
            setattr(tokenizer, f"{own}_token", tokenizer.convert_ids_to_tokens(token))
    split, steps = metadata.get("tokenizer.ggml.pre"), []
    if split in _SINGLE_DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif split in _SPLITS:
        steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[split]]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    elif metadata.get("tokenizer.ggml.model") == "gpt2" and split not in (None, *_GPT2, *_known_splits()):
        warnings.warn(
            f"{path}: its split of a text into words, {split!r}, is unknown, so that of GPT-2 is used. Some words may "
            "become other tokens; the model's repository has the tokenizer itself",
            stacklevel=2,
        )
    if steps:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def _created(path: Path) -> Any:
    """transformers (5.24) looks for the architecture first, but does not need it."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except (ValueError, KeyError) as error:
        try:
            from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer
        except ImportError:
            raise CheckpointError(f"{path}: {error}. Its tokenizer needs transformers >= 5.24") from error
    try:
        architecture, content, options = get_gguf_tokenizer(str(path))
        backend, _ = convert_gguf_tokenizer(architecture, content)
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: transformers cannot read its tokenizer: {error}") from error
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def _known_splits() -> tuple[str, ...]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return ()
    return tuple(GGUF_PRE_TOKENIZER_SPLITS)


def tokenizer_metadata(model: Path, vocab_size: int) -> dict[str, Any]:
    """Entries "tokenizer.…" for a model in a directory or a GGUF file; {} if there is no tokenizer.

    Raises:
        CheckpointError: llama.cpp has no such tokenizer.
    """
    if model.suffix == ".gguf":
        from gguf import GGUFReader

        fields = GGUFReader(model).fields.items()
        return {name: field.contents() for name, field in fields if name.startswith("tokenizer.")}
    directory = model if model.is_dir() else model.parent
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return {}
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
    if not tokenizer.is_fast:
        raise CheckpointError(f"{directory}: {type(tokenizer).__name__} has no tokenizer.json, which GGUF is made from")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    made = _vocabulary(content, tokenizer, vocab_size, str(directory))
    for name, own in _SPECIAL.items():
        token = getattr(tokenizer, f"{own}_token_id")
        if token is not None:
            made[f"{name}_token_id"] = int(token)
    ids = tokenizer("a")["input_ids"]
    made["add_bos_token"] = tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
    made["add_eos_token"] = tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    entries = {f"tokenizer.ggml.{name}": value for name, value in made.items()}
    return entries | ({"tokenizer.chat_template": template} if template else {})


def _vocabulary(content: dict[str, Any], tokenizer: Any, size: int, where: str) -> dict[str, Any]:
    model = content["model"]
    if model["type"] != "BPE":
        raise CheckpointError(f"{where}: a tokenizer of type {model['type']}; only BPE is written to GGUF")
    added = {one["id"]: one for one in content["added_tokens"]}
    named = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(named) >= size:
        raise CheckpointError(f"{where}: the tokenizer has a token {max(named)}, the model only {size} rows")
    sentencepiece = bool(model.get("byte_fallback"))
    tokens, types = [], []
    for index in range(size):
        token = named.get(index)
        tokens.append(f"[PAD{index}]" if token is None else token)
        types.append(
            _UNUSED
            if token is None
            else _UNKNOWN
            if sentencepiece and token == tokenizer.unk_token
            else _CONTROL
            if index in added and added[index]["special"]
            else _USER_DEFINED
            if index in added
            else _BYTE
            if sentencepiece and token.startswith("<0x") and len(token) == 6
            else _NORMAL
        )
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    made: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if not sentencepiece:
        return {"model": "gpt2", "pre": _split(content["pre_tokenizer"], where), **made, "merges": merges}
    ranks: dict[str, float] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), -float(rank))
    scores = [ranks.get(token, -float(len(merges))) for token in tokens]
    text = json.dumps([content["normalizer"], content["pre_tokenizer"]])
    prefix = '"Prepend"' in text or ('"Metaspace"' in text and '"prepend_scheme": "never"' not in text)
    return {"model": "llama", "pre": "default", **made, "scores": scores, "add_space_prefix": prefix}


def _split(pre_tokenizer: dict[str, Any] | None, where: str) -> str:
    """llama.cpp's name of the split of a text into words, by its regular expression in transformers."""
    steps = pre_tokenizer or {}
    steps = steps.get("pretokenizers", [steps])
    patterns = [one["pattern"].get("Regex", "") for one in steps if one.get("type") == "Split"]
    digits = [one for one in steps if one.get("type") == "Digits" and one.get("individual_digits")]
    bytewise = [one for one in steps if one.get("type") == "ByteLevel" and one.get("use_regex", True)]
    if bytewise and not patterns and len(steps) == len(bytewise) + len(digits):
        return "smollm" if digits else "gpt-2"
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError as error:
        raise CheckpointError(f"{where}: tokenizers with regular expressions need transformers >= 5.24") from error
    known: dict[str, str] = {}
    for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items():
        known.setdefault(pattern, "llama-bpe" if name == "llama3" else name)
    if len(patterns) == 1 and patterns[0] in known and not digits:
        return known[patterns[0]]
    raise CheckpointError(
        f"{where}: llama.cpp's name of this tokenizer's split into words is unknown ({patterns or steps}). Convert the "
        "float model with llama.cpp's convert_hf_to_gguf.py"
    )
