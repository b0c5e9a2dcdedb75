"""Experts of a serving engine without the engine: GPTQ and AWQ words, shards, MoE forward."""

from __future__ import annotations

from typing import Any

import pytest
import qao
import torch
from experts_support import SCHEMES
from fused_support import DTYPE, WIDTH, E, K, auto_checkpoint, expected, routing
from qao.checkpoints.awq import values_of
from qao.integrations.serving import common as served
from qao.integrations.serving import moe as served_experts
from qao.integrations.serving.projection import expert_shards, wait_for
from qao.nn.experts import QuantProjection, quantize_projection
from qao.ops.grouped_autograd import SILU_MUL
from torch import Tensor, nn

SIZES = ((2 * WIDTH, K), (K, WIDTH))  # of up (gate and up) and down
GROUP = 128
OWN = [
    *(qao.Fp4WeightOnly("nvfp4"), qao.Float8DynamicActivationFloat8Weight("block")),
    *(qao.Float8DynamicActivationFloat8Weight("tensor"), qao.Float8StaticActivationFloat8Weight(activation_scale=0.2)),
]

Part = tuple[QuantProjection, QuantProjection]


def check(parts: list[Part], dense: list[dict[str, Tensor]], allowed: float, device: str) -> None:
    """allowed: distance of results, bfloat16 between products and rounding of activations included."""
    for tokens in (1, 7, 300):
        x, weights, chosen = routing(tokens)
        chosen[0, 1] = -1
        y = torch.zeros(tokens, K, dtype=torch.float64)
        for up, down in parts:

            def gated(*given: Tensor, up: QuantProjection = up) -> Tensor:
                return up(*given, gate=SILU_MUL)

            routed = x.to(device), chosen.to(device), weights.to(device)
            with torch.no_grad():
                y += served_experts.through(*routed, E, gated, down).double().cpu()
        exact = expected(dense, x, weights, chosen, torch.float64)
        assert (y - exact).norm() < allowed * exact.norm(), tokens


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_words_of_four_bits(kind: str, device: str) -> None:
    torch.manual_seed(1)
    _, states, dense = auto_checkpoint(kind, GROUP)

    def plain(matrix: dict[str, Tensor]) -> served_experts.Plain:
        weight, scales, zeros = (matrix[key].to(device) for key in ("qweight", "scales", "qzeros"))
        if kind == "awq":
            return values_of(weight), scales.t(), values_of(zeros)
        return served.rows(weight, 4, packed_dim=0, output_dim=1), scales.t(), None

    made = []
    for keys, (n, k) in zip((("w1", "w3"), ("w2",)), SIZES, strict=True):
        joined = [{one: torch.cat([state[key][one] for key in keys], 1) for one in state["w1"]} for state in states]
        scheme, weight = served_experts.integers(map(plain, joined), E, GROUP, 4, k)
        made.append(QuantProjection(E, n, k, scheme, weight, None, DTYPE))
    check([(made[0], made[1])], dense, 0.02, device)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("scheme", [*SCHEMES, *OWN], ids=str)
def test_shares_of_own_experts(scheme: Any, ranks: int, device: str) -> None:
    torch.manual_seed(2)
    states, whole = [], []
    for n, k in SIZES:
        packed = quantize_projection(torch.randn(E, n, k, dtype=DTYPE) * 0.1, scheme, False, None, "w")
        made = QuantProjection(E, n, k, scheme, packed, None, DTYPE)
        states.append(made.state_dict())
        whole.append(made.dequantize(torch.float64))
    dense = [{"w1": up[:WIDTH], "w3": up[WIDTH:], "w2": down} for up, down in zip(*whole, strict=True)]
    parts = []
    for rank in range(ranks):
        layer = nn.Module()
        with torch.device(device):
            fitted = [scheme.fitted(k) for _, k in SIZES]
            wait_for(layer, "w", fitted, expert_shards(WIDTH, K, range(E), rank, ranks), DTYPE)
        for arriving, state in zip(list(layer.children()), states, strict=True):
            for key, tensor in state.items():
                parameter: Any = arriving._parameters[key]
                parameter.weight_loader(parameter, tensor)
        up, down = layer.children()
        assert isinstance(up, QuantProjection) and isinstance(down, QuantProjection)
        assert up.qweight.device.type == down.qweight.device.type == device
        parts.append((up, down))
    check(parts, dense, 0.02 if scheme.activations == "float" else 0.08, device)
