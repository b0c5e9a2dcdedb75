"""Mapping from tensors in files to tensors of a model: renamed, joined or split by transformers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.base import Checkpoint
from .common import Failure, one_line
from .skeleton import model_of


@dataclass
class Group:
    """Tensors of the file that together form tensors of the model."""

    target: str  # the first tensor of the model
    sources: list[str] = field(default_factory=list)  # names in the file, in the order of transformers' loader
    patterns: list[str] = field(default_factory=list)  # patterns of the converter, one per source
    converter: Any = None  # from transformers; None: the single source is the single target
    model: Any = None

    def read(self, source: Checkpoint) -> dict[str, Tensor]:
        """The tensors of the model by name."""
        return self.convert([float_tensor(source, name) for name in self.sources])

    def convert(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        if self.converter is None:
            return {self.target: tensors[0]}
        converter = copy.deepcopy(self.converter)
        for name, pattern, tensor in zip(self.sources, self.patterns, tensors, strict=True):
            converter.add_tensor(self.target, name, pattern, tensor)
        try:
            made = converter.convert(self.target, model=self.model, config=self.model.config)
        except Exception as error:  # transformers' operations raise many types for tensors that do not fit
            raise Failure(
                f"{self.sources[0]}: transformers cannot make {self.target} from it and {len(self.sources) - 1} more "
                f"tensors: {one_line(error)}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Names:
    """Mapping from tensors of a file to tensors of a model, as in transformers' loader.

    Attributes:
        groups: by name of a tensor of the model.
        left_over: names in the file without a tensor in the model.
    """

    def __init__(self, stored: Mapping[str, tuple[int, ...]], model: nn.Module) -> None:
        """``stored``: shapes of the tensors in the file, by name."""
        self.groups: dict[str, Group] = {}
        self.left_over: list[str] = []
        keys = sorted(stored, key=_natural_key())
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._known: dict[str, Any] = dict(shapes)
        rename, self.in_file, converters = _renaming(model, self._known)
        self._rename = rename
        by_target: dict[str, Group] = {}
        for key in keys:
            target, pattern = rename(key)
            if target not in shapes:
                self.left_over.append(key)
                continue
            group = by_target.setdefault(target, Group(target, model=model))
            if pattern is not None:
                group.converter = converters[pattern]
            elif group.sources:
                self.left_over.append(key)
                continue
            group.sources.append(key)
            group.patterns.append(pattern or key)
        for group in by_target.values():
            if group.converter is None:
                self.groups[group.target] = group
                continue
            empty = [torch.empty(stored[name], device="meta") for name in group.sources]
            self.groups.update(dict.fromkeys(group.convert(empty), group))

    def file_prefix(self, module: str) -> str:
        """The prefix of a quantized layer's tensors in the file.

        It is that of ".weight", also if the weight belongs to another module or several tensors. If transformers
        renames only the float weight (DeepSeek V4's head), it is the module's name.
        """
        group = self.groups.get(f"{module}.weight")
        prefix = self.in_file(f"{module}.weight").removesuffix(".weight")
        if group is not None and group.converter is None and group.sources[0].endswith(".weight"):
            prefix = group.sources[0].removesuffix(".weight")
        packed = f"{module}.qweight"
        self._known[packed] = ()
        return prefix if self._rename(f"{prefix}.qweight")[0] == packed else module


def float_tensor(source: Checkpoint, name: str) -> Tensor:
    """A float tensor of a file; a quantized (GGUF) weight is dequantized to float32."""
    layer = source.layers.get(name.removesuffix(".weight"))
    if layer is None or not name.endswith(".weight"):
        return source.tensor(name)
    tensors = layer.pack()
    n, k = layer.out_features, layer.in_features
    return layer.scheme.dequantize(tensors["qweight"], tensors["scales"], n, k, torch.float32)


def shape_dtype(source: Checkpoint, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    layer = source.layers.get(name.removesuffix(".weight"))
    if layer is None or not name.endswith(".weight"):
        return source.shape_dtype(name)
    return (layer.out_features, layer.in_features), torch.float32


def module_names(model: nn.Module) -> Callable[[str], str]:
    """Map from a layer name in a file to that in the model."""
    known = {f"{name}.weight": () for name, _ in model.named_modules(remove_duplicate=False)}
    rename, _, _ = _renaming(model, known)

    def named(layer: str) -> str:
        name, converter = rename(f"{layer}.weight")
        return layer if converter is not None else name.removesuffix(".weight")  # otherwise one of joined layers

    return named


def modules_of(source: Checkpoint, trust: bool = False) -> list[str]:
    """The model's names of the quantized layers in a checkpoint, in checkpoint order."""
    try:
        model = model_of(source, trust) if source.config else None
    except Failure:  # transformers does not know the model: use the file's names
        model = None
    return list(source.layers) if model is None else list(map(module_names(model), source.layers))


def stored_shapes(source: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes of all float tensors in a file, including layers that are quantized in GGUF."""
    keys = [*source.others, *(f"{name}.weight" for name in source.layers)]
    return {key: shape_dtype(source, key)[0] for key in keys}


def _natural_key() -> Callable[[str], Any]:
    """Sort key that compares numbers in names, for the order in which experts are stacked."""
    try:
        from transformers.core_model_loading import dot_natural_key
    except ImportError:
        return lambda name: [(part.isdigit(), int(part) if part.isdigit() else part) for part in name.split(".")]
    key: Callable[[str], Any] = dot_natural_key
    return key


_Rename = Callable[[str], tuple[str, str | None]]


def _renaming(model: nn.Module, known: dict[str, Any]) -> tuple[_Rename, Callable[[str], str], dict[str, Any]]:
    """Name mappings between file and model, and converters.

    Returns: from a name in the file to the model's first tensor and the converter's pattern; from a name in the model
    to the file, for one-to-one tensors; converters by pattern.
    """
    if not hasattr(model, "base_model_prefix"):
        return (lambda name: (name, None)), (lambda name: name), {}
    prefix: str = model.base_model_prefix  # type: ignore[assignment]
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return _renaming_4(model, prefix, known)
    # A fresh list each, since conversions record whether they matched.
    every: list[Any] = get_model_conversion_mapping(model)
    renamings = [one for one in every if isinstance(one, WeightRenaming)]
    converters = [one for one in every if isinstance(one, WeightConverter)]

    def rename(name: str) -> tuple[str, str | None]:
        found: tuple[str, str | None] = rename_source_key(name, renamings, converters, prefix, known)
        if found[0] not in known and name in known:  # must not be renamed
            found = rename_source_key(name, [], [], prefix, known)
        return found

    def in_file(name: str) -> str:
        used = [one for one in reversed(renamings) if getattr(one, "_was_used", True)]
        return str(rename_source_key(name, [one.reverse_transform() for one in used], [])[0])

    return rename, in_file, {pattern: one for one in converters for pattern in one.source_patterns}


def _renaming_4(
    model: nn.Module, prefix: str, known: dict[str, Any]
) -> tuple[_Rename, Callable[[str], str], dict[str, Any]]:
    """As version 4 of transformers, which neither renames nor joins."""
    mapping: dict[str, str] = getattr(model, "_checkpoint_conversion_mapping", None) or {}

    def rename(name: str) -> tuple[str, str | None]:
        for pattern, replacement in mapping.items():
            renamed, count = re.subn(pattern, replacement, name)
            if count:
                name = renamed
                break
        stripped = name.removeprefix(f"{prefix}.")
        if name not in known and stripped in known:
            name = stripped
        elif name not in known and f"{prefix}.{name}" in known:
            name = f"{prefix}.{name}"
        return name, None

    return rename, (lambda name: name), {}
