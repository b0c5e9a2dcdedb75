"""Linear layers of qao's own checkpoints in vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor import parameter
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method

from ..served_linear import ServedLinear


@register_weight_loader_v2_supported_method
class QaoLinearMethod(ServedLinear, LinearMethodBase):  # type: ignore[misc]
    parameters = parameter

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        rows = {"int4": 16, "fp8": 128 if self._granularity() == "block" else 1}.get(self.scheme.weights, 1)
        vocabulary = getattr(layer, "org_vocab_size", 0)  # of a head, which vLLM pads
        if vocabulary % rows or (vocabulary and rows == 128):
            raise ValueError(
                f"qao: {self.name}: vLLM pads a head of {vocabulary} rows, which {self.scheme} shares scales among. "
                "Leave it in floats or quantise it to int8."
            )
        super().create_weights(layer, *args, **kwargs)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ServedLinear.apply(self, layer, x, bias)
