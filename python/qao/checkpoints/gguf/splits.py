"""Splits of a text into words by their names in llama.cpp, for BPE on bytes.

The source is llama.cpp's table of them (src/llama-vocab.cpp). Regular expressions are spelled as in tokenizer.json, so
that the name is found for a model that is written to a file.
"""

from __future__ import annotations

from typing import Any

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_REST_OF_PATHS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NOT_HAN = r"&&[^\p{Han}]"


def _cased(ending: str, limit: str = "") -> str:
    """Words that begin in upper case, or are in upper case."""
    upper, lower, before = f"[{_UPPER}{limit}]", f"[{_LOWER}{limit}]", r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"


_ONE_DIGIT = (rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_REST}",)
_THREE_DIGITS = (rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",)
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_TEKKEN = (rf"{_cased('')}|\p{{N}}|{_REST_OF_PATHS}",)
_GPT4O = (rf"{_cased(f'{_ENDINGS}?')}|\p{{N}}{{1,3}}|{_REST_OF_PATHS}",)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_V2 = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\u10d0-\u10ff]]+",  # letters with a case, without Georgian ones
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_KIMI = (rf"[\p{{Han}}]+|{_cased(f'{_ENDINGS}?', _NOT_HAN)}|\p{{N}}{{1,3}}|{_REST}",)
_SEED = (rf"{_ENDINGS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)

_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
# A word in the vocabulary is one token without merges. Texts begin with BOS unless the file says otherwise.
WHOLE_WORDS = (*_LLAMA3, "tekken")

# Regular expressions, applied one after the other. Of equal ones, files are written with the first name.
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_LLAMA3, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _ONE_DIGIT),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _ONE_DIGIT),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "deepseek-llm": _DEEPSEEK_V2,
    "seed-coder": _SEED,
    "kimi-k2": _KIMI,
}
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
_GPT2 = ("gpt-2", "phi-2", "olmo", "exaone4", "mpt", "trillion", "default", "jais", "gigachat", "a.x-4.0", "mellum")
KNOWN = {*_PATTERNS, *_SINGLE_DIGITS, *_GPT2, "granite-docling"}


def pre_tokenizer(name: str) -> Any:
    """The split as an object of tokenizers; GPT-2's for an unknown name."""
    from tokenizers import Regex, pre_tokenizers

    if name in _SINGLE_DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        return pre_tokenizers.Sequence(steps)
    if name not in _PATTERNS:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS[name]]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def name_of(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The name of a split in a tokenizer.json; None if there is none."""
    steps = pre_tokenizer or {}
    steps = steps.get("pretokenizers", [steps])
    patterns = tuple(one["pattern"].get("Regex", "") for one in steps if one.get("type") == "Split")
    digits = [one for one in steps if one.get("type") == "Digits" and one.get("individual_digits")]
    bytewise = [one for one in steps if one.get("type") == "ByteLevel" and one.get("use_regex", True)]
    if bytewise and not patterns and len(steps) == len(bytewise) + len(digits):
        return "smollm" if digits else "gpt-2"
    if digits:
        return None
    return next((name for name, known in _PATTERNS.items() if known == patterns), None)
