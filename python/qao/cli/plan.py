"""What becomes of every tensor of a float checkpoint that is quantised."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import grouping
from ..checkpoints.base import Checkpoint
from ..embedding import QuantEmbedding
from ..formats import Int4Weight, PackedWeight, Scheme
from ..importance import told_by, told_importance, told_part
from ..linear import is_linear
from ..marker import MARKER, TRIPWIRE
from ..packed import PackedModule
from ..quantize import quantize_
from ..report import Report
from .common import DTYPES, Failure
from .skeleton import skeleton
from .transfer import Step, copies, encode, tensor_bytes

_FLOATS = (*DTYPES.values(), torch.float64)
_SHARED = ("qweight", "scales", MARKER, TRIPWIRE)  # what tied modules have in common, which a file holds once


class Plan:
    """Which layers ``quantize_`` would quantise, and how each is read and made.

    Attributes:
        report: that of ``quantize_``; the steps fill in the errors.
        layers: scheme of every quantised module by name.
        in_features: K of each.
        linears: names of the linear layers that stay in float.
        aliases: in qao's layout, names of tensors that the file holds under another name only.
        obstacle: why the result is nothing for compressed-tensors; None if it may be.

    Raises:
        Failure: no layer is to be quantised, or the file lacks one that the config has.
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
    ) -> None:
        self._dtype, self._device = dtype, device
        model = skeleton(source)
        model.to(dtype or _usual_dtype(source))
        # Parts of names whose tensors transformers keeps in float32, whatever the dtype of the model.
        kept = (getattr(model, name, None) or () for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
        self._kept = {part for parts in kept for part in parts}
        # Conv1D of transformers, with weight [K, N].
        self._transposed = {
            name for name, module in model.named_modules() if is_linear(module) and not isinstance(module, nn.Linear)
        }
        schemes: Any = scheme
        if grouping.is_auto(scheme):
            options: Any = {"exclude": exclude, "embeddings": embeddings, "dtype": dtype, "device": device}
            schemes = Plan(source, grouping.fixed(scheme, 128), **options)._with_groups(source, scheme)
        if exclude:
            # The last pattern is one that nobody writes: of two equal keys one would be lost.
            rest = schemes if isinstance(schemes, dict) else {"re:(?:.*)": schemes}
            schemes = {**dict.fromkeys(exclude), **rest}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "quantize_: no layer was quantised")  # an error, below
            self.report: Report = quantize_(model, schemes, embeddings=embeddings, progress=False)
        self._rows = {row.name: row for row in self.report.rows}
        self._modules = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}
        if not self._modules:
            raise Failure("; ".join(("no layer is to be quantised", *self.report.reasons)))
        self.linears = [name for name, module in model.named_modules() if is_linear(module)]
        self._prefix = self._find(source)
        self.layers = {name: self._scheme(source, name) for name in self._modules}
        self.in_features = {name: module._sizes[1] for name, module in self._modules.items()}
        self.obstacle = self._obstacle()
        self.aliases = self._aliases(source)

    def steps(self, source: Checkpoint, format: str) -> list[Step]:
        """How to make all tensors of the result from those of ``source``."""
        own = {f"{prefix}.weight" for prefix in self._prefix.values()}
        result = copies(source, [name for name in source.others if name not in own], self._cast)
        for names in self._tied().values():
            first = next(name for name in names if _holds(source, self._prefix[name]))
            result.append(self._layer(source, format, first, names))
        return result

    def _layer(self, source: Checkpoint, format: str, first: str, names: list[str]) -> Step:
        prefix, module = self._prefix[first], self._modules[first]

        def make(source: Checkpoint) -> dict[str, Tensor]:
            weight = self._read(source, first)
            packed = module.scheme.quantize(weight.to(self._device), prefix, self._importance(source, first))
            tensors: dict[str, Tensor] = {}
            for name in names:
                self._rows[name].relative_error = packed.relative_error
                own = packed
                if isinstance(self._modules[name], QuantEmbedding):  # it has no sums of the weight
                    own = PackedWeight(packed.qweight, packed.scales)
                tensors |= encode(format, self._prefix[name], module.scheme, *module._sizes, own, weight.dtype)
            return {key: tensor for key, tensor in tensors.items() if key not in self.aliases}

        return Step(_layer_bytes(source, prefix), make)

    def _read(self, source: Checkpoint, name: str) -> Tensor:
        """The float weight [N, K] of a module."""
        prefix, sizes = self._prefix[name], self._modules[name]._sizes
        weight = self._cast(f"{prefix}.weight", _weight(source, prefix))
        weight = weight.t() if name in self._transposed else weight
        if tuple(weight.shape) != sizes or weight.dtype not in _FLOATS:
            found = f"{weight.dtype}{list(weight.shape)}"
            raise Failure(f"{prefix}.weight is {found}, and the config makes it float of shape {list(sizes)}")
        return weight

    def _with_groups(self, source: Checkpoint, scheme: Scheme) -> dict[str, Scheme]:
        """``scheme`` with a group size for each module, as ``quantize_`` chooses them."""
        found, elements = [], []
        tied = list(self._tied().values())
        for names in tied:
            first = next(name for name in names if _holds(source, self._prefix[name]))
            weight = self._read(source, first)
            importance = self._importance(source, first)
            errors = grouping.weight_errors(weight.to(self._device), scheme, self._prefix[first], importance)
            found.append(grouping.options_of(weight.shape, weight.dtype, scheme, errors))
            elements.append(weight.numel())
        sizes = grouping.choose(found, elements, scheme)
        return {name: grouping.fixed(scheme, size) for names, size in zip(tied, sizes, strict=True) for name in names}

    def _importance(self, source: Checkpoint, name: str) -> Tensor | None:
        """As ``quantize_`` finds it, from the weights of layers beside this one."""
        others = told_by(name)
        if not self.in_features.keys() >= set(others):
            return None
        prefixes = [self._prefix[other] for other in others]
        weights = (self._cast(f"{prefix}.weight", _weight(source, prefix)) for prefix in prefixes)
        return told_importance([told_part(weight, name) for weight in weights], self.in_features[name])

    def _dtype_of(self, source: Checkpoint, prefix: str) -> torch.dtype:
        """That ``_cast`` will give its weight."""
        name = f"{prefix}.weight"
        dtype = torch.float32 if prefix in source.layers or name not in source.others else source.shape_dtype(name)[1]
        return self._cast(name, torch.empty(0, dtype=dtype)).dtype

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        stays = self._dtype is None or tensor.dtype not in _FLOATS or not self._kept.isdisjoint(name.split("."))
        return tensor if stays else tensor.to(self._dtype)

    def _tied(self) -> dict[int, list[str]]:
        """Names of the modules of each weight."""
        groups: dict[int, list[str]] = {}
        for name, module in self._modules.items():
            groups.setdefault(id(module.qweight), []).append(name)
        return groups

    def _find(self, source: Checkpoint) -> dict[str, str]:
        """What stands before ".weight" in the file, by name of the module; a shared one may go by another name."""
        found: dict[str, str] = {}
        missing = []
        for names in self._tied().values():
            for name in names:
                called = [name, *self._rows[name].aliases]
                found[name] = next((prefix for prefix in called if _holds(source, prefix)), name)
            if not any(_holds(source, found[name]) for name in names):
                missing.append(names[0])
        if missing:
            listed = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
            raise Failure(
                f"the file lacks the weights of {len(missing)} layers that config.json has ({listed}). If it names "
                "them otherwise, load the model with transformers and save it: save_pretrained gives today's names"
            )
        return found

    def _scheme(self, source: Checkpoint, name: str) -> Scheme:
        """As exact as layout.describe: of int4 with the dtype that its scales will have."""
        scheme = self._modules[name].scheme
        if isinstance(scheme, Int4Weight):
            scheme = replace(scheme, scale_dtype=scheme.scale_dtype_of(self._dtype_of(source, self._prefix[name])))
        return scheme

    def _aliases(self, source: Checkpoint) -> dict[str, str]:
        found: dict[str, str] = {}
        for names in self._tied().values():
            first = next(self._prefix[name] for name in names if _holds(source, self._prefix[name]))
            for prefix in {self._prefix[name] for name in names} - {first}:
                if not _holds(source, prefix):
                    found |= {f"{prefix}.{key}": f"{first}.{key}" for key in _SHARED}
        return found

    def _obstacle(self) -> str | None:
        for name, module in self._modules.items():
            if isinstance(module, QuantEmbedding):
                return f"{name} is a quantised embedding"
            if name in self._transposed:
                return f"{name} is a Conv1D, no Linear"
            scheme = module.scheme
            if isinstance(scheme, Int4Weight) and not scheme.symmetric and not scheme.whole_zeros:
                return "zero points are no whole numbers; --set whole_zeros=true makes them so"
        return "several layers share a weight" if len(self._tied()) < len(self._modules) else None


def _usual_dtype(source: Checkpoint) -> torch.dtype:
    dtypes = [source.shape_dtype(name)[1] for name in source.others]
    floats = Counter(dtype for dtype in dtypes if dtype in _FLOATS)
    return floats.most_common(1)[0][0] if floats else torch.float32


def _holds(source: Checkpoint, prefix: str) -> bool:
    if prefix in source.layers:
        return True
    try:
        source.shape_dtype(f"{prefix}.weight")
    except KeyError:
        return False
    return True


def _weight(source: Checkpoint, prefix: str) -> Tensor:
    """The float weight; of a layer that is quantised (in GGUF) what it stands for, in float32."""
    layer = source.layers.get(prefix)
    if layer is None:
        return source.tensor(f"{prefix}.weight")
    tensors = layer.pack()
    n, k = layer.out_features, layer.in_features
    return layer.scheme.dequantize(tensors["qweight"], tensors["scales"], n, k, torch.float32)


def _layer_bytes(source: Checkpoint, prefix: str) -> int:
    layer = source.layers.get(prefix)
    return tensor_bytes(source, f"{prefix}.weight") if layer is None else layer.out_features * layer.in_features
