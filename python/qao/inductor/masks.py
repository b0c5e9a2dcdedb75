"""Reader of masks that a graph makes of indices: where a mask is causal, and from which token on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .nodes import arguments, aten, is_call, value

_iota: Any = torch.ops.prims.iota.default
_cast: Any = torch.ops.prims.convert_element_type.default
_AT_MOST = {aten.le.Tensor: 0, aten.lt.Tensor: -1}  # one <= other + this
_AT_LEAST = {aten.ge.Tensor: 0, aten.gt.Tensor: -1}  # other <= one + this
_KEYS, _QUERIES = -1, -2  # dimensions of a mask


class Causal(NamedTuple):
    """A mask with which query i sees key j if ``i + start + shift - window < j <= i + start + shift``."""

    start: Node | None  # an integer on the device; None is 0
    shift: int
    window: int | None


class _Index(NamedTuple):
    """i + start + shift, where i counts along one dimension, from the end, and all others are broadcast."""

    dim: int
    start: Node | None = None
    shift: int = 0


def causal(mask: Any) -> Causal | None:
    """The causal form of a mask of booleans [..., queries, keys]; None if it hides other keys, or all of a query."""
    highest, lowest = [], []
    for term in _terms(mask):
        bound = _bound(term)
        if bound is None:
            return None
        low, high, slack = bound
        shift = high.shift - low.shift + slack
        if low.dim == _KEYS and low.start is None:  # key <= query + start + shift
            highest.append((high.start, shift))
        elif high.start is None:  # query + start <= key + shift
            lowest.append((low.start, -shift))
        else:
            return None
    if len(highest) != 1 or len(lowest) > 1 or highest[0][1] < 0:
        return None
    ((start, shift),) = highest
    if not lowest:
        return Causal(start, shift, None)
    ((other, first),) = lowest
    return Causal(start, shift, shift - first + 1) if other is start and first <= shift else None


def _terms(mask: Any) -> list[Any]:
    """The masks that have to be true where ``mask`` is, without those that are true everywhere."""
    in_front = is_call(mask, aten.unsqueeze.default) and _position(mask) < _QUERIES
    if in_front or is_call(mask, aten.expand.default):
        return _terms(mask.args[0])
    if is_call(mask, aten.bitwise_and.Tensor, aten.logical_and.default):
        return [term for part in mask.args for term in _terms(part)]
    everywhere = is_call(mask, aten.full.default) and arguments(mask)["fill_value"] is True
    return [] if everywhere else [mask]


def _bound(term: Any) -> tuple[_Index, _Index, int] | None:
    """Two indices, of keys and queries, and a number: the first index is at most the second one plus the number."""
    if not is_call(term, *_AT_MOST, *_AT_LEAST):
        return None
    one, other = (_index(side) for side in term.args)
    if one is None or other is None or {one.dim, other.dim} != {_KEYS, _QUERIES}:
        return None
    if term.target in _AT_MOST:
        return one, other, _AT_MOST[term.target]
    return other, one, _AT_LEAST[term.target]


def _index(node: Any) -> _Index | None:
    """What ``node`` counts; None if it is no index."""
    if is_call(node, _iota):
        given = arguments(node)
        return _Index(-1, None, given["start"]) if given["step"] == 1 and isinstance(given["start"], int) else None
    inner = _index(node.args[0]) if isinstance(node, Node) and node.args else None
    if inner is None:
        return None
    if is_call(node, aten.unsqueeze.default):
        return inner._replace(dim=inner.dim - (inner.dim <= _position(node)))
    if is_call(node, aten.expand.default) or (is_call(node, _cast) and not value(node).dtype.is_floating_point):
        return inner
    if not is_call(node, aten.add.Tensor, aten.sub.Tensor) or arguments(node)["alpha"] != 1:
        return None
    more = node.args[1]
    if isinstance(more, int):
        return inner._replace(shift=inner.shift + (more if node.target is aten.add.Tensor else -more))
    scalar = isinstance(more, Node) and value(more).numel() == 1 and node.target is aten.add.Tensor
    return inner._replace(start=more) if scalar and inner.start is None else None


def _position(unsqueeze: Node) -> int:
    """The new dimension, from the end."""
    dim: Any = unsqueeze.args[1]
    return dim if dim < 0 else dim - value(unsqueeze).dim()  # type: ignore[no-any-return]
