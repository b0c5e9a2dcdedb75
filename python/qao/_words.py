"""Words and names that the command line checks before torch is imported."""

from __future__ import annotations

import os
import re

# The class in qao.schemes of each word.
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
# Of qao.calibrate.
METHODS = ("gptq", "smoothquant")

_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
_ENDINGS = (".gguf", ".safetensors", ".json")  # of files: what ends so names no repository


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Whether it may be that of a repository, with or without its owner."""
    name = os.fspath(path)
    return _REPOSITORY.fullmatch(name) is not None and not name.endswith(_ENDINGS)


def counted(count: int, what: str) -> str:
    """ "1 layer", "2 layers"."""
    return f"{count} {what}{'' if count == 1 else 's'}"
