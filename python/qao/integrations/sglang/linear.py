"""Linear layers from qao's own checkpoints in SGLang."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers import linear, parameter
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from ...schemes import Scheme
from ..serving.interface import check_class
from ..serving.linear import ServedLinear


class QaoLinearMethod(ServedLinear, LinearMethodBase):  # type: ignore[misc]
    parameters = parameter

    def __init__(self, scheme: Scheme, name: str, quant_config: Any) -> None:
        super().__init__(scheme, name, quant_config.served)
        self.quant_config = quant_config


check_class(QaoLinearMethod)
if QaoLinearMethod.__name__ not in linear.WEIGHT_LOADER_V2_SUPPORTED:
    linear.WEIGHT_LOADER_V2_SUPPORTED.append(QaoLinearMethod.__name__)
