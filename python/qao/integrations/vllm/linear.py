"""Linear layers from qao's own checkpoints in vLLM."""

from __future__ import annotations

from vllm.model_executor import parameter
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method

from ..serving.interface import check_class
from ..serving.linear import ServedLinear


@register_weight_loader_v2_supported_method
class QaoLinearMethod(ServedLinear, LinearMethodBase):  # type: ignore[misc]
    parameters = parameter


check_class(QaoLinearMethod)
