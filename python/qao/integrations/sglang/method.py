"""Linear layers of checkpoints that SGLang reads, computed by qao's operators.

SGLang's method of a layer creates and loads its parameters. kernels.py rejects, with a reason, everything that would
not be computed exactly as the checkpoint specifies. The reason is logged once, and SGLang's method stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers import linear
from sglang.srt.layers.quantization.awq.awq import AWQLinearMethod
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.gptq.gptq import GPTQLinearMethod, GPTQMarlinLinearMethod
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp8LinearMethod
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8LinearMethod
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8LinearMethod
from torch import Tensor, nn

from ..serving import common
from ..serving.interface import check_class
from . import WITHOUT, kernels
from .kernels import Kernel, Share
from .process import log_served, log_unsupported, missing
from .reloading import Reloading

_KERNELS: dict[type, Callable[[Any, nn.Module, Share], Kernel | str]] = {
    CompressedTensorsLinearMethod: kernels.of_compressed_tensors,
    GPTQLinearMethod: kernels.of_gptq,
    GPTQMarlinLinearMethod: kernels.of_gptq,
    AWQLinearMethod: kernels.of_awq,
    Fp8LinearMethod: kernels.of_fp8,
    ModelOptFp8LinearMethod: kernels.of_modelopt_fp8,
    W8A8Fp8LinearMethod: kernels.of_w8a8_fp8,
    W8A8Int8LinearMethod: kernels.of_w8a8_int8,
}


def _kernel_of(own: Any, layer: nn.Module, share: Share) -> Kernel | str:
    return missing(next(layer.parameters()).device) or _KERNELS[type(own)](own, layer, share)


# Attributes that loaders and models read from a method, if present.
_METHOD_ATTRIBUTES = ("quant_config", "quantization_config", "weight_block_size")


def choose(own: Any, layer: nn.Module, name: str) -> Any:
    """qao's method for a layer with SGLang's method ``own``, or ``own`` itself."""
    return QaoLayoutMethod(own, name) if type(own) in _KERNELS else own


class QaoLayoutMethod(LinearMethodBase):  # type: ignore[misc]
    """SGLang's method ``own`` creates and loads the weight of a layer; qao's kernel packs and multiplies it."""

    def __init__(self, own: Any, name: str) -> None:
        self.own, self.name, self.reloading = own, name, Reloading(name)
        for attribute in _METHOD_ATTRIBUTES:
            if hasattr(own, attribute):
                setattr(self, attribute, getattr(own, attribute))

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size
        self.own.create_weights(layer, *sizes, params_dtype, **extra)
        share = Share(list(output_partition_sizes), input_size_per_partition, input_size)
        made = common.decided("sglang", WITHOUT["method"], _kernel_of, self.own, layer, share)
        if isinstance(made, str):
            self._leave(layer, made)
            return
        self.kernel: Kernel = made
        log_served(made.operator_name, self.name)

    def _leave(self, layer: nn.Module, reason: str) -> None:
        log_unsupported(reason, self.name)
        layer.quant_method = self.own

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if getattr(layer, "keep_plain_weight_layout", False):
            self._leave(layer, "a weight that the model reads itself")
            self.own.process_weights_after_loading(layer)
            return
        layer.deepgemm_mxfp8_input = False  # type: ignore[assignment]  # which a model may have asked for
        self.reloading.process(layer, self.kernel.load)

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        """SGLang calls this before it loads other weights, from version 0.5.21 on."""
        self.reloading.restore(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel.apply(layer, x, bias)


check_class(QaoLayoutMethod, "restore_weights_before_loading")
if QaoLayoutMethod.__name__ not in linear.WEIGHT_LOADER_V2_SUPPORTED:
    linear.WEIGHT_LOADER_V2_SUPPORTED.append(QaoLayoutMethod.__name__)
