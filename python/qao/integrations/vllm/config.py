"""The quantisation config "qao" of vLLM: checkpoints in qao's own format. Linear layers, experts only in floats.

It is registered while vLLM's table of methods is imported, so that what it needs of vLLM's layers comes later.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ..config import QaoConfig
from ..served_linear import quantised_inside, scheme_of


class QaoQuantizationConfig(QuantizationConfig):  # type: ignore[misc]
    """``quantization_config`` of a config.json that qao wrote."""

    def __init__(self, config: QaoConfig) -> None:
        super().__init__()
        if config.scheme is not None and not config.layers:
            raise ValueError(
                "qao: this config.json asks to quantise a model of floats while it is loaded. vLLM serves models that "
                "are quantised: qao quantize MODEL FOLDER --scheme int4 writes one"
            )
        self.layers = dict(config.layers)

    @classmethod
    def get_name(cls) -> str:
        return "qao"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QaoQuantizationConfig:
        made = QaoConfig.from_dict(copy.deepcopy(config))
        assert isinstance(made, QaoConfig)
        return cls(made)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        from .linear import QaoLinearMethod

        if isinstance(layer, (LinearBase, ParallelLMHead)):
            scheme = scheme_of(self.layers, prefix, self.packed_modules_mapping)
            if scheme is not None:
                return QaoLinearMethod(scheme, prefix)
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        inside = quantised_inside(self.layers, prefix)
        if isinstance(layer, RoutedExperts):
            if inside:
                raise NotImplementedError(
                    f"qao: {prefix}: experts quantised by qao ({len(inside)} layers, such as {inside[0]}) have no "
                    "kernel in vLLM. Leave them in floats, or save the model as compressed-tensors."
                )
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if isinstance(layer, VocabParallelEmbedding) and inside:
            raise NotImplementedError(
                f"qao: {prefix}: a quantised embedding is not served by vLLM. Quantise without embeddings=True."
            )
        return None


def register() -> None:
    """Makes the name "qao" known; another call puts the same class there."""
    register_quantization_config("qao")(QaoQuantizationConfig)
