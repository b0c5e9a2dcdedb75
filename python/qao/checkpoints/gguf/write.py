"""Writer of a language model as a GGUF file, which llama.cpp and qao read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base import Checkpoint, CheckpointError
from .architectures import ROWS, TOP
from .encode import encoded, type_of
from .file import TYPES, TensorInfo
from .model import EXPERTS, LONG_FACTORS, ROPE_FACTORS, Model, llama3_factors
from .rows import Architecture

_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}  # llama.cpp's enum llama_ftype
_SAME = {"mistral": "llama", "gemma3": "gemma3_text"}  # model types that llama.cpp treats alike
# Entries of config.json that do not change what a model computes.
_WITHOUT_EFFECT = re.compile(
    r".*(_token_id|dropout|initializer|use_cache|dtype|version|aux_loss|jitter|max_window_layers|pdrop).*|_.*|model_type|"
    r"architectures|output_.*|return_dict|pretraining_tp|chunk_size.*|id2label|label2id|problem_type|is_.*|sliding_window_pattern|"
    r"quantization_config|transformers_.*|rope_theta|rope_scaling|vocab_size|head_dim|name_or_path|layer_group.*|"
    r"num_nextn_predict_layers|num_mtp_layers|full_attn_idxs|block_multiple_of|block_ffn_dim_multiplier"
)


@dataclasses.dataclass
class Planned:
    """A file before it is written, with the interface of an open one.

    Attributes:
        sources: names in the checkpoint of a tensor of the file: one, or one per expert.
        parts: of tensors that are rows of a layer of all experts: which part of how many.
        floats: tensors that the file has and transformers computes.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    sources: dict[str, list[str]]
    floats: dict[str, Tensor]
    parts: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def bytes_of(self, tensor: TensorInfo) -> Tensor:
        return self.floats[tensor.name].view(torch.uint8)


@dataclasses.dataclass
class Written:
    """What was written: bytes of tensors, types of their number, and the largest change of a code in steps."""

    bytes: int
    types: Counter[str]
    worst: float


def plan(source: Checkpoint, path: Path, name: str) -> Planned:
    """Names, types and metadata of the file, without a tokenizer. Nothing is written.

    Raises:
        CheckpointError: llama.cpp has no such architecture or tensor, or would compute something else.
    """
    content = _content(source)
    kind = _SAME.get(content["model_type"], content["model_type"])
    written = [one for one, (_, about) in ROWS.items() if about.written]
    if kind in ROWS and kind not in written:
        raise CheckpointError(
            f"GGUF: models of model_type {kind!r} are read, but not written: use llama.cpp's convert_hf_to_gguf.py"
        )
    if kind not in ROWS:
        raise CheckpointError(f"GGUF: no architecture for model_type {kind!r}, only {', '.join(sorted(written))}")
    arch, about = ROWS[kind]
    config = _full_config(content)
    metadata, floats = _metadata(config, arch, about)
    made = Planned(path, {"general.type": "model", "general.name": name, **metadata}, {}, {}, floats)
    _plan_tensors(made, source, config, about)
    kind = Counter(tensor.type for tensor in made.tensors.values() if len(tensor.shape) > 1).most_common(1)[0][0]
    made.metadata["general.file_type"] = _FILE_TYPES.get(kind, 1)
    _check_config(made, config)
    return made


