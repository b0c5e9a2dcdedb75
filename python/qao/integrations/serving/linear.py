"""A linear layer of a serving engine with a weight of qao's own checkpoints: parameters, loading, the product.

Engines make a layer for the share of a weight that one process has, often of several matrices joined (q, k and v), and
fill each parameter through a loader that cuts a matrix along ``output_dim`` and ``input_dim``. Packed weights of four
bits are [tiles of 16 rows, tiles of 64 columns, bytes], so they are cut between tiles, without unpacking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...nn import marker
from ...ops.fp4 import ROW_PARTS
from ...ops.packed_shape import SCALE_BLOCK
from ...ops.rotation import with_row_scales
from ...schemes import Float8Weight, Fp4Weight, Int4Weight, Scheme
from .common import OPERATORS, row_scales
from .config import Served

_TILE_ROWS, _TILE_COLUMNS = 16, 64


def check_marker(loaded: Tensor, scheme: Scheme, k: int, name: str) -> marker.Marker:
    """What the marker of a checkpoint says of a weight, which must be what the config says."""
    found = marker.decode(loaded, f"{name}.{marker.MARKER}")
    said, wanted = ({**one, "scale_dtype": None} for one in (found.scheme, scheme.to_dict()))
    for one in (said, wanted):  # each layer has its own
        if one.get("activation_scale") is not None:
            one["activation_scale"] = 1.0
    if said != wanted or found.in_features != k:
        raise ValueError(
            f"qao: {name}: the config says {scheme} of {k} columns, the checkpoint holds "
            f"{found.scheme} of {found.in_features}. Save the model anew."
        )
    return found


class ServedLinear:
    """The quantization method of one layer, as vLLM and SGLang ask it."""

    parameters: ClassVar[Any]  # the engine's module of parameter classes

    def __init__(self, scheme: Scheme, name: str, served: Served) -> None:
        self.scheme, self.name, self.served = scheme, name, served
        self.come = 0  # matrices that were loaded
        self.operator = OPERATORS[scheme.word]

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Makes the parameters of a share of the weight [output_size, input_size]."""
        k, parts = input_size_per_partition, list(output_partition_sizes)
        n = sum(parts)
        self._check_head(getattr(layer, "org_vocab_size", 0))
        self._check_cuts(parts, k, cut_rows=len(parts) > 1 or n != output_size, cut_columns=k != input_size)
        self.parts, self.k, self.full_k = parts, k, input_size
        self.rest = self.scheme.constants(n, k)
        layer.weight_block_size = [SCALE_BLOCK, SCALE_BLOCK]  # type: ignore[assignment]
        loader = extra["weight_loader"]
        empty = self.scheme.empty(n, k, dtype=params_dtype, device="meta").tensors()
        for name, meta in empty.items():
            parameter = None if meta is None else self._parameter(name, meta, loader)
            layer.register_parameter(name, parameter)
        for name in (marker.MARKER, marker.TRIPWIRE):  # which are in the checkpoint, and gone once it is loaded
            data = torch.empty(0, dtype=torch.uint8)
            made = self.parameters.BasevLLMParameter(data=data, weight_loader=self._check_marker)
            layer.register_parameter(name, made)

    def _granularity(self) -> str | None:
        return self.scheme.granularity if isinstance(self.scheme, Float8Weight) else None

    def _group_size(self) -> int | None:
        """Columns that share a scale in the tiles of a weight of four bits, -1: all; None of other weights."""
        return self.scheme.size if isinstance(self.scheme, (Fp4Weight, Int4Weight)) else None

    def _check_head(self, rows: int) -> None:
        """Of a head, whose rows engines pad: one of ``rows`` rows, 0 of other layers."""
        if self._granularity() == "block" and rows or self._group_size() is not None and rows % _TILE_ROWS:
            raise ValueError(
                f"qao: {self.name}: a head of {rows} rows is padded here, which {self.scheme} shares scales or tiles "
                "among. Leave it in floats or quantise it to int8."
            )

    def _check_cuts(self, parts: list[int], k: int, *, cut_rows: bool, cut_columns: bool) -> None:
        rows, columns = 1, 1
        size = self._group_size()
        if size is not None:
            rows, columns = _TILE_ROWS, max(_TILE_COLUMNS, size)
        elif self._granularity() == "block":
            rows = columns = SCALE_BLOCK
        columns = max(columns, self.scheme.rotation)
        if cut_rows and any(part % rows for part in parts):
            wrong = f"matrices of {parts} rows, which {self.scheme} can be cut into and joined from between {rows} rows"
        elif cut_columns and k % columns:
            wrong = f"{k} columns, which {self.scheme} can be cut into between {columns} columns"
        else:
            return
        raise ValueError(f"qao: {self.name}: one process gets {wrong}. Choose another tensor parallel size.")

    def _parameter(self, name: str, meta: Tensor, loader: Callable[..., None]) -> nn.Parameter:
        kinds, size = self.parameters, self._group_size()
        if name == "activation_scale" or (name == "scales" and self._granularity() == "tensor"):
            data = torch.zeros(len(self.parts), dtype=meta.dtype)
            return kinds.BasevLLMParameter(data=data, weight_loader=_one_of_each)  # type: ignore[no-any-return]
        options: dict[str, Any] = {"data": torch.empty_like(meta, device=torch.get_default_device())}
        options |= {"weight_loader": loader, "output_dim": 0}
        tiles = {"packed_dim": 0, "packed_factor": _TILE_ROWS}
        if name == "qweight":
            if size is not None:
                return kinds.PackedvLLMParameter(input_dim=1, **tiles, **options)  # type: ignore[no-any-return]
            return kinds.ModelWeightParameter(input_dim=1, **options)  # type: ignore[no-any-return]
        if name == "scales" and size is not None:
            if size == -1:
                return kinds.PackedColumnParameter(**tiles, **options)  # type: ignore[no-any-return]
            if isinstance(self.scheme, Fp4Weight) and self.scheme.format == "nvfp4" and self.k != self.full_k:
                options["weight_loader"] = _DivisorOfEach(self.full_k // self.k, loader)
            return kinds.PackedvLLMParameter(input_dim=1, **tiles, **options)  # type: ignore[no-any-return]
        if name == "scales" and self._granularity() == "block":
            return kinds.BlockQuantScaleParameter(input_dim=1, **options)  # type: ignore[no-any-return]
        return kinds.ChannelQuantScaleParameter(**options)  # type: ignore[no-any-return]

    def _check_marker(self, parameter: nn.Parameter, loaded: Tensor, part: Any = None, **kwargs: Any) -> None:
        """What a layer of the checkpoint says of itself, against what the config says of it."""
        if not torch.equal(loaded.cpu(), marker.tripwire()):
            check_marker(loaded, self.scheme, self.full_k, self.name)
            self.come += len(self.parts) if part is None else len(part) if isinstance(part, tuple) else 1
            self.served.loads = True
            self.served.tell_unasked()

    def _check_come(self, layer: nn.Module) -> None:
        """Raises ValueError where others were loaded, and this was not. A head may get another's weight later."""
        if self.served.loads and self.come < len(self.parts) and not hasattr(layer, "org_vocab_size"):
            raise ValueError(
                f"qao: {self.name}: {self.served.engine} has loaded {self.come} of {len(self.parts)} weights into it: "
                "the checkpoint has no others of this name. Save the model anew."
            )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Makes of what was loaded what the operator takes."""
        self._check_come(layer)
        for name in (marker.MARKER, marker.TRIPWIRE):
            layer._parameters.pop(name, None)
        own: Any = layer._parameters
        if self._granularity() == "tensor":
            own["scales"].data = row_scales(own["scales"].data, self.parts)
        if own["activation_scale"] is not None:  # matrices that are joined multiply one x
            own["activation_scale"].data = own["activation_scale"].data.max().reshape(1)
        if own["weight_sums"] is not None and self.k != self.full_k:  # those of all columns were loaded
            weight = own["qweight"].data, own["scales"].data
            plain = self.scheme.unpack(*weight, sum(self.parts), self.k)
            own["weight_sums"].data = self.scheme._weight_sums(*plain)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, scales = layer.qweight, layer.scales
        rest = with_row_scales(self.rest, layer.row_scales)  # type: ignore[arg-type]
        if self.scheme.activations == "int8":
            return self.operator(x, weight, scales, bias, layer.weight_sums, *rest)  # type: ignore[no-any-return]
        if self.scheme.word == "fp8_fp8":
            return self.operator(x, weight, scales, bias, layer.activation_scale, *rest)  # type: ignore[no-any-return]
        return self.operator(x, weight, scales, bias, *rest)  # type: ignore[no-any-return]


class _DivisorOfEach:
    """Loads NVFP4 scales [tiles, G + 3, 1, 16] that are cut along G: every share ends with the three rows of its
    divisor, so they are repeated behind the groups of each of ``shares`` before ``loader`` cuts."""

    def __init__(self, shares: int, loader: Callable[..., None]) -> None:
        self._shares, self._loader = shares, loader

    def __call__(self, parameter: nn.Parameter, loaded: Tensor, *args: Any, **kwargs: Any) -> None:
        groups, divisor = loaded[:, :-ROW_PARTS], loaded[:, -ROW_PARTS:]
        parts = [torch.cat([share, divisor], 1) for share in groups.chunk(self._shares, 1)]
        self._loader(parameter, torch.cat(parts, 1), *args, **kwargs)


def _one_of_each(parameter: nn.Parameter, loaded: Tensor, part: Any = None, **kwargs: Any) -> None:
    """Loads the number that one of the joined matrices has; without ``part``, all of them have it."""
    index = slice(None) if part is None else {"q": 0, "k": 1, "v": 2}.get(part, part)
    parameter.data[index] = loaded.reshape(())
