"""The quantization config "qao" of SGLang, for checkpoints in qao's own format.

It is registered while SGLang imports its table of methods, so dependencies on SGLang's layers are imported later.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers import quantization
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from torch import nn

from ...ops.packed_shape import SCALE_BLOCK
from ..serving import common
from ..serving.config import Served
from ..serving.interface import check_class
from . import WITHOUT


class QaoQuantizationConfig(QuantizationConfig):  # type: ignore[misc]
    """``quantization_config`` of a config.json written by qao."""

    weight_block_size = [SCALE_BLOCK, SCALE_BLOCK]  # read by loaders if scales are per block

    def __init__(self, served: Served, packed_modules_mapping: dict[str, list[str]] | None = None) -> None:
        super().__init__()
        self.served = served
        self.packed_modules_mapping = packed_modules_mapping or {}

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

    def get_scaled_act_names(self) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QaoQuantizationConfig:
        # SGLang passes its mapping inside the checkpoint's config.
        return cls(Served.from_dict(config, "SGLang"), config.get("packed_modules_mapping"))

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        self.served.layers = hf_to_sglang_mapper.apply_dict(self.served.layers)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
        from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        with common.required("sglang", WITHOUT["config"]):
            from .linear import QaoLinearMethod
            from .own_experts import QaoOwnExpertsMethod
            from .process import follow_batch_invariance
        follow_batch_invariance()

        if isinstance(layer, (LinearBase, ParallelLMHead)):
            scheme = self.served.scheme_of(prefix, self.packed_modules_mapping)
            if scheme is not None:
                return QaoLinearMethod(scheme, prefix, self)
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        if isinstance(layer, FusedMoE):
            schemes = self.served.experts_of(prefix)
            if schemes is not None:
                return QaoOwnExpertsMethod(*schemes, layer, prefix, self)
            return UnquantizedFusedMoEMethod(layer.use_triton_kernels, layer.use_flashinfer_trtllm_moe)
        if isinstance(layer, VocabParallelEmbedding):
            self.served.refuse_embedding(prefix)
        return None


def register() -> None:
    """Register the name "qao". Idempotent: the class stays the same."""
    check_class(QaoQuantizationConfig)
    for table in (quantization.QUANTIZATION_METHODS, quantization.CPU_QUANTIZATION_METHODS):
        table["qao"] = QaoQuantizationConfig
