"""Codes of quantized layers as values of a ``state_dict``, and checks of copies into them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class SavedCodes(Tensor):
    """Integer codes in a ``state_dict``, with checks of copies into them.

    Averages by hand, ``own.copy_(decay * own + (1 - decay) * new)``, would truncate codes to other codes without an
    error. In all else it is an ordinary tensor: results, copies, pickles and Parameters of it are plain.
    """

    packed_sizes: tuple[int, ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, codes: Tensor, sizes: tuple[int, ...]) -> SavedCodes:
        made = codes.as_subclass(cls)
        made.packed_sizes = sizes
        return made

    def plain(self) -> Tensor:
        return self.as_subclass(Tensor)

    def copy_(self, src: Tensor, non_blocking: bool = False) -> SavedCodes:
        check_copy(self, src)
        super().copy_(src, non_blocking)
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        check_copy(self, value)
        super().__setitem__(index, value)

    def detach(self) -> SavedCodes:
        return self.of(super().detach(), self.packed_sizes)

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:  # nn.Parameter sets it for a subclass
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = copy.deepcopy(self.plain(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


def check_copy(own: Tensor, source: Any) -> None:
    """Raises if the packed tensor ``own`` cannot take ``source``: no codes, or those of a weight of another size."""
    sizes: tuple[int, ...] = own.packed_sizes  # type: ignore[attr-defined]
    if not isinstance(source, Tensor):
        return
    of = getattr(source, "packed_sizes", sizes)
    if of != sizes:
        raise ValueError(
            f"copy_: the source belongs to a quantized weight {list(of)}, but the layer has {list(sizes)}. Packed "
            "tensors of several sizes have the same shape. Make a layer of the other weight instead."
        )
    if source.dtype != own.dtype and not own.is_floating_point():
        raise TypeError(
            f"copy_: {source.dtype}{list(source.shape)} into {own.dtype}{list(own.shape)}, the codes of a quantized "
            "layer, which cannot be averaged or cast. Average the parameters with requires_grad, as "
            "torch.optim.swa_utils.AveragedModel does, and copy the rest. Quantize new weights with "
            "qao.update_(model, state_dict)."
        )
