"""Experts of a serving engine without the engine: words of GPTQ and AWQ, shares of qao's own, the way of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import qao
import torch
from experts_support import SCHEMES
from qao.checkpoints.awq import values_of
from qao.experts import QuantProjection, quantize_projection
from qao.grouped import SILU_MUL
from qao.integrations import served, served_experts
from qao.integrations.served_projection import Arriving, Share
from torch import Tensor

EXPERTS, K, WIDTH, TOP, GROUP = 8, 512, 768, 2, 128
SIZES = ((2 * WIDTH, K), (K, WIDTH))  # of up (gate and up) and down
DTYPE = torch.bfloat16
OWN = [
    *(qao.Fp4WeightOnly("nvfp4"), qao.Float8DynamicActivationFloat8Weight("block")),
    *(qao.Float8DynamicActivationFloat8Weight("tensor"), qao.Float8DynamicActivationFloat8Weight(activation_scale=0.2)),
]

Part = tuple[QuantProjection, QuantProjection]


def by_loops(up: Tensor, down: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Of weights in float64, experts outside 0..EXPERTS - 1 left out."""
    y = torch.zeros(len(x), K, dtype=torch.float64)
    for t, experts in enumerate(chosen.tolist()):
        for weight, expert in zip(weights[t].double(), experts, strict=True):
            if 0 <= expert < EXPERTS:
                gate, other = (x[t].double() @ up[expert].t()).chunk(2)
                y[t] += weight * ((torch.nn.functional.silu(gate) * other) @ down[expert].t())
    return y


def check(parts: list[Part], dense: list[Tensor], allowed: float, device: str) -> None:
    """allowed: distance of results, bfloat16 between products and rounding of activations included."""
    for tokens in (1, 7, 300):
        x, weights = torch.randn(tokens, K, dtype=DTYPE), torch.rand(tokens, TOP)
        chosen = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(tokens)]).int()
        chosen[0, 1] = -1
        y = torch.zeros(tokens, K, dtype=torch.float64)
        for up, down in parts:

            def gated(*given: Tensor, up: QuantProjection = up) -> Tensor:
                return up(*given, gate=SILU_MUL)

            routed = x.to(device), chosen.to(device), weights.to(device)
            with torch.no_grad():
                y += served_experts.through(*routed, EXPERTS, gated, down).double().cpu()
        expected = by_loops(dense[0], dense[1], x, weights, chosen)
        assert (y - expected).norm() < allowed * expected.norm(), tokens


def words(values: Tensor, order: list[int]) -> Tensor:
    """Eight numbers of four bits an int32, along the last dimension."""
    total = sum((values[:, order[i] :: 8] << 4 * i for i in range(8)), torch.zeros((), dtype=torch.int64))
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_words_of_four_bits(kind: str, device: str) -> None:
    torch.manual_seed(1)
    order = {"gptq": list(range(8)), "awq": [0, 2, 4, 6, 1, 3, 5, 7]}[kind]
    made, dense = [], []
    for n, k in SIZES:
        q, scales = torch.randint(0, 16, (EXPERTS, k, n)), (torch.rand(EXPERTS, k // GROUP, n) * 0.02 + 0.01).to(DTYPE)
        zeros = torch.randint(0, 16, scales.shape) if kind == "awq" else torch.full(scales.shape, 8)
        of_column = torch.arange(k) // GROUP
        dense.append(((q - zeros[:, of_column]) * scales.double()[:, of_column]).transpose(1, 2))
        plain: list[served_experts.Plain] = []
        for e in range(EXPERTS):
            own = scales[e].to(device).t()
            if kind == "awq":
                whole, points = (values_of(words(t, order).to(device)) for t in (q[e], zeros[e]))
                plain.append((whole, own, points))
            else:
                packed = words(q[e].t(), order).t().contiguous().to(device)
                plain.append((served.rows(packed, 4, packed_dim=0, output_dim=1), own, None))
        scheme, weight = served_experts.integers(plain, EXPERTS, GROUP, 4, k)
        made.append(QuantProjection(EXPERTS, n, k, scheme, weight, None, DTYPE))
    check([(made[0], made[1])], dense, 0.02, device)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scheme", [*SCHEMES, *OWN], ids=str)
def test_shares_of_own_experts(scheme: Any, ranks: int, device: str) -> None:
    torch.manual_seed(2)
    states, dense = [], []
    for n, k in SIZES:
        packed = quantize_projection(torch.randn(EXPERTS, n, k, dtype=DTYPE) * 0.1, scheme, False, None, "w")
        whole = QuantProjection(EXPERTS, n, k, scheme, packed, None, DTYPE)
        states.append(whole.state_dict())
        dense.append(whole.dequantize(torch.float64))
    parts = []
    for rank in range(ranks):
        shares = (Share(n, k, range(EXPERTS), i, 2 - i, rank, ranks) for i, (n, k) in enumerate(SIZES))
        made: list[QuantProjection] = []
        for share, state in zip(shares, states, strict=True):
            with torch.device(device):
                arriving = Arriving(scheme.fitted(share.k), share, DTYPE, "w", made.append)
            for key, tensor in state.items():
                parameter: Any = arriving._parameters[key]
                parameter.weight_loader(parameter, tensor)
        parts.append((made[0], made[1]))
        assert all(one.qweight.device.type == device for one in made)
    check(parts, dense, 0.02 if scheme.activations == "float" else 0.08, device)
