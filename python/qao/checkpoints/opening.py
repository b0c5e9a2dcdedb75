"""Which format a path holds, and its reader."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from . import awq, compressed_tensors, fp8, gptq, native, torchao
from .base import Checkpoint, CheckpointError
from .files import SafetensorsCheckpoint, TensorFiles, read_json
from .gguf import GgufCheckpoint
from .mxfp4 import Mxfp4Checkpoint
from .settings import Settings

__all__ = ["open_checkpoint"]

_READERS = {
    "gptq": gptq.read,
    "awq": awq.read,
    "fp8": fp8.read_huggingface,
    "fbgemm_fp8": fp8.read_fbgemm,
    "torchao": torchao.read,
}
# What only quantised weights have. A float checkpoint with such a name has lost its config.
_QUANTISED = (".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_zero_point")


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint: quantised by others, by qao, or in float.

    Args:
        path: a directory as Hugging Face lays it out (config.json, safetensors files), a .safetensors file (config.json
            beside it is read, if there is one), or a .gguf file.

    Returns:
        The checkpoint. Shapes and dtypes of its tensors are checked; numbers are read when they are asked for.

    Raises:
        CheckpointError: there is nothing of the kind, it is damaged, or quantised in a way that no kernel of qao
            multiplies; the message names the file and the tensor and says what to do.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if path.suffix == ".gguf":
        checkpoint: Checkpoint = GgufCheckpoint(path)
        return checkpoint
    if path.is_file() and path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: only .safetensors and .gguf files are read; pickles can run any code")
    files = TensorFiles(path)
    config, settings = _config(files)
    if native.is_native(files.names):
        return SafetensorsCheckpoint("qao", config, files, native.read(files))
    method = "float" if settings is None else settings.text("quant_method", "none").replace("_", "-")
    if method == "float" and torchao.is_torchao(files.metadata):
        method, settings = "torchao", Settings({}, f"{path}: header")
    if settings is None:
        opened = SafetensorsCheckpoint("float", config, files)
    elif method == "mxfp4":
        opened = Mxfp4Checkpoint(config, files)
    elif method == "compressed-tensors":
        opened = SafetensorsCheckpoint(method, config, files, *compressed_tensors.read(files, settings))
    else:
        method = method.replace("-", "_")
        if method not in _READERS:
            known = ", ".join(["compressed-tensors", *_READERS, "mxfp4"])
            raise CheckpointError(f"{settings.where}: quant_method {method!r:.40} is not read; {known} are")
        opened = SafetensorsCheckpoint(method, config, files, _READERS[method](files, settings))
    for name in opened.others:
        raw = settings is not None and opened.shape_dtype(name)[1] == torch.float8_e4m3fn
        if raw or name.endswith(_QUANTISED):
            raise files.error(name, f"is part of a quantised weight, but of no {method} layer; is config.json its own?")
    found = opened.others != files.names if method == "mxfp4" else opened.layers
    if settings is not None and not found:
        raise CheckpointError(f"{path}: {settings.where} says {method}, but no tensor is quantised in that way")
    return opened


def _config(files: TensorFiles) -> tuple[dict[str, Any], Settings | None]:
    """config.json without what it says about quantisation, and that."""
    file = files.directory / "config.json"
    config = read_json(file) if file.exists() else {}
    inner = config.get("text_config")  # of models with several parts
    for holder in (config, inner if isinstance(inner, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            found = holder.pop(key, None)
            if found:
                return config, Settings(found, f"{file}: {key}")
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        file = files.directory / name
        if file.exists():
            return config, Settings({"quant_method": method, **read_json(file)}, str(file))
    return config, None
