"""Projections of fused experts from qao's own checkpoints in a serving engine: loading and sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...distributed.cut import Cut, units
from ...nn import marker
from ...nn.experts import QuantProjection
from ...schemes import PackedWeight, Scheme, stacked
from .linear import check_marker

_KEYS = ("up", "down")
_MOST_RANKS = 64  # listed in an error


class ExpertShard(NamedTuple):
    """The part of W [E, n, k] on one rank.

    Attributes:
        slots: the local experts, in local order.
        dim: 0 shards the rows, 1 the columns.
        parts: number of matrices joined along ``dim``, each of which is sharded: 2 for gate before up.
        rank, ranks: index and number of the shards.
    """

    n: int
    k: int
    slots: Sequence[int]
    dim: int
    parts: int
    rank: int
    ranks: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of this part."""
        return (self.n // self.ranks, self.k) if self.dim == 0 else (self.n, self.k // self.ranks)

    def cuts(self) -> list[Cut]:
        size = (self.n, self.k)[self.dim]
        whole, own = size // self.parts, size // self.parts // self.ranks
        begins = [part * whole + self.rank * own for part in range(self.parts)]
        return [Cut(self.dim, size, begin, begin + own, self.rank, self.ranks) for begin in begins]

    def unit(self, scheme: Scheme) -> int:
        """Number of rows or columns that a shard boundary must not split."""
        return units(scheme, (self.n, self.k))[self.dim]

    def is_shardable(self, scheme: Scheme, ranks: int) -> bool:
        """Whether the weight can be sharded over this number of ranks."""
        whole = (self.n, self.k)[self.dim] // self.parts
        return ranks == 1 or whole % (ranks * self.unit(scheme)) == 0

    def bias(self, bias: Tensor) -> Tensor | None:
        """This part of the bias [E, n] of all experts. A bias added to a sum over ranks belongs to rank 0."""
        own = bias[list(self.slots)]
        if self.dim == 0:
            return torch.cat([own[:, cut.begin : cut.end] for cut in self.cuts()], 1)
        return own if self.rank == 0 else None


def expert_shards(
    width: int, hidden: int, slots: Sequence[int], rank: int, ranks: int, *, interleaved: bool = False
) -> tuple[ExpertShard, ExpertShard]:
    """The parts of up [E, 2 * width, hidden], gate and up together, and of down [E, hidden, width].

    Args:
        interleaved: rows of gate and up alternate; otherwise gate precedes up.
    """
    up = ExpertShard(2 * width, hidden, slots, 0, 1 if interleaved else 2, rank, ranks)
    return up, ExpertShard(hidden, width, slots, 1, 1, rank, ranks)


def wait_for(
    layer: nn.Module,
    name: str,
    schemes: Sequence[Scheme],
    pair: Sequence[ExpertShard],
    dtype: torch.dtype,
    *,
    biases: bool = False,
) -> None:
    """Add the children ``up`` and ``down`` to an engine's layer. They become projections once they are loaded.

    Raises:
        ValueError: a weight cannot be sharded in this way. The message starts with ``name`` and lists valid sizes.
    """
    _check_cuts(name, schemes, pair)
    for key, scheme, shard in zip(_KEYS, schemes, pair, strict=True):
        pending = PendingProjection(scheme, shard, dtype, f"{name}.{key}", partial(layer.add_module, key), bias=biases)
        layer.add_module(key, pending)


def _check_cuts(name: str, schemes: Sequence[Scheme], pair: Sequence[ExpertShard]) -> None:
    def works(ranks: int) -> bool:
        return all(shard.is_shardable(scheme, ranks) for scheme, shard in zip(schemes, pair, strict=True))

    for key, scheme, shard in zip(_KEYS, schemes, pair, strict=True):
        if shard.is_shardable(scheme, shard.ranks):
            continue
        own, what = shard.sizes[shard.dim] // shard.parts, ("rows", "columns")[shard.dim]
        fit = ", ".join(str(ranks) for ranks in range(1, _MOST_RANKS + 1) if works(ranks))
        raise ValueError(
            f"qao: {name}.{key}: one process gets {own} {what} of a matrix, and {scheme} shares scales or a rotation "
            f"among {shard.unit(scheme)}. Tensor parallel sizes that work: {fit}."
        )


def check_loaded(layer: nn.Module, engine: str) -> None:
    """Raise ValueError if a tensor of ``up`` or ``down`` has not arrived."""
    for one in (layer.up, layer.down):
        if isinstance(one, PendingProjection):
            raise ValueError(f"qao: {one.name}: {engine} has not loaded {', '.join(sorted(one.missing))} into it")


class PendingProjection(nn.Module):
    """Collects the tensors of a projection. When all have arrived, ``done`` gets the result.

    Its parameters are empty. They only provide names and loaders.
    """

    def __init__(
        self,
        scheme: Scheme,
        shard: ExpertShard,
        dtype: torch.dtype,
        name: str,
        done: Callable[[QuantProjection], None],
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.scheme, self.shard, self.dtype, self.name, self.done = scheme, shard, dtype, name, done
        self.device = torch.empty(0).device
        empty = scheme.empty(shard.n, shard.k, dtype=dtype, device="meta").tensors()
        self.missing = {one for one, tensor in empty.items() if tensor is not None} | {marker.MARKER, marker.TRIPWIRE}
        self.missing |= {"bias"} if bias else set()
        self.found: dict[str, Tensor] = {}
        for one in self.missing:
            placeholder: Any = nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
            placeholder.weight_loader = partial(self._take, one)
            self._parameters[one] = placeholder

    def _take(self, one: str, parameter: nn.Parameter, loaded: Tensor) -> None:
        if one == marker.MARKER:
            stored = check_marker(loaded, self.scheme, (self.shard.n,), self.shard.k, self.name)
            if stored.experts is None or stored.experts <= max(self.shard.slots):
                raise ValueError(
                    f"qao: {self.name}: the checkpoint holds {stored.experts} experts, but the model has expert "
                    f"{max(self.shard.slots)}. Use the checkpoint of this model."
                )
        elif one != marker.TRIPWIRE:
            self.found[one] = loaded
        self.missing.discard(one)
        if not self.missing:
            self.done(self._made())

    def _made(self) -> QuantProjection:
        shard, scale, bias = self.shard, self.found.pop("activation_scale", None), self.found.pop("bias", None)

        def expert(number: int) -> PackedWeight:
            own: dict[str, Any] = {key: one[number].to(self.device) for key, one in self.found.items()}
            own |= {} if scale is None else {"activation_scale": scale.to(self.device)}  # shared by all experts
            packed = PackedWeight(**own)
            return packed if shard.ranks == 1 else _part(self.scheme, packed, (shard.n, shard.k), shard.cuts())

        count = len(shard.slots)
        packed = stacked(map(expert, shard.slots), count)
        bias = None if bias is None else shard.bias(bias.to(self.device))
        return QuantProjection(count, *shard.sizes, self.scheme, packed, bias, self.dtype)


def _part(scheme: Scheme, packed: PackedWeight, sizes: tuple[int, int], cuts: Sequence[Cut]) -> PackedWeight:
    """As ``distributed.cut.part``, for several joined ranges of rows or columns."""
    dim, unit = cuts[0].dim, scheme.units(*sizes)[cuts[0].dim]

    def own(tensor: Tensor, unit: int = 1) -> Tensor:
        one_for_all = tensor.dim() <= dim or tensor.shape[dim] == 1
        return tensor if one_for_all else torch.cat([cut.of(tensor, unit) for cut in cuts], dim)

    q, scales, zeros = scheme.unpack(packed.qweight, packed.scales, *sizes)
    made = scheme.pack(own(q), own(scales, unit), None if zeros is None else own(zeros, unit))
    rows = packed.row_scales  # the same on all ranks if columns are sharded
    return made._replace(activation_scale=packed.activation_scale, row_scales=None if rows is None else own(rows))
