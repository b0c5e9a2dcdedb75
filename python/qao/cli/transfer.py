"""Tensor-by-tensor transfer between checkpoints, shared by ``quantize`` and ``convert``."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import files
from ..checkpoints.base import Checkpoint
from ..checkpoints.compressed_tensors.write import can_write, layer_tensors, quantization_config
from ..checkpoints.gguf.tokenizer import load_tokenizer
from ..checkpoints.native import header
from ..checkpoints.shard_writer import ShardWriter
from ..integrations.huggingface.config import QaoConfig
from ..nn.experts import QuantProjection
from ..nn.linear import QuantLinear
from ..nn.packed_module import PackedModule
from ..schemes import PackedWeight, Scheme
from .common import Failure, memory, one_line, progress, size
from .readable import check_readable
from .staging import staged

_RENEW = 128 << 20  # bytes read until the source is reopened: pages of a mapped file count as process memory
# Duplicate weights at the top of a directory: a float model, when the result is quantized.
_AGAIN = re.compile(
    r"((pytorch_model|model|tf_model|flax_model|rust_model|consolidated)[-._].*|.*\.(gguf|onnx|onnx_data|h5|msgpack|ot))$"
)
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".npz", ".ot"),
    *(".safetensors.index.json", ".bin.index.json", ".xml", ".tflite", ".mlmodel"),
)
_AGAIN_IN = ("onnx", "openvino", "original", "coreml", "metal", "gguf")  # folders with the weights in another format
_OF_TOOLS = (".git", ".cache", "__pycache__")  # folders of other tools, not part of a model
_CONFIGS = ("config.json", "quantize_config.json", "quant_config.json")


@dataclass
class Step:
    """A step that makes tensors of the result together, from the currently open source."""

    bytes: int  # approximate bytes read
    make: Callable[[Checkpoint], Mapping[str, Tensor]]


@dataclass
class Figures:
    """Statistics of a transfer."""

    bytes_read: int
    bytes_written: int  # tensors only
    seconds: float
    peak_memory: int  # bytes of the whole process

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rate = size(self.bytes_read / max(self.seconds, 1e-9))
        return (
            f"{size(self.bytes_read)} read, {size(self.bytes_written)} written in {self.seconds:.1f} s ({rate}/s), "
            f"peak memory {size(self.peak_memory)}"
        )


def transfer(
    args: argparse.Namespace,
    reopen: Callable[[], Checkpoint],
    steps: list[Step],
    config: dict[str, Any],
    layers: Mapping[str, Scheme],
    aliases: Mapping[str, str] | None = None,
    known: list[str] | None = None,
) -> Figures:
    """Run the steps and write the directory ``args.out``, with all other files of ``args.model``.

    ``layers``: schemes of the quantized layers by their names in the model. ``aliases``: further names of tensors in
    qao's layout, as ``qao.save`` writes them. ``known``: problems of the source, which the result may share. Raises
    Failure if the result could not be loaded.
    """
    if not args.shard_size > 0:
        args.parser.error(f"--shard-size {args.shard_size}: must be positive")
    begun = time.monotonic()
    total, fresh = sum(step.bytes for step in steps), 0
    with staged(args.out, args.model, args.force) as directory:
        source = reopen()
        written = ShardWriter(directory, header(aliases or {}), int(args.shard_size * 1e9))
        with written as writer, progress(args, total, args.command) as bar:
            for step in steps:
                writer.add(step.make(source))
                bar.set_postfix_str(f"memory {size(memory()['now'])}", refresh=False)
                bar.update(step.bytes)
                fresh += step.bytes
                if fresh > _RENEW:
                    source, fresh = reopen(), 0
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        check_readable(directory, layers, known or [], args.trust_remote_code)
        copy_others(args.model, directory)
    return Figures(total, writer.bytes, time.monotonic() - begun, memory()["peak"])


def copies(
    checkpoint: Checkpoint, names: Iterable[str], cast: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor
) -> list[Step]:
    """A step for each unchanged tensor, with an optional ``cast``."""

    def step(name: str) -> Step:
        return Step(tensor_bytes(checkpoint, name), lambda source: {name: cast(name, source.tensor(name))})

    return [step(name) for name in names]


def tensor_bytes(checkpoint: Checkpoint, name: str) -> int:
    shape, dtype = checkpoint.shape_dtype(name)
    return torch.Size(shape).numel() * dtype.itemsize


def encode(
    format: str,
    name: str,
    scheme: Scheme,
    n: int,
    k: int,
    packed: PackedWeight,
    dtype: torch.dtype,
    experts: int | None = None,
    bias: Tensor | None = None,
) -> dict[str, Tensor]:
    """The tensors of a layer on the CPU, by their names in a file of this format.

    ``experts``, ``bias``: for a projection of fused experts, which only qao's format supports.
    """
    host: Any = {key: None if tensor is None else tensor.cpu() for key, tensor in packed.tensors().items()}
    if experts is not None:
        assert format == "qao"
        projection = QuantProjection(experts, n, k, scheme, PackedWeight(**host), bias, dtype)
        return projection.state_dict(prefix=f"{name}.")
    if format == "qao":
        return PackedModule(n, k, scheme, PackedWeight(**host), dtype).state_dict(prefix=f"{name}.")
    layer = QuantLinear(k, n, scheme, PackedWeight(**host), None, dtype)
    return {f"{name}.{key}": tensor for key, tensor in layer_tensors(layer).items()}


def choose_format(
    wanted: str | None, layers: Mapping[str, Scheme], in_features: Mapping[str, int], unsupported_reason: str | None
) -> str:
    """The format of the result: compressed-tensors if it supports every layer, else qao's own.

    Raises:
        Failure: ``wanted`` is compressed-tensors, which does not support some layer.
    """
    if wanted == "qao":
        return wanted
    reasons = (f"{name}: {why}" for name, scheme in layers.items() if (why := can_write(scheme, in_features[name])))
    reason = unsupported_reason or next(reasons, None)
    if reason is None:
        return "compressed-tensors"
    if wanted:
        raise Failure(f"compressed-tensors cannot hold this: {reason}; use --to qao")
    warnings.warn(f"written in qao's own layout, because compressed-tensors cannot hold this: {reason}", stacklevel=2)
    return "qao"


def config_of(
    format: str, config: dict[str, Any], layers: Mapping[str, Scheme], linears: list[str], dtype: torch.dtype | None
) -> dict[str, Any]:
    """config.json of the result; ``linears``: names of the float layers, ``dtype``: a new dtype for float tensors."""
    if format == "qao":
        added = QaoConfig(layers=layers).to_dict()
    else:
        added = quantization_config(layers, linears)
    config = config | {"quantization_config": added}
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
    return config


def copy_others(model: Path, directory: Path) -> None:
    """Copy all other files of a model except its config, and warn of files that are not copied.

    These are the tokenizer, chat template, code and license, and the contents of folders: adapters, further modules.
    """
    if model.suffix == ".gguf":
        _tokenizer_of_gguf(model, directory)
        return
    folder = model if model.is_dir() else model.parent
    if not model.is_dir() and not (folder / "config.json").exists():
        return
    replaced = {model.name} if model.is_file() else set(weight_files(folder))
    left, broken = [], []
    for file in _files_in(folder, directory):
        inside = file.relative_to(folder)
        top = len(inside.parts) == 1
        if (top and (inside.name in replaced or inside.name in _CONFIGS)) or (directory / inside).exists():
            continue
        weights = inside.name.endswith(_WEIGHTS)
        if weights and (_AGAIN.match(inside.name) if top else inside.parts[0] in _AGAIN_IN):
            left.append(str(inside))
        elif not file.is_file():
            broken.append(str(inside))
        else:
            (directory / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, directory / inside)
    if left:
        warnings.warn(f"not copied, because they hold the model in another format: {', '.join(left)}", stacklevel=2)
    if broken:
        warnings.warn(f"not copied, because they are not files (broken links?): {', '.join(broken)}", stacklevel=2)


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files that open_checkpoint reads, and of their index."""
    indices = [file.name for file in folder.glob("*.safetensors.index.json")]
    return [*(file.name for file in files._in_directory(folder)), *(indices if len(indices) == 1 else [])]


def _files_in(folder: Path, directory: Path) -> Iterator[Path]:
    """All files in a folder and its subfolders, following links, except ``directory``."""
    seen = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in seen or real == os.path.realpath(directory):  # a cyclic link
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name not in _OF_TOOLS)
        yield from (Path(root, name) for name in sorted(names))


def _tokenizer_of_gguf(model: Path, directory: Path) -> None:
    try:
        load_tokenizer(model).save_pretrained(str(directory))
    except Exception as error:  # the weights are usable without one
        warnings.warn(f"no tokenizer was written: {one_line(error)}", stacklevel=2)
