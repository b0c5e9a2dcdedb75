"""Tokenizers of GGUF files: vocabulary, merges, special tokens and chat template as metadata, written and read.

llama.cpp has two kinds of BPE: "gpt2" on bytes spelled as characters, with merges and a named split of the text into
words, and "llama" (sentencepiece), which joins the pair with the highest score. "gemma4" is the second with merges.
They are built with the package tokenizers, so they are the same with every version of transformers.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import CheckpointError
from .file import STRING, Array, open_gguf, read_elements
from .splits import KNOWN, WHOLE_WORDS, name_of, pre_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # llama.cpp's types of tokens
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # of files that do not name them
_SPACE = "\u2581"  # a space in a token of sentencepiece
# A file does not say what its architecture decides here.
_GEMMA = ("gemma", "gemma2", "gemma3")  # merges by the order of tokens, not by score; no space before a text
_PREPENDED = ("phi3",)  # a text that begins with a space gets another one
_REMEDY = "Take the tokenizer of the model's repository: transformers.AutoTokenizer.from_pretrained(NAME)"


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a GGUF file as one of transformers, with its special tokens and chat template.

    Args:
        path: a ``.gguf`` file, or one of its parts.

    Raises:
        CheckpointError: the file has no tokenizer, one of another kind, or a damaged one.
        OSError: the file cannot be opened.
    """
    from transformers import PreTrainedTokenizerFast

    content = _content(Path(path))
    backend = _byte_level(content) if content.kind == "gpt2" else _sentencepiece(content)
    special = {name: content.tokens[index] for name, index in content.special_ids().items()}
    _add_tokens(backend, content, special)
    ends = [name for name in ("bos", "eos") if name in special and _is_added(content, name)]
    _add_ends(backend, *(special[name] if name in ends else None for name in ("bos", "eos")))
    template = content.metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template if isinstance(template, str) else None,
        add_bos_token="bos" in ends,
        add_eos_token="eos" in ends,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{_SPECIAL[name]}_token": token for name, token in special.items()},
    )


@dataclass(frozen=True)
class _Content:
    """What a file says of its tokenizer."""

    path: Path
    metadata: dict[str, Any]
    tokens: list[str]
    types: list[int]

    @property
    def kind(self) -> str:
        return str(self.metadata["tokenizer.ggml.model"])

    @property
    def architecture(self) -> Any:
        return self.metadata.get("general.architecture")

    def number(self, key: str, default: int) -> int:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        return value if isinstance(value, int) else default

    def special_ids(self) -> dict[str, int]:
        """Ids by the names in ``_SPECIAL``. An id outside the vocabulary, such as -1, is that of no token."""
        defaults = {}
        if self.kind == "llama":
            kinds = dict(enumerate(self.types[:3]))
            defaults = {name: at for name, at in _SENTENCEPIECE_IDS.items() if kinds.get(at) in (_CONTROL, _UNKNOWN)}
        found = {name: self.number(f"{name}_token_id", defaults.get(name, -1)) for name in _SPECIAL}
        return {name: index for name, index in found.items() if 0 <= index < len(self.tokens)}

    def scores(self) -> list[float]:
        scores = _elements(self.path, self.metadata, "scores", length=len(self.tokens))
        if scores is None:
            raise _error(self.path, "tokenizer.ggml.scores is missing")
        return scores

    def merges(self) -> list[tuple[str, str]] | None:
        """Pairs of tokens, the first to be joined first; None if the file has none."""
        lines = _elements(self.path, self.metadata, "merges", strings=True)
        if lines is None:
            return None
        cuts = [line.find(" ", 1) for line in lines]
        if -1 in cuts:
            raise _error(self.path, f"merge {cuts.index(-1)}, {lines[cuts.index(-1)]!r}, is not a pair of tokens")
        return [(line[:cut], line[cut + 1 :]) for line, cut in zip(lines, cuts, strict=True)]


