"""A projection of fused experts of qao's own checkpoints in a serving engine: loading, and the share of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import marker
from ..distributed.cut import Cut, units
from ..experts import QuantProjection
from ..formats import PackedWeight, Scheme
from ..scheme import stacked
from .served_linear import check_marker


class Share(NamedTuple):
    """What one process has of W [E, n, k].

    Attributes:
        slots: the experts, in the order in which it has them.
        dim: 0, a part of the rows, or 1, of the columns.
        parts: matrices joined along ``dim``, of each of which it has a part: 2 of gate and up.
        rank, ranks: which part, of how many.
    """

    n: int
    k: int
    slots: Sequence[int]
    dim: int
    parts: int
    rank: int
    ranks: int

    def cuts(self) -> list[Cut]:
        size = (self.n, self.k)[self.dim]
        whole, own = size // self.parts, size // self.parts // self.ranks
        begins = [part * whole + self.rank * own for part in range(self.parts)]
        return [Cut(self.dim, size, begin, begin + own, self.rank, self.ranks) for begin in begins]

    def obstacle(self, scheme: Scheme) -> str | None:
        """Why the weight cannot be cut so; None if it can."""
        unit, own = units(scheme, (self.n, self.k))[self.dim], (self.n, self.k)[self.dim] // self.parts // self.ranks
        if self.ranks == 1 or own % unit == 0:
            return None
        what = ("rows", "columns")[self.dim]
        return (
            f"one process gets {own} {what} of a matrix, and {scheme} shares scales or a rotation among {unit}. Choose "
            "another tensor parallel size."
        )


class Arriving(nn.Module):
    """Holds the tensors of a projection until all have come; ``done`` gets what they make.

    Its parameters are empty, and there for the names and loaders.
    """

    def __init__(
        self, scheme: Scheme, share: Share, dtype: torch.dtype, name: str, done: Callable[[QuantProjection], None]
    ) -> None:
        super().__init__()
        if reason := share.obstacle(scheme):
            raise ValueError(f"qao: {name}: {reason}")
        self.scheme, self.share, self.dtype, self.name, self.done = scheme, share, dtype, name, done
        self.device = torch.empty(0).device
        empty = scheme.empty(share.n, share.k, dtype=dtype, device="meta").tensors()
        self.missing = {one for one, tensor in empty.items() if tensor is not None} | {marker.MARKER, marker.TRIPWIRE}
        self.found: dict[str, Tensor] = {}
        for one in self.missing:
            placeholder: Any = nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
            placeholder.weight_loader = partial(self._take, one)
            self._parameters[one] = placeholder

    def _take(self, one: str, parameter: nn.Parameter, loaded: Tensor) -> None:
        if one == marker.MARKER:
            said = check_marker(loaded, self.scheme, self.share.k, self.name)
            if said.out_features != self.share.n or said.experts is None or said.experts <= max(self.share.slots):
                raise ValueError(
                    f"qao: {self.name}: the checkpoint holds {said.experts} experts of {said.out_features} rows, the "
                    f"model has them of {self.share.n} rows: another model?"
                )
        elif one != marker.TRIPWIRE:
            self.found[one] = loaded
        self.missing.discard(one)
        if not self.missing:
            self.done(self._made())

    def _made(self) -> QuantProjection:
        share, scale = self.share, self.found.pop("activation_scale", None)

        def expert(number: int) -> PackedWeight:
            own: dict[str, Any] = {key: one[number].to(self.device) for key, one in self.found.items()}
            own |= {} if scale is None else {"activation_scale": scale.to(self.device)}  # that of all
            packed = PackedWeight(**own)
            return packed if share.ranks == 1 else _part(self.scheme, packed, (share.n, share.k), share.cuts())

        packed = stacked(map(expert, share.slots), len(share.slots))
        n, k = (share.n // share.ranks, share.k) if share.dim == 0 else (share.n, share.k // share.ranks)
        return QuantProjection(len(share.slots), n, k, self.scheme, packed, None, self.dtype)


def _part(scheme: Scheme, packed: PackedWeight, sizes: tuple[int, int], cuts: Sequence[Cut]) -> PackedWeight:
    """As ``distributed.cut.part``, of several runs of rows or columns that are joined."""
    dim, unit = cuts[0].dim, scheme.units(*sizes)[cuts[0].dim]

    def own(tensor: Tensor, unit: int = 1) -> Tensor:
        one_for_all = tensor.dim() <= dim or tensor.shape[dim] == 1
        return tensor if one_for_all else torch.cat([cut.of(tensor, unit) for cut in cuts], dim)

    q, scales, zeros = scheme.unpack(packed.qweight, packed.scales, *sizes)
    made = scheme.pack(own(q), own(scales, unit), None if zeros is None else own(zeros, unit))
    rows = packed.row_scales  # the same on all processes that have columns
    return made._replace(activation_scale=packed.activation_scale, row_scales=None if rows is None else own(rows))
