"""Detection of a checkpoint's format and dispatch to its reader."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from . import autoround, awq, fp8, gptq, modelopt, native, torchao
from .base import Checkpoint, CheckpointError
from .compressed_tensors import read
from .files import PICKLES, SafetensorsCheckpoint, TensorFiles, is_index, read_json
from .gguf.read import GgufCheckpoint
from .gguf.rows import stacks_experts
from .mxfp4 import Mxfp4Checkpoint
from .settings import Settings

__all__ = ["open_checkpoint"]

_READERS = {
    "gptq": gptq.read,
    "awq": awq.read,
    "fp8": fp8.read_huggingface,
    "fbgemm_fp8": fp8.read_fbgemm,
    "torchao": torchao.read,
    "auto_round": autoround.read,
}
_METHODS = ("compressed-tensors", "modelopt", *_READERS, "mxfp4")
_ALIASES = {"intel/auto-round": "auto_round", "auto-round": "auto_round", "modelopt_fp4": "modelopt"}
# Unsupported storage formats of other libraries, for the message.
_UNREAD = {
    "bitsandbytes": "codes of a table (NF4, FP4), or rows with separate outliers (LLM.int8())",
    "aqlm": "codebooks",
    "vptq": "codebooks",
    "higgs": "codebooks after a rotation",
    "spqr": "integers and a sparse matrix of outliers",
    "hqq": "float zero points in a packing by shape",
    "quanto": "tensors of quanto",
    "eetq": "columns in the order of a specific kernel",
    "bitnet": "ternary weights",
    "quark": "Quark's own layout",
    "mxfp8": "e4m3 in groups of 32",
    "exl2": "a layout for one kernel",
    "exl3": "a layout for one kernel",
    "mlx": "groups with float offsets",
}
# Suffixes that only quantized weights have. A float checkpoint with such a name has lost its config.
_QUANTIZED = (".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_zero_point")


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: third-party quantized, written by qao, or float.

    Args:
        path: a directory in Hugging Face's layout (config.json, safetensors files), a .safetensors file or an index of
            several (with config.json from the same directory, if there is one), or a .gguf file.

    Returns:
        The checkpoint. Shapes and dtypes of its tensors are checked; values are read on request.

    Raises:
        CheckpointError: no checkpoint was found, it is damaged, or qao has no kernel for its format. The message names
            the file and the tensor and says how to proceed.
        OSError: a file or the directory cannot be opened, for example without permission.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if path.suffix == ".gguf":
        checkpoint: Checkpoint = GgufCheckpoint(path, stacked=stacks_experts())
        return checkpoint
    if path.is_file() and path.suffix != ".safetensors" and not is_index(path):
        why = "is a pickle, which can execute arbitrary code" if path.suffix in PICKLES else "is not a checkpoint"
        raise CheckpointError(f"{path} {why}; qao reads .safetensors, their .index.json, .gguf, and their directories")
    files = TensorFiles(path)
    config = _read_config(files.directory)
    settings = take_settings(config, files.directory)
    if native.is_native(files.names):
        return SafetensorsCheckpoint("qao", config, files, native.read(files))
    method = "float" if settings is None else method_of(settings)
    if method == "float" and torchao.is_torchao(files.metadata):
        method, settings = "torchao", Settings({}, f"{path}: header")
    if settings is None:
        opened = SafetensorsCheckpoint("float", config, files)
    elif method == "mxfp4":
        opened = Mxfp4Checkpoint(config, files)
    elif method == "compressed-tensors":
        opened = SafetensorsCheckpoint(method, config, files, *read.read(files, settings))
    elif method == "modelopt":
        opened = SafetensorsCheckpoint(method, config, files, *modelopt.read(files, settings))
    else:
        method = method.replace("-", "_")
        if method not in _READERS:
            raise _unread(settings, method)
        opened = SafetensorsCheckpoint(method, config, files, _READERS[method](files, settings))
    for name in opened.others:
        dtype = opened.shape_dtype(name)[1]
        raw = settings is not None and dtype == torch.float8_e4m3fn
        raw |= method != "mxfp4" and name.endswith("weight") and not dtype.is_floating_point
        if raw or name.endswith(_QUANTIZED):
            why = (
                f"not of a {method} layer" if settings is not None else "config.json does not say how it was quantized"
            )
            raise files.error(name, f"is part of a quantized weight, but {why}; is config.json its own?")
    found = opened.others != files.names if method == "mxfp4" else opened.layers
    if settings is not None and not found:
        raise CheckpointError(f"{path}: {settings.where} says {method}, but no tensor is quantized that way")
    return opened


def open_to_quantize(path: str | os.PathLike[str]) -> Checkpoint:
    """As ``open_checkpoint``, but reads Q8_0 layers of a GGUF file as float, from which a scheme loses less."""
    path = Path(path)
    return GgufCheckpoint(path, dequantize=True) if path.suffix == ".gguf" and path.exists() else open_checkpoint(path)


def is_for_a_scheme(checkpoint: Checkpoint, embeddings: bool = False) -> bool:
    """Whether a checkpoint has layers to quantize: it is float, or a GGUF file with linear layers read as float.

    ``embeddings``: an embedding that is tied to the head counts too.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        return bool(checkpoint.linears) or (embeddings and bool(checkpoint.config["tie_word_embeddings"]))
    return checkpoint.format in ("float", "mxfp4")


def method_of(settings: Settings) -> str:
    """The quant_method in qao's spelling, or its value inferred from other entries."""
    values = settings.values
    if "quant_method" in values and values["quant_method"] is not None:
        method = settings.text("quant_method", "")
        return _ALIASES.get(method, method).replace("_", "-").replace("auto-round", "auto_round")
    if values.get("load_in_4bit") or values.get("load_in_8bit"):
        return "bitsandbytes"
    producer = values.get("producer")
    if values.get("quant_library") == "modelopt" or (isinstance(producer, dict) and producer.get("name") == "modelopt"):
        return "modelopt"
    return "none"


def _unread(settings: Settings, method: str) -> CheckpointError:
    known = ", ".join(_METHODS)
    if method == "none":
        return CheckpointError(f"{settings.where}: has no quant_method; {known} are supported")
    what = f", which has {_UNREAD[method]}" if method in _UNREAD else ""
    return CheckpointError(
        f"{settings.where}: quant_method {method!r:.40} is not supported{what}; {known} are. Take the float model and "
        "quantize it: scheme="
    )


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    return read_json(file) if file.exists() else {}


def take_settings(config: dict[str, Any], directory: Path) -> Settings | None:
    """Remove the quantization settings from the content of config.json and return them, or those of another file."""
    file = directory / "config.json"
    inner = config.get("text_config")  # multimodal models
    for holder in (config, inner if isinstance(inner, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            found = holder.pop(key, None)
            if found:
                return Settings(found, f"{file}: {key}")
    if isinstance(config.get("quantization"), dict) and "bits" in config["quantization"]:
        return Settings({"quant_method": "mlx", **config["quantization"]}, f"{file}: quantization")
    file = directory / "hf_quant_config.json"
    if file.exists():
        return modelopt.settings_of(read_json(file), str(file))
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        file = directory / name
        if file.exists():
            return Settings({"quant_method": method, **read_json(file)}, str(file))
    return None