def _error(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: cannot read its tokenizer: {problem}. {_REMEDY}")


def _content(path: Path) -> _Content:
    file = open_gguf(path)
    path, metadata = file.path, file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        what = (
            "the file has none"
            if kind in (None, "none", "no_vocab")
            else f"its kind is {kind!r}, not 'gpt2', 'llama' or 'gemma4'"
        )
        raise _error(path, what)
    tokens = _elements(path, metadata, "tokens", strings=True)
    if not tokens:
        raise _error(path, "tokenizer.ggml.tokens, the vocabulary, is missing")
    types = _elements(path, metadata, "token_type", length=len(tokens))
    return _Content(path, metadata, tokens, types or [_NORMAL] * len(tokens))


def _elements(
    path: Path, metadata: dict[str, Any], key: str, strings: bool = False, length: int | None = None
) -> list[Any] | None:
    """An array of the metadata; None if it is missing."""
    key = f"tokenizer.ggml.{key}"
    array = metadata.get(key)
    if array is None:
        return None
    if not isinstance(array, Array) or (array.value_type == STRING) != strings:
        raise _error(path, f"{key} is not an array of {'strings' if strings else 'numbers'}")
    if length is not None and array.length != length:
        raise _error(path, f"{key} has {array.length} elements for {length} tokens")
    return read_elements(path, array)


def _byte_level(content: _Content) -> Any:
    from tokenizers import decoders

    split = content.metadata.get("tokenizer.ggml.pre") or "gpt-2"
    if split not in KNOWN:
        warnings.warn(
            f"{content.path}: its split of a text into words, {split!r}, is unknown, so that of GPT-2 is used. Some "
            "words may become other tokens; the model's repository has the tokenizer itself",
            stacklevel=3,
        )
    made = _bpe(content, content.tokens, content.merges(), ignore_merges=split in WHOLE_WORDS)
    made.pre_tokenizer = pre_tokenizer(split)
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(content: _Content) -> Any:
    from tokenizers import decoders, normalizers, pre_tokenizers

    gemma = content.architecture in _GEMMA
    tokens = content.tokens
    if gemma:  # runs of spaces, which files spell as they are
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    merges = content.merges()
    if merges is None and content.kind == "llama":
        scores = [-float(index) for index in range(len(tokens))] if gemma else content.scores()
        merges = _merges_by_score(tokens, content.types, scores)
    unknown = content.special_ids().get("unknown")
    token = None if unknown is None else tokens[unknown]
    made = _bpe(content, tokens, merges, unk_token=token, fuse_unk=True, byte_fallback=True)
    prefix = content.kind == "llama" and not gemma and content.number("add_space_prefix", 1) != 0
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if not prefix:
        made.normalizer = normalizers.Replace(" ", _SPACE)
    elif content.architecture in _PREPENDED:
        made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return made


def _bpe(content: _Content, tokens: list[str], merges: list[tuple[str, str]] | None, **options: Any) -> Any:
    from tokenizers import Tokenizer, models

    if merges is None:
        raise _error(content.path, "tokenizer.ggml.merges is missing")
    ids = {token: index for index, token in enumerate(tokens)}
    ids |= {tokens[index]: index for index in content.special_ids().values()}  # not those of equal words
    try:
        return Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    except Exception as error:  # tokenizers has no type for this: a merge of or into no token
        raise _error(content.path, f"{error}") from error


def _merges_by_score(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that is a token; first the one with the highest score and the longest left part."""
    joined = {token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    pairs: list[tuple[float, str, str]] = []
    for token, score in dict(zip(tokens, scores, strict=True)).items():
        if token in joined:
            halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            pairs += [(score, *pair) for pair in halves if joined.issuperset(pair)]
    pairs.sort(key=lambda one: (-one[0], -len(one[1]), -len(one[2])))
    return [pair[1:] for pair in pairs]


def _is_added(content: _Content, name: str) -> bool:
    """Whether every text begins with BOS, or ends with EOS."""
    if content.kind == "gemma4" and name == "bos":
        return False  # its chat template has it
    default = content.kind == "llama" or content.metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS
    return bool(content.number(f"add_{name}_token", default and name == "bos"))


def _add_tokens(backend: Any, content: _Content, special: dict[str, str]) -> None:
    """Keep tokens whole in a text: control tokens, those that users defined, and the special ones."""
    from tokenizers import AddedToken

    control, user = [], []
    for token, kind in dict(zip(content.tokens, content.types, strict=True)).items():
        if kind == _CONTROL or token in special.values():
            control.append(AddedToken(token, normalized=False))
        elif kind == _USER_DEFINED and backend.token_to_id(token) is not None:  # not a run of spaces of Gemma
            user.append(AddedToken(token, normalized=False))
    backend.add_special_tokens(control)
    backend.add_tokens(user)


def _add_ends(backend: Any, begin: str | None, end: str | None) -> None:
    """Put BOS before and EOS behind every text, as far as they are given."""
    from tokenizers import processors

    sides = [
        [*([f"{begin}:{side}"] if begin else []), f"${text}:{side}", *([f"{end}:{side}"] if end else [])]
        for side, text in enumerate("AB")
    ]
    special = [(token, backend.token_to_id(token)) for token in (begin, end) if token]
    if special:
        backend.post_processor = processors.TemplateProcessing(
            single=sides[0], pair=sides[0] + sides[1], special_tokens=special
        )


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
    name = name_of(pre_tokenizer)
    if name is None:
        raise CheckpointError(
            f"{where}: llama.cpp's name of this tokenizer's split into words is unknown ({pre_tokenizer}). Convert the "
            "float model with llama.cpp's convert_hf_to_gguf.py"
        )
    return name
