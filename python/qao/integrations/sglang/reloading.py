"""Loading of other weights into a packed layer while SGLang runs, as reinforcement learning does after each step.

SGLang calls ``restore_weights_before_loading`` before it loads, and ``process_weights_after_loading`` after it. The
packed values are copied into the tensors of the first load, because captured CUDA graphs hold their addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class _Plain(NamedTuple):
    """A parameter as SGLang created it, which its loaders know. It has no memory while the layer is packed."""

    parameter: nn.Parameter
    shape: torch.Size
    device: torch.device


class Reloading:
    """The state of one layer. ``name``: of the layer, for errors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._plain: dict[str, _Plain] = {}
        self._packed: dict[str, nn.Parameter] | None = None  # by name, with those of children, while others are loaded
        self._own: dict[str, nn.Parameter | None] = {}  # the layer's, with names that hold None

    def restore(self, layer: nn.Module) -> None:
        """Put SGLang's parameters back, with memory for other values. Scales are NaN until they are loaded."""
        if not self._plain or self._packed is not None:
            return
        self._packed, self._own = dict(layer.named_parameters()), dict(layer._parameters)
        for name, (parameter, shape, device) in self._plain.items():
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=device)
            if parameter.dtype in _FLOATS:
                parameter.data.fill_(torch.nan)
            layer._parameters[name] = parameter

    def process(self, layer: nn.Module, pack: Callable[[nn.Module], None]) -> None:
        """Pack the loaded values with ``pack``, which replaces parameters of ``layer`` or moves them into its children.

        Raises:
            RuntimeError: only some tensors of the layer were loaded again.
        """
        before = {name: one for name, one in layer._parameters.items() if one is not None}
        if self._packed is not None and self._is_untouched():
            layer._parameters.clear()
            layer._parameters.update(self._own)
        elif self._packed is not None:
            self._pack_again(layer, pack)
        else:
            pack(layer)
            self._plain = {
                name: _Plain(one, one.shape, one.device)
                for name, one in before.items()
                if layer._parameters.get(name) is not one
            }
        for parameter, *_ in self._plain.values():
            parameter.data = parameter.data.new_empty(0)
        self._packed = None

    def _is_untouched(self) -> bool:
        scales = [one.parameter for one in self._plain.values() if one.parameter.dtype in _FLOATS]
        return bool(scales) and all(bool(scale.isnan().all()) for scale in scales)

    def _pack_again(self, layer: nn.Module, pack: Callable[[nn.Module], None]) -> None:
        try:
            pack(layer)
            made = dict(layer.named_parameters())
            wrong = next((name for name, one in made.items() if one.dtype in _FLOATS and bool(one.isnan().any())), None)
            error = None if wrong is None else ValueError(f"{wrong} is not complete")
        except ValueError as raised:  # scales that are NaN
            error = raised
        if error is not None:
            raise RuntimeError(
                f"qao: {self.name}: SGLang loaded only some of this layer's tensors again, so it has no valid weight "
                f"now ({error}). Update all tensors of a layer together."
            ) from error
        self._put_back(layer, made)

    def _put_back(self, layer: nn.Module, made: dict[str, nn.Parameter]) -> None:
        """Copy ``made`` into the packed tensors of the first load, and make these the layer's parameters again."""
        assert self._packed is not None
        for name, held in self._packed.items():
            path, _, leaf = name.rpartition(".")
            if name in made and made[name] is not held:
                held.data.copy_(made[name].data)
            layer.get_submodule(path)._parameters[leaf] = held
