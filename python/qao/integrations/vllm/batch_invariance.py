"""qao's batch-invariant kernels where vLLM's own selection bypasses linear kernels under VLLM_BATCH_INVARIANT.

vLLM 0.33 dequantizes W4A16 weights in each call, and FP8 weights unless the kernel is one of two of its classes. qao's
GEMMs are batch-invariant in this mode (``process.follow_batch_invariance``). Versions without such a bypass need
nothing of this module.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from torch import nn

from ..serving.interface import function_of
from ..wrapping import wrap
from .process import replace_functions

_SCHEME = "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16"
_LINEAR = "vllm.model_executor.kernels.linear"


def register_w4a16() -> None:
    """Give W4A16 layers qao's kernel, if it takes them, instead of vLLM's dequantization. Idempotent."""
    scheme: Any = sys.modules[_SCHEME].CompressedTensorsWNA16
    function_of(scheme, "create_weights", "layer")
    wrap(scheme, "create_weights", _with_kernel)


def _with_kernel(create: Any) -> Any:
    def create_weights(self: Any, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        bypassed = getattr(self, "use_batch_invariant", False)
        if bypassed:
            self.use_batch_invariant = False  # vLLM then asks the linear kernels, of which qao's is the first
        create(self, layer, *args, **kwargs)
        if bypassed:
            from .kernels import QaoMixedPrecisionKernel

            # The parameters are the same with and without a kernel.
            if not isinstance(self.kernel, QaoMixedPrecisionKernel):
                self.use_batch_invariant, self.kernel = True, None

    return create_weights


def register_fp8(linear: Any, ours: type) -> None:
    """Make vLLM use ``ours`` directly, unless one scale for all tokens is dynamic. Idempotent."""
    own = getattr(linear, "fp8_scaled_mm_is_batch_invariant", None)
    if own is None or getattr(own, "patched_by_qao", False):
        return

    @wraps(own)
    def is_batch_invariant(kernel: Any) -> bool:
        return isinstance(kernel, ours) or own(kernel)  # ours.can_implement refuses that scale

    is_batch_invariant.patched_by_qao = True  # type: ignore[attr-defined]
    replace_functions(_LINEAR, {"fp8_scaled_mm_is_batch_invariant": is_batch_invariant})
