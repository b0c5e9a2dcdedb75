"""Plan for quantizing a float checkpoint: the result of every tensor."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoints.base import Checkpoint
from ..checkpoints.compressed_tensors.write import unread_by_engines
from ..nn.eligibility import is_linear
from ..nn.embedding import QuantEmbedding
from ..nn.experts import QuantExperts, QuantProjection, quantize_projection
from ..nn.linear import QuantLinear, kernel_bias
from ..nn.marker import MARKER, TRIPWIRE
from ..nn.packed_module import PackedModule
from ..quant_primitives.importance import importance_part, importance_sources, inferred_importance
from ..quantization.quantize import quantize_
from ..quantization.report import Report
from ..schemes import Int4Weight, PackedWeight, Scheme
from .common import Failure, counted
from .contents import DTYPES
from .names import Group, Names, float_tensor, shape_dtype, stored_shapes
from .skeleton import skeleton
from .transfer import Step, encode

_FLOATS = (*DTYPES.values(), torch.float64)
_SHARED = ("qweight", "scales", MARKER, TRIPWIRE)  # shared by tied modules, stored once in a file


class _Projection(NamedTuple):
    """A projection of fused experts: the float tensors that form it."""

    weight: str
    bias: str | None
    transposed: bool


class Plan:
    """The layers that ``quantize_`` would quantize, and how to read and convert each.

    Without ``requantize``, layers that qao can hold in their GGUF format keep their values, as in
    ``qao.from_pretrained``.

    Attributes:
        report: the report of ``quantize_``; the steps fill in the errors.
        layers: scheme of every quantized module by its name in the model.
        in_features: K of each.
        linears: names of the linear layers that stay in float.
        aliases: names in qao's layout of tensors that the file stores only under another name.
        unsupported_reason: why compressed-tensors cannot hold the result; None if it may.
        problems: mismatches of file and model that would also fail on loading, in tensors that stay unchanged.

    Raises:
        Failure: there are no layers to quantize, or the file lacks one that the config has.
        ValueError: a pattern of ``exclude`` matches no module.
    """

    def __init__(
        self,
        source: Checkpoint,
        scheme: Scheme,
        *,
        exclude: Sequence[str] = (),
        embeddings: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        trust: bool = False,
        requantize: bool = False,
    ) -> None:
        self._dtype, self._device, self._usual = dtype, device, dtype or _usual_dtype(source)
        self._stored = {} if requantize else dict(source.layers)
        model = skeleton(source, trust)
        model.to(self._usual)
        self._names = Names(stored_shapes(source), copy.deepcopy(model))  # conversions need the float modules
        self.problems = [f"{name} is missing" for name in model.state_dict() if name not in self._names.groups]
        self.problems += [f"{name} is not a tensor of the model" for name in self._names.left_over]
        # Parts of tensor names that transformers keeps in float32, regardless of the model's dtype.
        kept = (getattr(model, name, None) or () for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
        self._kept = {part for parts in kept for part in parts}
        # transformers' Conv1D, with weight [K, N].
        self._transposed = {
            name for name, module in model.named_modules() if is_linear(module) and not isinstance(module, nn.Linear)
        }
        schemes: Any = scheme
        if exclude or self._stored:
            # The last pattern differs from any that users write, so that equal keys do not collide.
            stored = {name: layer.scheme for name, layer in self._stored.items()}
            schemes = {**stored, **{name: None for name in exclude if name not in stored}, "re:(?:.*)": scheme}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "quantize_: no layer was quantized")  # reported as an error below
            warnings.filterwarnings("ignore", "quantize_: these big weights")  # rows of the report
            self.report: Report = quantize_(model, schemes, embeddings=embeddings, progress=False)
        for row in self.report.rows:
            row.note = row.note and row.note.replace("embeddings=True", "--embeddings")
        self._modules = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}
        if self._modules.keys() == self._stored.keys():
            raise Failure("; ".join(("no layers to quantize", *self.report.reasons)))
        self._projections = dict(_projections(model))
        rows = {row.name: row for row in self.report.rows}
        of = {name: one.weight for name, one in self._projections.items()}
        self._rows = {name: rows[of.get(name, name)] for name in self._modules}
        for name in self._stored:
            self._rows[name].status, self._rows[name].note = "already quantized", "as in the file"
        self.linears = [name for name, module in model.named_modules() if is_linear(module)]
        self._held = self._find()
        self._prefix = {name: self._names.file_prefix(held) for name, held in self._held.items()}
        self.layers = {name: self._scheme(source, name) for name in self._modules}
        self.in_features = {name: module._sizes[1] for name, module in self._modules.items()}
        self.unsupported_reason = self._unsupported_reason()
        self.aliases = self._aliases()

    def steps(self, source: Checkpoint, format: str) -> list[Step]:
        """The steps that make all tensors of the result from those of ``source``."""
        made = {self._weight(name) for name in self._modules}
        made |= {one.bias for one in self._projections.values() if one.bias is not None}
        groups = {id(group): group for group in self._names.groups.values()}
        taken = {id(self._names.groups[name]) for name in made if name in self._names.groups}
        result = [self._copy(source, name) for name in self._names.left_over]
        for key, group in groups.items():
            if key not in taken:
                result += [self._copy(source, name, group.target) for name in group.sources]
        for name, group in self._names.groups.items():  # joined with a quantized tensor in the file
            if id(group) in taken and name not in made:
                result.append(self._part(source, name))
        for names in self._tied().values():
            first = next(name for name in names if self._holds(name))
            result.append(self._layer(source, format, first, names))
        return result

    def _copy(self, source: Checkpoint, name: str, target: str | None = None) -> Step:
        """Copy a tensor, with a cast if needed; ``target``: its name in the model."""

        def make(source: Checkpoint) -> dict[str, Tensor]:
            return {name: self._cast(target or name, float_tensor(source, name))}

        return Step(_bytes(source, [name]), make)

    def _part(self, source: Checkpoint, name: str) -> Step:
        def make(source: Checkpoint) -> dict[str, Tensor]:
            return {self._names.in_file(name): self._tensor(source, name).contiguous()}

        return Step(_bytes(source, self._names.groups[name].sources), make)

    def _layer(self, source: Checkpoint, format: str, first: str, names: list[str]) -> Step:
        count = _bytes(source, self._group(first).sources)
        if first in self._projections:
            return Step(count, partial(self._experts, first))
        module = self._modules[first]
        if first in self._stored:
            return Step(count, partial(self._as_stored, format, first))

        def make(source: Checkpoint) -> dict[str, Tensor]:
            weight = self._read(source, first)
            packed = module.scheme.quantize(
                weight.to(self._device), self._prefix[first], self._importance(source, first)
            )
            tensors: dict[str, Tensor] = {}
            for name in names:
                self._rows[name].relative_error = packed.relative_error
                own = packed
                if isinstance(self._modules[name], QuantEmbedding):  # an embedding has no weight sums
                    own = PackedWeight(packed.qweight, packed.scales)
                tensors |= encode(format, self._prefix[name], module.scheme, *module._sizes, own, weight.dtype)
            return {key: tensor for key, tensor in tensors.items() if key not in self.aliases}

        return Step(count, make)

    def _as_stored(self, format: str, name: str, source: Checkpoint) -> dict[str, Tensor]:
        layer = source.layers[name]
        tensors: Any = layer.pack()
        sizes = layer.out_features, layer.in_features
        return encode(format, self._prefix[name], layer.scheme, *sizes, PackedWeight(**tensors), self._usual)

    def _experts(self, name: str, source: Checkpoint) -> dict[str, Tensor]:
        """A projection of fused experts in qao's layout."""
        module, parts = self._modules[name], self._projections[name]
        weight = self._tensor(source, parts.weight)
        shape = tuple((weight.mT if parts.transposed else weight).shape) if weight.dim() == 3 else ()
        if shape != module.shape or weight.dtype not in _FLOATS:
            raise Failure(
                f"{parts.weight} is {weight.dtype}{list(weight.shape)} in the file; the config says float of "
                f"shape {list(module.shape)}"
            )
        bias = None if parts.bias is None else kernel_bias(self._tensor(source, parts.bias), torch.device("cpu"))
        packed = quantize_projection(weight, module.scheme, parts.transposed, self._device, parts.weight)
        self._rows[name].relative_error = packed.relative_error
        prefix, sizes = self._prefix[name], module._sizes
        return encode("qao", prefix, module.scheme, *sizes, packed, weight.dtype, len(weight), bias)

    def _read(self, source: Checkpoint, name: str) -> Tensor:
        """The float weight [N, K] of a module."""
        sizes = self._modules[name]._sizes
        weight = self._tensor(source, self._weight(name))
        weight = weight.t() if name in self._transposed else weight
        if tuple(weight.shape) != sizes or weight.dtype not in _FLOATS:
            found = f"{weight.dtype}{list(weight.shape)}"
            prefix = self._prefix[name]
            raise Failure(f"{prefix}.weight is {found} in the file; the config says float of shape {list(sizes)}")
        return weight

    def _tensor(self, source: Checkpoint, name: str) -> Tensor:
        """A tensor of the float model in its target dtype."""
        return self._cast(name, self._names.groups[name].read(source)[name])

    def _weight(self, name: str) -> str:
        """The name of the module's weight in the float model."""
        parts = self._projections.get(name)
        return f"{self._held.get(name, name)}.weight" if parts is None else parts.weight

    def _group(self, name: str) -> Group:
        return self._names.groups[self._weight(name)]

    def _holds(self, name: str) -> bool:
        """Whether the file has the weight of a module under this name or an alias of the module."""
        return self._weight(name) in self._names.groups

    def _importance(self, source: Checkpoint, name: str) -> Tensor | None:
        """Importance as in ``quantize_``, inferred from the weights of neighboring layers."""
        others, scheme = importance_sources(name), self._modules[name].scheme
        searched = isinstance(scheme, Int4Weight) and scheme.clip_search
        quantized = self.in_features.keys() - self._stored.keys()  # quantized from float
        if not searched or not quantized >= set(others):
            return None
        weights = (self._tensor(source, self._weight(other)) for other in others)
        return inferred_importance([importance_part(weight, name) for weight in weights], self.in_features[name])

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        stays = self._dtype is None or tensor.dtype not in _FLOATS or not self._kept.isdisjoint(name.split("."))
        return tensor if stays else tensor.to(self._dtype)

    def _tied(self) -> dict[int, list[str]]:
        """Names of the modules of each weight."""
        groups: dict[int, list[str]] = {}
        for name, module in self._modules.items():
            groups.setdefault(id(module.qweight), []).append(name)
        return groups

    def _find(self) -> dict[str, str]:
        """For each module, the name under which the file has its weight; its own name if there is none."""
        found: dict[str, str] = {}
        missing = []
        for names in self._tied().values():
            for name in names:
                called = [name, *self._rows[name].aliases]
                found[name] = next((one for one in called if f"{one}.weight" in self._names.groups), name)
            parts = next((self._projections[name] for name in names if name in self._projections), None)
            needed = [f"{found[name]}.weight" for name in names] if parts is None else [parts.weight]
            if not any(name in self._names.groups for name in needed):
                missing.append(names[0] if parts is None else parts.weight)
            elif parts is not None and parts.bias is not None and parts.bias not in self._names.groups:
                missing.append(parts.bias)
        if missing:
            listed = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
            held = ", ".join(self._names.left_over[:3])
            count = counted(len(missing), "layer")
            raise Failure(
                f"the file lacks the weights of {count} that config.json has ({listed})"
                + (f"; it has others, which this model does not use: {held}" if held else "")
            )
        return found

    def _scheme(self, source: Checkpoint, name: str) -> Scheme:
        """The scheme, as exact as skeleton.describe: int4 includes the dtype of its scales."""
        if name in self._stored:
            return self._stored[name].scheme
        scheme = self._modules[name].scheme
        if isinstance(scheme, Int4Weight):
            weight = self._weight(next(one for one in self._tied_to(name) if self._holds(one)))
            _, dtype = shape_dtype(source, self._names.groups[weight].sources[0])
            scale_dtype = scheme.scale_dtype_of(self._cast(weight, torch.empty(0, dtype=dtype)).dtype)
            scheme = replace(scheme, scale_dtype=scale_dtype)
        return scheme

    def _tied_to(self, name: str) -> list[str]:
        """The module and all modules that share its weight."""
        weight = self._modules[name].qweight
        return [other for other, module in self._modules.items() if module.qweight is weight]

    def _aliases(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for names in self._tied().values():
            first = next(self._prefix[name] for name in names if self._holds(name))
            others = {self._prefix[name] for name in names if not self._holds(name)}
            found |= {f"{prefix}.{key}": f"{first}.{key}" for prefix in others - {first} for key in _SHARED}
        return found

    def _unsupported_reason(self) -> str | None:
        for name, module in self._modules.items():
            if isinstance(module, QuantEmbedding):
                return f"{name} is a quantized embedding"
            if isinstance(module, QuantProjection):
                return f"{name} is a projection of fused experts"
            if isinstance(module, QuantLinear) and module.stands_for != "Linear":
                return f"{name} is a {module.stands_for}, no Linear"
            scheme = module.scheme
            if name in self._stored and isinstance(scheme, Int4Weight) and not scheme.symmetric:
                return "zero points of Q4_1 are not integers; --requantize quantizes these layers too"
            if isinstance(scheme, Int4Weight) and not scheme.symmetric and not scheme.whole_zeros:
                return "its zero points are not integers; --for vllm (or --set whole_zeros=true) rounds them"
            if reason := unread_by_engines(scheme):
                return reason
        return "several layers share a weight" if len(self._tied()) < len(self._modules) else None


def _projections(model: nn.Module) -> Iterator[tuple[str, _Projection]]:
    """Projections of quantized experts, by module name."""
    for name, module in model.named_modules():
        if isinstance(module, QuantExperts):
            transposed: bool = module.skeleton().is_transposed  # type: ignore[assignment]
            own = {id(child): key for key, child in module.named_children()}
            for key, projection in module.projections().items():
                bias = None if projection.bias is None else f"{name}.{key}_bias"
                yield f"{name}.{own[id(projection)]}", _Projection(f"{name}.{key}", bias, transposed)


def _usual_dtype(source: Checkpoint) -> torch.dtype:
    dtypes = [source.shape_dtype(name)[1] for name in source.others]
    floats = Counter(dtype for dtype in dtypes if dtype in _FLOATS)
    return floats.most_common(1)[0][0] if floats else torch.float32


def _bytes(source: Checkpoint, names: Sequence[str]) -> int:
    """Approximate number of bytes read for these tensors."""
    found = [(name.removesuffix(".weight") in source.layers, *shape_dtype(source, name)) for name in names]
    return sum(torch.Size(shape).numel() * (1 if packed else dtype.itemsize) for packed, shape, dtype in found)