def write(made: Planned, source: Checkpoint, reopen: Callable[[], Checkpoint], done: Callable[[int], None]) -> Written:
    """Write the file, one tensor at a time. ``done``: called with the bytes of each.

    Raises:
        CheckpointError: a layer cannot be read or its scales do not fit.
        ImportError: the package gguf is not installed.
    """
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    model = Model(made)
    writer = GGUFWriter(made.path, made.metadata["general.architecture"])
    for key, value in made.metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, info in made.tensors.items():
        of = GGMLQuantizationType[info.type]
        writer.add_tensor_info(name, info.shape, np.dtype(np.float32), info.nbytes, of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    result, fresh = Written(0, Counter(), 0.0), 0
    for name, info in made.tensors.items():
        values, worst = _values(made, model, source, name)
        assert values.nbytes == info.nbytes, name
        writer.write_tensor_data(values.contiguous().view(torch.uint8).numpy())
        result.worst = max(result.worst, worst)
        result.bytes += info.nbytes
        result.types[info.type] += 1
        fresh += info.nbytes
        done(info.nbytes)
        if fresh > 128 << 20:  # pages of a mapped file count as process memory
            source, fresh = reopen(), 0
    writer.close()
    return result


def _content(source: Checkpoint) -> dict[str, Any]:
    """config.json of the language model."""
    content = source.config.get("text_config") if source.config.get("model_type") == "gemma3" else source.config
    if not content or "model_type" not in content:
        raise CheckpointError("GGUF needs the model's config.json, which names its architecture")
    return content


def _full_config(content: dict[str, Any]) -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(**content)
    if getattr(config, "block_auto_adjust_ff_dim", False):  # LFM2: a file has the size of the layers
        size = int(2 * config.intermediate_size / 3)
        if config.block_ffn_dim_multiplier is not None:
            size, multiple = int(config.block_ffn_dim_multiplier * size), config.block_multiple_of
            size = multiple * -(-size // multiple)
        config.intermediate_size, config.block_auto_adjust_ff_dim = size, False
    return config


def _rope(config: Any) -> dict[str, Any]:
    """Parameters of rotary embeddings, as in version 5 of transformers; Gemma 3: of layers with full attention.

    Without ``rope_theta``, the model has no such embeddings (BLOOM, StarCoder).
    """
    found = getattr(config, "rope_parameters", None)
    if found is None:  # version 4
        scaling = getattr(config, "rope_scaling", None) or {}
        theta = getattr(config, "rope_theta", None)
        found = {"rope_type": scaling.get("type", "default"), "rope_theta": theta, **scaling}
    return dict(found.get("full_attention", found))


def _metadata(config: Any, arch: str, about: Architecture) -> tuple[dict[str, Any], dict[str, Tensor]]:
    rope = _rope(config)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    share = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0) or 1.0)
    rotated = int(head_dim * share)
    norm = "layer_norm_epsilon" if about.layer_norm else "layer_norm_rms_epsilon"
    numbers: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": getattr(config, "max_position_embeddings", None),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        f"attention.{norm}": float(getattr(config, about.epsilon, 1e-5)),  # a constant in OLMo
        "rope.dimension_count": rotated,
        "rope.freq_base": None if rope.get("rope_theta") is None else float(rope["rope_theta"]),
    }
    numbers |= about.constants
    for entry in about.entries:
        value = getattr(config, entry.name, None)
        if value is not None:
            numbers[entry.key] = entry.kind(value)
    if about.keys is not None:
        numbers |= about.keys(config)
    if about.patterned and getattr(config, "sliding_window", None):
        numbers["attention.sliding_window_pattern"] = [one == "sliding_attention" for one in config.layer_types]
    if about.local_theta is not None:
        nested = getattr(config, "rope_parameters", None) or {}
        numbers["rope.freq_base_swa"] = float(nested.get("sliding_attention", rope)["rope_theta"])
    floats: dict[str, Tensor] = {}
    kind = rope.get("rope_type", "default")
    original: Any = rope.get("original_max_position_embeddings")
    original = original or getattr(config, "original_max_position_embeddings", None)
    if kind in ("linear", "yarn"):
        numbers |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        numbers |= {"rope.scaling.original_context_length": original} if kind == "yarn" else {}
        for name in {"beta_fast", "beta_slow"} & rope.keys() - about.yarn.keys():
            numbers[f"rope.scaling.yarn_{name}"] = float(rope[name])
    elif kind == "llama3":
        parameters = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        floats[ROPE_FACTORS] = llama3_factors(rotated, rope["rope_theta"], **{name: rope[name] for name in parameters})
    elif kind == "longrope":
        floats |= {name: torch.tensor(rope[key]) for key, name in LONG_FACTORS.items()}
        numbers["rope.scaling.original_context_length"] = original
        scale = config.max_position_embeddings / original
        numbers["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    elif kind != "default":
        raise CheckpointError(f"GGUF: rotary embeddings scaled by {kind!r} are not supported")
    if numbers["rope.freq_base"] is None:
        numbers = {key: value for key, value in numbers.items() if not key.startswith("rope.")}
    named = {f"{arch}.{key}": value for key, value in numbers.items()}
    return {"general.architecture": arch, "general.quantization_version": 2, **named}, floats


def _plan_tensors(made: Planned, source: Checkpoint, config: Any, about: Architecture) -> None:
    tied = bool(config.tie_word_embeddings)
    stored: dict[str, tuple[str, int | None]] = {}
    for name, stem in {**TOP, **about.top}.items():
        stored |= {f"{stem.module}.{kind}": (f"{name}.{kind}", None) for kind in stem.names}
    found = (getattr(config, name, None) for name in EXPERTS)
    counts = {"e": next((int(count) for count in found if count), 0), "n": config.num_attention_heads}
    counts["m"] = getattr(config, "num_key_value_heads", counts["n"])
    for block in range(config.num_hidden_layers):
        for name, stem in about.stems.items():
            experts: list[int | None] = list(range(counts[stem.shape[0]])) if "{}" in stem.module else [None]
            for expert in experts:
                if stem.split:
                    continue
                module = f"{about.layers}.{block}.{stem.module.format(expert)}"
                for kind, own in zip(("weight", "bias"), stem.names, strict=False):
                    stored[f"{module}.{own}"] = f"blk.{block}.{name}.{kind}", expert
    stacks = _stacks(config, about)
    for name, tensor in made.floats.items():
        made.tensors[name] = TensorInfo(name, "F32", tuple(tensor.shape), 0, tensor.nbytes)
    layers = [f"{name}.weight" for name, layer in source.layers.items() if layer.shares is None]
    for name in (*layers, *source.others):
        if tied and name == "lm_head.weight":
            continue
        if name in stacks:
            for part, own in enumerate(stacks[name]):
                made.sources[own], made.parts[own] = [name], (part, len(stacks[name]))
                made.tensors[own] = _info(source, name, own, len(stacks[name]))
            continue
        if name not in stored:
            raise CheckpointError(f"GGUF: {name} has no name in llama.cpp's architecture for {config.model_type}")
        own, expert = stored[name]
        made.sources.setdefault(own, []).append(name)
        info = _info(source, name, own)
        if own in made.tensors:
            if made.tensors[own].type != info.type or expert is None:
                raise CheckpointError(f"GGUF: experts of {own} are of several types, {made.tensors[own].type}, {info}")
        made.tensors[own] = info
    for name, names in made.sources.items():
        if len(names) > 1:
            names.sort(key=lambda one: stored[one][1] or 0)
            info = made.tensors[name]
            made.tensors[name] = dataclasses.replace(
                info, shape=(len(names), *info.shape), nbytes=len(names) * info.nbytes
            )


def _stacks(config: Any, about: Architecture) -> dict[str, list[str]]:
    """By the name of a layer of all experts, which transformers 5 has, the tensors of the file that have its rows."""
    made = {}
    for block in range(config.num_hidden_layers):
        for layer, names in (("up", ("ffn_gate_exps", "ffn_up_exps")), ("down", ("ffn_down_exps",))):
            stems = [about.stems.get(name) for name in names]
            if all(stem is not None and ".experts.{}" in stem.module for stem in stems):
                path = f"{about.layers}.{block}.{stems[0].module}".partition(".experts.")[0]  # type: ignore[union-attr]
                made[f"{path}.experts.{layer}.weight"] = [f"blk.{block}.{name}.weight" for name in names]
    return made


def _info(source: Checkpoint, name: str, own: str, parts: int = 1) -> TensorInfo:
    """``parts``: of a layer of all experts, how many tensors share its rows."""
    shape: tuple[int, ...]
    layer = source.layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
    if layer is not None:
        kind, shape = type_of(layer), (layer.out_features // parts, layer.in_features)
        shape = shape if layer.experts is None else (layer.experts, *shape)
    else:
        whole, dtype = source.shape_dtype(name)
        shape = tuple(one for one in whole if one != 1) or (1,)
        single = len(shape) == 1 or "_inp" in own or own.endswith("_norm.weight")  # llama.cpp has these in float32
        kind = "F32" if single else _FLOATS.get(dtype, "F32")
    _, block, size = next(row for row in TYPES.values() if row[0] == kind)
    return TensorInfo(own, kind, shape, 0, math.prod(shape) // block * size)


def _values(made: Planned, model: Model, source: Checkpoint, name: str) -> tuple[Tensor, float]:
    """The tensor in the file's row order, and how far its codes moved."""
    if name in made.floats:
        return made.floats[name].float(), 0.0
    info, parts, worst = made.tensors[name], [], 0.0
    for own in made.sources[name]:
        layer = source.layers.get(own.removesuffix(".weight")) if own.endswith(".weight") else None
        if layer is not None:
            values, error = encoded(layer, *made.parts.get(name, ()))
            worst = max(worst, error)
        else:
            dtype = next((dtype for dtype, kind in _FLOATS.items() if kind == info.type), torch.float32)
            values = source.tensor(own)
            values = (values.float() + model.norm_offset(name) if model.norm_offset(name) else values).to(dtype)
        order = model.row_order(name)
        parts.append(values if order is None else values[order.argsort()])
    return (parts[0] if len(parts) == 1 else torch.stack(parts)), worst


def _check_config(made: Planned, config: Any) -> None:
    """Raise CheckpointError if the file stands for a model with another config.

    What config.json has besides, such as notes of other tools, is not known to transformers and has no effect.
    """
    import transformers

    wanted, read = config.to_dict(), transformers.AutoConfig.for_model(**Model(made).config).to_dict()
    known = type(config)().to_dict()
    for key, value in wanted.items():
        if key not in known or _WITHOUT_EFFECT.fullmatch(key) or (key not in read and not value):
            continue
        if not _alike(value, read.get(key)):
            raise CheckpointError(
                f"GGUF: {made.metadata['general.architecture']} files cannot hold {key} = {value!r}: llama.cpp "
                f"computes with {read.get(key)!r}"
            )


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = (one.keys() | other.keys()) - {"type"}  # version 4 of transformers' name of rope_type
        missing = {"partial_rotary_factor": 1.0}
        return all(_alike(*(of.get(key, missing.get(key)) for of in (one, other))) for key in keys)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
