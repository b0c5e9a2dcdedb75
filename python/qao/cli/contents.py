"""The contents of a checkpoint, for ``inspect`` and ``convert``."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ..checkpoints.base import Checkpoint, CheckpointError, QuantizedLayer
from ..checkpoints.gguf.read import GgufCheckpoint
from ..nn.eligibility import is_linear
from ..quantization.report import common_name, table
from . import common
from .common import Failure, counted, size
from .names import Names, module_names, stored_shapes
from .skeleton import model_of

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in common.DTYPES}
_BIG = 0.01  # share of the parameters above which a float matrix gets a line
_GGUF_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EMBEDDINGS = ("embed", "wte", "wpe", "shared.weight")


@dataclass
class LayerFacts:
    name: str
    out_features: int
    in_features: int
    scheme: dict[str, Any]
    text: str  # the scheme, for people
    bytes: int  # all tensors in qao's layout; for GGUF, those of the file
    note: str | None
    relative_error: float | None = None  # ‖W - Ŵ‖ / ‖W‖, Frobenius
    bytes_in_memory: int = 0  # in qao's layout
    experts: int | None = None  # number of fused experts with these sizes, for a projection

    @property
    def parameters(self) -> int:
        return (self.experts or 1) * self.out_features * self.in_features

    @property
    def shape(self) -> str:
        return "x".join(str(one) for one in (self.experts, self.out_features, self.in_features) if one is not None)

    @property
    def bits(self) -> float:
        return 8 * self.bytes / self.parameters


@dataclass
class TensorFacts:
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass
class Contents:
    """Everything that ``inspect`` shows without reading values."""

    format: str
    layers: list[LayerFacts]
    floats: list[TensorFacts]
    notes: list[str]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Contents:
        return cls(
            checkpoint.format,
            [_layer_facts(checkpoint, layer) for layer in checkpoint.layers.values() if layer.shares is None],
            [_tensor_facts(checkpoint, name) for name in checkpoint.others],
            list(checkpoint.notes),
        )

    @property
    def parameters(self) -> int:
        return self.quantized_parameters + sum(torch.Size(one.shape).numel() for one in self.floats)

    @property
    def quantized_parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers) + sum(one.bytes for one in self.floats)

    @property
    def odd(self) -> list[str]:
        return [*self.notes, *_odd(self)]

    def to_dict(self) -> dict[str, Any]:
        layers = [asdict(layer) | {"bits_per_weight": layer.bits} for layer in self.layers]
        return {
            "format": self.format,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "layers": layers,
            "floats": [asdict(one) for one in self.floats],
            "odd": self.odd,
        }

    def __str__(self) -> str:
        lines = _layer_table(self.layers) if self.layers else []
        if self.floats:
            lines += ["", *_float_table(self.floats)]
        share = self.quantized_parameters / max(self.parameters, 1)
        bits = 8 * self.bytes / max(self.parameters, 1)
        layers = f"{counted(len(self.layers), 'quantized layer')} with {share:.1%} of"
        lines += [
            "",
            f"{self.format}: {layers if self.layers else 'no quantized layers,'} {self.parameters:,} parameters",
            f"{size(self.bytes)} in all, {bits:.2f} bits per parameter",
        ]
        held = sum(layer.bytes_in_memory for layer in self.layers)
        if self.format == "gguf":
            lines.append(f"the layers take {size(held)} in memory on a CPU")
        return "\n".join([*lines, *(f"odd: {text}" for text in self.odd)]).lstrip("\n")


def float_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The activation dtype of a model: from config.json, or that of most float tensors."""
    inner = checkpoint.config.get("text_config")
    for holder in (checkpoint.config, inner if isinstance(inner, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if holder.get(key) in DTYPES:
                return DTYPES[holder[key]]
    dtypes = Counter(
        dtype for name in checkpoint.others if (dtype := checkpoint.shape_dtype(name)[1]) in DTYPES.values()
    )
    return dtypes.most_common(1)[0][0] if dtypes else torch.float32


def float_linears(checkpoint: Checkpoint, trust: bool = False) -> list[str]:
    """Names of the float linear layers; for a model that cannot be built, of every candidate matrix."""
    try:
        model = model_of(checkpoint, trust)
        quantized = set(map(module_names(model), checkpoint.layers))
        modules = model.named_modules()
        return [name for name, module in modules if is_linear(module) and name not in quantized]
    except Failure:
        matrices = (name for name in checkpoint.others if len(checkpoint.shape_dtype(name)[0]) == 2)
        return [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]


def packed_bytes(layer: QuantizedLayer) -> int:
    sizes = layer.out_features, layer.in_features
    packed = layer.scheme.empty(*sizes, dtype=torch.float32, device="meta", experts=layer.experts)
    return sum(tensor.nbytes for tensor in packed.tensors().values() if tensor is not None)


def _layer_facts(checkpoint: Checkpoint, layer: QuantizedLayer) -> LayerFacts:
    sizes, scheme = (layer.out_features, layer.in_features), layer.scheme
    held = packed_bytes(layer)
    stored = checkpoint.stored(layer.name) if isinstance(checkpoint, GgufCheckpoint) else None
    facts: dict[str, Any] = {"experts": layer.experts, "bytes_in_memory": held}
    count = held if stored is None else stored[1]
    return LayerFacts(layer.name, *sizes, scheme.to_dict(), str(scheme), count, layer.note, **facts)


def _tensor_facts(checkpoint: Checkpoint, name: str) -> TensorFacts:
    shape, dtype = checkpoint.shape_dtype(name)
    text, count = str(dtype).removeprefix("torch."), torch.Size(shape).numel() * dtype.itemsize
    if isinstance(checkpoint, GgufCheckpoint):
        kind, count = checkpoint.stored(name)
        text = _GGUF_FLOATS.get(kind, kind)
    return TensorFacts(name, tuple(shape), text, count)


def _family(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _layer_table(layers: list[LayerFacts]) -> list[str]:
    groups: dict[tuple[Any, ...], list[LayerFacts]] = defaultdict(list)
    for one in layers:
        groups[_family(one.name), one.shape, one.text, one.note].append(one)
    rows = []
    for group in groups.values():
        errors = [one.relative_error for one in group if one.relative_error is not None]
        low, high = (f"{error:.4f}" for error in (min(errors), max(errors))) if errors else ("-", "-")
        rows.append(
            (
                common_name([one.name for one in group]),
                group[0].shape,
                group[0].text,
                size(sum(one.bytes for one in group)),
                f"{group[0].bits:.2f}",
                low if low == high else f"{low}..{high}",
                group[0].note or "",
            )
        )
    return table(("layer", "shape", "scheme", "bytes", "bits/weight", "error", "note"), rows)


def _float_table(floats: list[TensorFacts]) -> list[str]:
    groups: dict[tuple[Any, ...], list[TensorFacts]] = defaultdict(list)
    for one in floats:
        groups[_family(one.name), one.shape, one.dtype].append(one)
    rows = [
        (
            common_name([one.name for one in group]),
            "x".join(map(str, group[0].shape)) or "scalar",
            group[0].dtype,
            size(sum(one.bytes for one in group)),
        )
        for group in groups.values()
    ]
    return table(("float", "shape", "dtype", "bytes"), rows)


def _odd(contents: Contents) -> Iterator[str]:
    families: dict[str, set[str]] = defaultdict(set)
    for layer in contents.layers:
        families[_family(layer.name)].add(layer.text)
    likes: dict[tuple[Any, ...], list[TensorFacts]] = defaultdict(list)
    for one in contents.floats:
        family = _family(one.name.removesuffix(".weight"))
        if one.name.endswith(".weight") and family in families:
            families[family].add(one.dtype)
        likes[_family(one.name), one.shape, one.dtype].append(one)
    for (family, shape, dtype), group in likes.items():
        embedding = any(word in family.lower() for word in _EMBEDDINGS)
        share = len(group) * torch.Size(shape).numel() / max(contents.parameters, 1)
        big = contents.layers and len(shape) >= 2 and share >= _BIG and not embedding
        if big or (dtype not in DTYPES and contents.format != "gguf"):
            name = common_name([one.name for one in group])
            yield f"{name} {list(shape)}: {dtype}, {share:.1%} of the parameters"
    for family, kinds in families.items():
        if len(kinds) > 1:
            yield f"{family} differs between blocks: {', '.join(sorted(kinds))}"


def check(checkpoint: Checkpoint, contents: Contents, against: FloatModel | None) -> Iterator[str]:
    """Read all values and yield their errors. Fills in the differences from a float model."""
    for facts in contents.layers:
        layer = checkpoint.layers[facts.name]
        try:
            tensors = layer.pack()
            if against is not None:
                facts.relative_error = _relative_error(layer, tensors, against)
        except (CheckpointError, Failure) as error:
            yield str(error)
    for one in contents.floats:
        tensor = checkpoint.tensor(one.name)
        if tensor.is_floating_point() and tensor.numel() and not torch.isfinite(tensor.float()).all():
            yield f"{one.name} holds NaN or Inf"


def _relative_error(layer: QuantizedLayer, tensors: dict[str, torch.Tensor], against: FloatModel) -> float:
    """‖W - Ŵ‖ / ‖W‖ over the weights of all experts."""
    sizes, dtype = (layer.out_features, layer.in_features), torch.float32
    qweight, scales = tensors["qweight"], tensors["scales"]
    if layer.experts is None:
        weight = layer.scheme.dequantize(qweight, scales, *sizes, dtype)
        return _error(weight, against.weight(layer))
    pairs = zip(qweight, scales, strict=True)
    weight = torch.stack([layer.scheme.dequantize(w, s, *sizes, dtype) for w, s in pairs])
    return _error(weight, against.weight(layer))


class FloatModel:
    """The weights of a float model under the names of the layers in its quantized checkpoint."""

    def __init__(self, source: Checkpoint, trust: bool = False) -> None:
        self._source = source
        self._model: nn.Module | None = None
        if source.config:
            try:
                self._model = model_of(source, trust)
            except Failure:  # unknown to transformers: use the names in its files
                self._model = None
        self._names = None if self._model is None else Names(stored_shapes(source), self._model)
        self._module = (lambda name: name) if self._model is None else module_names(self._model)

    def weight(self, layer: QuantizedLayer) -> torch.Tensor:
        """The float weight of a layer. Raises Failure if there is none of the same sizes."""
        sizes = layer.out_features, layer.in_features
        shape = sizes if layer.experts is None else (layer.experts, *sizes)
        for name in self._called(layer):
            if self._names is not None and name in self._names.groups:
                weight = self._names.groups[name].read(self._source)[name]
            elif name in self._source.others:
                weight = self._source.tensor(name)
            else:
                continue
            if tuple(weight.shape) not in (shape, shape[:-2] + sizes[::-1]):
                raise Failure(f"{layer.name}: the float model has {list(weight.shape)}, not {list(shape)}")
            return weight
        raise Failure(f"{layer.name}: the float model has no {layer.name}.weight")

    def _called(self, layer: QuantizedLayer) -> list[str]:
        names = [layer.name, self._module(layer.name)]
        if layer.experts is None:
            return [f"{name}.weight" for name in names]
        keys = ("down_proj",) if layer.name.endswith(".down") else ("gate_up_proj", "up_proj")
        return [f"{name.rpartition('.')[0]}.{key}" for name in names for key in keys]


def _error(weight: torch.Tensor, reference: torch.Tensor) -> float:
    """‖W - Ŵ‖ / ‖W‖. GPT-2 and similar models store W transposed, which a square shape does not show."""
    reference = reference.double()
    sides = [side for side in (reference, reference.mT) if side.shape == weight.shape]
    norm = reference.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return min(float((weight - side).norm() / norm) for side in sides)
