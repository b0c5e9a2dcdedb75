"""What reading ``weight`` of a quantised layer gives: a tensor that is dequantised when somebody computes with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_said = False


class DequantizedWeight(Tensor):
    """The weight [N, K] of a quantised layer, for models that read it instead of calling the layer.

    Its shape, dtype and device cost nothing to ask, and that is all that most models ask. Any operation dequantises it,
    each time anew, and gives plain tensors. The first time in a process a warning says so. What is written into it is
    an error: the layer would not see it.
    """

    source: Tensor  # the packed weight it is computed from
    _dequantize: Callable[[], Tensor]
    _is_hf_initialized = True  # initialisers of transformers, which some models call on weights of children, skip it

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, source: Tensor, dequantize: Any) -> Any:
        weight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=source.device)
        weight.source, weight._dequantize = source, dequantize
        return weight

    def __init__(self, *arguments: Any) -> None:
        super().__init__()

    def plain(self) -> Tensor:
        """The dequantised weight as an ordinary tensor of its own memory."""
        global _said
        if not _said:
            _said = True
            warnings.warn(
                f"The weight {list(self.shape)} of a quantised layer was read, and is dequantised each time that is "
                "done. If a model does so in its forward, leave that layer out: quantize_(model, {name: None, ...}).",
                stacklevel=2,
            )
        return self._dequantize()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        mutated = func._schema.arguments[0].is_write if func._schema.arguments else False
        if mutated and isinstance(args[0], cls):
            raise RuntimeError(
                f"{func}: the weight {list(args[0].shape)} of a quantised layer cannot be written. Make a layer of the "
                "new weight: qao.QuantLinear.from_linear(linear, scheme)."
            )
        args, kwargs = tree_map_only(cls, cls.plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DequantizedWeight({list(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    # These reach for memory that this tensor does not have.
    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.plain()

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain().numpy(force=force)

    def tolist(self) -> Any:
        return self.plain().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.plain()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)
