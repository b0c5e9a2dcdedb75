"""Words and names that the command line checks before it imports torch."""

from __future__ import annotations

import os
import re
from typing import Any

# The class in qao.schemes for each word.
SCHEMES = {
    "int4": "Int4WeightOnly",
    "int8": "Int8WeightOnly",
    "fp8": "Float8WeightOnly",
    "fp4": "Fp4WeightOnly",
    "int8_int8": "Int8DynamicActivationInt8Weight",
    "int8_int4": "Int8DynamicActivationInt4Weight",
    "fp8_fp8": "Float8DynamicActivationFloat8Weight",
    "fp8_int4": "Float8DynamicActivationInt4Weight",
}
# Methods of qao.calibrate.
METHODS = ("gptq", "smoothquant", "importance")


def default_method(has_data: bool) -> str:
    """The method of qao.calibrate that is used if none is given."""
    return "gptq" if has_data else "importance"


# ---- names in other libraries ----

_NAMES = {word: f"qao.{kind}()" for word, kind in SCHEMES.items()}
_FOUR = "qao.Int4WeightOnly()"
# Words as other libraries and file names have them, in lower case and without "_", "-" and spaces.
_WORDS = {
    **{word.replace("_", ""): name for word, name in _NAMES.items()},
    **dict.fromkeys(("4bit", "bnb4bit", "nf4", "loadin4bit", "w4a16", "q40", "q41", "q4km", "q4ks", "w4"), _FOUR),
    **dict.fromkeys(("awq", "gptq", "hqq", "autoround", "uint4", "int4weightonly", "int4wo", "marlin"), _FOUR),
    **dict.fromkeys(("8bit", "bnb8bit", "loadin8bit", "w8a16", "q80", "int8wo", "int8weightonly"), _NAMES["int8"]),
    **dict.fromkeys(("w8a8", "llmint8", "int8dynamic", "smoothquant", "w8a8int8"), _NAMES["int8_int8"]),
    **dict.fromkeys(("w4a8", "qqq"), _NAMES["int8_int4"]),
    **dict.fromkeys(("float8", "fp8weightonly", "float8weightonly", "float8wo", "e4m3", "w8a16fp8"), _NAMES["fp8"]),
    **dict.fromkeys(("fp8dynamic", "float8dynamic", "w8a8fp8", "fbgemmfp8", "fp8e4m3"), _NAMES["fp8_fp8"]),
    **dict.fromkeys(("fp8block", "finegrainedfp8"), 'qao.Float8DynamicActivationFloat8Weight("block")'),
    **dict.fromkeys(("w4afp8",), _NAMES["fp8_int4"]),
    **dict.fromkeys(("fp4", "mxfp4", "nvfp4", "bnbfp4"), _NAMES["fp4"]),
}
_CLASSES = {
    "GPTQConfig": _FOUR,
    "AwqConfig": _FOUR,
    "HqqConfig": _FOUR,
    "AutoRoundConfig": _FOUR,
    "SinqConfig": _FOUR,
    "MetalConfig": _FOUR,
    "EetqConfig": _NAMES["int8"],
    "NVFP4Config": 'qao.Fp4WeightOnly("nvfp4")',
    "Mxfp4Config": _NAMES["fp4"],
    "FbgemmFp8Config": _NAMES["fp8_fp8"],
    "FineGrainedFP8Config": 'qao.Float8DynamicActivationFloat8Weight("block")',
    "Int4WeightOnlyConfig": _FOUR,
    "Int8WeightOnlyConfig": _NAMES["int8"],
    "Int8DynamicActivationInt8WeightConfig": _NAMES["int8_int8"],
    "Int8DynamicActivationInt4WeightConfig": _NAMES["int8_int4"],
    "Int8DynamicActivationIntxWeightConfig": _NAMES["int8_int4"],
    "IntxWeightOnlyConfig": _FOUR,
    "Float8WeightOnlyConfig": _NAMES["fp8"],
    "Float8DynamicActivationFloat8WeightConfig": _NAMES["fp8_fp8"],
    "Float8DynamicActivationInt4WeightConfig": _NAMES["fp8_int4"],
    "Float8StaticActivationFloat8WeightConfig": "qao.Float8StaticActivationFloat8Weight(activation_scale=...)",
}


def counterpart(given: Any) -> str | None:
    """How to write the scheme of qao for a word ("nf4", "w4a16", ...) or a config of another library; None: unknown."""
    if isinstance(given, str):
        return _WORDS.get("".join(part for part in given.lower() if part.isalnum()))
    kind = given.__name__ if isinstance(given, type) else type(given).__name__
    if kind == "BitsAndBytesConfig":
        return _NAMES["int8"] if getattr(given, "load_in_8bit", False) else _FOUR
    if kind == "TorchAoConfig":
        inner = getattr(given, "quant_type", None)
        return None if inner is None else counterpart(inner)
    if kind == "QuantoConfig":  # "weights" in transformers, "weights_dtype" in diffusers
        weights = getattr(given, "weights", None) or getattr(given, "weights_dtype", "")
        return counterpart(f"{getattr(given, 'activations', None) or ''}{weights}".replace("float8", "fp8"))
    found = _CLASSES.get(kind)
    return _NAMES["int8"] if found == _FOUR and _bits(given) == 8 else found


def _bits(config: Any) -> Any:
    """Bits of a weight in a config of another library; None: unknown."""
    hqq = (getattr(config, "quant_config", None) or {}).get("weight_quant_params", {})
    return getattr(config, "bits", None) or getattr(config, "nbits", None) or hqq.get("nbits")


def described(given: Any) -> str:
    """A value in an error message, with qao's counterpart where it is known. Configs may have long texts."""
    text, found = repr(given), counterpart(given)
    text = type(given).__name__ if len(text) > 80 or "\n" in text else text
    return text if found is None else f"{text}; the equivalent in qao is {found}"


def word_hint(word: str) -> str | None:
    """The word of the command line for a word of another library; None: unknown."""
    found = counterpart(word)
    kinds = {kind: own for own, kind in SCHEMES.items()}
    return None if found is None else kinds[found.removeprefix("qao.").partition("(")[0]]


# ---- names on the hub, and numbers of things ----

_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
_ENDINGS = (".gguf", ".safetensors", ".json")  # file suffixes, which repository names do not have


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Whether this can be the name of a hub repository, with or without its owner."""
    name = os.fspath(path)
    return _REPOSITORY.fullmatch(name) is not None and not name.endswith(_ENDINGS)


def counted(count: int, what: str) -> str:
    """ "1 layer", "2 layers"."""
    return f"{count} {what}{'' if count == 1 else 's'}"
