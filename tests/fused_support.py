"""Fused experts of checkpoints, for any engine: their tensors, and the expected results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from checkpoint_support import ORDERS, words
from qao.ops import reference
from qao.ops.library import cpu_features
from torch import Tensor
from torch.nn import functional

E, K, WIDTH, TOP = 5, 256, 384, 2
PREFIX = "model.layers.0.mlp.experts"
SHARDS = {"w1": ("gate_proj", WIDTH, K), "w3": ("up_proj", WIDTH, K), "w2": ("down_proj", K, WIDTH)}
DTYPE = torch.bfloat16
State = dict[str, dict[str, Tensor]]  # the tensors of one expert, by matrix


def checkpoint(case: str) -> tuple[dict[str, Any], list[State], list[dict[str, Tensor]]]:
    """The config, each expert's tensors by matrix, and their float64 values. Needs compressed-tensors."""
    from test_checkpoints_compressed_tensors import CASES, compressed, config_of, decompressed, scheme_of

    scheme = scheme_of(CASES[case][0])
    states = [{key: compressed(scheme, n, k, DTYPE) for key, (_, n, k) in SHARDS.items()} for _ in range(E)]
    dense = [
        {key: decompressed({**one, "weight_scale": one["weight_scale"].double()}, scheme) for key, one in state.items()}
        for state in states
    ]
    return config_of({"group_0": scheme}, format=scheme.format), states, dense


def auto_checkpoint(
    kind: str, group: int, zero_points: bool = False, bits: int = 4, **more: Any
) -> tuple[dict[str, Any], list[State], list[dict[str, Tensor]]]:
    """As ``checkpoint``, of AutoGPTQ (symmetric, or with ``zero_points``) or AutoAWQ, value by value from the
    description of the formats. ``group`` -1: the row."""
    states, dense = [], []
    top, order = 1 << bits, ORDERS[kind][: 32 // bits]
    for _ in range(E):
        state, exact = {}, {}
        for key, (_, n, k) in SHARDS.items():
            q, groups = torch.randint(0, top, (k, n)), 1 if group == -1 else k // group
            own_zeros = kind == "awq" or zero_points
            zeros = torch.randint(0, top, (groups, n)) if own_zeros else torch.full((groups, n), top // 2)
            scales = ((torch.rand(groups, n) * 0.3 + 0.15) / top).to(DTYPE)
            of_rows = torch.arange(k) // (k // groups)
            exact[key] = ((q - zeros[of_rows]) * scales.double()[of_rows]).t()
            weight = words(q, order) if kind == "awq" else words(q.t(), order).t()
            stored = zeros if kind == "awq" else zeros - 1 & top - 1
            state[key] = {"qweight": weight, "scales": scales, "qzeros": words(stored, order)}
        states.append(state)
        dense.append(exact)
    config: dict[str, Any] = {"bits": bits, "group_size": group, "quant_method": kind}
    config |= {"zero_point": True, "version": "gemm"} if kind == "awq" else {"desc_act": False, "sym": not zero_points}
    return config | more, states, dense


STATIC = {"w1": 0.05, "w3": 0.05, "w2": 0.4}  # scales of activations, the largest of those that experts have


def fp8_checkpoint(scheme: str) -> tuple[dict[str, Any], list[State], list[dict[str, Tensor]]]:
    """As ``checkpoint``, in the layouts of Hugging Face ("dynamic", "static") and DeepSeek ("block")."""
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if scheme == "static" else "dynamic"}
    states, dense = [], []
    for number in range(E):
        state, exact = {}, {}
        for key, (_, n, k) in SHARDS.items():
            weight, scale = torch.randn(n, k).mul(60).to(torch.float8_e4m3fn), torch.rand(()) * 0.002 + 0.0005
            if scheme == "block":
                scale = torch.rand(n // 128, k // 128) * 0.002 + 0.0005
            state[key] = {"weight": weight, "weight_scale_inv" if scheme == "block" else "weight_scale": scale}
            if scheme == "static":
                state[key]["input_scale"] = torch.tensor(STATIC[key] / (1 + number))
            blocks = scale.repeat_interleave(128, 0).repeat_interleave(128, 1) if scheme == "block" else scale
            exact[key] = weight.double() * blocks.double()
        states.append(state)
        dense.append(exact)
    return config | ({"weight_block_size": [128, 128]} if scheme == "block" else {}), states, dense


def routing(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.stack([torch.randperm(E)[:TOP] for _ in range(tokens)]).int()
    return torch.randn(tokens, K, dtype=DTYPE), torch.rand(tokens, TOP), ids


def rounding_of(group_size: int) -> Callable[[Tensor], Tensor]:
    """A token in e4m3, with a scale for each ``group_size`` columns (-1: for all)."""

    def rounded(row: Tensor) -> Tensor:
        q, scales = reference.quantize_activation_fp8(row.float()[None], group_size)
        return reference.dequantize_activation(q, scales)[0].double()

    return rounded


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def expected(
    dense: list[dict[str, Tensor]],
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    dtype: torch.dtype,
    activation: Callable[[Tensor], Tensor] = Tensor.double,
    second: Callable[[Tensor], Tensor] | None = None,
    gated: Callable[[Tensor, Tensor], Tensor] = silu_mul,
) -> Tensor:
    """The expected result from loops, with every GEMM and gate rounded to ``dtype``.

    ``activation`` transforms the inputs of GEMMs; ``second``, if given, those of the second one. An id of -1 is no
    expert. ``dense``: biases are "b1", "b3" and "b2".
    """
    y = torch.zeros(len(x), K, dtype=torch.float64)
    for token, expert in (ids >= 0).nonzero().tolist():
        own = {key: value.double() for key, value in dense[ids[token, expert]].items()}

        def product(rows: Tensor, number: int, own: dict[str, Tensor] = own) -> Tensor:
            return (rows @ own[f"w{number}"].t() + own.get(f"b{number}", 0)).to(dtype).double()

        gate, up = (product(activation(x[token]), number) for number in (1, 3))
        rows = (second or activation)(gated(gate, up).to(dtype))
        y[token] += weights[token, expert].double() * product(rows, 2)
    return y


def check(y: Tensor, dense: list[dict[str, Tensor]], x: Tensor, weights: Tensor, ids: Tensor, **options: Any) -> None:
    """Checks that y is as near as loops that round where bfloat16 layers do."""
    exact, rounded = (expected(dense, x, weights, ids, dtype, **options) for dtype in (torch.float64, DTYPE))
    assert y.shape == (len(x), K)
    error, plain = (y.double() - exact).norm(), (rounded.to(DTYPE).double() - exact).norm()
    assert error <= 2 * plain, (error, plain)


def on_amx() -> bool:
    """Whether kernels round W of short groups to bfloat16."""
    return cpu_features()["selected"] == "amx"


def check_rounded(
    y: Tensor,
    dense: list[dict[str, Tensor]],
    given: tuple[Tensor, Tensor, Tensor],
    *activations: Callable[[Tensor], Tensor],
    same: bool = True,
) -> None:
    """Checks that y is as near to exact GEMMs as loops that round activations in the same way. If the activations of y
    have the ``same`` scales, y and the loops differ by bfloat16's rounding only, with AMX also of W in short groups."""
    exact, plain = expected(dense, *given, torch.float64), expected(dense, *given, DTYPE, *activations)
    error, of_loops = (y - exact).norm(), (plain - exact).norm()
    assert error <= 1.2 * of_loops, (error, of_loops)
    if same:
        assert (y - plain).norm() <= (0.6 if on_amx() else 0.4) * of_loops, ((y - plain).norm(), of_loops)
