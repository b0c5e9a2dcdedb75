"""Float zero points and those outside 0..15, as in GGUF's Q4_1: W = q d + m, zero = -m / d."""

from __future__ import annotations

import pytest
import torch
from ops_schemes import DTYPES, INT4_SCHEMES, Scheme, Weight, generator
from ops_support import check_product, randn
from qao import QuantLinear
from qao.schemes import Float8DynamicActivationInt4Weight, Int4WeightOnly, Int8DynamicActivationInt4Weight

CLASSES = {
    scheme.word: scheme
    for scheme in (Int4WeightOnly, Int8DynamicActivationInt4Weight, Float8DynamicActivationInt4Weight)
}
N, K = 80, 608


def blocks(lowest: float, highest: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [N, K], d and m [N, K / 32], which are float16 numbers, with -m / d from ``lowest`` to ``highest``."""
    g = generator(3)
    q = torch.randint(0, 16, (N, K), generator=g, dtype=torch.uint8)
    d = (torch.rand(N, K // 32, generator=g) * 0.02 + 0.005).half()
    m = (-d * (torch.rand(N, K // 32, generator=g) * (highest - lowest) + lowest)).half()
    return q, d, m


@pytest.mark.every_isa
@pytest.mark.parametrize("m", [1, 2, 4, 5, 16, 17, 64, 256])
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("between", [(0.0, 15.0), (-20.0, 35.0)], ids=str)
@pytest.mark.parametrize("scheme", INT4_SCHEMES, ids=lambda scheme: scheme.word)
def test_products(scheme: Scheme, between: tuple[float, float], x_dtype: torch.dtype, m: int, device: str) -> None:
    """The layer multiplies with q d + m."""
    q, d, minimum = blocks(*between)
    dense = q * d.double().repeat_interleave(32, 1) + minimum.double().repeat_interleave(32, 1)
    config = CLASSES[scheme.word](group_size=32, scale_dtype=torch.float32)
    layer = QuantLinear.from_quantized(q, d, -minimum.double() / d.double(), scheme=config).to(device)
    assert (layer.dequantize(torch.float32).double().cpu() - dense).abs().max() <= 2.0**-22 * dense.abs().max()
    x = randn(m, K, dtype=x_dtype, device=device, seed=m)
    activation = scheme.few_formats[0].activation
    weight = Weight((layer.qweight, layer.scales), (), dense.to(device), activation)
    check_product(layer(x), x, weight)
