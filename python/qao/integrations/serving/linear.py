"""Linear layer of a serving engine from qao's own checkpoints: parameters, loading, GEMM.

Engines create a layer for the part of a weight that one rank holds, often of several joined matrices (q, k and v), and
fill each parameter through a loader that slices a matrix along ``output_dim`` and ``input_dim``. Packed 4-bit weights
are [tiles of 16 rows, tiles of 64 columns, bytes], so they are sliced between tiles without unpacking.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...nn import marker
from ...ops.fp4 import ROW_PARTS
from ...ops.packed_shape import SCALE_BLOCK
from ...schemes import Float8Weight, Fp4Weight, Int4Weight, Scheme
from .common import OPERATORS, multiply, row_scales
from .config import Served

_TILE_ROWS, _TILE_COLUMNS = 16, 64


def check_marker(loaded: Tensor, scheme: Scheme, rows: Collection[int], k: int, name: str) -> marker.Marker:
    """The marker of a weight in a checkpoint, which must agree with the config and with the model's weight.

    Args:
        rows: numbers of rows that the model's weight may have.
        k: its number of columns.
    """
    found = marker.decode(loaded, f"{name}.{marker.MARKER}")
    stored, wanted = ({**one, "scale_dtype": None} for one in (found.scheme, scheme.to_dict()))
    for one in (stored, wanted):  # the static scale differs between layers
        if one.get("activation_scale") is not None:
            one["activation_scale"] = 1.0
    if stored != wanted:
        raise ValueError(
            f"qao: {name}: the config says {scheme}, but the checkpoint holds {found.scheme}. Save the model again."
        )
    if found.out_features not in rows or found.in_features != k:
        n = " or ".join(map(str, sorted(rows)))
        raise ValueError(
            f"qao: {name}: the model's weight is [{n}, {k}], but the checkpoint holds a weight "
            f"[{found.out_features}, {found.in_features}]. Use the checkpoint of this model."
        )
    return found


_NAMES = ("q", "k", "v", "index_q", "index_k")  # of joined matrices, in their order; other layers number them


def _rows_of_matrices(layer: Any, parts: list[int], output_size: int) -> list[set[int]]:
    """Rows that each joined matrix may have in the checkpoint.

    Engines pad heads, and give every rank a whole head of k and v if there are more ranks than heads.

    Args:
        parts: rows of each matrix on this rank.
        output_size: rows of all matrices on all ranks.
    """
    if hasattr(layer, "org_vocab_size"):
        return [{layer.org_vocab_size}]
    ranks, replicas = output_size // sum(parts), getattr(layer, "num_kv_head_replicas", 1)
    rows = [{part * ranks // (replicas if i > 0 else 1)} for i, part in enumerate(parts)]
    if len(parts) == 1 or type(layer).__name__ in ("QKVParallelLinear", "MergedColumnParallelLinear"):
        return rows
    # Subclasses may give every rank a whole matrix.
    return [one | {part} for one, part in zip(rows, parts, strict=True)]


class ServedLinear:
    """The quantization method of one layer, with the interface of vLLM and SGLang."""

    parameters: ClassVar[Any]  # the engine's module of parameter classes

    def __init__(self, scheme: Scheme, name: str, served: Served) -> None:
        self.scheme, self.name, self.served = scheme, name, served
        self.come = 0  # number of loaded matrices
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
        """Create the parameters for this rank's part of the weight [output_size, input_size]."""
        k, parts = input_size_per_partition, list(output_partition_sizes)
        n = sum(parts)
        self._check_head(getattr(layer, "org_vocab_size", 0))
        self._check_cuts(parts, k, cut_rows=len(parts) > 1 or n != output_size, cut_columns=k != input_size)
        self.parts, self.k, self.full_k = parts, k, input_size
        self.rows = _rows_of_matrices(layer, parts, output_size)
        self.rest = self.scheme.constants(n, k)
        layer.weight_block_size = [SCALE_BLOCK, SCALE_BLOCK]  # type: ignore[assignment]
        loader = extra["weight_loader"]
        empty = self.scheme.empty(n, k, dtype=params_dtype, device="meta").tensors()
        for name, meta in empty.items():
            parameter = None if meta is None else self._parameter(name, meta, loader)
            layer.register_parameter(name, parameter)
        for name in (marker.MARKER, marker.TRIPWIRE):  # present in the checkpoint, removed after loading
            data = torch.empty(0, dtype=torch.uint8)
            made = self.parameters.BasevLLMParameter(data=data, weight_loader=self._check_marker)
            layer.register_parameter(name, made)

    def _granularity(self) -> str | None:
        return self.scheme.granularity if isinstance(self.scheme, Float8Weight) else None

    def _group_size(self) -> int | None:
        """Number of columns that share a scale in the tiles of a 4-bit weight, -1: all; None for other weights."""
        return self.scheme.group_size if isinstance(self.scheme, (Fp4Weight, Int4Weight)) else None

    def _check_head(self, rows: int) -> None:
        """Check a head with ``rows`` rows, which engines pad; 0 for other layers."""
        if self._granularity() == "block" and rows or self._group_size() is not None and rows % _TILE_ROWS:
            raise ValueError(
                f"qao: {self.name}: a head of {rows} rows is padded here, and {self.scheme} has scales or tiles of "
                "several rows. Leave it in float or quantize it to int8."
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
            wrong = f"matrices of {parts} rows, but {self.scheme} can only be divided at multiples of {rows} rows"
        elif cut_columns and k % columns:
            wrong = f"{k} columns, but {self.scheme} can only be divided at multiples of {columns} columns"
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
        """Compare the marker of a layer in the checkpoint with the config."""
        if not torch.equal(loaded.cpu(), marker.tripwire()):
            matrices = range(len(self.parts)) if part is None else part if isinstance(part, tuple) else (part,)
            each = (self.rows[_NAMES.index(one) if isinstance(one, str) else one] for one in matrices)
            check_marker(loaded, self.scheme, set(map(sum, product(*each))), self.full_k, self.name)
            self.come += len(matrices)
            self.served.loads = True
            self.served.warn_unrequested()

    def _check_loaded(self, layer: nn.Module) -> None:
        """Raise ValueError if other layers were loaded and this one was not. A tied head may get its weight later."""
        if self.served.loads and self.come < len(self.parts) and not hasattr(layer, "org_vocab_size"):
            raise ValueError(
                f"qao: {self.name}: {self.served.engine} has loaded {self.come} of {len(self.parts)} weights into it; "
                "the checkpoint has no others with this name. Save the model again."
            )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Convert the loaded parameters to operands of the operator."""
        self._check_loaded(layer)
        for name in (marker.MARKER, marker.TRIPWIRE):
            layer._parameters.pop(name, None)
        own: Any = layer._parameters
        if self._granularity() == "tensor":
            own["scales"].data = row_scales(own["scales"].data, self.parts)
        if own["activation_scale"] is not None:  # joined matrices share one x
            own["activation_scale"].data = own["activation_scale"].data.max().reshape(1)
        if own["weight_sums"] is not None and self.k != self.full_k:  # the loaded sums cover all columns
            weight = own["qweight"].data, own["scales"].data
            plain = self.scheme.unpack(*weight, sum(self.parts), self.k)
            own["weight_sums"].data = self.scheme._weight_sums(*plain)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        own = layer._parameters
        others = (own[name] for name in self.scheme.operands)
        return multiply(self.operator, x, own["qweight"], own["scales"], bias, *others, *self.rest)


class _DivisorOfEach:
    """Loads NVFP4 scales [tiles, G + 3, 1, 16] that are sliced along G.

    Every part ends with the three rows of the divisor, so they are repeated after the groups of each of ``shares``
    before ``loader`` slices.
    """

    def __init__(self, shares: int, loader: Callable[..., None]) -> None:
        self._shares, self._loader = shares, loader

    def __call__(self, parameter: nn.Parameter, loaded: Tensor, *args: Any, **kwargs: Any) -> None:
        groups, divisor = loaded[:, :-ROW_PARTS], loaded[:, -ROW_PARTS:]
        parts = [torch.cat([share, divisor], 1) for share in groups.chunk(self._shares, 1)]
        self._loader(parameter, torch.cat(parts, 1), *args, **kwargs)


def _one_of_each(parameter: nn.Parameter, loaded: Tensor, part: Any = None, **kwargs: Any) -> None:
    """Load the scalar of one joined matrix; without ``part``, all of them have it."""
    index = slice(None) if part is None else {"q": 0, "k": 1, "v": 2}.get(part, part)
    parameter.data[index] = loaded.reshape(())
