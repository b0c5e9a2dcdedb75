"""The quantization config "qao" of vLLM, for checkpoints in qao's own format.

It is registered while vLLM imports its table of methods, so dependencies on vLLM's layers are imported later.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ..serving import common
from ..serving.config import Served
from ..serving.interface import check_class
from . import WITHOUT

_EXPERTS = re.compile(r"\bexperts\.(?=(up|down)\.)")


class QaoQuantizationConfig(QuantizationConfig):  # type: ignore[misc]
    """``quantization_config`` of a config.json written by qao."""

    def __init__(self, served: Served) -> None:
        super().__init__()
        self.served = served

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
        return cls(Served.from_dict(config, "vLLM"))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.served.layers = hf_to_vllm_mapper.apply_dict(self.served.layers)

    def get_checkpoint_weight_mapper(self) -> Any:
        """Map tensor names to vLLM's, where experts are a child of the checkpoint's layer.

        vLLM calls this before loading, after all layers are created.
        """
        from vllm.model_executor.models.utils import WeightsMapper

        self.served.warn_unrequested()
        return WeightsMapper(orig_to_new_regex={_EXPERTS: "experts.routed_experts."})

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        with common.required("vllm", WITHOUT["config.register"]):
            from .linear import QaoLinearMethod
            from .own_experts import QaoOwnExpertsMethod
            from .process import follow_batch_invariance
        follow_batch_invariance()

        if isinstance(layer, (LinearBase, ParallelLMHead)):
            scheme = self.served.scheme_of(prefix, self.packed_modules_mapping)
            if scheme is not None:
                return QaoLinearMethod(scheme, prefix, self.served)
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        if isinstance(layer, RoutedExperts):
            schemes = self.served.experts_of(prefix)
            if schemes is not None:
                return QaoOwnExpertsMethod(*schemes, layer, prefix)
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if isinstance(layer, VocabParallelEmbedding):
            self.served.refuse_embedding(prefix)
        return None


def register() -> None:
    """Register the name "qao". Idempotent: the class stays the same."""
    check_class(QaoQuantizationConfig)
    register_quantization_config("qao")(QaoQuantizationConfig)
