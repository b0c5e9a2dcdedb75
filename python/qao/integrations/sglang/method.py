"""Linear layers of checkpoints that SGLang reads, multiplied by qao's operators.

Written against SGLang 0.5, whose own method of a layer makes its parameters and loads them. kernels.py says no, with a
reason, to whatever would not be computed exactly as the checkpoint says: it is logged once, and SGLang's method stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.layers import linear
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.awq.awq import AWQLinearMethod
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.gptq.gptq import GPTQLinearMethod, GPTQMarlinLinearMethod
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp8LinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8LinearMethod
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8LinearMethod
from sglang.srt.runtime_context import get_exec
from sglang.srt.utils import is_cuda
from torch import Tensor, nn

from .. import served
from . import kernels
from .kernels import Kernel, Share

logger = logging.getLogger(__name__)
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

# What loaders and models ask a method for, where it has it.
_ASKED_FOR = ("quant_config", "quantization_config", "weight_block_size")


def beside(own: Any, layer: nn.Module, name: str) -> Any:
    """qao's method for a layer of which ``own`` is SGLang's, or ``own``."""
    if type(own) in _KERNELS:
        return QaoLayoutMethod(own, name)
    if isinstance(layer, FusedMoE) and not isinstance(own, (UnquantizedFusedMoEMethod, type(None))):
        _tell_left(f"fused experts ({type(own).__name__})", name)
    return own


class QaoLayoutMethod(LinearMethodBase):  # type: ignore[misc]
    """SGLang's method ``own`` makes and loads the weight of a layer; qao's kernel packs and multiplies it."""

    def __init__(self, own: Any, name: str) -> None:
        self.own, self.name = own, name
        for attribute in _ASKED_FOR:
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
        made = _missing(next(layer.parameters()).device) or _KERNELS[type(self.own)](self.own, layer, share)
        if isinstance(made, str):
            self._leave(layer, made)
            return
        self.kernel = made
        _tell_served(made.operator_name, self.name)

    def _leave(self, layer: nn.Module, reason: str) -> None:
        _tell_left(reason, self.name)
        layer.quant_method = self.own

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if getattr(layer, "keep_plain_weight_layout", False):
            self._leave(layer, "a weight that the model reads itself")
            self.own.process_weights_after_loading(layer)
            return
        layer.deepgemm_mxfp8_input = False  # type: ignore[assignment]  # which a model may have asked for
        self.kernel.load(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel.apply(layer, x, bias)


def _missing(device: torch.device) -> str | None:
    """Why no kernel of qao runs in this process; None if they do."""
    if is_batch_invariant_mode_enabled() or _deterministic():
        return "deterministic inference: qao chooses its kernels by the number of tokens"
    if is_cuda():
        major, minor = torch.cuda.get_device_capability()
        return served.gpu_obstacle(10 * major + minor)
    return None if device.type == "cpu" else "qao runs on CUDA and on CPUs"


def _deterministic() -> bool:
    try:
        return bool(get_exec().deterministic.enable_deterministic_inference)
    except ValueError:  # nobody has said how this process is to run
        return False


_told: set[str] = set()


def _once(key: str, message: str, *of: object) -> None:
    if key not in _told:
        _told.add(key)
        logger.info(message, *of)


def _tell_served(operator: str, name: str) -> None:
    _once(operator, "qao serves layers such as %s with %s", name, operator)


def _tell_left(reason: str, name: str) -> None:
    _once(reason, "qao leaves layers such as %s to SGLang: %s", name, reason)


if QaoLayoutMethod.__name__ not in linear.WEIGHT_LOADER_V2_SUPPORTED:
    linear.WEIGHT_LOADER_V2_SUPPORTED.append(QaoLayoutMethod.__name__)
